"""Random numbers that are a function of what they are drawn for, not of what was drawn before.

The key is (seed, step, micro-batch, layer). So a layer drops the same values in any cut, under any
schedule, and again when its forward pass is recomputed.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# The default generators belong to the process, and the ranks of a test are threads of one.
_LOCK = threading.Lock()
_DRAWING = (
    threading.local()
)  # its `generators` are those that `seeded` has set, where this thread is inside it


@contextmanager
def seeded(*key: str | int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Draw as `key` says inside, and leave the caller's generators where they were. Must not be
    nested.
    """
    generators = _generators(torch.device(device))
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    with _LOCK:
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(number)
        _DRAWING.generators = generators
        try:
            yield
        finally:
            _DRAWING.generators = ()
            _set(generators, states)


@contextmanager
def paused() -> Iterator[None]:
    """Let other threads draw while this one waits for them inside `seeded`; outside of it,
    nothing.
    """
    generators = getattr(_DRAWING, "generators", ())
    if not generators:
        yield
        return
    states = [generator.get_state() for generator in generators]
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()
        _set(generators, states)


def same_draws() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch's checkpoint, which would set the generators of a process under threads that draw:
    what surrounds a function inside `seeded`, and what surrounds it when it runs again, from the
    same numbers on.
    """
    generators = getattr(_DRAWING, "generators", ())
    return nullcontext(), _again(generators, [generator.get_state() for generator in generators])


@contextmanager
def _again(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> Iterator[None]:
    with _LOCK:
        before = [generator.get_state() for generator in generators]
        _set(generators, states)
        try:
            yield
        finally:
            _set(generators, before)


def _set(generators: Iterable[torch.Generator], states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """A layer on a GPU may still draw on the CPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
