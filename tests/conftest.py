"""Fixtures and switches of all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="Accept what the tests see as the golden files.")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares with tests/golden/name.txt, or rewrites it where asked."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} has changed; if that is right: --rewrite-golden"

    return compare


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On CPU a run repeats bit for bit at the same number of threads."""
    torch.set_num_threads(1)
