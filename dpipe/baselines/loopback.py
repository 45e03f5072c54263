"""What the loopback link of this machine is, as a transport sees it: the network that a local run is simulated on.

rank 0    clock | send n bytes --.                       .--> clock      half of it is one way:
rank 1                      recv <'-- send n bytes ------'               delay + n / bandwidth
"""

import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # its stubs do not export it
from torch.multiprocessing.spawn import spawn

from dpipe.baselines.gloo import connect
from dpipe.topology import Link
from dpipe.wire.spec import TensorSpec

_SMALL_BYTES = 4
_REPEATS = 40


def measure_link(way: str, num_bytes: int = 1_000_000) -> Link:
    """Delay and bandwidth of a link over `way` ("grpc x1", "tcp x1"), from round trips of a few bytes and of many."""
    with TemporaryDirectory() as folder:
        spawn(_run, (folder, way, num_bytes), nprocs=2)
        small_s, large_s = json.loads((Path(folder) / "one_way_s.json").read_text())
    moving_s = max(large_s - small_s, 1e-6)
    return Link(delay_ms=small_s * 1e3, bandwidth_gbps=(num_bytes - _SMALL_BYTES) * 8 / moving_s / 1e9)


def _run(rank: int, folder: str, way: str, num_bytes: int) -> None:
    torch.set_num_threads(1)
    transport = connect(rank, way, FileStore(str(Path(folder) / "store"), 2))
    trips = [[_trip(transport, size) for size in (_SMALL_BYTES, num_bytes)] for _ in range(_REPEATS)]
    one_way_s = [median(seconds) / 2 for seconds in zip(*trips, strict=True)]  # in turns: they are to be subtracted
    if rank == 0:
        (Path(folder) / "one_way_s.json").write_text(json.dumps(one_way_s))
    transport.close()


def _trip(transport: Any, num_bytes: int) -> float:
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    spec, peer, began = TensorSpec.of(payload), 1 - transport.rank, time.perf_counter()
    if transport.rank == 0:
        transport.send(payload, peer, "there")
        transport.recv(spec, peer, "back").wait()
    else:
        transport.recv(spec, peer, "there").wait()
        transport.send(payload, peer, "back")
    return time.perf_counter() - began
