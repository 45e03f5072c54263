"""How long threads that wake wait for a core, from the kernel's events."""

import pytest
from click.testing import CliRunner

# Process 10 is the run; 11 is a thread of it, 12 one of that, 99 is other work.
EVENTS = """
  sh    10 [000] 1.000000: sched:sched_process_fork: comm=sh pid=10 child_comm=sh child_pid=11
  sh    11 [000] 1.000100: sched:sched_process_fork: comm=sh pid=11 child_comm=sh child_pid=12
  sh    11 [000] 1.001000: sched:sched_waking: comm=gloo_tcp_loop pid=12 prio=120 target_cpu=001
  sh    11 [001] 1.003000: sched:sched_switch: prev_comm=sh prev_pid=11 prev_prio=120 \
prev_state=R ==> next_comm=gloo_tcp_loop next_pid=12 next_prio=120
  sh    11 [001] 1.004000: sched:sched_waking: comm=gloo_tcp_loop pid=12 prio=120 target_cpu=001
  cc    99 [001] 1.004500: sched:sched_switch: prev_comm=cc prev_pid=99 prev_prio=120 \
prev_state=R ==> next_comm=gloo_tcp_loop next_pid=12 next_prio=120
  sh    11 [000] 1.005000: sched:sched_waking: comm=python pid=11 prio=120 target_cpu=000
  swap   0 [000] 1.005100: sched:sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 \
prev_state=R ==> next_comm=python next_pid=11 next_prio=120
  cc    99 [000] 1.006000: sched:sched_waking: comm=gloo_tcp_loop pid=98 prio=120 target_cpu=000
  cc    99 [000] 1.007000: sched:sched_switch: prev_comm=sh prev_pid=11 prev_prio=120 \
prev_state=R ==> next_comm=gloo_tcp_loop next_pid=98 next_prio=120
""".splitlines()


@pytest.fixture
def wakes(script):
    return script("wakes")


def test_waits_are_of_the_run_alone_by_what_the_core_was_at(wakes) -> None:
    waits = wakes.waits_ms(EVENTS, 10, "gloo")
    assert waits == {
        ("another core", "the run"): [pytest.approx(2.0)],
        ("the same core", "other work"): [pytest.approx(0.5)],
    }
    everything = wakes.waits_ms(EVENTS, 10, "")
    assert everything["the same core", "nothing"] == [pytest.approx(0.1)]


def test_row_has_mean_median_and_the_longest_tenth(wakes) -> None:
    waits = {("another core", "the run"): [0.01, 0.02, 0.03, 1.54]}
    (row,) = wakes.rows(waits)
    assert (row["wakes"], row["mean_ms"], row["median_ms"]) == (4, 0.4, 0.025)
    assert row["one of ten_ms"] > 1.5


def test_missing_perf_is_named(wakes, monkeypatch) -> None:
    def missing(*_, **__):
        raise FileNotFoundError(2, "No such file or directory", "perf")

    monkeypatch.setattr(wakes.subprocess, "run", missing)
    result = CliRunner().invoke(wakes.main, ["true"])
    assert result.exit_code == 1
    assert "apt-get install linux-perf" in result.output
