import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpipe.engine.ballot import BALLOT, Ballot
from dpipe.engine.update import count
from dpipe.errors import TransferError
from dpipe.ranks import ParallelRanks

SOUND = {"loss": 1.5, "norms": {"0": 2.0, "11": 3.0}, "bad": None, "stop": False, "report": {}}


def read(**changes: object) -> Ballot:
    return BALLOT.parse(json.dumps(SOUND | changes).encode(), "its ballot of step 3", 1)


def test_valid_ballot_is_read() -> None:
    ballot = read(loss=1, report={"bubble": 0.25, "mb_per_s": {"1->0": 2.0}})
    assert (ballot.loss, ballot.norms) == (1.0, {0: 2.0, 11: 3.0})
    assert (ballot.report.bubble, ballot.report.memory_mb) == (0.25, 0.0)


def test_overflowed_ballot_is_read_and_left_to_the_count() -> None:
    ballot = read(loss=float("nan"), norms={"0": float("nan"), "1": float("inf")})
    assert count(0, [ballot]).culprit == "the gradient of layer 0"


def test_largest_gradients_that_there_are_have_a_finite_norm() -> None:
    """The squares of 10^15 fp32 parameters, all at the largest value, in a thousand layers."""
    square = (3.4e38) ** 2 * 1e12
    norms = {str(layer): square for layer in range(1000)}
    verdict = count(0, [read(norms=norms)])
    assert verdict.culprit is None
    assert verdict.norm == pytest.approx(3.4e38 * 1e15**0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "1.5"},
        {"loss": [1.5]},
        {"loss": True},
        {"norms": {"a": 1.0}},
        {"norms": {"-1": 1.0}},
        {"norms": {"0": -1.0}},
        {"norms": {"0": 1e300}},
        {"norms": {"0": None}},
        {"norms": [1.0]},
        {"bad": 1},
        {"bad": "x" * 1001},
        {"stop": "no"},
        {"stop": 0},
        {"report": None},
        {"report": {"bubble": "0"}},
        {"report": {"bubble": float("nan")}},
        {"report": {"mb_per_s": {"0->1": "fast"}}},
        {"report": {"else": 1}},
        {"else": 1},
    ],
    ids=str,
)
def test_mistyped_ballot_names_its_rank(changes: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="rank 1 sent .* bytes for its ballot of step 3"):
        read(**changes)


@pytest.mark.parametrize("losses", [(None, None), (1.0, 1.0)])
def test_losses_that_are_not_one_a_replica_are_refused(losses: tuple[float | None, ...]) -> None:
    ballots = [read(loss=loss) for loss in losses]
    with pytest.raises(TransferError, match=r"step 3: \d ranks report a loss .* 1 replicas"):
        count(3, ballots, ParallelRanks())


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*SOUND, "else"]), JSON, max_size=3))
@example({"norms": {"\n": None}})
def test_any_ballot_is_counted_or_refused_in_words(changes: dict[str, object]) -> None:
    try:
        said = count(3, [read(**changes)]).culprit or ""
    except TransferError as error:
        said = str(error)
    assert said.isprintable()
