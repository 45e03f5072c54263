"""What the two ends of the line between a worker and a parameter server have in common: see
parameters.proto.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from dpipe.errors import TransferError
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.wire.message import byte_view, framed, unframed
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.parameters_pb2 import Attendance, Piece

M = TypeVar("M", bound=Message)

SERVICE = "dpipe.wire.v1.Parameters"
PROTOCOL = 2
ROWS = ("values", "exp_avg", "exp_avg_sq", "held")
PLACE_KEY = "dpipe-place-bin"


def piece(head: Piece, tensor: torch.Tensor | None = None) -> bytes:
    """A message: what it is, and its bytes."""
    lead = framed(head.SerializeToString())
    return lead if tensor is None else b"".join((lead, byte_view(tensor.contiguous())))


def parse(message: bytes) -> tuple[Piece, memoryview]:
    """Raises `TransferError` on bytes that are no piece."""
    head, body = unframed(message)
    try:
        return Piece.FromString(head), body
    except DecodeError:
        raise TransferError(f"{len(message)} bytes came that are no piece of a row") from None


def tensor_of(body: memoryview, spec: TensorSpec, what: str) -> torch.Tensor:
    """The bytes as a tensor of its own. Raises `TransferError` where they are too few or too
    many.
    """
    if len(body) != spec.num_bytes:
        raise TransferError(f"{what} came in {len(body)} bytes, {spec} takes {spec.num_bytes}")
    if not body:
        return spec.empty()
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(spec.dtype).view(spec.shape)


def values_spec(row: FlatSpec, chunk: int) -> TensorSpec:
    """A chunk of the row in fp32. Raises `TransferError` where the row has no such chunk."""
    if not 0 <= chunk < row.num_chunks:
        raise TransferError(f"chunk {chunk} came of a row that has {row.num_chunks}")
    part = row.chunk(chunk)
    return TensorSpec((part.stop - part.start,), torch.float32)


def pieces_of(row: FlatSpec, rows: dict[str, torch.Tensor]) -> Iterator[bytes]:
    """Whole rows, by name, as they stream in Load and Fetch."""
    for name, values in rows.items():
        for chunk in range(row.num_chunks):
            yield piece(Piece(row=name, chunk=chunk), values[row.chunk(chunk)])


def rows_from(row: FlatSpec, messages: Iterator[bytes]) -> dict[str, torch.Tensor]:
    """What `pieces_of` sent. Raises `TransferError` where some of it is missing."""
    rows: dict[str, torch.Tensor] = {}
    missing: dict[str, set[int]] = {}
    for message in messages:
        head, body = parse(message)
        if head.row not in ROWS:
            raise TransferError(f"a piece of a row {head.row!r} came; one of {', '.join(ROWS)}")
        values = tensor_of(
            body, values_spec(row, head.chunk), f"chunk {head.chunk} of {head.row!r}"
        )
        rows.setdefault(head.row, torch.zeros(row.length))[row.chunk(head.chunk)] = values
        missing.setdefault(head.row, set(range(row.num_chunks))).discard(head.chunk)
    lost = {name: len(chunks) for name, chunks in missing.items() if chunks}
    if lost:
        raise TransferError(
            f"rows ended before all of their chunks had come; missing, by row: {lost}"
        )
    return rows


def attendance(row: FlatSpec, rule: StepRule, num_updates: int, *, again: bool) -> Attendance:
    told = (json.dumps(asdict(part)) for part in (row, rule))
    return Attendance(
        protocol=PROTOCOL, row=next(told), rule=next(told), num_updates=num_updates, again=again
    )


def row_and_rule(told: Attendance) -> tuple[FlatSpec, StepRule]:
    """Raises `TransferError` on text that describes none."""
    try:
        return FlatSpec.of(json.loads(told.row)), StepRule.of(json.loads(told.rule))
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError(f"a worker describes no row, or no rule: {error!r}") from None


def message_of(kind: type[M], data: bytes) -> M:
    """Raises `TransferError` on bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise TransferError(
            f"{len(data)} bytes came where a {kind.DESCRIPTOR.name} belongs"
        ) from None
