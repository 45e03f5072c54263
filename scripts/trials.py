"""Runs that scripts start to measure something, and their results as files of JSON lines."""

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
    """Read a TOML file as `form`. Raises `ConfigError` naming the file and the mistake."""
    file = f"{form.__name__.lower()} file {path}"
    try:
        return form.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {where}: {first['msg']}, got {first['input']!r}") from None


def run_to_end(
    config_path: Path,
    overrides: Sequence[str],
    at: Venue,
    *,
    timeout_s: float,
    module: Sequence[str] = ("dpipe", "train"),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run all ranks of a configuration; returns its rows of metrics. An earlier run in the same
    folder is deleted.

    Raises `RunError` with the last lines of a failed run, and `KeyboardInterrupt` if the run was
    interrupted.
    """
    config = load(config_path, tuple(overrides))
    folder = Path(config.run.folder)
    shutil.rmtree(folder, ignore_errors=True)
    options = [option for override in overrides for option in ("-o", override)]
    argv = [sys.executable, "-m", *module, str(config_path), *options]
    messages: list[str] = []
    code = launch(
        lambda rank: at.enter(rank, argv),
        config.world_size,
        logs=folder / "logs",
        coordinator=at.coordinator,
        environ={**environment(), **at.environ, **environ},
        on_line=messages.append,
        timeout_s=timeout_s,
        quiet=True,
    )
    if STOPPING in messages:
        # The launcher has handled the signal, and its exit code is that of a successful run.
        raise KeyboardInterrupt
    if code != 0:
        raise RunError("\n".join(["the run has failed:", *messages]))
    return read_rows(folder)


def whole_lines(results: Path) -> list[dict[str, Any]]:
    """All complete lines. A last line that was cut short is removed from the file."""
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


def key_of(config: Config, *parts: Any) -> str:
    """Equal for runs with equal settings. Paths do not count, nor do keys that are not set, so that
    a new key changes no existing result.
    """
    files = {"transport": {"shape"}, "predict": {"network"}, "run": {"folder"}, "node": True}
    settings = config.model_dump(mode="json", exclude=files, exclude_unset=True)
    return hashlib.sha256(json.dumps([*parts, settings], sort_keys=True).encode()).hexdigest()[:16]


def commit_of_tree() -> str:
    """The commit of the working tree, with "-dirty" if it is changed; empty if git is missing."""
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout.strip()
    except FileNotFoundError:  # a missing git must not lose a measurement
        return ""
