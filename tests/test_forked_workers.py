"""`pytest --workers`: what `support/forked_workers.py` promises of tests that it runs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked_workers import shrinking

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]
MARKS = """
[pytest]
markers =
    alone
    waits
    lab
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(text, *options)`: pytest on a file of tests, in two workers."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeini(MARKS)

    def run_tests(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        plugin = ("-p", "support.forked_workers", "--workers", "2", "-p", "no:cacheprovider")
        return pytester.runpytest_subprocess(*plugin, *options)

    return run_tests


def test_each_test_runs_once_in_another_process(run: Run, pytester: pytest.Pytester) -> None:
    result = run("""
        import os, pytest
        @pytest.mark.parametrize("number", range(40))
        def test_number(number):
            with open(f"ran-{number}", "x") as file:
                file.write(f"{os.getpid()} {os.getppid()}")
    """)
    result.assert_outcomes(passed=40)
    assert result.ret == 0
    ran = [path.read_text().split() for path in pytester.path.glob("ran-*")]
    assert len(ran) == 40
    workers, parents = map(set, zip(*ran, strict=True))
    assert len(parents) == 1
    assert 1 <= len(workers) <= 2
    assert not workers & parents


def test_failure_says_what_its_test_printed(run: Run) -> None:
    result = run("""
        import pytest
        def test_that_prints():
            print("of the other test")
        def test_that_fails():
            print("of the test that fails")
            assert 1 == 2
        def test_that_is_skipped():
            pytest.skip("for a reason")
    """)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*assert 1 == 2", "*of the test that fails*"])
    result.stdout.no_fnmatch_line("*of the other test*")


def test_test_that_kills_its_worker_is_named(run: Run) -> None:
    result = run(
        """
        import os, pytest
        def test_that_kills():
            os._exit(3)
        @pytest.mark.parametrize("number", range(40))
        def test_number(number):
            pass
    """
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes["failed"] == 41
    assert outcomes["passed"] > 0
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*_ test_that_kills _*", "worker * ended in it with exit code 3"])


def test_no_test_is_forgotten_where_all_workers_have_ended(run: Run) -> None:
    result = run(
        """
        import os, pytest
        @pytest.mark.parametrize("number", range(40))
        def test_number(number):
            os._exit(0)
    """
    )
    assert result.parseoutcomes() == {"failed": 40}
    result.stdout.fnmatch_lines(["*no worker ran it*"])


def test_marked_tests_run_after_all_others(run: Run, pytester: pytest.Pytester) -> None:
    result = run("""
        import os, pytest, time
        def note(word):
            with open("order", "a") as file:
                file.write(word + "\\n")
        @pytest.mark.alone
        @pytest.mark.parametrize("number", range(2))
        def test_alone(number):
            note("alone begins")
            time.sleep(0.1)
            note("alone ends")
        @pytest.mark.waits
        def test_waits():
            time.sleep(0.1)
            note("waits")
        @pytest.mark.parametrize("number", range(3))
        def test_number(number):
            time.sleep(0.1)
            note("any")
    """)
    result.assert_outcomes(passed=6)
    order = (pytester.path / "order").read_text().splitlines()
    assert order == ["any"] * 3 + ["waits"] + ["alone begins", "alone ends"] * 2


@pytest.mark.parametrize(("begins_s", "ends_s"), [(0.3, 0), (0, 0.3)])
def test_workers_end_once_enough_has_failed(
    run: Run, pytester: pytest.Pytester, begins_s: float, ends_s: float
) -> None:
    """With what fixtures have begun: in the middle of their code, most likely."""
    result = run(
        f"""
        import os, pytest, time
        @pytest.fixture
        def begun(request):
            name = f"begun-{{os.getpid()}}"
            open(name, "w").close()
            time.sleep({begins_s})
            yield
            time.sleep({ends_s})
            os.remove(name)
        @pytest.mark.parametrize("number", range(400))
        def test_number(number, begun):
            time.sleep(0.05)
            assert False
    """,
        "--maxfail=3",
    )
    assert result.ret == 1
    assert result.parseoutcomes()["failed"] <= 5
    result.stdout.fnmatch_lines(["*stopping after 3 failures*"])
    assert not [*pytester.path.glob("begun-*")]


def test_fixture_of_a_module_ends_once_in_each_worker(run: Run, pytester: pytest.Pytester) -> None:
    run("""
        import os, pytest
        @pytest.fixture(scope="module", autouse=True)
        def of_the_module():
            yield
            with open(f"ended-{os.getpid()}", "x"):
                pass
        @pytest.mark.parametrize("number", range(40))
        def test_number(number):
            with open(f"ran-{os.getpid()}", "a"):
                pass
    """).assert_outcomes(passed=40)
    ran, ended = (
        {path.name.split("-")[1] for path in pytester.path.glob(f"{word}-*")}
        for word in ("ran", "ended")
    )
    assert ran == ended


def test_blocks_get_smaller_and_hold_all_tests() -> None:
    blocks = shrinking(7, 2000, 5)
    assert [number for first, count in blocks for number in range(first, first + count)] == [
        *range(7, 2000)
    ]
    counts = [count for _, count in blocks]
    assert counts == sorted(counts, reverse=True)
    assert counts[-5:] == [1] * 5


def test_without_the_option_tests_run_in_this_process(run: Run, pytester: pytest.Pytester) -> None:
    text = """
        import os
        def test_one():
            with open("parent", "w") as file:
                file.write(str(os.getppid()))
    """
    run(text, "--workers", "0").assert_outcomes(passed=1)
    assert (pytester.path / "parent").read_text() == str(os.getpid())
