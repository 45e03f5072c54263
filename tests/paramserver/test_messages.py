"""The messages of a parameter server: what they carry and what is refused."""

import pytest
import torch

from dpipe.errors import TransferError
from dpipe.paramserver.messages import (
    attendance,
    chunk_spec,
    parse,
    piece,
    pieces_of,
    spec_and_rule,
    vectors_from,
)
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.wire.message import framed, message_of, tensor_of
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.parameters_pb2 import Attendance, Piece, Wanted

SPEC = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)),
    chunk_values=16,
)
RULE = StepRule((0, 4), 0.1, (0.9, 0.95), "int8", 0)


def test_chunk_survives_the_wire() -> None:
    values = torch.arange(5.0)
    head, body = parse(piece(Piece(chunk=3, whole=True), values))
    assert (head.chunk, head.whole) == (3, True)
    assert torch.equal(tensor_of(body, TensorSpec.of(values), "chunk 3"), values)


def test_vectors_survive_the_wire() -> None:
    vectors = {"values": torch.randn(33), "exp_avg": torch.randn(33)}
    again = vectors_from(SPEC, pieces_of(SPEC, vectors))
    assert all(torch.equal(vectors[name], again[name]) for name in vectors)


def test_spec_and_rule_survive_the_wire() -> None:
    assert spec_and_rule(attendance(SPEC, RULE, 3, again=False)) == (SPEC, RULE)


@pytest.mark.parametrize("body", [b"", b"123", b"12345"])
def test_wrong_number_of_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(
        TransferError, match=rf"chunk 1 came in {len(body)} bytes, float32\[1\] takes 4"
    ):
        tensor_of(memoryview(body), TensorSpec((1,), torch.float32), "chunk 1")


def test_bytes_that_are_no_piece_are_refused() -> None:
    with pytest.raises(TransferError, match="where a Piece belongs"):
        parse(framed(b"\xff\xff"))


def test_chunk_that_the_row_has_not_is_refused() -> None:
    with pytest.raises(TransferError, match="chunk 3 came of a stage that has 3"):
        chunk_spec(SPEC, 3)


def test_row_of_another_name_is_refused() -> None:
    with pytest.raises(TransferError, match="a chunk of 'secrets' came, not of values"):
        vectors_from(SPEC, pieces_of(SPEC, {"secrets": torch.zeros(33)}))


def test_rows_that_end_too_early_are_refused() -> None:
    messages = list(pieces_of(SPEC, {"values": torch.zeros(33)}))[:2]
    with pytest.raises(TransferError, match="missing, by name: {'values': 1}"):
        vectors_from(SPEC, iter(messages))


@pytest.mark.parametrize(
    "message",
    [
        Attendance(row="{", rule="{}"),
        Attendance(row="{}"),
        Attendance(row="[1]", rule="3"),
        Attendance(row="[" * 100_000),
        Attendance(row='{"parameters": 3}', rule="{}"),
        Attendance(row='{"parameters": [{"name": "a"}], "chunk_values": 1}', rule="{}"),
        Attendance(row="9" * 10_000, rule="{}"),
    ],
)
def test_invalid_description_of_a_stage_is_refused(message: Attendance) -> None:
    with pytest.raises(TransferError, match="description of its stage cannot be read"):
        spec_and_rule(message)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(TransferError, match="2 bytes came where a Wanted belongs"):
        message_of(Wanted, b"\xff\xff")
