"""What the loopback link of this machine is, as a transport sees it: the network that a local run is simulated on.

rank 0    clocks | send n bytes --.                       .--> clocks      half of it is one way: delay + n / bandwidth,
rank 1                       recv <'-- send n bytes ------'                and what a message costs the cores at one end
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # its stubs do not export it
from torch.multiprocessing.spawn import spawn

from dpipe.baselines.gloo import connect
from dpipe.topology import Host, Link
from dpipe.wire.spec import TensorSpec

_SMALL_BYTES = 4
_REPEATS = 40


@dataclass(frozen=True)
class Loopback:
    """A link, and the processor time of each of its ends: for any message, and for a megabyte."""

    link: Link
    message_us: float
    us_per_mb: float

    def host(self, ranks: Sequence[int], *, computes: bool) -> Host:
        """This machine, with `ranks` on it."""
        return Host(tuple(ranks), os.cpu_count() or 1, self.message_us, self.us_per_mb, computes)


def measure_loopback(way: str, num_bytes: int = 1_000_000) -> Loopback:
    """What `way` ("grpc x1", "tcp x1") makes of the loopback link, from round trips of a few bytes and of many."""
    with TemporaryDirectory() as folder:
        spawn(_run, (folder, way, num_bytes), nprocs=2)
        (small_s, small_cpu_s), (large_s, large_cpu_s) = json.loads((Path(folder) / "one_way_s.json").read_text())
    moving_s, more_mb = max(large_s - small_s, 1e-6), (num_bytes - _SMALL_BYTES) / 1e6
    link = Link(delay_ms=small_s * 1e3, bandwidth_gbps=more_mb * 8e-3 / moving_s)
    return Loopback(link, small_cpu_s * 1e6, max(0.0, large_cpu_s - small_cpu_s) * 1e6 / more_mb)


def _run(rank: int, folder: str, way: str, num_bytes: int) -> None:
    torch.set_num_threads(1)
    transport = connect(rank, way, FileStore(str(Path(folder) / "store"), 2))
    sizes = (_SMALL_BYTES, num_bytes)
    rounds = [[_trip(transport, size) for size in sizes] for _ in range(_REPEATS)]  # in turns: they are subtracted
    one_way_s = [[median(seconds) / 2 for seconds in zip(*trips, strict=True)] for trips in zip(*rounds, strict=True)]
    if rank == 0:
        (Path(folder) / "one_way_s.json").write_text(json.dumps(one_way_s))
    transport.close()


def _trip(transport: Any, num_bytes: int) -> tuple[float, float]:
    """Seconds of a round trip, and of this end's threads in it."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    spec, peer = TensorSpec.of(payload), 1 - transport.rank
    began, cpu_began = time.perf_counter(), time.process_time()
    if transport.rank == 0:
        transport.send(payload, peer, "there")
        transport.recv(spec, peer, "back").wait()
    else:
        transport.recv(spec, peer, "there").wait()
        transport.send(payload, peer, "back").wait()
    return time.perf_counter() - began, time.process_time() - cpu_began
