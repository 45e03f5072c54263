"""Write the pages of the reference that are made from the code: docs/generated/*.md.

configuration.md   every key, from the models of `dpipe.config`
command-line.md    what `--help` prints, for dpipe and for each script that has options
python.md          what `import dpipe` gives, from signatures and docstrings

Pages include these files. Docstrings are Markdown already: code between backticks, pictures indented.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import dpipe
from dpipe.config.load import Config

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "docs/generated"
COMMANDS = {
    "dpipe": "dpipe.cli.main",
    "python -m netem": "netem.cli",
    "scripts/cluster": "fleet.cluster",
    "scripts/aws": "fleet.aws",
    "scripts/sweep.py": "sweep",
    "scripts/table.py": "table",
    "scripts/convergence.py": "convergence",
    "scripts/tensor_product.py": "tensor_product",
    "scripts/link.py": "link",
    "scripts/bert_text.py": "bert_text",
    "scripts/gpu_check": "gpu_check",
}


def command(name: str) -> click.Command:
    """The click command behind one of `COMMANDS`."""
    found = import_module(COMMANDS[name]).main
    assert isinstance(found, click.Command)
    return found


def command_line() -> str:
    return "\n".join(
        section for name in COMMANDS for section in _command_sections(command(name), name, None, 2)
    )


def _command_sections(
    what: click.Command, name: str, parent: click.Context | None, level: int
) -> Iterator[str]:
    context = click.Context(what, info_name=name, parent=parent, terminal_width=88)
    yield f"{'#' * level} `{context.command_path}`\n"
    yield f"```text\n{what.get_help(context)}\n```\n"
    if isinstance(what, click.Group):
        for inner in what.list_commands(context):
            yield from _command_sections(what.commands[inner], inner, context, level + 1)


def configuration() -> str:
    """Every key, section by section: type and default."""
    return "\n".join(_config_section(name, info) for name, info in Config.model_fields.items())


def _config_section(section: str, info: Any) -> str:
    lines = [f"## `[{section}]`", "", "| key | type | default |", "| --- | --- | --- |"]
    for key, field in info.annotation.model_fields.items():
        kind = str(field.annotation).replace("|", "or")
        lines.append(f"| `{section}.{key}` | `{kind}` | `{field.get_default()!r}` |")
    return "\n".join([*lines, ""])


def python() -> str:
    """The public names of dpipe: functions, then classes."""
    values = {name: getattr(dpipe, name) for name in dpipe.__all__}
    names = sorted(values, key=lambda name: (inspect.isclass(values[name]), name))
    return "\n".join(_python_section(name, values[name]) for name in names)


def _python_section(name: str, value: Any) -> str:
    parts = [f"## `dpipe.{name}`", _docstring(f"dpipe.{name}", value)]
    if inspect.isclass(value):
        parts[1:1] = _signature(value, name) if is_dataclass(value) else ()
        parts += _members(name, value)
    else:
        parts[1:1] = _signature(value, name)
    return "\n\n".join([*parts, ""])


def _signature(value: Any, name: str) -> tuple[str]:
    parameters = inspect.signature(value).parameters.values()
    inside = "".join(f"    {parameter},\n" for parameter in parameters)
    returned = inspect.signature(value).return_annotation
    arrow = "" if returned in (inspect.Signature.empty, None) else f" -> {_type_name(returned)}"
    return (f"```text\n{name}(\n{inside}){arrow}\n```",)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _members(name: str, value: type) -> Iterator[str]:
    """The public methods and properties of a class that say what they do."""
    for member, what in vars(value).items():
        function = getattr(what, "fget", None) or getattr(what, "__func__", what)
        described = inspect.isfunction(function) and function.__doc__
        if member.startswith("_") or not described:
            continue
        call = "" if isinstance(what, property) else str(inspect.signature(function))
        yield f"### `{name}.{member}{call}`\n\n{inspect.getdoc(function)}"


def _docstring(name: str, value: Any) -> str:
    text = value.__doc__ and inspect.getdoc(value)
    if not text:
        raise ValueError(f"{name} has no docstring; it is public, and its page is made from it")
    return text


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "command-line.md": command_line,
    "python.md": python,
}


def main() -> None:
    GENERATED.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (GENERATED / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    sys.path.append(str(ROOT / "scripts"))
    main()
