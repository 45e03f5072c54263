"""Imports that stay for as long as the process does.

Torch and what it imports are some 500,000 objects, none of them ever garbage. The collector goes
through all of them again and again while they are made, once more when the process ends, and now
and then in between, in the middle of a step.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """What is imported inside is never looked through for garbage: that takes as long as importing
    it.

    For a process of dpipe's own: what is garbage already, and refers to itself, is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.freeze)  # also what is imported later: the end looks through it
        if was_enabled:
            gc.enable()
