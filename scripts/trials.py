"""Runs that scripts start to measure something, and the files of JSON lines that the results go
to.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from table import ROOT, lines_of
from venue import Venue

from dpipe.config.load import Config, load
from dpipe.errors import ConfigError, RunError
from dpipe.processes.environment import environment
from dpipe.processes.launch import STOPPING, launch
from dpipe.report.metrics import read_rows

TableT = TypeVar("TableT", bound=BaseModel)


def read_table(form: type[TableT], path: Path) -> TableT:
    """A TOML file as `form`. Raises `ConfigError` naming the file and what is wrong in it."""
    what = f"{form.__name__.lower()} file {path}"
    try:
        return form.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{what}: {where}: {first['msg']}, got {first['input']!r}") from None


def run_to_end(
    config_path: Path,
    overrides: Sequence[str],
    at: Venue,
    *,
    timeout_s: float,
    module: Sequence[str] = ("dpipe", "train"),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run all ranks of a configuration; returns the rows of its metrics. An earlier run in the same
    folder goes.

    Raises `RunError` with the end of what a failed run said, and `KeyboardInterrupt` where it was
    stopped early.
    """
    config = load(config_path, tuple(overrides))
    folder = Path(config.run.folder)
    shutil.rmtree(folder, ignore_errors=True)
    given = [word for override in overrides for word in ("-o", override)]
    argv = [sys.executable, "-m", *module, str(config_path), *given]
    said: list[str] = []
    code = launch(
        lambda rank: at.enter(rank, argv),
        config.world_size,
        logs=folder / "logs",
        coordinator=at.coordinator,
        environ={**environment(), **at.environ, **environ},
        on_line=said.append,
        timeout_s=timeout_s,
        quiet=True,
    )
    if STOPPING in said:
        # the launcher had it first: ranks that ended in good order leave no result either
        raise KeyboardInterrupt
    if code != 0:
        raise RunError("\n".join(["the run has failed:", *said]))
    return read_rows(folder)


def whole_lines(results: Path) -> list[dict[str, Any]]:
    """The lines that are there; one that was cut short is taken out of the file."""
    if not results.exists():
        return []
    text = results.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        new = results.with_suffix(".tmp")
        new.write_text(whole, encoding="utf-8")
        os.replace(new, results)
    return lines_of(results)


def append(results: Path, line: dict[str, Any]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def key_of(config: Config, *more: Any) -> str:
    """Equal for runs that are given the same, wherever their files are, and whatever defaults are
    added later.
    """
    files = {"transport": {"shape"}, "predict": {"network"}, "run": {"folder"}, "node": True}
    given = config.model_dump(mode="json", exclude=files, exclude_unset=True)
    return hashlib.sha256(json.dumps([*more, given], sort_keys=True).encode()).hexdigest()[:16]


def commit_of_tree() -> str:
    """Empty where nothing is known of it."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout.strip()
    except FileNotFoundError:  # no git here, and a cell that has been measured is not lost for that
        return ""
