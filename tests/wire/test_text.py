import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.wire.text import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 1 (10.0.0.7): größer, 模型", "rank 1 (10.0.0.7): größer, 模型"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\rb\tc\x7f", r"a\rb\tc\x7f"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\u2028\U000e0041\ud800", r"\u2028\U000e0041\ud800"),
        ("lost\n2026-01-01 rank 0 step 5", "lost\n  2026-01-01 rank 0 step 5"),
        ("\n\n  indented", "\n  \n  indented"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_whatever_is_shown_is_printable_and_stays_so(text: str) -> None:
    shown = visible(text)
    first, *lines = shown.split("\n")
    assert all(line.isprintable() for line in (first, *lines))
    assert all(line.startswith("  ") for line in lines)
    assert visible(shown) == shown
