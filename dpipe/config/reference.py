"""Every key with its type, default, allowed values and meaning, as the sections declare them.

sections()    [SectionReference("train", "Steps, ...", (Key("train.steps", ...), ...)), ...]
text()        for a terminal, 100 columns wide
markdown()    the reference page of the documentation
as_json()     for programs
"""

import textwrap
from dataclasses import dataclass
from typing import Any

from dpipe.config.load import Config
from dpipe.toml import to_toml

_WIDTH = 100
_COLUMN = 38  # where types begin

Schema = dict[str, Any]  # JSON schema, as pydantic makes it


@dataclass(frozen=True)
class Alternative:
    """One kind of value that a key takes. Where `names` are given, it is one of these."""

    type: str
    bounds: str = ""
    names: tuple[str, ...] = ()

    def shown(self, quote: str) -> str:
        if self.names:
            return ", ".join(f"{quote}{to_toml(name)}{quote}" for name in self.names)
        if self.bounds:
            return f"{self.type}, {self.bounds}"
        return self.type


@dataclass(frozen=True)
class Key:
    """One key. `default` is TOML, and "" where leaving the key out means something of its own."""

    name: str
    alternatives: tuple[Alternative, ...]
    default: str
    meaning: str

    def values(self, quote: str = "") -> str:
        """`integer, at least 1, or "auto"`; with `quote` around each name."""
        return ", or ".join(alternative.shown(quote) for alternative in self.alternatives)


@dataclass(frozen=True)
class SectionReference:
    name: str
    meaning: str
    keys: tuple[Key, ...]


def sections() -> list[SectionReference]:
    """All sections in the order in which `Config` has them."""
    return [_section(name, field.annotation) for name, field in Config.model_fields.items()]


def text() -> str:
    """All keys by section:

    [train]  Steps, batches, the optimizer (AdamW), precision and evaluation.

      steps = 100                           integer, at least 1
          Optimizer steps of the whole run. A resumed run ends at the same step.
    """
    return "\n\n".join(_section_text(section) for section in sections())


def markdown() -> str:
    """All keys as one table a section, under headings of the second level."""
    return "\n\n".join(_section_markdown(section) for section in sections())


def as_json() -> list[dict[str, Any]]:
    """One object a key: key, type, allowed, default (null where left out), meaning."""
    return [
        {
            "key": key.name,
            "type": " or ".join(alternative.type for alternative in key.alternatives),
            "allowed": key.values(),
            "default": key.default or None,
            "meaning": key.meaning,
        }
        for section in sections()
        for key in section.keys
    ]


def _section_text(section: SectionReference) -> str:
    lines = _wrapped(f"[{section.name}]  {section.meaning}", first="", rest=" " * 4)
    lines.append("")
    for key in section.keys:
        name = key.name.removeprefix(f"{section.name}.")
        setting = f"{name} = {key.default}" if key.default else f"{name}, left out"
        line = f"{setting:<{_COLUMN - 2}}  {key.values()}"
        lines += _wrapped(line, first="  ", rest=" " * (_COLUMN + 2))
        lines += _wrapped(key.meaning, first=" " * 6, rest=" " * 6)
    return "\n".join(lines)


def _wrapped(line: str, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        line,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _section_markdown(section: SectionReference) -> str:
    lines = [
        f"## `[{section.name}]`",
        "",
        section.meaning,
        "",
        "| key | value | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for key in section.keys:
        default = f"`{key.default}`" if key.default else ""
        cells = [f"`{key.name}`", key.values(quote="`"), default, key.meaning]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def _section(name: str, section: Any) -> SectionReference:
    schema = section.model_json_schema()
    keys = []
    for key, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        keys.append(
            Key(
                name=f"{name}.{key}",
                alternatives=_alternatives(schema["properties"][key]),
                default="" if default is None else to_toml(default),
                meaning=_one_line(field.description or ""),
            )
        )
    return SectionReference(name, _one_line(schema["description"]), tuple(keys))


def _one_line(description: str) -> str:
    return " ".join(description.split())


def _alternatives(schema: Schema) -> tuple[Alternative, ...]:
    """The kinds of value of a key, without null: TOML has none, the key is left out instead."""
    every = schema.get("anyOf", [schema])
    return tuple(_alternative(each) for each in every if each.get("type") != "null")


def _alternative(schema: Schema) -> Alternative:
    match schema["type"]:
        case "array":
            items = schema["prefixItems"] if "prefixItems" in schema else [schema["items"]]
            count = f"{len(items)} " if "prefixItems" in schema else ""
            item = _alternative(items[0])
            return Alternative(f"list of {count}{item.type}s", item.bounds, item.names)
        case "object":
            return Alternative("table")
        case name:
            # Names of a choice, or the one value of a `Literal` with one.
            names = schema.get("enum", [schema["const"]] if "const" in schema else [])
            return Alternative(name, _bounds(schema), tuple(names))


def _bounds(schema: Schema) -> str:
    """`at least 1`, `above 0, at most 10`, `0 to 65,535`."""
    if "minimum" in schema and "maximum" in schema:
        return f"{schema['minimum']:,} to {schema['maximum']:,}"
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return ", ".join(f"{word} {schema[name]:,}" for name, word in words.items() if name in schema)
