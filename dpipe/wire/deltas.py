"""`Deltas`: what a sample's activation has changed by since it last crossed the same link (AQ-SGD:
Wang et al. 2022), for trainings that see their samples again.

    sender      x - m  --encode-->  bytes  ==link==>  bytes  --decode-->  d      receiver
                m = bf16(m + d)                                m = bf16(m + d)

Each end keeps m of each sample and works it out from the same bytes by the same operations, none of
which depends on the machine: the two stay equal to the last bit. What the next stage computes with
is m. Before a sample's first visit m is 0, and what is sent then is x itself in bf16.

So the error is the format's of a change, which shrinks as the training converges, and not its error
of x: |x - m| is at most the format's bound for x - (the last m), and |m| / 256.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dpipe.errors import RunError
from dpipe.wire.codec import Cast, Codec
from dpipe.wire.spec import TensorSpec

KEPT = torch.bfloat16
_FIRST = Cast(KEPT)


class SampleCache:
    """What has come of each sample, in bf16, on disk: the system keeps in memory what it has room
    for.

    The file has no name any more as soon as it is open, so that nothing is left of it however the
    run ends. Raises `RunError` where the disk has no room.
    """

    def __init__(self, num_samples: int, shape: Sequence[int], folder: Path) -> None:
        """A sample is a tensor of this shape."""
        self.num_samples = num_samples
        rows = TensorSpec((num_samples, *shape), KEPT)
        self._rows = _on_disk(rows, folder)
        self._visited = torch.zeros(num_samples, dtype=torch.bool)

    def visit(self, sample: int) -> bool:
        """Whether it was visited before; it has been from now on."""
        visited = bool(self._visited[sample])
        self._visited[sample] = True
        return visited

    def read(self, sample: int, into: Tensor) -> None:
        """Zeros before anything was kept of it."""
        into.copy_(self._rows[sample])

    def keep(self, sample: int, row: Tensor) -> None:
        """Round `row` to what is kept of the sample."""
        kept = self._rows[sample]
        kept.copy_(row)
        row.copy_(kept)
        # What is not finite is seen by the stage that gets it, and shall not stay for good.
        if not row.sum().isfinite():
            kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def cache_bytes(num_samples: int, shape: Sequence[int]) -> int:
    return TensorSpec((num_samples, *shape), KEPT).num_bytes


def _on_disk(spec: TensorSpec, folder: Path) -> Tensor:
    """Zeros."""
    descriptor, path = tempfile.mkstemp(prefix=".deltas-", dir=folder)
    try:
        # All of it now: where the disk is full later, writing to a map kills the process.
        os.posix_fallocate(descriptor, 0, spec.num_bytes)
        flat = torch.from_file(path, shared=True, size=spec.num_values, dtype=spec.dtype)
    except OSError as error:
        raise RunError(
            f"{folder} has no room for the {spec.num_bytes / 1e9:.3g} GB that a link with "
            f'"+delta" keeps of its samples: {error.strerror}; make room, set run.folder to '
            'another disk, or leave "+delta" out'
        ) from None
    finally:
        os.close(descriptor)
        os.unlink(path)
    return flat.view(spec.shape)


class Deltas:
    """The option "delta". Where nobody says whose samples a tensor is of, as in an evaluation, it
    is sent like those of a first visit, and nothing is kept.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner

    def encode(self, tensor: Tensor) -> Tensor:
        return _FIRST.encode(tensor)

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return _FIRST.decode(wire, like)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return _FIRST.wire_spec(like)

    def visit(self, samples: Sequence[int], cache: SampleCache) -> Codec:
        """The codec of one tensor [B, ...], whose rows are of these samples. Both ends visit the
        same ones in the same order.
        """
        visits = []
        for sample in samples:
            visit = Visit(sample, known=cache.visit(sample))
            visits.append(visit)
        return _RowByRow(self._inner, visits, cache)


class Visit(NamedTuple):
    sample: int
    known: bool  # from a visit before this one


class _RowByRow:
    """The same sample may be there twice, and some may be there for the first time."""

    def __init__(
        self,
        inner: Codec,
        visits: Sequence[Visit],
        cache: SampleCache,
    ) -> None:
        self._inner = inner
        self._visits = visits
        self._cache = cache

    def encode(self, tensor: Tensor) -> Tensor:
        rows = tensor.detach().float()
        # One buffer for all: as large as an activation, each new one costs as much as the encoding.
        buffer = torch.empty_like(rows[0])
        parts = []
        for row, visit in zip(rows, self._visits, strict=True):
            self._cache.read(visit.sample, buffer)
            change = torch.sub(row, buffer, out=buffer)
            wire = self._codec(visit).encode(change)
            self._arrive(visit, wire, buffer)
            flat = wire.view(-1)
            parts.append(flat.view(torch.uint8))
        return torch.cat(parts)

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        row = _row_of(like)
        rows = torch.empty(like.shape, dtype=row.dtype, device=wire.device)
        start = 0
        for number, visit in enumerate(self._visits):
            spec = self._codec(visit).wire_spec(row)
            end = start + spec.num_bytes
            # A copy, because values of several bytes must begin where memory is aligned for them.
            part = wire[start:end].clone()
            encoded = part.view(spec.dtype).view(spec.shape)
            self._arrive(visit, encoded, rows[number])
            start = end
        return rows.to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        row = _row_of(like)
        size = 0
        for visit in self._visits:
            spec = self._codec(visit).wire_spec(row)
            size += spec.num_bytes
        return TensorSpec((size,), torch.uint8)

    def _codec(self, visit: Visit) -> Codec:
        return self._inner if visit.known else _FIRST

    def _arrive(self, visit: Visit, wire: Tensor, row: Tensor) -> None:
        """Make `row` what both ends have of the sample now."""
        change = self._codec(visit).decode(wire, TensorSpec.of(row))
        self._cache.read(visit.sample, row)
        row.add_(change)
        self._cache.keep(visit.sample, row)


def _row_of(like: TensorSpec) -> TensorSpec:
    return TensorSpec(like.shape[1:], torch.float32)
