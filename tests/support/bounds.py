"""Bounds on the cost of a refusal."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quickly(seconds: float = 5.0, megabytes: int = 200) -> Iterator[None]:
    """Fails if the block takes more. Processor time does not say how busy the machine is."""
    before = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - before < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < megabytes * 1024
