"""`dpipe measure` from the command line."""

import subprocess
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner, Result

from dpipe.cli.main import main
from dpipe.config.load import load
from dpipe.machines.file import load_machines
from dpipe.measure import layers, this_machine
from dpipe.processes.launch import free_port

JOB = """
[model]
num_layers = 2
width = 16
num_heads = 2
context = 8
"""
REPLAY = '[model]\nlayers = "replay"\n[node]\ntoken = "t"\n'


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "_STRETCH_S", 0.01)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def measure(*words: object) -> Result:
    return CliRunner().invoke(main, ["measure", *map(str, words)])


def test_one_machine_alone_is_measured_without_links(job: Path) -> None:
    words = ("--alone", "--name", "here", "--price", "2.5")
    done = measure(job, *words, "--micro-batch-size", 1, "--micro-batch-size", 2)
    assert done.exit_code == 0, done.output
    assert "wrote machines.toml: 1 machines, 0 links" in done.output
    cluster = load_machines("machines.toml")
    (machine,) = cluster.machines
    assert (machine.name, machine.price_per_hour, machine.device) == ("here", 2.5, "cpu")
    assert machine.cores >= 1
    assert machine.memory_gb > 0
    assert machine.layer_time("block", 2).forward_ms > 0
    assert cluster.measured.model == load(job).layers_digest()


class TickingClock:
    """Of a machine on which a millisecond passes between two looks at the clock."""

    def __init__(self) -> None:
        self.shares: list[float] = []  # of the time since it last woke, that it then slept
        self._now = 0.0
        self._woke = 0.0

    def perf_counter(self) -> float:
        self._now += 0.001
        return self._now

    def sleep(self, seconds: float) -> None:
        worked = self._now - self._woke - 0.001  # without the look at which it began
        self.shares.append(seconds / (seconds + worked))
        self._now += seconds
        self._woke = self._now


@pytest.mark.parametrize(
    ("stages", "a_rank", "batches", "idle"),
    [
        (1, 1, 8, 0),
        (2, 1, 8, 1 / 9),
        pytest.param(2, 2, 8, 0, id="a rank with both stages waits for nobody"),
        pytest.param(4, 1, 1, 1 / 2, id="of three quarters no more than a half"),
    ],
)
def test_layers_rest_between_micro_batches_as_long_as_a_rank_waits_for_others(
    job: Path, monkeypatch: pytest.MonkeyPatch, stages: int, a_rank: int, batches: int, idle: float
) -> None:
    clock = TickingClock()
    monkeypatch.setattr(layers, "time", clock)
    schedule = "interleaved" if a_rank > 1 else "1f1b"
    config = load(
        job,
        (
            f"pipeline.stages={stages}",
            f"pipeline.stages_per_rank={a_rank}",
            f"pipeline.schedule={schedule}",
            f"train.batch_size={batches}",
            f"train.num_microbatches={batches}",
        ),
    )
    layers.time_layers(config, (1,))
    assert median(clock.shares) == pytest.approx(idle)


def test_digest_is_that_of_the_model_and_its_precision_alone(job: Path) -> None:
    digest = load(job).layers_digest()
    assert load(job, ("train.steps=7", "transport.kind=tcp")).layers_digest() == digest
    assert load(job, ("train.precision=bf16",)).layers_digest() != digest
    assert load(job, ("model.width=32",)).layers_digest() != digest


def test_two_processes_measure_each_other(tmp_path: Path, warm_python: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(REPLAY)
    argv = [warm_python, "-m", "dpipe", "measure", str(job), "--world-size", "2"]
    argv += ["--coordinator", f"127.0.0.1:{free_port()}", "--out", str(tmp_path / "m.toml")]
    both = []
    for rank in "01":
        command = [*argv, "--rank", rank, "--name", f"machine{rank}"]
        both.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=100)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "1 rounds of disjoint pairs: at most" in said[0]
    assert "rounds" not in said[1]
    cluster = load_machines(tmp_path / "m.toml")
    assert cluster.names == ("machine0", "machine1")
    assert cluster.missing(cluster.names) == []
    assert cluster.machine("machine1").host == "127.0.0.1"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--alone", "--out", "there.toml"), "there.toml exists, and may have been edited by hand"),
        (("--alone", "--out", "no/m.toml"), "no/m.toml cannot be written: there is no folder no"),
        (("--alone", "-o", "model.width=17"), "model.width"),
        (("--alone", "--rank", "0"), "--alone cannot be combined with --rank"),
        (("--rank", "0"), "--rank, --world-size and --coordinator go together"),
        (("--alone", "--name", "a b"), "--name 'a b'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    job: Path, words: tuple[str, ...], complaint: str
) -> None:
    Path("there.toml").write_text("")
    done = measure(job, *words)
    assert done.exit_code == 2
    assert complaint in done.output


def test_second_process_of_a_machine_is_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")
    done = measure(job)
    assert done.exit_code == 2
    assert "start one dpipe measure on each machine" in done.output


def test_container_has_the_memory_that_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "_CGROUP", tmp_path)
    whole = this_machine.free_bytes("cpu")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert this_machine.free_bytes("cpu") == pytest.approx(whole, rel=0.5)
    (tmp_path / "memory.max").write_text("5000\n")
    assert this_machine.free_bytes("cpu") == 4000
    (tmp_path / "memory.max").write_text("500\n")
    assert this_machine.free_bytes("cpu") == 0
