"""The code that README and the pages show, run."""

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import DOCS, README, Block, blocks

from dpipe.config.load import Config
from dpipe.run.generate import generate_text

Make = Callable[..., Config]
Losses = Callable[..., list[float]]

PYTHON = [
    pytest.param(page, block, id=f"{page.name}-{number}")
    for page in (README, *sorted(DOCS.glob("*.md")))
    for number, block in enumerate(blocks(page, "python"))
]
MODELS = [shown for shown in PYTHON if shown.values[1].file]
PROGRAMS = [shown for shown in PYTHON if not shown.values[1].file]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a user who follows a page."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(("page", "block"), MODELS)
def test_model_that_is_shown_learns_the_same_in_one_stage_and_in_two(
    page: Path, block: Block, folder: Path, tiny: Make, losses: Losses
) -> None:
    assert block.file is not None
    (folder / block.file).write_text(block.text, encoding="utf-8")
    mine = {"model__layers": f"{Path(block.file).stem}:layers", "train__steps": 4}
    whole = losses(tiny(**mine))
    assert losses(tiny(**mine, pipeline__stages=2, run__folder=str(folder / "cut"))) == whole
    assert whole[-1] < whole[0]
    assert generate_text(folder / "cut", "The", tokens=2, temperature=0, seed=0).startswith("The")


@pytest.mark.parametrize("page", [README, DOCS / "your-own-model.md"], ids=lambda page: page.name)
def test_configuration_beside_the_model_trains_it(
    page: Path, folder: Path, tiny: Make, losses: Losses
) -> None:
    """As in the docs, but with a short text and a few steps."""
    (model,) = [block for block in blocks(page, "python") if block.file == "my_model.py"]
    (job,) = [block for block in blocks(page, "toml") if block.file == "job.toml"]
    (folder / "my_model.py").write_text(model.text, encoding="utf-8")
    shown = tomllib.loads(job.text)
    few = {"steps": 2, "batch_size": 8, "num_microbatches": 4}
    keys = {
        f"{section}__{key}": value
        for section in ("model", "pipeline")
        for key, value in shown[section].items()
    }
    short = {**keys, "model__context": 16, **{f"train__{key}": value for key, value in few.items()}}
    assert len(losses(tiny(**short))) == 2


@pytest.mark.parametrize(("page", "block"), PROGRAMS)
def test_program_that_is_shown_runs(
    page: Path, block: Block, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a job.toml of one rank."""
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    (folder / "job.toml").write_text(
        "model = { num_layers = 1, width = 16, num_heads = 2, context = 16 }\n"
        'data = { files = ["text.txt"] }\n'
        "train = { learning_rate = 1e-2 }\n"
        "run = { tensorboard = false }\n"
    )
    exec(compile(block.text, str(page), "exec"), {})
    assert capsys.readouterr().out.endswith(("runs/run\n", " ms\n"))
