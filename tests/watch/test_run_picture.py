"""The data of the page, without a page."""

import json
import logging
import os
import re
import time
from pathlib import Path

import pytest
from run_folders import append, config_of, row, write_config

from dpipe.config.run import RunConfig
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.errors import ConfigError
from dpipe.store.run_folder import logging_to
from dpipe.watch.broadcast import Broadcast, Seen
from dpipe.watch.folder import RunFolder, plan_of, state_of
from dpipe.watch.network_map import link_views, seat_views, with_binding
from dpipe.watch.picture import Picture, as_json
from dpipe.watch.points import RunPoints, thinned
from dpipe.watch.tail import FileTail


def picture_of(source: RunFolder) -> Picture:
    """Once what takes a while is there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        picture = source.poll()
        if picture.lanes is not None:
            return picture
        time.sleep(0.02)
    raise AssertionError("no prediction after a minute")


def points_of(rates: dict[str, float], **values: object) -> RunPoints:
    points = RunPoints()
    points.add(row(0, mb_per_s=rates, **values))
    return points


def test_picture_of_a_folder_says_where_the_run_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0), row(1, loss=3.5), {"step": 2, "held_out_loss": 3.25})
    source = RunFolder(folder)
    picture = picture_of(source)
    source.close()
    assert (picture.state, picture.step, picture.steps) == ("training", 2, 10)
    assert (picture.loss, picture.held_out_loss) == (3.5, 3.25)
    assert (picture.elapsed_s, picture.eta_s) == (1.0, 4.0)  # 2 and 8 steps of 0.5 s
    assert picture.price == pytest.approx(10.8 / 3600)  # both machines, for a second
    assert [seat.machine for seat in picture.seats] == ["oslo", "porto"]
    assert [seat.layers for seat in picture.seats] == ["layers 0–2", "layers 3–5"]
    assert [seat.limit_mb for seat in picture.seats] == [2000.0, 1000.0]
    assert picture.notes == ()


def test_links_are_as_full_as_their_rate_says(tmp_path: Path) -> None:
    layout = plan_of(config_of(tmp_path / "run")).layout
    there, back = link_views(layout, points_of({"1->0": 5.0, "0->1": 10.0}))
    assert (there.source, there.target, there.delay_ms) == ("0", "1", 20)
    assert there.rate_gbps == pytest.approx(0.1)
    assert (there.full, back.full) == (pytest.approx(0.8), pytest.approx(0.4))


def test_link_is_relayed_where_the_run_has_found_it_so(tmp_path: Path) -> None:
    layout = plan_of(config_of(tmp_path / "run")).layout
    rates = {"0->1": 1.0, "1->0": 1.0, "1->server": 1.0}
    views = link_views(layout, points_of(rates, relayed=["1->0", 7]))
    assert [view.relayed for view in views] == [False, True, False]


def test_link_is_relayed_where_the_file_of_machines_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    with (tmp_path / "machines.toml").open("a") as file:
        file.write("relayed = true\n")
    views = link_views(plan_of(config).layout, points_of({"0->1": 1.0, "1->0": 1.0}))
    assert [view.relayed for view in views] == [True, True]


def test_fullest_link_binds_where_no_rank_is_busier(tmp_path: Path) -> None:
    layout = plan_of(config_of(tmp_path / "run")).layout
    links = link_views(layout, points_of({"0->1": 10.0, "1->0": 5.0}))
    seats = seat_views(layout, {})
    _, marked, sentence = with_binding(seats, links)
    assert [link.binds for link in marked] == [True, False]
    assert sentence == "The link 0 → 1 binds: 80% of its rate is used."


def test_nothing_binds_where_nothing_is_half_full(tmp_path: Path) -> None:
    layout = plan_of(config_of(tmp_path / "run")).layout
    _, links, sentence = with_binding((), link_views(layout, points_of({"0->1": 1.0})))
    assert not any(link.binds for link in links)
    assert sentence.startswith("Nothing is full")


def test_profile_that_is_not_here_is_said(tmp_path: Path) -> None:
    """A folder that was copied from another machine."""
    folder = tmp_path / "run"
    write_config(folder)
    (tmp_path / "machines.toml").unlink()
    append(folder, row(0))
    source = RunFolder(folder)
    until = time.monotonic() + 60
    while not (notes := source.poll().notes) and time.monotonic() < until:
        time.sleep(0.02)
    source.close()
    assert "Links are shown without their rates" in notes[0]


def test_resumed_run_begins_its_points_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0), row(1), row(2))
    source = RunFolder(folder)
    source.poll()
    before = source.points.generation
    # What `keep_rows_before` does: another file takes its place.
    (folder / "metrics.tmp").write_text(json.dumps(row(0)) + "\n")
    os.replace(folder / "metrics.tmp", folder / "metrics.jsonl")
    append(folder, row(1, loss=9.0))
    picture = source.poll()
    source.close()
    assert source.points.generation > before
    assert (picture.step, picture.loss) == (2, 9.0)


def test_row_that_is_half_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b"a\nb")
    assert tail.read() == (True, [b"a"])
    with path.open("ab") as file:
        file.write(b"c\nd\n")
    assert tail.read() == (False, [b"bc", b"d"])


def test_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root\n")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "secret")
    assert FileTail(tmp_path / "metrics.jsonl").read() == (False, [])


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"{}", b'{"step": "1"}', b'{"step": true}', b"[" * 100_000, b"\xff"]
)
def test_damaged_row_is_counted_and_left_out(line: bytes) -> None:
    points = RunPoints()
    points.add_line(line)
    assert (points.points, points.damaged) == ([], 1)


def test_values_that_are_no_numbers_count_as_not_there() -> None:
    points = RunPoints()
    points.add({"step": 0, "loss": "<b>", "step_s": 1e999, "mb_per_s": [1], "tokens_per_s": True})
    assert points.points[0][2:5] == (None, None, None)
    assert points.usual_step_s is None
    assert json.loads(as_json([float("nan"), {"a": (1,)}])) == [None, {"a": [1]}]


def test_rows_between_which_steps_are_left_out_stand_for_them() -> None:
    points = RunPoints()
    points.add(row(9, step_s=0.5, mb_per_s={"0->1": 2.0}))
    points.add(row(19, step_s=1.5, mb_per_s={"0->1": 2.0}))
    assert points.last("elapsed_s") == 10 * 0.5 + 10 * 1.5
    assert points.last("sent_mb") == 40.0


def test_thinned_points_keep_held_out_losses_and_the_last() -> None:
    points = RunPoints()
    for step in range(1000):
        points.add(row(step))
    points.add({"step": 1000, "held_out_loss": 1.0})
    points.add(row(1000))
    kept = thinned(points.points, 100)
    assert 90 <= len(kept) <= 103
    assert kept[-1].step == 1000
    assert [point.held_out_loss for point in kept if point.held_out_loss] == [1.0]


def test_state_is_silent_after_half_a_minute_or_five_steps() -> None:
    now = time.time()
    assert state_of(None, 10, None, None)[0] == "waiting"
    assert state_of(10, 10, 1.0, now - 9999)[0] == "finished"
    assert state_of(5, 10, 1.0, now - 10)[0] == "training"
    assert state_of(5, 10, 60.0, now - 200)[0] == "training"
    assert state_of(5, 10, 1.0, now - 200) == (
        "silent",
        "No new step for 3 minutes: it has stopped, or waits.",
    )


def test_events_come_from_log_and_journal_and_are_made_visible(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    (folder / "logs" / "rank-0.log").write_text(
        "2026-11-23 18:00:20,679 rank 0 step 40 loss 2.6397, 23.82 ms a sample\n"
        "2026-11-23 18:00:21,679 rank 0 time (ms) | forward-compute: 7.3\n"
        "2026-11-23 18:00:22,679 rank 0 lost \x1b[31mrank 3\n"
    )
    journal = RunJournal(folder / NAME)
    journal.note("spare takes rank 3")
    source = RunFolder(folder)
    events = source.poll().events
    source.close()
    journal.close()
    assert [event.text for event in events] == ["spare takes rank 3", "lost \\x1b[31mrank 3"]


def test_damaged_configuration_is_said_and_points_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    append(folder, row(0))
    source = RunFolder(folder)
    picture = source.poll()
    source.close()
    assert picture.step == 1
    assert "not the folder of a run" in picture.notes[0]


def test_folder_without_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    """A folder named by mistake waited for its first step without a word."""
    source = RunFolder(tmp_path)
    assert "no run has begun in this folder" in source.poll().notes[0]
    write_config(tmp_path / "run")
    (tmp_path / "run/config.json").rename(tmp_path / "config.json")
    notes = source.poll().notes
    source.close()
    assert not notes


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run; give a run\.folder"):
        RunFolder(tmp_path / "absent")


def test_each_watcher_is_sent_what_it_has_not_seen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0))
    broadcast = Broadcast(RunFolder(folder), interval_s=0)
    early = Seen()
    assert [name for name, _ in broadcast.news(early)][:1] == ["begin"]
    append(folder, row(1))
    news = dict(broadcast.news(early))
    assert [point[0] for point in json.loads(news["points"])] == [1]
    begun = dict(broadcast.news(Seen()))
    assert [point[0] for point in json.loads(begun["begin"])] == [0, 1]


def test_events_are_read_of_a_json_log_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    with logging_to(folder, 0, RunConfig(log_format="json")):
        logging.getLogger("dpipe").info("step 3 loss 2.5, 1 ms a sample")
        logging.getLogger("dpipe").info("rank 2 was \x1b[2J replaced")
    source = RunFolder(folder)
    (event,) = source.poll().events
    source.close()
    assert event.text == "rank 2 was \\x1b[2J replaced"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", event.at)
