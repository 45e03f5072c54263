"""Values as TOML writes them; Python reads TOML, and does not write it."""

import json
from collections.abc import Mapping
from typing import Any


def to_toml(value: Any) -> str:
    """A string, number, truth value, list or table on one line. Raises `TypeError` for another."""
    match value:
        case Mapping():
            items = [f"{_string(key)} = {to_toml(each)}" for key, each in value.items()]
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(to_toml(each) for each in value) + "]"
        case str():
            return _string(value)
        # Before numbers: True is an int as well.
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)  # of inf and nan too
        case _:
            raise TypeError(f"TOML has no {type(value).__name__}")


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but JSON leaves DEL as it is
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
