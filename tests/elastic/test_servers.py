"""Which of a run's parameter servers has moved."""

import pytest

from dpipe.elastic.servers import ServerMoved, moved

ONE = ("10.0.0.5:7100",)
TWO = ("10.0.0.5:7100", "10.0.0.6:7100")


@pytest.mark.parametrize(
    ("before", "instead_of", "after"),
    [
        (ONE, None, ("10.0.0.9:7100",)),
        (ONE, "10.0.0.5:7100", ("10.0.0.9:7100",)),
        (TWO, "10.0.0.6:7100", ("10.0.0.5:7100", "10.0.0.9:7100")),
        # Said again.
        (("10.0.0.9:7100",), None, ("10.0.0.9:7100",)),
        (("10.0.0.5:7100", "10.0.0.9:7100"), "10.0.0.6:7100", ("10.0.0.5:7100", "10.0.0.9:7100")),
    ],
)
def test_server_takes_the_place_of_one(
    before: tuple[str, ...], instead_of: str | None, after: tuple[str, ...]
) -> None:
    message = ServerMoved(address="10.0.0.9:7100", instead_of=instead_of)
    assert moved(before, message) == after


@pytest.mark.parametrize(
    ("before", "instead_of", "words"),
    [
        ((), None, "has no parameter server by itself"),
        (TWO, None, "several servers, at 10.0.0.5:7100, 10.0.0.6:7100: say with --instead-of"),
        (TWO, "10.0.0.7:7100", "no server of the run is at 10.0.0.7:7100: they are at 10.0.0.5"),
    ],
)
def test_server_of_no_place_is_refused(
    before: tuple[str, ...], instead_of: str | None, words: str
) -> None:
    message = ServerMoved(address="10.0.0.9:7100", instead_of=instead_of)
    with pytest.raises(ValueError, match=words):
        moved(before, message)
