"""What a line carries, and what it refuses."""

import pytest
import torch

from dpipe.errors import TransferError
from dpipe.paramserver.messages import (
    attendance,
    message_of,
    parse,
    piece,
    pieces_of,
    spec_and_rule,
    vectors_from,
    tensor_of,
    chunk_spec,
)
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.wire.message import framed
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.parameters_pb2 import Attendance, Piece, Wanted

ROW = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)),
    chunk_values=16,
)
RULE = StepRule((0, 4), 0.1, (0.9, 0.95), "int8", 0)


def test_piece_comes_out_as_it_went_in() -> None:
    values = torch.arange(5.0)
    head, body = parse(piece(Piece(chunk=3, whole=True), values))
    assert (head.chunk, head.whole) == (3, True)
    assert torch.equal(tensor_of(body, TensorSpec.of(values), "chunk 3"), values)


def test_rows_come_out_as_they_went_in() -> None:
    rows = {"values": torch.randn(33), "exp_avg": torch.randn(33)}
    again = vectors_from(ROW, pieces_of(ROW, rows))
    assert all(torch.equal(rows[name], again[name]) for name in rows)


def test_row_and_rule_come_out_as_they_went_in() -> None:
    assert spec_and_rule(attendance(ROW, RULE, 3, again=False)) == (ROW, RULE)


@pytest.mark.parametrize("body", [b"", b"123", b"12345"])
def test_wrong_number_of_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(
        TransferError, match=rf"chunk 1 came in {len(body)} bytes, float32\[1\] takes 4"
    ):
        tensor_of(memoryview(body), TensorSpec((1,), torch.float32), "chunk 1")


def test_bytes_that_are_no_piece_are_refused() -> None:
    with pytest.raises(TransferError, match="no piece of a row"):
        parse(framed(b"\xff\xff"))


def test_chunk_that_the_row_has_not_is_refused() -> None:
    with pytest.raises(TransferError, match="chunk 3 came of a row that has 3"):
        chunk_spec(ROW, 3)


def test_row_of_another_name_is_refused() -> None:
    with pytest.raises(TransferError, match="a piece of a row 'secrets' came"):
        vectors_from(ROW, pieces_of(ROW, {"secrets": torch.zeros(33)}))


def test_rows_that_end_too_early_are_refused() -> None:
    messages = list(pieces_of(ROW, {"values": torch.zeros(33)}))[:2]
    with pytest.raises(TransferError, match="missing, by row: {'values': 1}"):
        vectors_from(ROW, iter(messages))


@pytest.mark.parametrize(
    "told", [Attendance(row="{", rule="{}"), Attendance(row="{}"), Attendance(row="[1]", rule="3")]
)
def test_text_that_describes_no_row_is_refused(told: Attendance) -> None:
    with pytest.raises(TransferError, match="describes no row"):
        spec_and_rule(told)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(TransferError, match="2 bytes came where a Wanted belongs"):
        message_of(Wanted, b"\xff\xff")
