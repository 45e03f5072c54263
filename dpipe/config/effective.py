"""What a file comes to: the value of every key, and from where it is.

    [model]
    layers = "gpt"                                        # default
    width = 2048                                          # preset gpt3-xl
    num_layers = 2                                        # job.toml
    # vocab_size is left out                              # default

    [train]
    steps = 5                                             # override

It is a TOML file of the same meaning. The token, a secret, is not shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpipe.config.load import build, override, read_table
from dpipe.config.presets import PRESETS
from dpipe.toml import to_toml

_SECRETS = ("node.token",)  # shown as set, not as they are


@dataclass(frozen=True)
class Setting:
    """The value of a key; `origin` is "default", "override", "preset NAME", or the file."""

    name: str
    value: Any
    origin: str

    @property
    def is_secret(self) -> bool:
        return self.name in _SECRETS and bool(self.value)


def settings(path: str | Path, overrides: Sequence[str] = ()) -> list[Setting]:
    """Every key of the configuration that `load` makes of the same. Raises as `load` does."""
    table = read_table(path)
    origins = dict.fromkeys(_names(table), str(path))
    for text in overrides:
        override(table, text)
        origins[text.partition("=")[0].strip()] = "override"
    config = build(table)
    if config.model.preset is not None:
        for key in PRESETS[config.model.preset]:
            # A size that is set as well wins, and so does where it is from.
            origins.setdefault(f"model.{key}", f"preset {config.model.preset}")
    return [
        Setting(f"{section}.{key}", value, origins.get(f"{section}.{key}", "default"))
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
    ]


def text(every: list[Setting]) -> str:
    """The settings as a TOML file, with the origin of each as a comment."""
    return "\n".join(_lines(every))


def as_json(every: list[Setting]) -> dict[str, dict[str, Any]]:
    """`{"train.steps": {"value": 5, "origin": "override"}, ...}`; a secret's value is null."""
    return {
        setting.name: {
            "value": None if setting.is_secret else setting.value,
            "origin": setting.origin,
        }
        for setting in every
    }


def _names(table: dict[str, Any]) -> Iterator[str]:
    for section, keys in table.items():
        # what is no section here, `build` refuses
        for key in keys if isinstance(keys, dict) else ():
            yield f"{section}.{key}"


def _lines(every: list[Setting]) -> Iterator[str]:
    previous = ""
    for setting in every:
        section, _, key = setting.name.partition(".")
        if section != previous:
            yield f"\n[{section}]" if previous else f"[{section}]"
            previous = section
        yield f"{_assignment(key, setting):<50}  # {setting.origin}"


def _assignment(key: str, setting: Setting) -> str:
    if setting.is_secret:
        return f"# {key} is not shown"
    if setting.value is None:
        return f"# {key} is left out"
    return f"{key} = {to_toml(setting.value)}"
