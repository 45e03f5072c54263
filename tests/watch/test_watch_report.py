"""One HTML file of a run, and of several."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from run_folders import append, row, write_config

from dpipe.errors import ConfigError
from dpipe.watch.report import write_report

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0), row(1, mb_per_s={"0->1": 10.0, f"0->{HOSTILE}": 1.0}))
    return folder


def content_of(page: str) -> object:
    found = re.search(r'id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_report_is_one_file_that_loads_nothing(run: Path) -> None:
    path = write_report([str(run)], None)
    assert path == run / "report.html"
    page = path.read_text()
    assert not re.search(r"(?:src|href)=[\"']?/", page)
    content = content_of(page)
    assert content["picture"]["step"] == 2
    assert [seat["machine"] for seat in content["picture"]["seats"]] == ["oslo", "porto"]
    assert content["picture"]["lanes"]["predicted_ms"] > 0
    assert len(content["points"]) == 2
    # What came from another machine ends no script: there are four of ours, and the data.
    assert page.count("</script>") == 4
    assert HOSTILE in [link["target"] for link in content["picture"]["links"]]


def test_policy_allows_the_scripts_of_the_report_by_their_hashes(run: Path) -> None:
    page = write_report([str(run)], None).read_text()
    policy = re.search(r'Policy" content="([^"]+)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy[1]
    assert "unsafe" not in policy[1]


def test_several_runs_are_compared_in_one_file(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_config(other)
    append(other, row(0, loss=2.0))
    path = write_report([str(run), str(other)], str(tmp_path / "both.html"))
    compared = content_of(path.read_text())
    assert [each["picture"]["loss"] for each in compared] == [3.9, 2.0]
    assert [each["picture"]["sent_mb"] for each in compared] == [7.5 + 5.5, 7.5]


def test_link_in_the_place_of_the_report_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (run / "report.html").symlink_to(tmp_path / "precious")
    write_report([str(run)], None)
    assert (tmp_path / "precious").read_text() == "kept"


def test_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    write_config(tmp_path / "run")
    with pytest.raises(ConfigError, match="has no step yet"):
        write_report([str(tmp_path / "run")], None)
