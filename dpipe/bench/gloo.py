"""A tensor from one process to another on this machine: gloo's send and recv against our
transports.

All move the same tensor the same way, in turns in one run, so that whatever else keeps the machine
busy hits them all:

    rank 0    clock | send 16 MB, four times --.                    .--> clock
    rank 1                        recv, recv, <'  send 1 byte ------'
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from dpipe.bench.processes import run_processes
from dpipe.report.pace import Pace, agreed_rounds, silent
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.spec import TensorSpec

Wire = GrpcTransport | TcpTransport
Ways = dict[str, Callable[[], None]]
Seconds = dict[str, list[float]]  # by way, of each round
_ACK = torch.zeros(1, dtype=torch.uint8)
_ACK_SPEC = TensorSpec.of(_ACK)
_RESULTS = "seconds.json"  # rank 0 writes it, into a folder of both
_BURST = 4  # tensors under way one behind the other, as in a pipeline
_JOIN_S = 120.0  # for the other process, which imports torch first
# By name: the transport and its connections a link.
_OURS: dict[str, tuple[type[Wire], int]] = {
    "grpc x1": (GrpcTransport, 1),
    "grpc x2": (GrpcTransport, 2),
    "tcp x1": (TcpTransport, 1),
}


def compare_transport(
    num_bytes: int = 16 << 20, repeats: int = 30, pace: Pace | None = None
) -> list[dict[str, Any]]:
    """A row for each way to move tensors of `num_bytes` between two processes: median rate, and
    rate over gloo.
    """
    with TemporaryDirectory() as folder:
        args = (folder, num_bytes, repeats, pace or silent())
        run_processes(_run, args, 2)
        results = Path(folder) / _RESULTS
        seconds: Seconds = json.loads(results.read_text())
    gloo_s = seconds["gloo"]
    rows = []
    for way, values in seconds.items():
        row = _row(way, num_bytes, values, gloo_s)
        rows.append(row)
    return rows


def _row(
    way: str,
    num_bytes: int,
    seconds: Sequence[float],
    gloo_s: Sequence[float],
) -> dict[str, Any]:
    """Each turn is held against gloo's of the same round; the middle half of those ratios says how
    far to trust it.
    """
    ratios = list(map(truediv, gloo_s, seconds))
    low, middle, high = quantiles(ratios, n=4)
    bytes_per_s = _BURST * num_bytes / median(seconds)
    return {
        "way": way,
        "num_bytes": num_bytes,
        "gb_per_s": bytes_per_s / 1e9,
        "over gloo": middle,
        "middle half": f"{low:.3f} to {high:.3f}",
    }


def _run(
    rank: int,
    folder: str,
    num_bytes: int,
    repeats: int,
    pace: Pace,
) -> None:
    torch.set_num_threads(1)
    place = Path(folder) / "store"
    store: Any = dist.FileStore(str(place), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    # All are open before the first round, so that none is timed while it opens sockets.
    transports = {way: connect(rank, way, store) for way in _OURS}
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    ways: Ways = {"gloo": partial(_over_gloo, rank, payload)}
    for way, transport in transports.items():
        ways[way] = partial(_over_ours, transport, payload)
    _time_in_turns(ways)  # opens gloo's sockets
    first = _time_in_turns(ways)
    round_s = sum(first.values())
    rounds = agreed_rounds(pace, rank, store, repeats, round_s)
    seconds: Seconds = {way: [] for way in ways}
    for number in range(rounds):
        took = _time_in_turns(ways)
        for way, took_s in took.items():
            seconds[way].append(took_s)
        if rank == 0:
            pace.done(number + 1, rounds)
    if rank == 0:
        results = Path(folder) / _RESULTS
        results.write_text(json.dumps(seconds))
    for transport in transports.values():
        transport.close()
    dist.destroy_process_group()


def connect(rank: int, way: str, store: Any) -> Wire:
    """One end of a link between two processes that share `store`."""
    kind, connections = _OURS[way]
    transport = kind(rank, connections=connections, connect_timeout_s=_JOIN_S)
    own = f"127.0.0.1:{transport.port}"
    store.set(f"{way}/{rank}", own)
    addresses: dict[int, str | None] = {}
    for end in (0, 1):
        address = store.get(f"{way}/{end}")
        addresses[end] = address.decode()
    other = 1 - rank
    transport.connect(addresses, [other])
    return transport


def _time_in_turns(ways: Ways) -> dict[str, float]:
    """One round: the seconds of each way."""
    seconds = {}
    for way, move in ways.items():
        dist.barrier()
        start = time.perf_counter()
        move()
        end = time.perf_counter()
        seconds[way] = end - start
    return seconds


def _over_gloo(rank: int, payload: torch.Tensor) -> None:
    if rank == 0:
        for _ in range(_BURST):
            dist.send(payload, 1)
        dist.recv(_ACK, 1)
    else:
        for _ in range(_BURST):
            dist.recv(payload, 0)
        dist.send(_ACK, 0)


def _over_ours(transport: Wire, payload: torch.Tensor) -> None:
    if transport.rank == 0:
        for _ in range(_BURST):
            transport.send(payload, 1, "payload")
        transport.recv(_ACK_SPEC, 1, "ack").wait()
    else:
        like = TensorSpec.of(payload)
        # All are posted before the first is waited for, as the executor posts its receives.
        pending = deque(transport.recv(like, 0, "payload") for _ in range(_BURST))
        while pending:
            # Popped: a tensor that has arrived is not kept while the next one is received.
            received = pending.popleft()
            received.wait()
            del received
        transport.send(_ACK, 0, "ack")
