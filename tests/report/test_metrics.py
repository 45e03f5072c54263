import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from dpipe.errors import RunError
from dpipe.report.metrics import Metrics, insert_rows, keep_rows_before, read_rows


def some_metrics(folder: Path, first_step: int = 0, tensorboard: bool = False) -> Metrics:
    return Metrics(folder, first_step=first_step, tensorboard=tensorboard, show=lambda row: None)


def test_rows_are_read_back_in_order(tmp_path: Path) -> None:
    metrics = some_metrics(tmp_path)
    rows: list[dict[str, Any]] = [{"step": 0, "loss": 2.5}, {"step": 1, "loss": 2.25}]
    for row in rows:
        metrics.write(row)
    metrics.close()
    assert read_rows(tmp_path) == rows


def test_rows_are_shown_as_they_come(tmp_path: Path) -> None:
    seen: list[Any] = []
    metrics = Metrics(tmp_path, first_step=0, tensorboard=False, show=seen.append)
    metrics.write({"step": 0, "loss": 2.5})
    metrics.close()
    assert seen == [{"step": 0, "loss": 2.5}]


def test_resumed_run_drops_the_rows_that_it_trains_again(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    some_metrics(tmp_path, first_step=3).close()
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "\xff\xfe', b"\0\0\0\0", b'{"loss": 2}', b"[]", b'{"step": null}']
)
def test_line_that_is_no_row_is_dropped(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1}\n' + torn)
    some_metrics(tmp_path, first_step=3).close()
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1]


def test_rows_that_are_kept_are_on_the_disk_before_they_replace_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a machine that loses its power may come back with an empty metrics.jsonl."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    synced: dict[int, bytes] = {}
    sync = os.fsync
    replace = os.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced[os.fstat(descriptor).st_ino] = path.with_suffix(".tmp").read_bytes()

    def replace_synced(source: Path, target: Path) -> None:
        assert synced.get(source.stat().st_ino) == source.read_bytes()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace_synced)
    keep_rows_before(path, 1)
    assert path.read_text() == '{"step": 0}\n'


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = some_metrics(tmp_path, tensorboard=True)
    metrics.write({"step": 7, "loss": 2.5, "grad_norm": None, "mb_per_s": {"0->1": 3.0}})
    metrics.close()
    log = EventAccumulator(str(tmp_path / "tensorboard"))
    log.Reload()
    assert log.Tags()["scalars"] == ["loss", "mb_per_s/0->1"]
    assert [(e.step, e.value) for e in log.Scalars("loss")] == [(7, 2.5)]


def test_row_that_finds_no_room_ends_the_run_with_one_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing tried to write the row again, and its error replaced the first one."""
    metrics = some_metrics(tmp_path)
    metrics.close()
    with open("/dev/full", "a") as full:
        monkeypatch.setattr(metrics, "_file", full)
        with pytest.raises(
            RunError, match=r"cannot write .*metrics\.jsonl: .*No space left .*; make room there"
        ):
            metrics.write({"step": 0, "loss": 2.5})
        metrics.close()


def test_tensorboard_without_room_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers are also in the rows."""
    metrics = some_metrics(tmp_path, tensorboard=True)
    assert metrics._board is not None
    metrics._board.close()
    with open("/dev/full", "wb") as full:
        monkeypatch.setattr(metrics._board, "_file", full)
        for step in range(3):
            metrics.write({"step": step, "loss": 2.5})
        metrics.close()
    assert len(read_rows(tmp_path)) == 3
    assert len(caplog.records) == 1
    assert "No space left on device; the run continues without it" in caplog.text


def test_tensorboard_that_cannot_begin_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file of that name")
    metrics = some_metrics(tmp_path, tensorboard=True)
    metrics.write({"step": 0, "loss": 2.5})
    metrics.close()
    assert "the run continues without it" in caplog.text


def test_rows_are_dropped_and_inserted_without_the_whole_file_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "text": "x" * 500} for step in range(2000) if step != 700]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    keep_rows_before(path, 1900)
    insert_rows(path, [{"step": 700}])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(1900))
    assert peak < path.stat().st_size / 4
