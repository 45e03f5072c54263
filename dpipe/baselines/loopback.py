"""What the loopback link of this machine is, as a transport sees it: the network that a local run
is simulated on.

rank 0    pause --[clock] send n bytes --.                   one way takes delay + n / bandwidth;
rank 1    --ready                         `--> recv [clock]  both ranks read one clock

The processor time that a message takes at one end is measured too.

The pause is what a run has between its messages: both ends have slept, and what they need has left
the cores' caches. A ping-pong without it makes the link two to three times as quick as any run
finds it.
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
from dpipe.network.link import Host, Link
from dpipe.wire.spec import TensorSpec

# Seconds: when a message left or had arrived, and the processor time of this end's threads.
Stamp = tuple[float, float]
SMALL_BYTES = 4
_REPEATS = 40
_READY = TensorSpec((1,), torch.uint8)


@dataclass(frozen=True)
class Loopback:
    """A link, and the processor time of each of its ends: for any message, and for a megabyte."""

    link: Link
    message_us: float
    us_per_mb: float

    def host(self, ranks: Sequence[int], *, computes: bool) -> Host:
        """This machine, with `ranks` on it."""
        return Host(tuple(ranks), os.cpu_count() or 1, self.message_us, self.us_per_mb, computes)


def measure_loopback(way: str, num_bytes: int = 1_000_000, pause_s: float = 0.01) -> Loopback:
    """What `way` ("grpc x1", "tcp x1") makes of the loopback link, from messages of a few bytes and
    of `num_bytes`.

    `pause_s` is for how long a rank of the run to be simulated computes before it sends.
    """
    with TemporaryDirectory() as folder:
        spawn(_run, (folder, way, num_bytes, pause_s), nprocs=2)
        sent, received = (json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2))
    return loopback_of(sent, received, num_bytes)


def loopback_of(
    sent: Sequence[Sequence[Stamp]], received: Sequence[Sequence[Stamp]], num_bytes: int
) -> Loopback:
    """The link that messages have crossed, of each size the median: the small ones first, then
    those of `num_bytes`.
    """
    (small_s, small_cpu_s), (large_s, large_cpu_s) = (
        (
            median(end - start for (start, _), (end, _) in pairs),
            median((out + into) / 2 for (_, out), (_, into) in pairs),
        )
        for pairs in (list(zip(*ends, strict=True)) for ends in zip(sent, received, strict=True))
    )
    moving_s = max(large_s - small_s, 1e-6)
    more_mb = (num_bytes - SMALL_BYTES) / 1e6
    link = Link(delay_ms=small_s * 1e3, bandwidth_gbps=more_mb * 8e-3 / moving_s)
    return Loopback(link, small_cpu_s * 1e6, max(0.0, large_cpu_s - small_cpu_s) * 1e6 / more_mb)


def _run(rank: int, folder: str, way: str, num_bytes: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    transport = connect(rank, way, FileStore(str(Path(folder) / "store"), 2))
    stamps: list[list[Stamp]] = [[], []]
    for _ in range(_REPEATS):
        # In turns, because the times of the two sizes are subtracted.
        for size, stamps_of_size in zip((SMALL_BYTES, num_bytes), stamps, strict=True):
            if rank == 0:
                stamps_of_size.append(_send(transport, size, pause_s))
            else:
                stamps_of_size.append(_receive(transport, size))
    (Path(folder) / str(rank)).write_text(json.dumps(stamps))
    # Rank 0 closes last: its peer's last send might still wait to hear that it has arrived.
    if rank == 0:
        transport.send(_READY.empty(), 1, "goodbye")
    else:
        transport.recv(_READY, 0, "goodbye").wait()
    transport.close()


def _send(transport: Any, num_bytes: int, pause_s: float) -> Stamp:
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    transport.recv(_READY, 1, "ready").wait()
    time.sleep(pause_s)
    start_s = time.perf_counter()
    cpu_s = time.process_time()
    transport.send(payload, 1, "there").wait()
    return start_s, time.process_time() - cpu_s


def _receive(transport: Any, num_bytes: int) -> Stamp:
    pending = transport.recv(TensorSpec((num_bytes,), torch.uint8), 0, "there")
    transport.send(_READY.empty(), 0, "ready").wait()
    cpu_s = time.process_time()
    pending.wait()
    return time.perf_counter(), time.process_time() - cpu_s
