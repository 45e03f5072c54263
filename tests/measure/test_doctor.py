"""What `dpipe doctor` finds, and what it says to do."""

import re
import socket
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dpipe.cli.main import main
from dpipe.config.load import build
from dpipe.measure import doctor
from dpipe.measure.doctor import CHECKS, Finding, State, examine


def found(**sections: dict[str, Any]) -> list[Finding]:
    return list(examine(build(sections)))


def bad(**sections: dict[str, Any]) -> list[Finding]:
    return [finding for finding in found(**sections) if finding.state is State.HURTS]


def test_every_check_finds_something_here() -> None:
    for check in CHECKS:
        assert list(check(build({}))), check.__name__


@pytest.mark.parametrize("extra", doctor.EXTRAS)
def test_extra_is_looked_for_by_a_package_that_it_brings(extra: str) -> None:
    """With mlflow-skinny installed it said that the extra mlflow was not."""
    requirements = requires("dpipe") or []
    package = re.escape(doctor.EXTRAS[extra])
    brings = re.compile(rf"{package}[<>=~!;\[ ].*extra == .{extra}.")
    assert any(brings.match(requirement) for requirement in requirements)


def test_what_hurts_says_how_to_mend_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = bad(node={"bind": "127.0.0.1", "port": port})
    assert finding.what.startswith(f"cannot listen on 127.0.0.1:{port}")
    assert "node.port" in finding.mend
    (finding,) = bad(transport={"kind": "tcp", "congestion_control": "nosuchthing"})
    assert "tcp_allowed_congestion_control" in finding.mend


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_hurts() -> None:
    (finding,) = bad(node={"device": "cuda"})
    assert "sees no GPU" in finding.what


def test_full_disk_and_few_files_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_DISK_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "_LEAST_FILES", 1 << 40)
    findings = {finding.state: finding.mend for finding in found()}
    assert findings[State.HURTS].startswith("ulimit -n")
    assert any(finding.mend.startswith("make room") for finding in found())


@pytest.mark.parametrize(
    ("sysctl", "text"),
    [
        (
            {"tcp_rmem": "4096 87380 212992", "tcp_wmem": "1 2 3"},
            "net.ipv4.tcp_rmem ends at 212992",
        ),
        ({"tcp_mtu_probing": "0"}, "net.ipv4.tcp_mtu_probing is 0"),
        ({}, "net.ipv4.tcp_rmem cannot be read here"),
    ],
)
def test_settings_of_tcp_that_cost_time_are_noted(
    sysctl: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in sysctl.items():
        (tmp_path / name).write_text(value)
    monkeypatch.setattr(doctor, "_SYSCTL", tmp_path)
    assert any(finding.what.startswith(text) for finding in found())


@pytest.mark.parametrize(
    ("allowed", "kind", "is_noted"),
    [("reno cubic", "tcp", True), ("reno cubic bbr", "tcp", False), ("reno cubic", "grpc", False)],
)
def test_host_without_bbr_is_noted_where_a_run_would_take_it(
    allowed: str,
    kind: str,
    is_noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tcp_allowed_congestion_control").write_text(f"{allowed}\n")
    monkeypatch.setattr(doctor, "_SYSCTL", tmp_path)
    mends = [finding.mend for finding in found(transport={"kind": kind})]
    assert any("'reno cubic bbr'" in mend for mend in mends) == is_noted


def test_bbr_of_the_host_is_replaced_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    monkeypatch.setattr(doctor, "_SYSCTL", tmp_path)
    said = [finding.what for finding in found(transport={"kind": "tcp"})]
    assert "congestion control reno, in the place of the host's bbr" in said


def test_exit_code_says_whether_something_is_bad() -> None:
    well = CliRunner().invoke(main, ["doctor"])
    assert well.exit_code == 0, well.output
    overrides = ("-o", "transport.kind=tcp", "-o", "transport.congestion_control=nosuchthing")
    hurt = CliRunner().invoke(main, ["doctor", *overrides])
    assert hurt.exit_code == 1
    assert "bad  congestion control" in hurt.output
    assert "     -> transport.congestion_control" in hurt.output
