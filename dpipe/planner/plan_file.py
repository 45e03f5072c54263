"""`plan.toml`: what was decided, for people to read and edit, and for a run to take.

    [plan]
    model = "3f2ac41b90d5e677"            # a digest: of another model it is refused
    machines = "machines"
    step_s = 12.4                         # predicted

    [pipeline]                            # keys of a job's file, which the plan sets
    stages = 3
    split = [9, 4, 2]

    [[replica]]
    machines = ["a", "c", "b"]            # by stage

Rank r of a run is stage r % stages of replica r // stages; with tensor parallelism several ranks
are on each machine.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpipe.errors import ConfigError, TransferError
from dpipe.toml import parse_toml, read_text, to_toml

# The keys of a job that a plan decides, by section.
DECIDED: Mapping[str, frozenset[str]] = {
    "train": frozenset({"num_microbatches"}),
    "pipeline": frozenset(
        {"stages", "split", "splits", "schedule", "in_flight", "programs", "recompute", "wire"}
    ),
    "tensor_parallel": frozenset({"size"}),
    "data_parallel": frozenset({"kind", "replicas", "wire"}),
    "transport": frozenset({"connections"}),
}
_MOST_RANKS = 1 << 16
_LONGEST_NAME = 100
_DIGEST_CHARACTERS = 12
_HEAD = """\
# written by `dpipe plan`; may be edited by hand
# to run it: dpipe launch job.toml --plan plan.toml
"""

Settings = Mapping[str, Mapping[str, Any]]  # by section and key


@dataclass(frozen=True)
class Plan:
    """What was decided for a model on some machines."""

    model: str  # `Config.layers_digest` of the job
    machines: str  # the name of their file
    step_s: float  # predicted
    settings: Settings  # of the job
    replicas: tuple[tuple[str, ...], ...]  # the machine of each stage, by replica
    price_per_million_tokens: float | None = None  # None: machines without a price

    @property
    def group_size(self) -> int:
        """Ranks of a stage."""
        size: int = self.settings.get("tensor_parallel", {}).get("size", 1)
        return size

    @property
    def seats(self) -> tuple[str, ...]:
        """The machine of each rank."""
        return tuple(name for name in self.groups for _ in range(self.group_size))

    @property
    def groups(self) -> tuple[str, ...]:
        """The machine of each stage's ranks, as `predict.seats` has it: once for a tensor-parallel
        group.
        """
        return tuple(name for replica in self.replicas for name in replica)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as `-o` takes them."""
        lines = []
        for section, keys in self.settings.items():
            for key, value in keys.items():
                lines.append(f"{section}.{key}={to_toml(value)}")
        return tuple(lines)


def dump_plan(plan: Plan) -> str:
    """The text of a file that reads as `plan`."""
    head = {"model": plan.model, "machines": plan.machines, "step_s": plan.step_s}
    if plan.price_per_million_tokens is not None:
        head["price_per_million_tokens"] = plan.price_per_million_tokens
    # In the order of a job's file, with the machines last: they may be hundreds.
    blocks = [_HEAD + _block("[plan]", head)]
    for section, keys in plan.settings.items():
        if keys:
            blocks.append(_block(f"[{section}]", keys))
    for replica in plan.replicas:
        blocks.append(_block("[[replica]]", {"machines": list(replica)}))
    return "\n".join(blocks)


def _block(title: str, keys: Mapping[str, Any]) -> str:
    lines = [title, *(f"{key} = {to_toml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def load_plan(path: str | Path) -> Plan:
    """Raises `ConfigError` naming the file, and what of it is no plan."""
    try:
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            raise ConfigError("it is not a regular file")
        return parse_plan(parse_toml(read_text(path)))
    except FileNotFoundError:
        raise ConfigError(f"plan {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, ConfigError) as error:  # TOML, UTF-8, or a path that no file can have
        raise ConfigError(f"plan {path}: {error}") from None


def parse_plan(table: dict[str, Any]) -> Plan:
    """The plan of a file's table. What its settings are worth, a job that takes them tells."""
    _refuse_unknown(table, {"plan", "replica", *DECIDED}, "the file")
    head = _table(table, "plan")
    _refuse_unknown(head, {"model", "machines", "step_s", "price_per_million_tokens"}, "[plan]")
    settings = {}
    for section, known in DECIDED.items():
        if section in table:
            keys = _table(table, section)
            _refuse_unknown(keys, known, f"[{section}]")
            settings[section] = keys
    price = None
    if "price_per_million_tokens" in head:
        price = _number(head, "price_per_million_tokens")
    plan = Plan(
        model=_name(head.get("model"), "[plan] model"),
        machines=_name(head.get("machines"), "[plan] machines"),
        step_s=_number(head, "step_s"),
        settings=settings,
        replicas=_replicas(table.get("replica")),
        price_per_million_tokens=price,
    )
    _check_sizes(plan)
    return plan


def plan_of_rank_0(text: str) -> Plan:
    """Raises `TransferError` where it is none."""
    try:
        return parse_plan(parse_toml(text))
    except (ValueError, ConfigError) as error:
        raise TransferError(
            f"rank 0 sent a plan that cannot be read ({error}); install one dpipe version on all "
            "machines"
        ) from None


def _replicas(rows: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(rows, list) or not rows:
        raise ConfigError("it needs the machines of each replica, as [[replica]] machines = [...]")
    replicas = []
    for row in rows:
        names = row.get("machines") if isinstance(row, dict) else None
        if not isinstance(names, list) or len(row) != 1 or not names:
            raise ConfigError(
                f"a [[replica]] has machines, a list of names, alone; got {row!r:.100}"
            )
        replicas.append(tuple(_name(name, "[[replica]] machines") for name in names))
    return tuple(replicas)


def _check_sizes(plan: Plan) -> None:
    """What would not fit the plan itself."""
    size: Any = plan.settings.get("tensor_parallel", {}).get("size", 1)
    _count(size, "[tensor_parallel] size")
    stages: Any = plan.settings.get("pipeline", {}).get("stages", 1)
    replicas: Any = plan.settings.get("data_parallel", {}).get("replicas", 1)
    _count(stages, "[pipeline] stages")
    _count(replicas, "[data_parallel] replicas")
    if len(plan.replicas) != replicas:
        raise ConfigError(
            f"[data_parallel] replicas is {replicas}, but {len(plan.replicas)} are listed as "
            "[[replica]]"
        )
    for number, names in enumerate(plan.replicas):
        if len(names) != stages:
            raise ConfigError(
                f"[[replica]] {number} lists {len(names)} machines, but [pipeline] stages is "
                f"{stages}"
            )


def _count(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_RANKS:
        raise ConfigError(f"{what} must be a number from 1 to {_MOST_RANKS}, got {value!r:.100}")


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key)
    if not isinstance(value, dict):
        raise ConfigError(f"it needs a section [{key}], got {value!r:.100}")
    return value


def _refuse_unknown(table: dict[str, Any], known: set[str] | frozenset[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r:.100} in {where}; known keys: {', '.join(sorted(known))}"
        )


def _number(table: dict[str, Any], key: str) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ConfigError(f"[plan] {key} must be a number that is not negative, got {value!r:.100}")
    return float(value)


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME or not value.isprintable():
        raise ConfigError(f"{what} must be a name, got {value!r:.100}")
    return value


def keep_text(folder: Path, kind: str, text: str) -> Path:
    """In a file named by its content: ranks that share the folder write the same. Raises
    `ConfigError` where it cannot be written.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    path = folder / f"{kind}-{digest}.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as part:
            part.write(text)
        os.replace(part.name, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; set data.cache") from None
    return path
