"""Runs with a parameter server, embedded or standalone: whole runs as threads over real links."""

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dpipe
from dpipe.config.load import Config
from dpipe.errors import ConfigError, JoinError, RunError
from dpipe.paramserver.journal import Journal
from dpipe.paramserver.server import ParameterServer
from dpipe.paramserver.stage_state import StepDecision
from dpipe.paramworker.client import StageClient
from dpipe.paramworker.kind import _StageWorker
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_steps
from dpipe.run.parameter_servers import _beside
from dpipe.serve.standalone import FolderSnapshots, _state_folder, serve_parameters
from dpipe.store import checkpoint
from dpipe.timeline.span import Lane
from dpipe.wire.rpc import Security

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

# relative: how far fp32 sums in another order move a loss within a few steps of the tiny model
ROUNDING = 2e-6
BATCH = 12
PARAMETER_SERVER = '[data_parallel]\nkind = "parameter-server"\n'
EAGER = {"train__clip_norm": 0.0}


@pytest.fixture
def with_server(tiny: Make, tmp_path: Path) -> Make:
    """`with_server(3)`: the batch over three replicas and a parameter server; `with_server(1)` is
    one process without a server.
    """

    def make(replicas: int, folder: str = "split", **overrides: Any) -> Config:
        settings = {"data_parallel__kind": "parameter-server", "data_parallel__replicas": replicas}
        settings |= {"train__num_microbatches": BATCH // replicas, "train__batch_size": BATCH}
        return tiny(**settings | {"run__folder": str(tmp_path / folder)} | overrides)

    return make


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Callable[..., ParameterServer]]:
    """`apart(port)`: a standalone server, whose state is in `tmp_path / "server"`."""
    servers: list[ParameterServer] = []

    def start(port: int = 0, folder: str = "server") -> ParameterServer:
        kept = {"folder": tmp_path / folder, "snapshots": FolderSnapshots()}
        servers.append(ParameterServer(port=port, security=Security("secret"), **kept))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def parameters(config: Config) -> dict[str, torch.Tensor]:
    return checkpoint.load(str(Path(config.run.folder) / "checkpoints"), lambda name: True).tensors


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("replicas", "overrides"),
    [
        (2, {"pipeline__stages": 2, "train__clip_norm": 0.1}),
        (3, {**EAGER, "data_parallel__servers": "per-stage"}),
        (4, {"train__clip_norm": 0.1, "transport__connections": 2}),
        (2, {"pipeline__stages": 2, "model__tie_embeddings": True, "model__dropout": 0.1}),
    ],
)
def test_replicas_have_the_losses_of_one_process_on_their_batch(
    replicas: int, overrides: dict[str, Any], with_server: Make, losses: Losses
) -> None:
    one = {"pipeline__stages": 1, "pipeline__stages_per_rank": 1, "pipeline__schedule": "1f1b"}
    alone = with_server(1, "alone", train__eval_every=2, **{**overrides, **one})
    shared = with_server(replicas, train__eval_every=2, **overrides)
    assert losses(shared) == pytest.approx(losses(alone), rel=ROUNDING)
    assert held_out(shared) == pytest.approx(held_out(alone), rel=ROUNDING)


def held_out(config: Config) -> list[float]:
    return [
        row["held_out_loss"] for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row
    ]


ACTIVATION = """
from torch import nn
import torch.nn.functional as F


def layers():
    return [nn.Embedding(256, 8), nn.ReLU(), nn.Linear(8, 256)], loss


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["activation_alone:layers", "replay"])
@pytest.mark.parametrize("wire", ["none", "int8"])
def test_stage_without_parameters_trains_on_a_server(
    wire: str,
    layers: str,
    with_server: Make,
    losses: Losses,
    apart: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a server that stores its state."""
    (tmp_path / "activation_alone.py").write_text(ACTIVATION)
    monkeypatch.syspath_prepend(tmp_path)
    server = apart()
    address = {"data_parallel__address": (f"127.0.0.1:{server.port}",), "data_parallel__wire": wire}
    losses(with_server(2, model__layers=layers, pipeline__stages=3, **address))
    assert server.standing == {0: 3, 1: 3, 2: 3}


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["none", "int8"])
def test_run_repeats_itself_bit_for_bit(wire: str, with_server: Make, losses: Losses) -> None:
    again = {"pipeline__stages": 2, "data_parallel__wire": wire, **EAGER}
    first, second = with_server(2, **again), with_server(2, "again", **again)
    assert losses(first) == losses(second)
    assert equal(parameters(first), parameters(second))


def test_embedded_server_does_not_wait_if_no_step_is_left(
    with_server: Make, losses: Losses
) -> None:
    config = with_server(2, timeouts__transfer=20)
    losses(config)
    began = time.monotonic()
    losses(config, resume=True)
    assert time.monotonic() - began < 15


def test_standalone_server_gives_the_losses_of_an_embedded_one(
    with_server: Make, losses: Losses, apart: Any
) -> None:
    server = apart()
    address = {"data_parallel__address": (f"127.0.0.1:{server.port}",)}
    assert losses(with_server(2, **address)) == losses(with_server(2, "embedded"))
    assert server.wait_until_left(5)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("wire", ["none", "int8"])
@pytest.mark.parametrize(
    "other", [{"data_parallel__replicas": 3}, {"data_parallel__kind": "all-reduce"}]
)
def test_run_resumes_with_other_replicas_or_another_kind(
    other: dict[str, Any], wire: str, with_server: Make, losses: Losses
) -> None:
    steady = {"train__decay": "none", "data_parallel__wire": wire, "train__num_microbatches": 2}
    whole = losses(with_server(2, "whole", train__steps=5, **steady))
    losses(with_server(2, "part", train__steps=3, **steady))
    goes_on = losses(with_server(2, "part", train__steps=5, **steady | other), resume=True)
    assert goes_on == pytest.approx(whole, rel=ROUNDING if wire == "none" else 1e-2)


@pytest.mark.slow
def test_resumed_lossy_run_equals_an_uninterrupted_one(with_server: Make, losses: Losses) -> None:
    """The checkpoint has the server's parameters beside those of the workers; after so few steps
    there is no error feedback.
    """
    steady = {"train__decay": "none", "data_parallel__wire": "bf16"}
    whole = losses(with_server(2, "whole", train__steps=5, **steady))
    losses(with_server(2, "part", train__steps=3, **steady))
    assert losses(with_server(2, "part", train__steps=5, **steady), resume=True) == whole


def test_fp16_run_learns_like_fp32(with_server: Make, losses: Losses) -> None:
    half, full = losses(with_server(2, train__precision="fp16")), losses(with_server(2, "full"))
    assert half == pytest.approx(full, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_run_learns(staleness: int, with_server: Make, losses: Losses) -> None:
    config = with_server(
        2, data_parallel__staleness=staleness, train__steps=8, pipeline__stages=2, **EAGER
    )
    seen = losses(config)
    assert len(seen) == 8
    assert seen[-1] < seen[0]


def test_rows_and_spans_have_pushes_and_pulls(with_server: Make, losses: Losses) -> None:
    config = with_server(2, pipeline__stages=2, run__trace_steps=1)
    losses(config)
    row = read_rows(Path(config.run.folder))[-1]
    assert set(row["mb_per_s"]) == {
        "0->1",
        "1->0",
        "2->3",
        "3->2",
        *(f"{rank}->server" for rank in range(4)),
    }
    (last,) = load_steps((Path(config.run.folder) / "trace/rank-1.json").read_bytes(), rank=1)
    spans = [span for span in last.spans if span.lane is Lane.REDUCE]
    assert spans
    assert all(span.num_bytes > 0 for span in spans)


def test_server_that_cannot_be_reached_is_named(with_server: Make, run_ranks: Run) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = with_server(2, data_parallel__address=(address,), timeouts__connect=1)
    errors = run_ranks(config)
    named = [
        error
        for error in errors
        if isinstance(error, JoinError) and f"server at {address}" in str(error)
    ]
    assert named
    assert "dpipe serve" in str(named[0])
    assert not (Path(config.run.folder) / "metrics.jsonl").exists()


def test_server_that_wants_another_token_says_so(with_server: Make, run_ranks: Run) -> None:
    server = ParameterServer(security=Security("another"))
    try:
        errors = run_ranks(with_server(2, data_parallel__address=(f"127.0.0.1:{server.port}",)))
    finally:
        server.close()
    assert any(isinstance(error, JoinError) and "wrong token" in str(error) for error in errors)


def test_restarted_server_changes_no_bit(with_server: Make, losses: Losses, apart: Any) -> None:
    """Closed and restarted from its state in the middle of the run."""
    steps = {"train__steps": 12, **EAGER}
    whole = with_server(2, "whole", **steps)
    losses(whole)
    first = apart()
    config = with_server(2, data_parallel__address=(f"127.0.0.1:{first.port}",), **steps)
    worker = threading.Thread(target=losses, args=(config,))
    worker.start()
    wait_until(lambda: first.standing.get(0, 0) >= 4)
    first.close()
    second = apart(first.port)
    assert second.standing[0] >= 4
    worker.join(60)
    assert equal(parameters(config), parameters(whole))


@pytest.mark.slow
def test_restarted_server_of_a_stale_run_continues_unfinished_steps(
    with_server: Make, losses: Losses, apart: Any
) -> None:
    """It has lost gradients and verdicts of steps that the workers have already passed."""
    first = apart()
    address = (f"127.0.0.1:{first.port}",)
    settings = {"data_parallel__staleness": 2, "train__steps": 12, **EAGER}
    config = with_server(2, data_parallel__address=address, **settings)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(losses, config)
        wait_until(lambda: first.standing.get(0, 0) >= 4)
        first.close()
        second = apart(first.port)
        assert len(run.result(60)) == 12
    assert second.standing[0] == 12


@pytest.mark.slow
@pytest.mark.timeout(300)  # seven runs' worth of threads: on a machine as busy as can be, a minute
def test_tensor_parallel_ranks_keep_their_parts_on_a_restarted_server(
    with_server: Make, losses: Losses, apart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses of one process; replicas, and replicated parameters of a tensor-parallel
    group, are equal to the last bit.
    """
    workers: dict[tuple[int, int], _StageWorker] = {}

    def leave(worker: _StageWorker) -> None:
        access = worker.client._access
        workers[access.replica, access.part] = worker
        plain(worker)

    plain = _StageWorker.leave
    monkeypatch.setattr(_StageWorker, "leave", leave)
    steps = {"train__steps": 6, "train__learning_rate": 1e-3}
    alone, first = losses(with_server(1, "alone", **steps)), apart()
    split = {"tensor_parallel__size": 2, "tensor_parallel__sequence_parallel": True}
    config = with_server(2, data_parallel__address=(f"127.0.0.1:{first.port}",), **steps, **split)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(losses, config)
        wait_until(lambda: first.standing.get(0, 0) >= 2)
        first.close()
        second = apart(first.port)
        assert run.result(240) == pytest.approx(alone, rel=1e-5)
    assert second.standing == {0: 6}
    for part in (0, 1):
        assert torch.equal(workers[0, part]._values, workers[1, part]._values)
    norms = [
        [
            worker._flat.view(worker._values, index)
            for index, name in enumerate(worker._flat.names)
            if "norm" in name
        ]
        for worker in workers.values()
    ]
    assert all(
        torch.equal(a, b) for of_rank in norms[1:] for a, b in zip(norms[0], of_rank, strict=True)
    )


@pytest.fixture
def serve(tmp_path: Path, warm_python: str) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """`serve(port)`: `dpipe serve` in a process of its own, listening; killed at the end."""
    job = tmp_path / "job.toml"
    job.write_text(f"{PARAMETER_SERVER}[run]\nfolder = '{tmp_path / 'kept'}'\n")
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(dpipe.__file__).parent.parent),
        "DPIPE_TOKEN": "secret",
        "PYTHONUNBUFFERED": "1",
    }
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> subprocess.Popen[str]:
        words = (
            warm_python,
            "-m",
            "dpipe",
            "serve",
            str(job),
            "--bind",
            f"127.0.0.1:{port}",
        )
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline().startswith(f"parameter server at 127.0.0.1:{port}")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.slow
def test_killed_and_restarted_server_changes_no_bit(
    with_server: Make, run_ranks: Run, losses: Losses, serve: Any
) -> None:
    """SIGKILL in the middle of a run with clipping, compared with an uninterrupted run."""
    whole, port = with_server(2, "whole", train__steps=30), free_port()
    losses(whole)
    first = serve(port)
    config = with_server(
        2, data_parallel__address=(f"127.0.0.1:{port}",), train__steps=30, timeouts__transfer=100
    )
    errors: list[BaseException | None] = []
    worker = threading.Thread(target=lambda: errors.extend(run_ranks(config)))
    worker.start()
    wait_until(lambda: num_rows(config) >= 5)
    first.kill()
    first.wait(10)
    assert num_rows(config) < 30
    second = serve(port)
    worker.join(90)
    assert errors == [None, None]
    assert equal(parameters(config), parameters(whole))
    assert second.wait(30) == 0


def num_rows(config: Config) -> int:
    path = Path(config.run.folder) / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_worker_that_fails_in_the_middle_of_a_push_stops_the_others_and_is_named(
    with_server: Make, run_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_at: list[float] = []
    plain = StageClient._chunks

    def chunks(line: StageClient, step: int, connection: int) -> Iterator[bytes]:
        for number, message in enumerate(plain(line, step, connection)):
            if (line._access.rank, step, number) == (1, 2, 1):
                failed_at.append(time.monotonic())
                raise OSError("the machine is gone")
            yield message

    monkeypatch.setattr(StageClient, "_chunks", chunks)
    errors = run_ranks(with_server(2, train__steps=100_000, transport__chunk_bytes=4096, **EAGER))
    assert time.monotonic() - failed_at[0] < 10
    assert all(isinstance(error, RunError) for error in errors), errors
    assert all("rank 1" in str(error) for error in errors)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come to that")


def test_server_that_comes_back_without_its_state_is_refused(
    with_server: Make, run_ranks: Run, apart: Any
) -> None:
    first = apart()
    config = with_server(
        2, data_parallel__address=(f"127.0.0.1:{first.port}",), train__steps=100_000, **EAGER
    )
    errors: list[BaseException | None] = []
    worker = threading.Thread(target=lambda: errors.extend(run_ranks(config)))
    worker.start()
    wait_until(lambda: first.standing.get(0, 0) >= 2)
    first.close()
    apart(first.port, "elsewhere")
    worker.join(60)
    assert all(isinstance(error, RunError) for error in errors)
    assert any("without the state of this run" in str(error) for error in errors)


def test_second_server_of_one_folder_is_refused(serve: Any, tmp_path: Path) -> None:
    serve(free_port())
    overrides = (f"run.folder={json.dumps(str(tmp_path / 'kept'))}",)
    with pytest.raises(
        ConfigError, match="another parameter server has its state in .*kept/server"
    ):
        serve_parameters(str(tmp_path / "job.toml"), overrides, "127.0.0.1:0", lambda line: None)


def test_server_that_cannot_listen_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(PARAMETER_SERVER)
    overrides = (f"run.folder={json.dumps(str(tmp_path / 'run'))}",)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(JoinError, match="cannot listen"):
            serve_parameters(
                str(tmp_path / "job.toml"), overrides, f"127.0.0.1:{taken.getsockname()[1]}", print
            )
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made_for_a_server_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(PARAMETER_SERVER)
    overrides = (f"run.folder={json.dumps(str(tmp_path / 'job.toml'))}",)
    with pytest.raises(ConfigError, match=r"job\.toml/server cannot be written"):
        serve_parameters(str(tmp_path / "job.toml"), overrides, "127.0.0.1:0", print)


def test_serve_needs_an_address(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(PARAMETER_SERVER)
    with pytest.raises(ConfigError, match="no address to listen on"):
        serve_parameters(str(tmp_path / "job.toml"), (), None, lambda line: None)


def test_serve_refuses_a_job_without_a_parameter_server(tmp_path: Path) -> None:
    """It waited for workers forever."""
    (tmp_path / "job.toml").write_text(PARAMETER_SERVER.replace("parameter-server", "all-reduce"))
    with pytest.raises(
        ConfigError, match='kind is "all-reduce", so that no worker would ever come'
    ):
        serve_parameters(str(tmp_path / "job.toml"), (), "127.0.0.1:0", lambda line: None)


@pytest.mark.parametrize("bind", ["7100", "host:", "host:99999", ":7100"])
def test_serve_refuses_what_is_no_address(bind: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(PARAMETER_SERVER)
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        serve_parameters(str(tmp_path / "job.toml"), (), bind, lambda line: None)


def fail(error: Exception, *_: object) -> None:
    raise error


def test_server_on_a_full_disk_ends_with_the_same_error_as_its_workers(
    with_server: Make, run_ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept running and could not continue."""
    plain = Journal.write

    def write(journal: Journal, step: int, verdict: StepDecision, average: torch.Tensor) -> None:
        if step == 2:
            monkeypatch.setattr(
                "dpipe.paramserver.journal.save_file", partial(fail, OSError(28, "No space left"))
            )
        plain(journal, step, verdict, average)

    monkeypatch.setattr(Journal, "write", write)
    (tmp_path / "job.toml").write_text(
        f"{PARAMETER_SERVER}[run]\nfolder = '{tmp_path / 'kept'}'\n[node]\ntoken = 'secret'"
    )
    bind = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(
            serve_parameters, str(tmp_path / "job.toml"), (), bind, lambda line: None
        )
        errors = run_ranks(with_server(2, data_parallel__address=(bind,), train__steps=10))
        reason = (
            r"step 2 of stage 0: cannot write \S+kept/server/stage-0/\S+: "
            r".*No space left; make room there"
        )
        with pytest.raises(RunError, match=reason):
            server.result(30)
    assert any(re.search(reason, str(error)) for error in errors)


def test_error_of_a_snapshot_on_a_full_disk_does_not_suggest_another_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.checkpoint_url does not apply to it."""
    monkeypatch.setattr(checkpoint, "save_file", partial(fail, OSError(28, "No space left")))
    with pytest.raises(
        RunError, match=r"No space left; make room there, on the parameter server's machine$"
    ):
        FolderSnapshots().save(tmp_path, 8, {"w": torch.zeros(1)}, {}, {})


def test_servers_of_single_stages_keep_their_state_apart(with_server: Make) -> None:
    """They shared RUN/server: a restarted server took over the stages of all, and then never
    ended.
    """
    each = with_server(2, data_parallel__servers="per-stage")
    folders = [_state_folder(each, "127.0.0.1", port) for port in (7100, 7101)]
    assert len({*folders, _state_folder(with_server(2), "127.0.0.1", 7100)}) == 3


def test_unreachable_rank_hosts_no_server() -> None:
    with pytest.raises(ConfigError, match=r"node\.advertise is none there"):
        _beside(None, 7100, 0)
