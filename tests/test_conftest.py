"""The guard of tests/conftest.py over the marks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))


def marked(path: Path, mark: str) -> SimpleNamespace:
    """A test in `path` that has `mark`, from wherever."""
    return SimpleNamespace(path=path, get_closest_marker=lambda name: name == mark or None)


@pytest.mark.parametrize("mark", ["gpu", "stand_in"])
def test_file_that_does_not_name_the_mark_of_its_tests_is_refused(
    conftest: Any, tmp_path: Path, mark: str
) -> None:
    """scripts/test would not find the file, and its tests would never run."""
    path = tmp_path / "test_it.py"
    path.write_text(f"pytestmark = [pytest.mark.{mark}]\n")
    conftest.pytest_collection_modifyitems([marked(path, mark)])
    path.write_text("from marks import pytestmark\n")
    with pytest.raises(pytest.UsageError, match=rf"test_it.py must say pytest.mark.{mark} itself"):
        conftest.pytest_collection_modifyitems([marked(path, mark)])


class Case:
    """One of a test that says `some_cases(number)`, or nothing where that is 0."""

    path = Path(__file__)

    def __init__(self, name: str, number: int) -> None:
        self.nodeid = f"test_it.py::{name}"
        self.marks: list[str] = []
        self._some_cases = SimpleNamespace(args=(number,)) if number else None

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self._some_cases if name == "some_cases" else None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def test_all_cases_are_slow_but_some_that_are_spread_evenly(conftest: Any) -> None:
    costly = [Case(f"test_costly[{number}]", 3) for number in range(8)]
    cheap = [Case(f"test_cheap[{number}]", 0) for number in range(8)]
    conftest.pytest_collection_modifyitems([*costly, *cheap])
    assert [number for number in range(8) if not costly[number].marks] == [0, 2, 5]
    assert all(case.marks == ["slow"] for case in costly if case.marks)
    assert not any(case.marks for case in cheap)
