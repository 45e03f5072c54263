"""Small text files that people write, or get from others: read whole, within bounds. And values as
TOML writes them: Python reads TOML, and does not write it.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 8 << 20
# tomllib takes time by the square of a key's parts, and fails in deep tables.
MAX_KEY_PARTS = 32

_NOT_KEYS = re.compile(r'"[^"\n]*"|\'[^\'\n]*\'|#[^\n]*')
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_OUTSIDE_KEYS = re.compile(r"[=\[\]{}#,\n]")


def read_text(path: str | Path) -> str:
    """A UTF-8 file without its byte-order mark, which some editors put first.

    Raises `OSError`, or `ValueError` with words for one that is not UTF-8, is of more than
    `MAX_BYTES`, or has a name that no file can have.
    """
    # By its length and not by its size: a device has none.
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content.decode("utf-8-sig")


def parse_toml(text: str) -> dict[str, Any]:
    """Raises `ValueError` with words for what is not TOML, or nested too deeply."""
    keys = _OUTSIDE_KEYS.split(_NOT_KEYS.sub("", text))
    parts = 1 + max(key.count(".") for key in keys)
    if parts > MAX_KEY_PARTS:
        raise ValueError(f"a key has {parts} parts; the most is {MAX_KEY_PARTS}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_toml(value: Any) -> str:
    """A string, number, truth value, list or table on one line. Raises `TypeError` for another."""
    match value:
        case Mapping():
            items = [f"{_key(key)} = {to_toml(each)}" for key, each in value.items()]
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


def _key(text: str) -> str:
    return text if _BARE_KEY.fullmatch(text) else _string(text)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but JSON leaves DEL as it is
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
