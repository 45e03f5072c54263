"""The way into this room for the others: it imports transformers, which takes seconds and need not
be installed.
"""

import importlib
from collections.abc import Callable
from typing import Any

from dpipe.choices import function_at
from dpipe.errors import ConfigError


def hub_function(path: str, room: str = "hub") -> Callable[..., Any]:
    """The function of `module:function` in this room, or in another that imports transformers.
    Raises `ConfigError` without the extra.
    """
    try:
        return function_at(f"dpipe.{room}.{path}")
    except ModuleNotFoundError as error:
        raise _missing("model.hf", error) from None


def extra_library(name: str, user: str) -> Any:
    """The library, for what only some runs need. Raises `ConfigError` if it is not installed: the
    configuration's `user` needs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing(user, error) from None


def _missing(user: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{user} needs {error.name}: pip install 'dpipe[hf]', or leave {user} out")
