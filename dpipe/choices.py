"""Tables of named choices: schedules, wire formats, kinds of data parallelism, transports, models.

Each choice is declared once, in the room that implements it, with the properties that others need
to know of it. Configuration, command line, prediction and documentation read the table; none of
them names a choice.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

from dpipe.errors import ConfigError

_COMPARED = 100  # characters of a name: to compare takes time by their square


class Named(Protocol):
    @property
    def name(self) -> str: ...


Choice = TypeVar("Choice", bound=Named)


class Choices(Mapping[str, Choice], Generic[Choice]):
    """The choices of one configuration key, by name, in the order in which they were added."""

    def __init__(self, what: str, *choices: Choice) -> None:
        """`what` names the choice in messages, such as "pipeline.schedule"."""
        self._what = what
        self._choices: dict[str, Choice] = {}
        for choice in choices:
            self.add(choice)

    def add(self, choice: Choice) -> Choice:
        """Make `choice` known under its name. Raises `ConfigError` where the name is taken."""
        if choice.name in self._choices:
            raise ConfigError(f"{self._what} {choice.name!r} is declared twice")
        self._choices[choice.name] = choice
        return choice

    def remove(self, name: str) -> None:
        """Forget a choice that a test or a plug-in has added."""
        del self._choices[name]

    def named(self, name: str) -> Choice:
        """Raises `ConfigError` naming the known choices, and the closest one."""
        if name in self._choices:
            return self._choices[name]
        raise ConfigError(f"{self._what} {unknown_name(name, self._choices)}")

    def __getitem__(self, name: str) -> Choice:
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """`must be one of "gpipe", "1f1b", got 'gpip'; did you mean "gpipe"?`"""
    names = list(known)
    quoted = ", ".join(f'"{each}"' for each in names)
    close = difflib.get_close_matches(name[:_COMPARED], names, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    return f"must be one of {quoted}, got {name!r:.200}{hint}"


def function_at(path: str) -> Callable[..., Any]:
    """The function of `package.module:function`, by which a table names what needs torch."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
