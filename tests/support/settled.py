"""Promises about time, on a machine that has other things to do."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def settled(look: Callable[[], T], good: Callable[[T], bool], tries: int = 5) -> T:
    """The first look that is good, or else the last: what is wrong is wrong each time, what is late
    is so at times.
    """
    for _ in range(tries):
        if good(seen := look()):
            break
    return seen
