from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dpipe.errors import RunError
from dpipe.network.link import Link
from netem import shell
from netem.shell import NetemError

FAR = "delay_ms = 50\nbandwidth_gbps = 1\n"


class Here:
    """A host of a lab that is this machine."""

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{number + 1}"

    def enter(self, command):
        return list(command)


HERE = [Here(0), Here(1)]


class Lab:
    """Two hosts with a link of the requested rate."""

    lab = SimpleNamespace(hosts=HERE)

    def become(self, profile: Path) -> dict[str, float]:
        return {"bandwidth_gbps": 0.99}


@pytest.fixture
def link(script):
    return script("link")


@pytest.fixture
def far(tmp_path) -> Path:
    path = tmp_path / "far.toml"
    path.write_text(FAR)
    return path


@pytest.fixture
def carried(link, monkeypatch) -> list[tuple[str, int, float, float]]:
    """What was asked for. Each way carries 0.1 Gbit/s a connection, and in later turns more, dpipe
    a tenth less.
    """
    asked = []

    def way(name: str, each_gbps: float):
        def carry(hosts, connections, warm_up_s, seconds):
            asked.append((name, connections, warm_up_s, seconds))
            return each_gbps * connections * len(asked)

        return carry

    monkeypatch.setattr(link, "iperf3", way("iperf3", 0.1))
    monkeypatch.setattr(link, "dpipe", way("dpipe", 0.09))
    return asked


def test_ways_take_turns_on_a_link_after_one_connection_alone(link, far, carried):
    link.measure(Lab(), far)
    count = Link(50, 1).connections
    turns = [("iperf3", count, 2.5, 10.0), ("dpipe", count, 2.5, 10.0)]
    assert carried == [("iperf3", 1, 2.5, 10.0), *3 * turns]


def test_row_is_the_middle_of_the_turns_held_against_what_was_asked_and_iperf3(link, far, carried):
    row = link.measure(Lab(), far)
    count = row["connections"]
    assert (row["iperf3"], row["dpipe"]) == pytest.approx((0.1 * count * 4, 0.09 * count * 5))
    assert row["dpipe / asked"] == row["dpipe"]
    assert row["dpipe / iperf3"] == pytest.approx(0.9 * 5 / 4)
    assert row["window MB"] == pytest.approx(0.1e9 / 8 * 0.1 / 1e6)


def test_warm_up_has_the_configured_length(link, far, carried):
    link.measure(Lab(), far, 20.0)
    assert {warm_up_s for _, _, warm_up_s, _ in carried} == {20.0}


@pytest.mark.usefixtures("carried")
def test_rows_are_printed_as_a_table(link, far):
    row = link.measure(Lab(), far)
    lines = "\n".join(
        [link.as_markdown(row, heads=True), link.as_markdown(row, heads=False)]
    ).splitlines()
    assert lines[0].startswith(
        "| network | asked | on the wire | iperf3 x1 | window MB | connections | iperf3 |"
    )
    assert lines[2].startswith("| far | 1.00 | 0.99 | 0.10 | ")
    assert lines[3:] == lines[2:3]


@pytest.mark.slow
def test_dpipe_is_timed_between_two_processes(link):
    assert link.dpipe(HERE, 2, 0.0, 0.1) > 0


def test_iperf3_is_timed_between_two_processes(link, possible):
    assert link.iperf3(HERE, 2, 0.0, 1.0) > 0


def test_program_that_ends_before_it_listens_is_named(link, monkeypatch):
    monkeypatch.setattr(link.sys, "executable", "/bin/false")
    with pytest.raises(
        RunError,
        match=r"'/bin/false', '-m', 'dpipe.bench.rate', '1'.* ended before it listened",
    ):
        link.dpipe(HERE, 1, 0.0, 0.1)


def test_failed_receiver_is_reported_with_its_output(link, monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text(
        '#!/bin/sh\necho listening\n[ "$3" = 0 ] || { echo "out of luck" >&2; exit 1; }\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(link.sys, "executable", str(program))
    with pytest.raises(
        RunError, match="dpipe between two hosts of the lab has failed:\nout of luck"
    ):
        link.dpipe(HERE, 1, 0.0, 0.1)


def test_missing_iperf3_says_what_to_install(link, monkeypatch):
    monkeypatch.setattr(shell.shutil, "which", lambda program: None)
    result = CliRunner().invoke(link.main, [])
    assert result.exit_code == 2
    assert "link: iperf3 not found; on Debian and Ubuntu: apt-get install iperf3" in result.output


def test_lab_that_cannot_be_made_is_reported(link, monkeypatch):
    def refuse(*_):
        raise NetemError("a lab needs root")

    monkeypatch.setattr(link, "lab_up", refuse)
    monkeypatch.setattr(shell, "require_programs", lambda *programs: None)
    result = CliRunner().invoke(link.main, [])
    assert (result.exit_code, result.output) == (2, "link: a lab needs root\n")
