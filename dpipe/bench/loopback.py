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

from dpipe.bench.gloo import connect
from dpipe.bench.processes import run_processes
from dpipe.network.link import Host, Link
from dpipe.wire.spec import TensorSpec

# Seconds: when a message left or had arrived, and the processor time of this end's threads.
Stamp = tuple[float, float]
SMALL_BYTES = 4  # what a message takes whatever its size
_REPEATS = 40  # of each size; their medians count
_READY = TensorSpec((1,), torch.uint8)


@dataclass(frozen=True)
class Loopback:
    """A link, and the processor time of each of its ends: for any message, and for a megabyte."""

    link: Link
    message_us: float
    us_per_mb: float

    def host(self, ranks: Sequence[int], *, computes: bool) -> Host:
        """This machine, with `ranks` on it."""
        return Host(
            tuple(ranks),
            cores=os.cpu_count() or 1,
            message_us=self.message_us,
            us_per_mb=self.us_per_mb,
            computes=computes,
        )


def measure_loopback(
    way: str,
    num_bytes: int = 1_000_000,
    pause_s: float = 0.01,
) -> Loopback:
    """What `way` ("grpc x1", "tcp x1") makes of the loopback link, from messages of a few bytes and
    of `num_bytes`.

    `pause_s` is for how long a rank of the run to be simulated computes before it sends.
    """
    with TemporaryDirectory() as folder:
        args = (folder, way, num_bytes, pause_s)
        run_processes(_run, args, 2)
        sent = _stamps_file(folder, 0).read_text()
        received = _stamps_file(folder, 1).read_text()
    return loopback_of(json.loads(sent), json.loads(received), num_bytes)


def _stamps_file(folder: str, rank: int) -> Path:
    return Path(folder) / str(rank)


def loopback_of(
    sent: Sequence[Sequence[Stamp]],
    received: Sequence[Sequence[Stamp]],
    num_bytes: int,
) -> Loopback:
    """The link that messages have crossed, of each size the median: the small ones first, then
    those of `num_bytes`.
    """
    small_s, small_cpu_s = _medians(sent[0], received[0])
    large_s, large_cpu_s = _medians(sent[1], received[1])
    # On a loaded machine the large ones may have been no slower; a link has some bandwidth still.
    moving_s = max(large_s - small_s, 1e-6)
    more_cpu_s = max(0.0, large_cpu_s - small_cpu_s)
    more_bytes = num_bytes - SMALL_BYTES
    more_mb = more_bytes / 1e6
    # Both ends work on a message one after the other: what is left is nobody's processor time.
    delay_s = max(0.0, small_s - 2 * small_cpu_s)
    delay_ms = delay_s * 1e3
    gbps = more_mb * 8e-3 / moving_s
    link = Link(delay_ms=delay_ms, bandwidth_gbps=gbps)
    message_us = small_cpu_s * 1e6
    us_per_mb = more_cpu_s * 1e6 / more_mb
    return Loopback(link, message_us, us_per_mb)


def _medians(sent: Sequence[Stamp], received: Sequence[Stamp]) -> tuple[float, float]:
    """Of messages of one size: the seconds one way, and a processor's seconds at one end."""
    one_way_s = []
    cpu_s = []
    for departure, arrival in zip(sent, received, strict=True):
        start_s, out_s = departure
        end_s, into_s = arrival
        one_way_s.append(end_s - start_s)
        # A host has one figure for either end: the mean stands for both.
        both_s = out_s + into_s
        cpu_s.append(both_s / 2)
    return median(one_way_s), median(cpu_s)


def _run(
    rank: int,
    folder: str,
    way: str,
    num_bytes: int,
    pause_s: float,
) -> None:
    torch.set_num_threads(1)
    place = Path(folder) / "store"
    store = FileStore(str(place), 2)
    transport = connect(rank, way, store)
    small: list[Stamp] = []
    large: list[Stamp] = []
    for _ in range(_REPEATS):
        # In turns, because the times of the two sizes are subtracted.
        for size, stamps in ((SMALL_BYTES, small), (num_bytes, large)):
            if rank == 0:
                stamps.append(_send(transport, size, pause_s))
            else:
                stamps.append(_receive(transport, size))
    text = json.dumps([small, large])
    _stamps_file(folder, rank).write_text(text)
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
    sending = transport.send(payload, 1, "there")
    sending.wait()
    took_s = time.process_time() - cpu_s
    return start_s, took_s


def _receive(transport: Any, num_bytes: int) -> Stamp:
    like = TensorSpec((num_bytes,), torch.uint8)
    # Posted before the sender may start: the payload then goes straight into its place.
    pending = transport.recv(like, 0, "there")
    ready = transport.send(_READY.empty(), 0, "ready")
    ready.wait()
    cpu_s = time.process_time()
    pending.wait()
    end_s = time.perf_counter()
    took_s = time.process_time() - cpu_s
    return end_s, took_s
