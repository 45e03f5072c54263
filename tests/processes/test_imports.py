"""Imports that the garbage collector leaves alone."""

import atexit
import gc
from collections.abc import Iterator

import pytest

from dpipe.processes.imports import imported_for_good


@pytest.fixture(autouse=True)
def _collects_again() -> Iterator[None]:
    gc.unfreeze()  # a command that ran here before has frozen what it imported
    yield
    gc.unfreeze()
    atexit.unregister(gc.freeze)
    gc.enable()


def test_nothing_is_collected_while_modules_are_imported_and_they_never_are() -> None:
    with imported_for_good():
        assert not gc.isenabled()
        modules = [{"made": "by an import"}]
        assert gc.is_tracked(modules) and gc.get_freeze_count() == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert all(modules is not tracked for tracked in gc.get_objects())


def test_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), imported_for_good():
        import dpipe.no_such_room  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with imported_for_good():
        pass
    assert not gc.isenabled()
