"""When copies are taken, sent, counted and forgotten; when a link is idle."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dpipe.engine.ballot import RankReport
from dpipe.engine.update import Verdict
from dpipe.epoch.control import EpochControl
from dpipe.epoch.guard import Guard
from dpipe.epoch.idle_time import IdleTime, WatchedLinks
from dpipe.errors import RunAborted
from dpipe.keeper.copies import PieceCopy
from dpipe.keeper.keeper import Keeper
from dpipe.transport.local import LocalHub
from dpipe.wire.rpc import Security
from dpipe.wire.spec import TensorSpec

TOKEN = Security("secret")
Make = Callable[..., Guard]


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    """Of this rank, and of its guard."""
    made = [Keeper(security=TOKEN), Keeper(security=TOKEN)]
    yield made
    for keeper in made:
        keeper.close()


@pytest.fixture
def guard_of(keepers: list[Keeper]) -> Iterator[Make]:
    made: list[Guard] = []

    def make(*addresses: str, every: int = 2, **options: Any) -> Guard:
        guard = Guard(
            keepers[0],
            epoch=1,
            every=every,
            addresses=addresses,
            security=TOKEN,
            take=lambda step: [PieceCopy(step, layer, bytes(100_000)) for layer in (0, 1)],
            **options,
        )
        made.append(guard)
        return guard

    yield make
    for guard in made:
        guard.close()


def verdict(*whole: int | None) -> Verdict:
    """What all ranks hear where each has said that."""
    reports = tuple(RankReport(guarded=step) for step in whole)
    return Verdict(step=0, loss=1.0, norm=None, stop=False, culprit=None, reports=reports)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_copies_are_held_here_and_there(keepers: list[Keeper], guard_of: Make) -> None:
    guard = guard_of(keepers[1].address)
    guard.after_step(1, None)
    assert keepers[0].held() == {}
    guard.after_step(2, None)
    until(lambda: guard.whole == 2)
    assert keepers[0].held() == keepers[1].held() == {2: [0, 1]}


def test_next_copy_is_taken_when_all_ranks_have_the_last_one(
    keepers: list[Keeper], guard_of: Make
) -> None:
    guard = guard_of()
    guard.after_step(2, verdict(None, None))
    assert guard.whole == 2, "there is no other machine that has to have it"
    for said in (verdict(2, None), verdict(2, 0)):
        guard.after_step(4, said)
        assert keepers[0].held() == {2: [0, 1]}
    guard.after_step(5, verdict(2, 2))
    guard.after_step(6, verdict(2, 2))
    assert keepers[0].held() == {2: [0, 1], 6: [0, 1]}, "one that is whole everywhere stays"
    guard.after_step(7, verdict(6, 6))
    assert keepers[0].held() == {6: [0, 1]}


def test_copies_that_an_epoch_begins_with_are_sent_at_once(
    keepers: list[Keeper], guard_of: Make
) -> None:
    """And as long as not all ranks have them there, none is taken, and none is dropped."""
    resumed = [PieceCopy(7, layer, b"resumed") for layer in (0, 1)]
    keepers[0].hold([PieceCopy(4, 0, b"agreed upon"), *resumed])
    guard = guard_of(keepers[1].address, resumed=7, copies=resumed)
    until(lambda: guard.whole == 7)
    assert keepers[1].held() == {7: [0, 1]}
    guard.after_step(8, verdict(7, None))
    assert keepers[0].held() == {4: [0], 7: [0, 1]}
    assert keepers[0].fallbacks(7) == {4, 7}
    guard.after_step(10, verdict(7, 7))
    assert keepers[0].held() == {7: [0, 1], 10: [0, 1]}


def test_guard_that_cannot_be_reached_is_tried_again(
    keepers: list[Keeper],
    guard_of: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("dpipe.epoch.guard._RETRY_S", 0.1)
    keepers[1].fence(2, newest=0)
    guard = guard_of(keepers[1].address)
    guard.after_step(2, None)
    until(lambda: "epoch 1 is over" in caplog.text)
    assert "the copy of step 2 cannot be sent to 127.0.0.1" in caplog.text
    assert guard.whole is None
    keepers[1]._epoch = 1
    until(lambda: guard.whole == 2)


def test_close_ends_what_is_under_way(keepers: list[Keeper], guard_of: Make) -> None:
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        time.sleep(0.2)

    guard = guard_of(keepers[1].address, before_chunk=wait)
    guard.after_step(2, None)
    assert waiting.wait(20)
    guard.close()
    assert guard.whole is None
    assert not [thread for thread in threading.enumerate() if thread.name == "guard"]


def test_links_say_whether_they_send() -> None:
    hub = LocalHub(2)
    links = WatchedLinks(hub.transport(0))
    other = hub.transport(1)
    assert not links.is_sending()
    pending = links.send(torch.ones(2), 1, "1SEND_F0")
    received = other.recv(TensorSpec((2,), torch.float32), 0, "1SEND_F0")
    assert torch.equal(received.wait(), torch.ones(2))
    pending.settle()
    assert not links.is_sending()
    links.close()
    other.close()


def test_pieces_wait_until_the_links_are_idle_but_not_for_ever() -> None:
    busy = [True, True, False]
    idle = IdleTime(lambda: busy.pop(0))
    idle.wait()  # nothing is known of how long a piece takes
    assert busy == [True, False]
    time.sleep(0.01)
    idle.wait()
    assert busy == []
    always = IdleTime(lambda: True)
    always.wait()
    time.sleep(0.002)
    began_at = time.monotonic()
    always.wait()
    assert time.monotonic() - began_at >= 0.2


def test_first_abort_counts_and_reaches_what_comes_later() -> None:
    control = EpochControl()
    heard: list[RunAborted] = []
    control.on_abort("a", heard.append)
    control.on_abort("a", heard.append)  # in the place of the first
    control.abort("one")
    control.abort("two")
    assert [str(error) for error in heard] == ["one"]
    with pytest.raises(RunAborted, match="one"):
        control.on_abort("b", heard.append)
    with pytest.raises(RunAborted, match="one"), control.watched():
        pass
