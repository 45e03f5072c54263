"""The mean of one row over four processes: gloo's all-reduce against our exchange, in turns in one
run.

    host 0    barrier | all-reduce 64 MB | clock    all wait for each other before each turn,
    host 1    barrier | all-reduce 64 MB | clock    and the time of the slowest process counts

Four processes on this machine, or one on each of several hosts that are told the same addresses
(`dpipe bench --help`).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from dpipe.bench.processes import CONTEXT, run_processes
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.processes.launch import free_port
from dpipe.report.pace import Pace, agreed_rounds, silent
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.collective import open_store
from dpipe.wire.feedback import wire

_PORT = 29_411  # where several hosts meet, on the first of them
_JOIN_S = 120.0  # for the others, which import torch first, perhaps on other hosts
_PART_BYTES = 32 << 20  # data_parallel.chunk_bytes: large, as nothing hides the cost of a message
Row = dict[str, Any]
Ways = dict[str, Callable[[], object]]
Wire = GrpcTransport | TcpTransport
# By name: the transport, its connections a link, and the wire format.
_WAYS: dict[str, tuple[type[Wire], int, str]] = {
    "tcp x1": (TcpTransport, 1, "none"),
    "tcp x2": (TcpTransport, 2, "none"),
    "tcp x4": (TcpTransport, 4, "none"),
    "grpc x4": (GrpcTransport, 4, "none"),
    "tcp x4 bf16": (TcpTransport, 4, "bf16"),
    "tcp x4 int8": (TcpTransport, 4, "int8"),
}


def compare_here(
    num_bytes: int = 64 << 20,
    processes: int = 4,
    repeats: int = 9,
    pace: Pace | None = None,
) -> list[Row]:
    """A row for each way, from processes of this machine."""
    results = CONTEXT.SimpleQueue()
    hosts = ["127.0.0.1"] * processes
    port = free_port()
    args = (hosts, port, num_bytes, repeats, pace or silent(), results)
    run_processes(_tell, args, processes)
    rows: list[Row] = results.get()
    return rows


def compare_hosts(
    hosts: Sequence[str],
    rank: int,
    num_bytes: int = 64 << 20,
    repeats: int = 5,
    pace: Pace | None = None,
) -> list[Row]:
    """As host `rank` of several, on each of which this runs; the rows are the same everywhere."""
    process = _Process(rank, hosts, _PORT, num_bytes)
    return process.compare(repeats, pace or silent())


def _tell(
    rank: int,
    hosts: Sequence[str],
    port: int,
    num_bytes: int,
    repeats: int,
    pace: Pace,
    results: Any,
) -> None:
    process = _Process(rank, hosts, port, num_bytes)
    rows = process.compare(repeats, pace)
    if rank == 0:
        results.put(rows)


class _Process:
    """One of the processes, with every way to all of the others open."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        port: int,
        num_bytes: int,
    ) -> None:
        torch.set_num_threads(1)  # the processes share this machine's cores
        self._rank = rank
        self._hosts = hosts
        self._num_bytes = num_bytes
        generator = torch.Generator().manual_seed(rank)
        num_floats = num_bytes // 4
        self._row = torch.randn(num_floats, generator=generator)
        first = rank == 0
        self._store = open_store(hosts[0], port, _JOIN_S, master=first)
        self._gloo = TorchGroup(
            self._store,
            rank,
            len(hosts),
            host=hosts[rank],
            part_bytes=num_bytes,
        )
        self._transports = {way: self._connect(way) for way in _WAYS}

    def compare(self, repeats: int, pace: Pace) -> list[Row]:
        ways: Ways = {"gloo": partial(self._average, self._gloo)}
        for way in _WAYS:
            exchange = self._exchange(way)
            ways[way] = partial(self._average, exchange)
        seconds = self._in_turns(ways, repeats, pace)
        # Nobody closes while another's last message is under way.
        self._wait_for_all()
        for transport in self._transports.values():
            transport.close()
        gloo_s = median(seconds["gloo"])
        rows = []
        for way, took_s in seconds.items():
            median_s = median(took_s)
            row = {
                "way": way,
                "num_bytes": self._num_bytes,
                "seconds": median_s,
                "times as fast as gloo": gloo_s / median_s,
            }
            rows.append(row)
        return rows

    def _connect(self, way: str) -> Wire:
        kind, connections, _ = _WAYS[way]
        bind = self._hosts[self._rank]
        transport = kind(
            self._rank,
            bind=bind,
            connections=connections,
            connect_timeout_s=_JOIN_S,
        )
        own = f"{bind}:{transport.port}"
        self._store.set(f"{way}/{self._rank}", own)
        ranks = range(len(self._hosts))
        addresses: dict[int, str | None] = {}
        for rank in ranks:
            address = self._store.get(f"{way}/{rank}")
            addresses[rank] = address.decode()
        others = set(ranks) - {self._rank}
        transport.connect(addresses, others)
        return transport

    def _exchange(self, way: str) -> DirectExchange:
        ranks = range(len(self._hosts))
        _, _, wire_format = _WAYS[way]
        coded = wire(wire_format)
        transport = self._transports[way]
        return DirectExchange(
            transport,
            self._rank,
            ranks,
            coded,
            part_bytes=_PART_BYTES,
        )

    def _average(self, exchange: TorchGroup | DirectExchange) -> None:
        exchange.average(self._row, 0, lambda piece: None)

    def _in_turns(
        self,
        ways: Ways,
        repeats: int,
        pace: Pace,
    ) -> dict[str, list[float]]:
        """Seconds of the slowest process, by way, of each round after the first: that one opens
        sockets and buffers.
        """
        first = self._round(ways)
        round_s = sum(first.values())
        rounds = agreed_rounds(pace, self._rank, self._store, repeats, round_s)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            took = self._round(ways)
            for way, took_s in took.items():
                seconds[way].append(took_s)
            if self._rank == 0:
                pace.done(number + 1, rounds)
        return seconds

    def _round(self, ways: Ways) -> dict[str, float]:
        seconds = {}
        for way, average in ways.items():
            self._wait_for_all()
            began = time.perf_counter()
            average()
            took_s = time.perf_counter() - began
            seconds[way] = self._largest(took_s)
        return seconds

    def _wait_for_all(self) -> None:
        self._largest(0.0)

    def _largest(self, value: float) -> float:
        num_ranks = len(self._hosts)
        of_ranks = torch.zeros(num_ranks)
        # The group averages: a number that one rank alone brings comes back divided by their count.
        of_ranks[self._rank] = value * num_ranks
        self._gloo.average(of_ranks, 0, lambda piece: None)
        return float(of_ranks.max())
