"""Configuration: TOML in, `-o section.key=value` overrides, frozen sections out.

    load(path, overrides) -> Config    raises ConfigError naming the key and what is allowed
    config.digest()                    the same on every rank of a run, or a rank may not join

Everything under `[node]` belongs to one process (addresses, certificates, device) and is left out
of the digest.
"""

import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from dpipe.config import checks
from dpipe.config.model import AdapterConfig, DataConfig, ModelConfig, ReplayConfig
from dpipe.config.parallel import DataParallelConfig, PipelineConfig, TensorParallelConfig
from dpipe.config.run import (
    GuardConfig,
    NodeConfig,
    PredictConfig,
    RunConfig,
    TimeoutsConfig,
    TrainConfig,
    TransportConfig,
)
from dpipe.config.section import Section
from dpipe.config.trust import refuse_untrusted
from dpipe.errors import ConfigError
from dpipe.ranks import ParallelRanks
from dpipe.toml import parse_toml, read_text

_ERRORS_SHOWN = 20
_SHOWN_CHARACTERS = 200


class Config(Section):
    """Every setting of a run, by section, such as `config.train.steps`.

    It is frozen, and its sections fit together: making one raises `pydantic.ValidationError` where
    they do not, `dpipe.load` a `ConfigError`.
    """

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    replay: ReplayConfig = ReplayConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    pipeline: PipelineConfig = PipelineConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()
    transport: TransportConfig = TransportConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    guard: GuardConfig = GuardConfig()
    predict: PredictConfig = PredictConfig()
    run: RunConfig = RunConfig()
    node: NodeConfig = NodeConfig()

    @model_validator(mode="after")
    def _fill(self) -> Self:
        self.__dict__["train"] = checks.with_micro_batches(self.train, self.data_parallel)
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks.check_size(self.pipeline, self.train, self.data_parallel)
        checks.check_transport(self.transport, self.model, self.node, self.data_parallel)
        checks.check_tensor_parallel(self.model, self.tensor_parallel, self.data_parallel)
        checks.check_replay(self.model, self.replay, self.pipeline, self.tensor_parallel, self.node)
        checks.check_published(self.model, self.adapter, self.data)
        checks.check_optimizer(self.train, self.pipeline, self.tensor_parallel, self.data_parallel)
        checks.check_compile(self.train, self.pipeline)
        checks.check_slices(
            self.model, self.replay, self.pipeline, self.tensor_parallel, self.train
        )
        checks.check_versions(self.pipeline, self.train, self.data_parallel, self.tensor_parallel)
        checks.check_epochs(self.model, self.data, self.train)
        checks.check_sample(self.model, self.run)
        checks.check_splits(self.pipeline, self.data_parallel)
        checks.check_batch(self.train, self.data_parallel)
        checks.check_reject(self.train, self.data_parallel)
        checks.check_servers(self.data_parallel, self.pipeline, self.train)
        checks.check_tied_embedding(self.model, self.data_parallel)
        checks.check_shape(self.transport, self.data_parallel)
        return self

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pipeline.ranks * self.tensor_parallel.size * self.data_parallel.replicas

    def ranks_of(self, rank: int) -> ParallelRanks:
        """The coordinates of `rank` among stages, replicas and tensor-parallel groups."""
        replicas = self.data_parallel.replicas
        return ParallelRanks(rank, self.pipeline.ranks, replicas, self.tensor_parallel.size)

    @property
    def num_machines(self) -> int:
        """The nodes of a network profile: a tensor-parallel group is one, and sends as one."""
        return self.world_size // self.ranks_per_machine

    @property
    def ranks_per_machine(self) -> int:
        """1 for a replay: its tensor parallelism is tried over a network, each rank a host."""
        return self.tensor_parallel.size if self.model.family.computes else 1

    @property
    def microbatch_size(self) -> int:
        """Sequences in a micro-batch."""
        return self.train.batch_size // self.data_parallel.replicas // self.train.num_microbatches

    @property
    def network_profile(self) -> str | None:
        """The network that a prediction assumes; None is loopback."""
        predict = self.predict
        return predict.network or predict.machines or self.transport.shape

    @property
    def counts_headers(self) -> bool:
        """Whether the network's rates include packet headers, as an interface's do; those of the
        shaped transport do not.
        """
        return self.transport.shape is None

    def shared(self) -> dict[str, Any]:
        """What every rank must agree on, as `section.key` -> JSON value."""
        sections = self.model_dump(mode="json", exclude={"node"})
        return {
            f"{name}.{key}": value
            for name, section in sections.items()
            for key, value in section.items()
        }

    def digest(self) -> str:
        """A hash of `shared()`."""
        # Short enough to be compared by eye: it tells configurations apart, and is no secret.
        return hashlib.sha256(json.dumps(self.shared(), sort_keys=True).encode()).hexdigest()[:16]

    def layers_digest(self, vocab_size: int | None = None) -> str:
        """A hash of what the time of a layer depends on: the model and its precision; `vocab_size`
        where the configuration leaves it to the tokenizer.
        """
        of_layers = [f"train.{key}" for key in ("precision", "parameters", "compile")]
        shared = self.shared()
        chosen = {
            key: value
            for key, value in shared.items()
            if key.startswith("model.") or key in of_layers
        }
        chosen["model.vocab_size"] = self.model.vocab_size or vocab_size
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]

    def with_(self, **overrides: Any) -> "Config":
        """A copy with some keys replaced, `config.with_(train__steps=5)`, and checked again. Raises
        `ConfigError`.
        """
        # From the whole table: what goes together is checked anew.
        table = self.model_dump()
        for name, value in overrides.items():
            section, _, key = name.partition("__")
            table[section][key] = value
        return build(table)


def load(
    path: Config | str | Path, overrides: Sequence[str] = (), *, trust_code: bool = False
) -> Config:
    """Read a TOML file, or take a configuration, and apply `section.key=value` overrides.

    The values of overrides are TOML; a bare word is a string. Raises `ConfigError` where the file
    cannot be read, for every mistake in it, and, without `trust_code`, where it names code that is
    neither the user's nor declared (`trust.py`).
    """
    table = path.model_dump(exclude_unset=True) if isinstance(path, Config) else read_table(path)
    for text in overrides:
        override(table, text)
    checked = build(table)
    refuse_untrusted(checked.model.layers, trust_code=trust_code)
    return checked


def in_folder(overrides: Sequence[str], resume: str | Path | None) -> tuple[str, ...]:
    """`overrides` for the run in the folder `resume`, if that is given."""
    if resume is None:
        return tuple(overrides)
    return (*overrides, f"run.folder={json.dumps(str(resume))}")


def read_table(path: str | Path) -> dict[str, Any]:
    """The file as it is, not checked: TOML, or JSON where its name ends so, as a run keeps it.

    Raises `ConfigError` where it cannot be read.
    """
    is_json = Path(path).suffix == ".json"
    try:
        content = read_text(path)
        table: dict[str, Any] = json.loads(content) if is_json else parse_toml(content)
    except FileNotFoundError:
        raise ConfigError(f"configuration {path} does not exist") from None
    except (RecursionError, ValueError) as error:  # of either decoder, and of UTF-8's
        language = "JSON" if is_json else "TOML"
        raise ConfigError(f"configuration {path} is not {language}: {error}") from None
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    if not isinstance(table, dict):  # JSON's top may be a list or a number
        raise ConfigError(f"configuration {path} must be a JSON object of sections")
    return table


def build(table: dict[str, Any]) -> Config:
    """Validate a table; raises `ConfigError` with one line a mistake."""
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain_all(error.errors(include_url=False))) from None


def override(table: dict[str, Any], text: str) -> None:
    """Apply `section.key=value` to a table. Raises `ConfigError` where it does not look so."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(
            f"override {text!r:.200} must look like section.key=value, such as train.steps=100"
        )
    if not isinstance(table.setdefault(section, {}), dict):
        raise ConfigError(f"override {text!r:.200}: {section!r:.200} is not a section")
    table[section][key] = _value(value.strip())


def _value(text: str) -> Any:
    # A bare word is a string: quotes within a shell's quotes are easily lost.
    try:
        return parse_toml(f"v = {text}")["v"]
    except ValueError:
        return text


def _explain_all(errors: Sequence[Any]) -> str:
    # A file of a hundred thousand unknown keys would fill the terminal, and each takes a search.
    lines = [_explain(error) for error in errors[:_ERRORS_SHOWN]]
    if len(errors) > _ERRORS_SHOWN:
        lines.append(f"and {len(errors) - _ERRORS_SHOWN} more")
    return "\n".join(lines)


def _explain(error: Any) -> str:
    """One line for one of pydantic's errors."""
    where = [str(part)[:_SHOWN_CHARACTERS] for part in error["loc"]]
    name = ".".join(where[:2]) or "the configuration"
    message = str(error["msg"])
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {name!r}{_did_you_mean(where)}"
        case "value_error":  # one of ours, which names its keys
            return message.removeprefix("Value error, ")
        case "name" | "absurd":
            return f"{name} {message}"
        case "model_type" if where:
            return f"{name} must be a section, [{name}], got {_shown(error['input'])}"
        case _:
            message = message.replace("a valid tuple", "a list")
            return f"{name}: {message}, got {_shown(error['input'])}"


def _shown(value: Any) -> str:
    """Enough of `value` to find it by."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # of deep tables, and of integers of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _did_you_mean(where: list[str]) -> str:
    fields = Config.model_fields
    if len(where) > 1:
        section = fields[where[0]].annotation
        assert section is not None
        fields = section.model_fields
    close = difflib.get_close_matches(where[-1], fields, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys: {', '.join(fields)}"
