"""Random numbers that are a function of what they are drawn for, not of what was drawn before.

The key is (seed, step, micro-batch, layer). So a layer's dropout is the same wherever the model is
cut, under any schedule, and when its forward pass is run again.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# torch's default generators belong to the process, and ranks may be threads of one.
_LOCK = threading.Lock()
# Its `generators` are those that `seeded` has set, while this thread is inside `seeded`.
_DRAWING = threading.local()


@contextmanager
def seeded(*key: str | int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the default generators by `key` inside, and restore their state behind. Not to be
    nested.
    """
    generators = _generators(torch.device(device))
    # Not `hash`, which is another one in every process.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8)
    number = int.from_bytes(digest.digest(), "big")
    with _LOCK:
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(number)
        _DRAWING.generators = generators  # for `paused` and `same_draws`, deep inside a layer
        try:
            yield
        finally:
            _DRAWING.generators = ()
            _set(generators, states)


@contextmanager
def paused() -> Iterator[None]:
    """Inside `seeded`: let other threads draw while this one waits for them. Outside: nothing."""
    generators = getattr(_DRAWING, "generators", ())
    if not generators:
        yield
        return
    # Kept, because whoever takes the lock may itself be paused with these generators seeded.
    states = [generator.get_state() for generator in generators]
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()
        _set(generators, states)


def same_draws() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's checkpoint: contexts for a function's first run, which is inside
    `seeded`, and for its second, in which it draws the same numbers.

    torch's own way would set the process's generators while other threads draw.
    """
    generators = getattr(_DRAWING, "generators", ())
    states = [generator.get_state() for generator in generators]
    return nullcontext(), _restored(generators, states)


class Undrawn(TorchFunctionMode):
    """Inside, what `torch.nn.init` would draw for a parameter is left as its memory is: for layers
    whose parameters are all read afterwards. To draw a billion of them takes some twenty seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        tensor = args[0] if args else named.get("tensor")
        draws = getattr(func, "__module__", None) == nn.init.__name__
        if draws and isinstance(tensor, nn.Parameter):
            return tensor
        return func(*args, **named)


@contextmanager
def _restored(
    generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]
) -> Iterator[None]:
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
    """The device's and the CPU's: a layer on a GPU may still draw on the CPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
