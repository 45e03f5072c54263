from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config import Config
from dpipe.engine.folder import open_folder
from dpipe.errors import CheckpointError, ConfigError

Make = Callable[..., Config]


def test_run_without_a_checkpoint_is_not_said_to_go_on(tiny: Make, tmp_path: Path) -> None:
    """A first run often fails before it has saved anything."""
    folder = open_folder(tiny(), resume=False)
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run; choose another run.folder, or delete it"):
        open_folder(tiny(), resume=False)


def test_nothing_is_made_for_a_run_that_is_not_there(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        open_folder(tiny(), resume=True)
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made_is_named(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file of that name")
    with pytest.raises(ConfigError, match="run.folder .*run cannot be written: .*Not a directory"):
        open_folder(tiny(), resume=False)
