"""The tensor-parallel group of a replayed stage: a ring over the run's own links, between hosts.

    rank 0 ──part──> rank 1 ──part──> rank 2 ──part──> rank 0

An all-reduce among T ranks is 2 (T - 1) such rounds of 1/T of its bytes (Patarasuk & Yuan 2009).
Nothing is added up: the replay shows what tensor parallelism costs over a network, where the group
of a real stage is refused.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dpipe.config.load import Config
from dpipe.ranks import ParallelRanks
from dpipe.transport.base import Transport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Pending

_TAG = "exchange"
_FLOAT_BYTES = 4

# Called around each all-reduce with the bytes that this rank sends.
Watch = Callable[[int], AbstractContextManager[None]]


class Ring:
    """One rank's end: a call is an all-reduce of `num_bytes`. Raises what the links raise."""

    def __init__(self, links: Transport, here: ParallelRanks, num_bytes: int, watch: Watch) -> None:
        self._links = links
        self._watch = watch
        size = here.tp_size
        self._before, self._behind = neighbours(here)
        # Never written to, so that every message can be the same tensor.
        num_values = num_bytes // _FLOAT_BYTES // size
        self._part = torch.zeros(max(1, num_values))
        self._spec = TensorSpec.of(self._part)
        self._rounds = 2 * (size - 1)
        self._leaving: list[Pending[None]] = []

    def __call__(self) -> None:
        # Of the call before: what went wrong with them shows here.
        for pending in self._leaving:
            pending.settle()
        sent = self._rounds * self._part.nbytes
        with self._watch(sent):
            self._leaving = [self._round() for _ in range(self._rounds)]

    def _round(self) -> Pending[None]:
        # Posted first: all ranks of the ring send at once.
        arriving = self._links.recv(self._spec, self._before, _TAG)
        leaving = self._links.send(self._part, self._behind, _TAG)
        arriving.wait()
        return leaving


def neighbours(here: ParallelRanks) -> tuple[int, int]:
    """The ranks before and behind this one."""
    ranks = here.tp_group
    before = ranks[here.tp_rank - 1]
    behind = ranks[(here.tp_rank + 1) % len(ranks)]
    return before, behind


def ring_peers(config: Config, here: ParallelRanks) -> set[int]:
    """The ranks that a replay needs links to for its ring; none for a stage on one rank."""
    if config.model.family.computes or here.tp_size == 1:
        return set()
    return set(neighbours(here))
