"""Write the pages of the reference that are made from the code: docs/generated/*.md.

configuration.md   every key, as `dpipe config --markdown` prints it
command-line.md    what `--help` prints, for dpipe and for each script that has options
python.md          what `import dpipe` gives, from signatures and docstrings
rooms.md           what each folder of dpipe/ says of itself

Pages include these files. Docstrings are Markdown already: code between backticks, pictures
indented.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import dpipe
from dpipe.config import reference

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "docs/generated"
COMMANDS = {
    "dpipe": "dpipe.cli.main",
    "python -m netem": "netem.cli",
    "scripts/cluster": "fleet.cluster",
    "scripts/aws": "fleet.aws",
    "scripts/sweep.py": "sweep",
    "scripts/table.py": "table",
    "scripts/today.py": "today",
    "scripts/convergence.py": "convergence",
    "scripts/tensor_product.py": "tensor_product",
    "scripts/link.py": "link",
    "scripts/bert_text.py": "bert_text",
    "scripts/gpu_check": "gpu_check",
    "scripts/fuzz": "fuzz",
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
    """Every key, as `dpipe config --markdown` prints it; each says what it means."""
    for section in reference.sections():
        for key in section.keys:
            if not key.meaning:
                raise ValueError(f"{key.name} has no meaning; write it below the key")
    return reference.markdown()


def python() -> str:
    """The public names of dpipe: functions, then classes."""
    values = {name: getattr(dpipe, name) for name in dpipe.__all__}
    names = sorted(values, key=lambda name: (inspect.isclass(values[name]), name))
    return "\n".join(_python_section(name, values[name]) for name in names)


def _python_section(name: str, value: Any) -> str:
    parts = [f"### `dpipe.{name}`", _docstring(f"dpipe.{name}", value)]
    if inspect.isclass(value):
        parts[1:1] = _signature(value, name) if is_dataclass(value) else ()
        parts += _members(name, value)
    else:
        parts[1:1] = _signature(value, name)
    return "\n\n".join([*parts, ""])


def _signature(value: Any, name: str) -> tuple[str]:
    signature = inspect.signature(value)
    parameters: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(_short(str(parameter)))
    inside = "".join(f"    {parameter},\n" for parameter in parameters)
    returned = signature.return_annotation
    nothing = returned is None or returned is inspect.Signature.empty
    arrow = "" if nothing else f" -> {_short(inspect.formatannotation(returned))}"
    return (f"```text\n{name}(\n{inside}){arrow}\n```",)


def _short(annotated: str) -> str:
    """Types by their own names, without the modules that they are from."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", annotated)


def _members(name: str, value: type) -> Iterator[str]:
    """The public methods and properties of a class that say what they do."""
    for member, what in vars(value).items():
        function = getattr(what, "fget", None) or getattr(what, "__func__", what)
        described = inspect.isfunction(function) and function.__doc__
        if member.startswith("_") or not described:
            continue
        call = "" if isinstance(what, property) else _short(str(inspect.signature(function)))
        yield f"#### `{name}.{member}{call}`\n\n{inspect.getdoc(function)}"


def _docstring(name: str, value: Any) -> str:
    text = value.__doc__ and inspect.getdoc(value)
    if not text:
        raise ValueError(f"{name} has no docstring; it is public, and its page is made from it")
    return text


def rooms() -> str:
    """The docstring of each room, as it stands."""
    sections = []
    for door in sorted((ROOT / "dpipe").rglob("__init__.py")):
        room = door.parent.relative_to(ROOT)
        text = ast.get_docstring(ast.parse(door.read_text(encoding="utf-8")))
        if room.name in ("dpipe", "v1"):
            continue
        if not text:
            raise ValueError(f"{room} does not say why it exists: give its __init__.py a docstring")
        sections.append(f"### `{room}`\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "command-line.md": command_line,
    "python.md": python,
    "rooms.md": rooms,
}


def main() -> None:
    GENERATED.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (GENERATED / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    sys.path.append(str(ROOT / "scripts"))
    main()
