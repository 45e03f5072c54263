"""A run's end writes its report, and no report ends a run."""

import logging
from pathlib import Path

import pytest
from run_folders import append, row, write_config

from dpipe.watch import report


def test_end_of_a_run_writes_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0))
    report.write_at_end(folder)
    assert "<html" in (folder / "report.html").read_text()


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("a bug"), OSError("full")])
def test_report_that_fails_is_a_line_of_the_log(
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(report, "write_report", fail)
    with caplog.at_level(logging.WARNING):
        report.write_at_end(tmp_path)
    assert "the run has no report.html" in caplog.text
    assert f"dpipe report {tmp_path} tries again" in caplog.text
