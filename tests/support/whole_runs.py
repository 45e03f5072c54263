"""Whole runs in this process: ranks are threads, their links real gRPC on loopback."""

import threading
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpipe.config.load import Config, build
from dpipe.processes.environment import ProcessInfo
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.run.build import run_rank
from support.small_job import TEXT, small_job


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Config]:
    """`tiny(pipeline__stages=2)`: a GPT of four layers on a short text, with some keys replaced."""
    (tmp_path / "text.txt").write_text(TEXT)
    table = small_job(
        data={"files": [str(tmp_path / "text.txt")], "cache": str(tmp_path / "cache")},
        train={"steps": 3, "learning_rate": 1e-2},
        run={"folder": str(tmp_path / "run")},
        # A rank on a busy machine is late, not lost.
        timeouts={"transfer": 60, "heartbeat": 30},
    )

    def make(**overrides: Any) -> Config:
        return build(table).with_(**overrides)

    return make


def _run_ranks(
    config: Config, of_rank: Mapping[int, Config] | None = None, **options: Any
) -> list[BaseException | None]:
    world = config.world_size
    address = f"127.0.0.1:{free_port()}" if world > 1 else None
    raised: list[BaseException | None] = [None] * world

    def rank_main(rank: int) -> None:
        process = ProcessInfo(rank, world, rank, address, token="secret")
        try:
            run_rank(
                (of_rank or {}).get(rank, config),
                process,
                console=Console(file=StringIO()),
                **options,
            )
        except BaseException as error:
            raised[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}")
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(90)
        if thread.is_alive():
            raised[rank] = TimeoutError(f"rank {rank} has not ended")
    return raised


@pytest.fixture
def run_ranks() -> Callable[..., list[BaseException | None]]:
    """`run_ranks(config)` runs every rank; what each raised, by rank. `of_rank` gives some another
    configuration.
    """
    return _run_ranks


@pytest.fixture
def losses() -> Callable[..., list[float]]:
    """`losses(config)`: the loss of every step of a run that must succeed."""

    def run(config: Config, **options: Any) -> list[float]:
        for error in _run_ranks(config, **options):
            if error is not None:
                raise error
        return [row["loss"] for row in read_rows(Path(config.run.folder)) if "loss" in row]

    return run
