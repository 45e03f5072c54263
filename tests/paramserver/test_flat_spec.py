"""The layout of a stage's flat vector."""

from dataclasses import replace

import pytest

from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule

SPEC = FlatSpec(
    (ParameterSpec("layers.0.a", 0, 5, True), ParameterSpec("layers.1.b", 1, 4, False)),
    chunk_values=4,
)


def test_chunks_cover_the_row_and_the_last_is_short() -> None:
    assert [SPEC.chunk(index) for index in range(SPEC.num_chunks)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 9),
    ]


def test_pieces_of_a_chunk_say_which_parameter_lies_where() -> None:
    """
    vector     a a a a a b b b b
    chunks     0 0 0 0 1 1 1 1 2
    """
    assert list(SPEC.pieces(SPEC.chunk(1))) == [(0, slice(4, 5)), (1, slice(5, 8))]


def test_position_is_described_by_its_parameter() -> None:
    assert [SPEC.name_at(position) for position in (0, 4, 5, 8)] == ["layers.0.a"] * 2 + [
        "layers.1.b"
    ] * 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (SPEC, None),
        (replace(SPEC, parameters=SPEC.parameters[:1]), "1 parameters where 2"),
        (
            replace(
                SPEC, parameters=(replace(SPEC.parameters[0], num_values=6), SPEC.parameters[1])
            ),
            "of 6 values",
        ),
        (replace(SPEC, chunk_values=8), "chunks of 8"),
    ],
)
def test_difference_names_the_first_thing_that_differs(other: FlatSpec, words: str | None) -> None:
    difference = SPEC.difference(other)
    assert difference is None if words is None else difference is not None and words in difference


@pytest.mark.parametrize(
    ("wire", "staleness", "lossy"), [("none", 0, False), ("int8", 0, True), ("int8", 1, False)]
)
def test_parameters_are_rounded_only_for_workers_that_get_every_version(
    wire: str, staleness: int, lossy: bool
) -> None:
    assert StepRule((0, 1), 0.1, (0.9, 0.95), wire, staleness).lossy_parameters == lossy
