"""What scripts/chaos counts of a run, and which faults it makes."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.small_job import small_toml

from dpipe.store import checkpoint

Script = Callable[[str], ModuleType]


def write_rows(path: Path, *steps: int) -> None:
    rows = [json.dumps({"step": step, "loss": 1.0 / (step + 1)}) for step in steps]
    # An evaluation, and a line that is still being written. An epoch puts a new file there.
    written = path.with_suffix(".written")
    written.write_text("\n".join([*rows, '{"step": 9, "held_out_loss": 1.0}', '{"step": 10, "lo']))
    written.replace(path)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_progress_reads_a_growing_file_on_from_where_it_was(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = script("chaos").Progress(path)
    write_rows(path, 0, 1)
    progress.look()
    append(path, 'ss": 0.5}\n{"step": 11, "loss": 0.5}\n')
    progress.look()
    assert progress.newest == 11
    read = progress._read
    assert read == path.stat().st_size
    append(path, '{"step": 12, "loss": 0.5}\n')
    progress.look()
    assert progress.newest == 12
    assert progress._read > read


def test_folder_that_is_there_is_left_alone(script: Script, tmp_path: Path) -> None:
    chosen = ["scripts/chaos.toml", "--folder", str(tmp_path)]
    result = CliRunner().invoke(script("chaos").main, chosen)
    assert result.exit_code == 2
    assert "(File exists); choose another --folder" in result.output


def test_progress_counts_what_is_repeated(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = script("chaos").Progress(path)
    progress.look()
    assert (progress.newest, progress.seconds) == (-1, 0.0)
    for steps in ((0,), (0, 1, 2, 3), (0, 1), (0, 1, 2), (0, 1, 2, 3, 4)):
        write_rows(path, *steps)
        progress.look()
    assert (progress.newest, progress.best, progress.num_repeated) == (4, 4, 2)
    assert progress.seconds == progress.newest_at - progress.first_at > 0


@pytest.fixture
def machines(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Four that sleep, and a coordinator."""
    made = script("chaos").Machines(tmp_path, "127.0.0.1:1", [], "job.toml", {})

    def start(name: str, argv: list[str], host: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(made, "_start", start)
    monkeypatch.setattr("machines.END_S", 0.1)
    monkeypatch.setattr("chaos.PAUSES_S", (0.1,))
    made.coordinate()
    for _ in range(4):
        made.join()
    yield made
    made.end()


def test_faults_are_those_of_the_seed(script: Script, machines: Any) -> None:
    chaos = script("chaos")
    storm = chaos.Storm(chaos.FAULTS, random.Random(5))
    progress = chaos.Progress(Path("none"))
    struck = [chaos.strike(machines, progress, storm) for _ in range(12)]
    said = [what for _, what in struck]
    assert any("is killed, m4 joins" in what for what in said)
    assert any("is stopped for 0.1 s" in what for what in said)
    assert any("coordinator is killed and started again" in what for what in said)
    assert len(machines.running) == 4
    time.sleep(0.2)
    machines.wake()
    assert machines.paused == {}
    assert sorted(machines.running) == sorted(machines.awake())
    machines.end()
    assert machines.awake() == []
    assert machines.coordinator.poll() is not None


def test_machine_is_cut_off_for_a_while(
    script: Script, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is killed meanwhile leaves a cable that is whole."""
    chaos = script("chaos")
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(chaos.labs, "cut", lambda lab, host: done.append(("cut", host)))
    monkeypatch.setattr(chaos.labs, "mend", lambda lab, host: done.append(("mend", host)))
    monkeypatch.setattr(chaos, "CUTS_S", (0.1,))
    machines.lab = object()
    storm = chaos.Storm([chaos.CUT], random.Random(1))
    kind, what = chaos.strike(machines, chaos.Progress(Path("none")), storm)
    assert kind == "cut of 0.1 s"
    assert "is cut off for 0.1 s" in what
    ((_, host),) = done
    assert len(machines.awake()) == 3
    time.sleep(0.2)
    machines.wake()
    assert done == [("cut", host), ("mend", host)]
    machines.cut_off("m1", 60.0)
    machines.kill("m1")
    assert done[2:] == [("cut", 2), ("mend", 2)]
    assert machines.join() == "m4"
    assert machines.hosts["m4"] == 2


def test_standby_takes_over_from_a_coordinator_whose_folder_is_gone(
    script: Script, machines: Any, tmp_path: Path
) -> None:
    chaos = script("chaos")
    folder = tmp_path / "disturbed"
    folder.mkdir()
    progress = chaos.Progress(folder / "metrics.jsonl")
    machines.stand_by()
    first, standby = machines.coordinator, machines.standby
    address = machines.standby_address
    kind, _ = chaos.strike(machines, progress, chaos.Storm([chaos.TAKEOVER]))
    assert kind == "takeover"
    assert first.poll() is not None
    assert not folder.exists()
    assert machines.coordinator is standby
    assert machines.address == address
    assert progress.path == tmp_path / "taken-over-1" / "metrics.jsonl"
    assert machines.standby is not standby
    assert machines.standby.poll() is None


def test_server_is_started_again_or_begins_elsewhere(script: Script, machines: Any) -> None:
    chaos = script("chaos")
    machines.serve()
    begun = machines.server_address
    assert machines.overrides[-1] == f'data_parallel.address="{begun}"'
    storm = chaos.Storm([chaos.SERVER], random.Random(1))
    seen = set()
    for _ in range(8):
        before, address = machines.server, machines.server_address
        kind, _ = chaos.strike(machines, chaos.Progress(Path("none")), storm)
        assert before.poll() is not None
        assert machines.server.poll() is None
        assert (machines.server_address == address) == (kind == "server")
        seen.add(kind)
    assert seen == {"server", "server elsewhere"}
    machines.end()
    assert machines.server.poll() is not None


def test_half_of_the_machines_are_parted_for_a_while(
    script: Script, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos = script("chaos")
    done: list[Any] = []
    monkeypatch.setattr(chaos.labs, "part", lambda lab, side: done.append(side))
    monkeypatch.setattr(chaos.labs, "rejoin", lambda lab: done.append("rejoin"))
    monkeypatch.setattr(chaos, "CUTS_S", (0.1,))
    machines.lab = object()
    progress = chaos.Progress(Path("none"))
    kind, what = chaos.strike(machines, progress, chaos.Storm([chaos.PARTITION]))
    assert kind == "partition of 0.1 s"
    assert "are parted from the others for 0.1 s" in what
    (side,) = done
    assert len(set(side)) == 2
    assert 0 not in side
    time.sleep(0.2)
    machines.wake()
    assert done[1:] == ["rejoin"]


def test_coordinator_is_started_again_or_taken_over_from(script: Script, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_toml())
    faults = ["--fault", "takeover", "--fault", "coordinator"]
    argv = [str(tmp_path / "job.toml"), *faults, "--folder", str(tmp_path / "chaos")]
    result = CliRunner().invoke(script("chaos").main, argv)
    assert result.exit_code == 2
    assert "leave out --fault takeover" in result.output


def test_links_are_cut_in_a_lab_alone(script: Script, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(small_toml())
    argv = [str(tmp_path / "job.toml"), "--fault", "cut", "--folder", str(tmp_path / "chaos")]
    result = CliRunner().invoke(script("chaos").main, argv)
    assert result.exit_code == 2
    assert "give --network" in result.output


@pytest.mark.slow
def test_command_that_is_forked_ends_as_it_would(
    script: Script, warm_python: str, tmp_path: Path
) -> None:
    """With its exit code and its output; and where it is killed."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from forked import Forked, import_dpipe
import_dpipe()
with open("log", "wb") as log:
    one = Forked(["status", "127.0.0.1:1:2"], {}, log.fileno())
    two = Forked(["schedule", "gpipe", "--stages", "2", "--micro-batches", "2"], {}, log.fileno())
    print(one.wait(), two.wait())
    other = Forked(["coordinate", "none.toml"], {}, log.fileno())
    other.kill()
    print(other.wait(5.0))
"""
    scripts = Path(script("chaos").__file__).parent
    argv = [warm_python, "-c", program, str(scripts)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    codes = done.stdout.split()
    assert codes[1:] == ["0", "-9"], done.stderr
    assert codes[0] != "0"
    assert "0F0" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_run_without_machines_is_over(script: Script, machines: Any, tmp_path: Path) -> None:
    chaos = script("chaos")
    for process in machines.running.values():
        process.kill()
        process.wait()
    progress = chaos.Progress(tmp_path / "none")
    assert chaos.disturb(machines, progress, chaos.Storm(chaos.FAULTS, minutes=1.0)) == []


def test_processes_are_looked_at_while_there_are_faults(
    script: Script, machines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the last one: what does not grow there would hide what grew before."""
    chaos = script("chaos")
    looks: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0
        if now == 100:
            machines.coordinator.kill()
            machines.coordinator.wait()

    monkeypatch.setattr(chaos, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(machines, "look", lambda: looks.append(now))
    write_rows(tmp_path / "metrics.jsonl", 0)
    progress = chaos.Progress(tmp_path / "metrics.jsonl")
    chaos.disturb(machines, progress, chaos.Storm(minutes=0.5))
    assert now == 100
    assert looks == [float(second) for second in range(31)]


def test_run_of_another_call_is_compared_with(script: Script, tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 0.5, "step_s": 1.0 + step} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    progress = script("progress").ended(tmp_path)
    assert progress.best == 3
    assert progress.seconds == 2 + 3 + 4


def test_job_without_a_server_cannot_lose_it(script: Script, tmp_path: Path) -> None:
    argv = ["scripts/chaos.toml", "--fault", "server", "--folder", str(tmp_path / "new")]
    result = CliRunner().invoke(script("chaos").main, argv)
    assert result.exit_code == 2
    assert "parameter-server" in result.output


def test_folder_without_a_run_is_nothing_to_compare_with(script: Script, tmp_path: Path) -> None:
    argv = ["scripts/chaos.toml", "--undisturbed", str(tmp_path), "--folder", f"{tmp_path}/new"]
    result = CliRunner().invoke(script("chaos").main, argv)
    assert result.exit_code == 2
    assert "name the folder of a run" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("changed", "same"), [(0.0, True), (1e-7, False)])
def test_one_bit_of_a_parameter_is_found(
    changed: float, same: bool, script: Script, tmp_path: Path
) -> None:
    chaos = script("chaos")
    progress = []
    for name, value in (("one", 0.5), ("two", 0.5 + changed)):
        folder = tmp_path / name / "checkpoints"
        tensors = {"layers.0.weight": torch.full((2,), value)}
        checkpoint.save(str(folder), 3, 0, tensors, {}, {}, lambda part: [part], 1)
        progress.append(chaos.Progress(tmp_path / name / "metrics.jsonl"))
        write_rows(progress[-1].path, 0, 1)
    assert chaos.compare(tmp_path, *progress) == same
    write_rows(progress[1].path, 0)
    assert not chaos.compare(tmp_path, *progress)


def test_clusters_are_simulated_by_the_seed(script: Script) -> None:
    result = CliRunner().invoke(script("chaos").main, ["--simulate", "3", "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "3 seeds from 7" in result.output
    assert CliRunner().invoke(script("chaos").main, []).exit_code == 2
