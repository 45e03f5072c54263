"""Fixtures and switches of all tests."""

import functools
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from dpipe.processes.imports import imported_for_good

with imported_for_good():
    import hypothesis
    import torch
    from fakes import cuda_on_cpu

    from netem.router import MODULES

pytest_plugins = ["support.warm_python", "support.forked_workers", "support.whole_runs"]
GOLDEN = Path(__file__).parent / "golden"

# The time of an example depends on the load of the machine: one took 0.8 s at first, then 0.3 ms.
hypothesis.settings.register_profile(
    "dpipe", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("dpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="Accept what the tests see as the golden files.",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All tests are imported and kept: looking through them for garbage takes as long as
    collecting them.
    """
    with imported_for_good():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # `-m` chooses among the marks that are there
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_further_cases(items)
    # scripts/test finds the files with these marks by their text, and collects no others.
    text = functools.cache(lambda path: path.read_text(encoding="utf-8"))
    for item in items:
        for mark in ("gpu", "stand_in"):
            if item.get_closest_marker(mark) and f"mark.{mark}" not in text(item.path):
                raise pytest.UsageError(f"{item.path} must say pytest.mark.{mark} itself")


def _mark_further_cases(items: list[pytest.Item]) -> None:
    """As `slow`: all cases of a test but `some_cases`, which are spread over them evenly. A number
    that divides theirs may leave values of a parameter out, which come at the same distances.
    """
    by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("some_cases"):
            test, _, _ = item.nodeid.partition("[")
            by_test[test].append(item)
    for cases in by_test.values():
        (number,) = cases[0].get_closest_marker("some_cases").args
        places = {part * len(cases) // number for part in range(number)}
        for place, case in enumerate(cases):
            if place not in places:
                case.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("daemon") and "daemon" not in item.config.option.markexpr:
        pytest.skip("runs only where it is asked for: scripts/test -m daemon")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(
            f"needs a CUDA GPU, and torch {torch.__version__} sees none; scripts/test has a "
            "stand-in for some"
        )
    if item.get_closest_marker("stand_in") and cuda_on_cpu.DEVICE is None:
        pytest.skip(
            "no stand-in was asked for, or there are real GPUs: PYTHONPATH=tests pytest -p "
            "fakes.cuda_on_cpu"
        )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares with tests/golden/name.txt, or rewrites it where
    asked.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} has changed; if that is right: --rewrite-golden"
        )

    return compare


@pytest.fixture(scope="session")
def possible() -> None:
    """Fails if a lab cannot be made here, instead of skipping silently."""
    if os.environ.get("DPIPE_NO_LAB") == "1":
        pytest.skip("DPIPE_NO_LAB=1: labs are not tested")
    missing = ["root"] if os.geteuid() else []
    programs = ("ip", "tc", "ping", "linux.uml", "insmod", "ethtool", "sysctl", "sshd", "nft")
    missing += [program for program in programs if not shutil.which(program)]
    missing += [] if list(MODULES.glob("*/kernel/net/sched/sch_netem.ko")) else [str(MODULES)]
    if missing:
        pytest.fail(
            f"a lab needs {', '.join(missing)}: run scripts/apt-lab as root, or set DPIPE_NO_LAB=1 "
            "to go without"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On CPU a run repeats bit for bit at the same number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def authority() -> type:
    """`certificates.Authority`; imported where it is used, because GPU tests run where
    `cryptography` need not be.
    """
    from support.certificates import Authority

    return Authority
