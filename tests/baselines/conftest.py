"""The same GPT or BERT for another engine and ours: from a file, because the other engine's ranks
are processes.
"""

from collections.abc import Callable
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from support.pieces import word_pieces

from dpipe.baselines.foreign import train_rank
from dpipe.config.load import Config, load
from dpipe.processes.environment import ProcessInfo
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.run.build import run_rank

# Relative: sums in another order, of which Adam makes a whole step where a gradient is all but
# zero. At bf16 that was seen to be 1e-7 with one set of instructions, and 1.3e-5 with another.
ROUNDING = {"fp32": 1e-5, "bf16": 1e-4}

FILE = """
    model = {{ num_layers = 4, width = 32, num_heads = 4, context = 16 }}
    data = {{ files = ["{folder}/text.txt"], cache = "{folder}/cache" }}
    train = {{ steps = 4, batch_size = 16, num_microbatches = 4, learning_rate = 1e-2, warmup_steps = 2, clip_norm = 0.5 }}
    pipeline = {{ stages = 2 }}
    run = {{ tensorboard = false, trace_steps = 0 }}
"""  # noqa: E501


_WHAT = ("a dog", "the lazy dog", "nobody", "one old man and his bird")


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With clipping and warm-up, so that they are compared as well."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog, and nobody knows why. " * 60
    )
    (folder / "job.toml").write_text(FILE.format(folder=folder))
    return folder / "job.toml"


@pytest.fixture(scope="session")
def as_bert(job: Path) -> tuple[str, ...]:
    """The settings that make the job a BERT, with tied embeddings and sentences of several
    lengths.
    """
    sentences = [
        f"{who} {verb} {what} ."
        for who in ("it", "the fox")
        for verb in ("sees", "jumps over")
        for what in _WHAT
    ]
    text = "\n".join(sentences) + "\n\n" + "\n".join(reversed(sentences)) + "\n"
    (job.parent / "sentences.txt").write_text(text)
    word_pieces(text).save(str(job.parent / "pieces.json"))
    data = (
        f'data.files=["{job.parent}/sentences.txt"]',
        f"data.tokenizer={job.parent}/pieces.json",
    )
    return ("model.layers=bert", "model.vocab_size=72", *data)


@pytest.fixture
def our_losses(job: Path, tmp_path: Path) -> Callable[..., object]:
    """`our_losses("train.precision=...")`: the losses of one process that trains the whole
    model.
    """

    def run(*overrides: str) -> object:
        alone = ("pipeline.stages=1", f"run.folder={tmp_path / 'ours'}")
        config = load(job, (*overrides, *alone))
        run_rank(config, ProcessInfo(), console=Console(file=StringIO()))
        losses = [row["loss"] for row in read_rows(tmp_path / "ours") if "loss" in row]
        return pytest.approx(losses, rel=ROUNDING[config.train.precision])

    return run


Rows = list[dict[str, float]]


@pytest.fixture(scope="session")
def forked_rows() -> Callable[[ModuleType, Config], Rows]:
    """`forked_rows(fsdp, config)`: of a run of that module's engine. Its ranks are forked from a
    process that has imported torch, because that is what takes most of their time.
    """

    def run(engine: ModuleType, config: Config) -> Rows:
        address, world = f"127.0.0.1:{free_port()}", config.world_size
        context = get_context("forkserver")
        context.set_forkserver_preload(["dpipe.baselines.fsdp", "megatron.core.optimizer"])
        processes = [ProcessInfo(rank, world, rank, address) for rank in range(world)]
        ranks = [
            context.Process(
                target=train_rank,
                args=(config, process, engine.check_config, engine.make_step),
                daemon=True,
            )
            for process in processes
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(90)
        assert [rank.exitcode for rank in ranks] == [0] * world
        return read_rows(Path(config.run.folder))

    return run


@pytest.fixture
def their_rows(
    job: Path, tmp_path: Path, forked_rows: Callable[[ModuleType, Config], Rows]
) -> Callable[..., Rows]:
    """`their_rows(fsdp, "pipeline.stages=4")`: of the job on that module's engine."""

    def run(engine: ModuleType, *overrides: str) -> Rows:
        return forked_rows(engine, load(job, (*overrides, f"run.folder={tmp_path / 'theirs'}")))

    return run
