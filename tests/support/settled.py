"""Assertions about time on a busy machine."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def settled(look: Callable[[], T], good: Callable[[T], bool], tries: int = 5) -> T:
    """The first result that is good, or else the last: a bug fails each time, a busy machine only
    sometimes.
    """
    for _ in range(tries):
        if good(seen := look()):
            break
    return seen
