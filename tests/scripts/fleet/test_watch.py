"""Watching a run: success and failure, signals, lost connections."""

import os
import signal
from contextlib import suppress

import psutil
from fleet import watch
from fleet.watch import Ended

COUNTS = 'for n in range(20): print(f"counts {n}", flush=True); time.sleep(0.1)'
UNTIL_STOPPED = """
def stop(*_):
    print("writes a checkpoint")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: print("hears", flush=True))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def ready(cloud, name="r", word="ready"):
    """Whether both ranks have started."""
    logs = [cloud.folder(n) / f"cluster/{name}/rank-{n}.log" for n in range(2)]
    return lambda: all(log.exists() and word in log.read_text() for log in logs)


def followed(cloud, number):
    """Whether the run is followed, which begins when all ranks have started."""
    folder = str(cloud.folder(number))

    def found(process):
        with suppress(psutil.Error):
            words = process.cmdline()
            return "follow" in words and (
                process.cwd().startswith(folder) or folder in " ".join(words)
            )

    return lambda: any(found(process) for process in psutil.process_iter())


def test_run_shows_every_rank_and_ends_well(cloud):
    cloud.play('print("says", rank)')
    done = cloud.run("--name", "r")
    assert done.exit_code == 0, done.output
    assert {"rank 0 | says 0", "rank 1 | says 1"} <= set(done.output.splitlines())


def test_first_failure_is_named_and_stops_the_others(cloud, monkeypatch):
    monkeypatch.setattr(watch, "GRACE_S", 0.3)
    cloud.play("if rank == 1: sys.exit(3)\ntime.sleep(60)")
    done = cloud.run("--name", "r")
    assert done.exit_code == 3
    assert [
        line for line in done.output.splitlines() if line.startswith("rank") and "|" not in line
    ] == [
        f"rank 1 on 127.0.0.2:{cloud.port}: exit code 3; the others stop",
        f"rank 1 on 127.0.0.2:{cloud.port}: exit code 3",
        f"rank 0 on 127.0.0.1:{cloud.port}: exit code 137 (SIGKILL)",
    ]


def test_killed_rank_is_reported_with_its_signal(cloud):
    cloud.play("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    done = cloud.run("--name", "r")
    assert done.exit_code == 137
    assert (
        f"rank 1 on 127.0.0.2:{cloud.port}: exit code 137 (SIGKILL); the others stop" in done.output
    )
    assert f"rank 0 on 127.0.0.1:{cloud.port}: ended well" in done.output


def test_elastic_run_outlives_every_process_but_the_first(cloud):
    cloud.play("if rank: sys.exit(3)\ntime.sleep(1)")
    elastic = ("-o", "pipeline.stages=1", "-o", "run.checkpoint_url='s3://b/r'", "--spares", "1")
    done = cloud.run("--name", "r", *elastic)
    assert done.exit_code == 0, done.output
    assert f"rank 1 on 127.0.0.2:{cloud.port}: exit code 3; the run goes on" in done.output
    followed_later = cloud("logs", "-f")
    assert followed_later.exit_code == 0, followed_later.output


def test_elastic_run_ends_with_the_process_that_coordinates_it(cloud, monkeypatch):
    monkeypatch.setattr(watch, "GRACE_S", 0.3)
    cloud.play("if rank == 0: sys.exit(3)\ntime.sleep(60)")
    elastic = ("-o", "pipeline.stages=1", "-o", "run.checkpoint_url='s3://b/r'", "--spares", "1")
    done = cloud.run("--name", "r", *elastic)
    assert done.exit_code == 3
    assert f"rank 0 on 127.0.0.1:{cloud.port}: exit code 3; the others stop" in done.output


def test_interrupt_asks_for_a_checkpoint(cloud, later):
    cloud.play(UNTIL_STOPPED)
    later(ready(cloud), lambda: os.kill(os.getpid(), signal.SIGINT))
    done = cloud.run("--name", "r")
    assert done.exit_code == 0, done.output
    assert (
        "stopping: the ranks finish their step and write a checkpoint; once more kills them"
        in done.output
    )
    assert done.output.count("| writes a checkpoint") == 2


def test_second_interrupt_kills(cloud, later):
    cloud.play(IGNORES_SIGTERM)
    later(ready(cloud), lambda: os.kill(os.getpid(), signal.SIGINT))
    later(ready(cloud, word="hears"), lambda: os.kill(os.getpid(), signal.SIGINT))
    done = cloud.run("--name", "r")
    assert done.exit_code == 137


def test_lost_connection_loses_no_line_and_repeats_none(cloud, later):
    cloud.play(COUNTS)
    later(ready(cloud, word="counts 5"), cloud.sshd.cut_all)
    done = cloud.run("--name", "r")
    assert done.exit_code == 0, done.output
    for rank in range(2):
        seen = [
            line for line in done.output.splitlines() if line.startswith(f"rank {rank} | counts")
        ]
        assert seen == [f"rank {rank} | counts {n}" for n in range(20)]


def test_lost_host_is_reported(cloud, monkeypatch, later):
    monkeypatch.setattr(watch, "LOST_S", 4.0)  # some attempts, on a busy machine too
    monkeypatch.setattr(watch, "RETRY_S", 0.1)
    cloud.play("time.sleep(60)")
    broken = cloud.folder(1) / "src/scripts/fleet/agent.py"
    gone = broken.with_name("gone.py")
    later(followed(cloud, 1), lambda: (broken.rename(gone), cloud.sshd.cut_all()))
    monkeypatch.setattr(watch, "GRACE_S", 0.3)
    done = cloud.run("--name", "r")
    gone.rename(broken)
    assert done.exit_code == 1
    assert (
        f"rank 1 on 127.0.0.2:{cloud.port}: not heard of for 4 s: host 127.0.0.2:{cloud.port}: "
        in done.output
    )
    assert "No such file or directory" in done.output


def test_detached_run_is_followed_again(cloud):
    cloud.play(COUNTS)
    assert cloud.run("--name", "r", "--detach").exit_code == 0
    done = cloud("logs", "-f", "-n", "0")
    assert done.exit_code == 0
    assert [f"rank 1 | counts {n}" for n in range(20)] == [
        line for line in done.output.splitlines() if line.startswith("rank 1 | counts")
    ]


def test_outcome_without_an_exit_code_is_a_failure():
    said = []
    lost = Ended(1, "b", None, "gone without an exit code")
    assert watch.conclude([Ended(0, "a", 0), lost], said.append) == 1
    assert said == ["rank 1 on b: gone without an exit code", "rank 0 on a: ended well"]
