"""What each wire format costs: bits a value, error, and time of one core.

Times are of this process's processor time, in one thread, of an activation of 16 MiB in fp32: the
least of some rounds, because on a busy machine others only make them longer.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dpipe.report.pace import Pace
from dpipe.wire.codec import Codec, codec
from dpipe.wire.deltas import Deltas, SampleCache
from dpipe.wire.format import FORMATS, OPTIONS, wire_bytes
from dpipe.wire.spec import TensorSpec

_SHAPE = (1, 2048, 2048)  # a sample, its tokens, and their width
_OUTLIER_CHANNELS = 16  # as language models have some: the same in every token
_FIRST_OUTLIER = 5  # not where a rotation makes it the zero point of its block alone
_OUTLIER = 30.0  # times as large as the others
_CHANGE = 0.1  # of the values, since a sample was seen before
_ROUNDS = 12


def names_to_compare() -> list[str]:
    """Every format, and between stages each option alone with those that it goes with."""
    names = []
    for form in FORMATS.values():
        names.append(form.name)
        if form.between_stages:
            for option in OPTIONS.values():
                if option.goes_with(form):
                    names.append(f"{form.name}+{option.name}")
    return names


def measure_format(name: str, pace: Pace) -> dict[str, Any]:
    """One row. Errors are root mean squares, of the values' own; where deltas of samples are sent,
    after a visit of which the values have changed by a tenth.
    """
    tensor = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))
    outliers = tensor.clone()
    outliers[..., _outlier_channels()] *= _OUTLIER
    like = TensorSpec.of(tensor)
    sender, receiver = _ends(name, tensor)
    wire = sender.encode(tensor)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = pace.rounds(_ROUNDS, 0.1)
        encode_s = _least_s(lambda: sender.encode(tensor), rounds)
        decode_s = _least_s(lambda: receiver.decode(wire, like), rounds)
    finally:
        torch.set_num_threads(num_threads)
    gigabytes = like.num_bytes / 1e9
    return {
        "format": name,
        "bits a value": wire_bytes(name, tensor.numel()) * 8 / tensor.numel(),
        "error": _error(name, tensor),
        "with outliers": _error(name, outliers),
        "encode, GB/s": gigabytes / encode_s,
        "decode, GB/s": gigabytes / decode_s,
        "round trip, GB/s": gigabytes / (encode_s + decode_s),
    }


def _outlier_channels() -> slice:
    apart = _SHAPE[-1] // _OUTLIER_CHANNELS
    return slice(_FIRST_OUTLIER, None, apart)


def _ends(name: str, tensor: torch.Tensor) -> tuple[Codec, Codec]:
    """Of the sender and of the receiver, which a tensor like it has crossed before if the format
    needs that.
    """
    coder = codec(name)
    if not isinstance(coder, Deltas):
        return coder, coder
    generator = torch.Generator().manual_seed(1)
    before = tensor - _CHANGE * tensor * torch.randn(_SHAPE, generator=generator)
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            cache = SampleCache(1, _SHAPE[1:], Path(folder))
            first = coder.visit([0], cache)
            first.encode(before)
            ends.append(coder.visit([0], cache))
    return ends[0], ends[1]


def _error(name: str, tensor: torch.Tensor) -> float:
    """Of a tensor's common values: in the channels without outliers."""
    common = torch.ones(_SHAPE[-1], dtype=torch.bool)
    common[_outlier_channels()] = False
    sender, receiver = _ends(name, tensor)
    arrived = receiver.decode(sender.encode(tensor), TensorSpec.of(tensor))
    difference = (arrived - tensor)[..., common]
    return float(difference.norm() / tensor[..., common].norm())


def _least_s(run: Callable[[], object], rounds: int) -> float:
    run()  # the first opens buffers
    return min(_durations_s(run, rounds))


def _durations_s(run: Callable[[], object], rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        before_s = time.process_time()
        run()
        # A clock of coarse ticks may say that no time has passed.
        yield max(time.process_time() - before_s, 1e-9)
