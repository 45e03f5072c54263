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
