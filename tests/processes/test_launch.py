"""The ranks are short Python programs. Signals are tested on a launcher in a separate process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpipe.errors import ConfigError, JoinError, RunError
from dpipe.processes import launch as launch_module
from dpipe.processes import leash
from dpipe.processes.environment import environment
from dpipe.processes.launch import free_port, launch

SLEEP = "import time; time.sleep(60)"


class Launcher:
    """Launches programs in a separate folder and records the launcher's messages."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "run" / "logs"
        self.lines: list[str] = []

    def __call__(self, *programs: str, **settings) -> int:
        return launch(
            lambda rank: [sys.executable, "-S", "-c", programs[rank]],
            len(programs),
            logs=self.logs,
            on_line=self.lines.append,
            **settings,
        )

    def log(self, rank: int) -> str:
        return (self.logs / f"rank-{rank}.log").read_text()


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def test_launch_gives_each_rank_its_number(launcher):
    show = (
        "import os, json; own = {k: v for k, v in os.environ.items() if k.startswith('DPIPE')}; "
        "print(json.dumps(own))"
    )
    assert launcher("", show, show) == 0
    first, second = json.loads(launcher.log(1)), json.loads(launcher.log(2))
    assert [first.pop("DPIPE_RANK"), second.pop("DPIPE_RANK")] == ["1", "2"]
    assert [first.pop("DPIPE_LOCAL_RANK"), second.pop("DPIPE_LOCAL_RANK")] == ["1", "2"]
    assert first == second
    assert first["DPIPE_WORLD_SIZE"] == "3"
    assert first["DPIPE_COORDINATOR"].startswith("127.0.0.1:")
    assert len(first["DPIPE_TOKEN"]) >= 16


def test_launch_makes_a_token_unless_one_is_set(launcher):
    show = "import os; print(os.environ['DPIPE_TOKEN'])"
    for environ in ({}, {}, {"DPIPE_TOKEN": "open sesame"}, {"DPIPE_TOKEN": "open sesame"}):
        assert launcher("", show, environ=environ) == 0
    first, second, *given = launcher.log(1).splitlines()
    assert first != second
    assert given == ["open sesame"] * 2


def test_launch_leaves_the_terminal_to_rank_0(launcher, capfd):
    say = "import sys; print('to out'); print('to err', file=sys.stderr)"
    assert launcher(say, say) == 0
    assert capfd.readouterr() == ("to out\n", "to err\n")
    assert sorted(launcher.log(1).splitlines()) == ["to err", "to out"]
    assert os.listdir(launcher.logs) == ["rank-1.log"]


def test_quiet_launch_gives_rank_0_a_log_too(launcher, capfd):
    assert launcher("print('said')", "print('said')", quiet=True) == 0
    assert capfd.readouterr() == ("", "")
    assert [launcher.log(rank) for rank in (0, 1)] == ["said\n"] * 2


SEND = "import os; os.write(int(os.environ['DPIPE_ROWS_FD']), b'{\"step\": %d}\\n')"


def test_launch_receives_the_rows_of_rank_0_until_its_end(launcher):
    rows = []
    many = "\n".join(SEND % step for step in range(100))
    assert (
        launcher(many, "import os; assert 'DPIPE_ROWS_FD' not in os.environ", on_row=rows.append)
        == 0
    )
    assert rows == [{"step": step} for step in range(100)]


def test_launch_kills_the_ranks_when_the_callback_fails(launcher):
    def stop(row):
        raise LookupError(row["step"])

    began = time.monotonic()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LookupError, match="7"):
        launcher(SEND % 7 + f"\n{SLEEP}", SLEEP, on_row=stop)
    assert time.monotonic() - began < 10
    assert set(os.listdir("/proc/self/fd")) == before


def test_launch_works_outside_the_main_thread(launcher):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(launcher("", "raise SystemExit(3)")))
    thread.start()
    thread.join(30)
    assert codes == [3]


def test_launch_kills_ranks_that_have_not_ended_in_time(launcher):
    began = time.monotonic()
    with pytest.raises(RunError, match=r"the ranks have not ended after 0\.3 s and were killed"):
        launcher("", SLEEP, timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_launch_shows_the_last_words_of_the_first_to_fail(launcher):
    die = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    assert launcher(SLEEP, SLEEP, die, grace_s=0.1) == 3
    assert launcher.lines == [
        f"rank 2 failed first, with exit code 3; the end of {launcher.logs / 'rank-2.log'}:",
        *[f"line {i}" for i in range(80, 100)],
    ]


def test_launch_shows_no_last_words_of_an_earlier_run(launcher):
    assert launcher("", "print('all is well')") == 0
    assert launcher("", "raise SystemExit(3)") == 3
    assert launcher.lines == [
        f"rank 1 failed first, with exit code 3; the end of {launcher.logs / 'rank-1.log'}:"
    ]


def test_launch_returns_the_signal_that_killed_a_rank(launcher):
    die = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert launcher(die, "") == 137
    assert launcher.lines == ["rank 0 failed first, with signal 9 (SIGKILL)"]


def test_launch_kills_ranks_that_do_not_stop(launcher):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    started = time.monotonic()
    assert launcher(deaf, deaf, "raise SystemExit(1)", grace_s=0.3) == 1
    assert 0.3 < time.monotonic() - started < 10


def test_launch_removes_its_logs_when_nothing_may_be_written(launcher):
    assert launcher("", "print('bad input'); raise SystemExit(2)") == 2
    assert launcher.lines[1:] == ["bad input"]
    assert not launcher.logs.parent.exists()


def test_launch_removes_only_files_of_this_run(launcher):
    assert launcher("", "print('first run')") == 0
    (launcher.logs.parent / "config.toml").touch()
    assert launcher("", "print('bad input'); raise SystemExit(2)") == 2
    assert launcher.log(1) == "first run\n"
    assert (launcher.logs.parent / "config.toml").exists()


def test_launch_that_cannot_start_a_rank_leaves_none_behind(launcher, tmp_path):
    pid_file = tmp_path / "pid"
    argv = [[sys.executable, "-S", "-c", _noting(pid_file) + SLEEP], ["/no/such/program"]]
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        launch(lambda rank: argv[rank], 2, logs=launcher.logs)
    assert not pid_file.exists() or not _alive(int(pid_file.read_text()))


def test_log_that_cannot_be_written_is_named(launcher):
    (launcher.logs / "rank-1.log").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"logs/rank-1\.log cannot be written: Is a directory; make it writable"
    ):
        launcher(SLEEP, SLEEP)


def test_launch_restores_the_handlers(launcher):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    launcher("")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_stop_while_starting_stops_those_who_come_later(launcher):
    def argv_of_rank(rank: int) -> list[str]:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return [sys.executable, "-S", "-c", SLEEP]

    assert launch(argv_of_rank, 3, logs=launcher.logs) == 128 + signal.SIGTERM


def test_environment_is_this_process_s(monkeypatch):
    monkeypatch.setenv("DPIPE_TOKEN", "open sesame")
    assert environment()["DPIPE_TOKEN"] == "open sesame"


def test_free_port_is_free_and_below_those_of_outgoing_connections():
    port = free_port()
    assert 20_000 <= port < 32_000
    socket.create_server(("127.0.0.1", port)).close()


def test_free_port_gives_up_when_all_are_taken(monkeypatch):
    port = free_port()
    monkeypatch.setattr(launch_module, "_PORTS", range(port, port + 1))
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(JoinError, match="found no free port"),
    ):
        free_port()


# A launcher in a process of its own

LAUNCHER = """
import sys
from pathlib import Path
from dpipe.processes.launch import launch
argv = [sys.executable, "-S", "-c", sys.argv[1]]
say = lambda line: print(line, flush=True)
sys.exit(launch(lambda rank: argv, 2, logs=Path("logs"), on_line=say))
"""


def _noting(path: str | Path) -> str:
    """Code that writes the process id to `path` atomically."""
    new = f"{path}.new"
    write = f"open('{new}', 'w').write(str(os.getpid()))"
    return f"import os; {write}; os.rename('{new}', '{path}')\n"


NOTE_PID = "import os; rank = os.environ['DPIPE_RANK']\n" + _noting("' + rank + '")
LEAVE_WHEN_ASKED = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
NEVER_LEAVE = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('not yet', flush=True))\n"
)


@contextlib.contextmanager
def running(program: str, folder: Path):
    """A launcher with two ranks that run `program`, once both have started, and their process
    ids.
    """
    argv = [sys.executable, "-c", LAUNCHER, program + NOTE_PID + SLEEP.replace("(60)", "(30)")]
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        argv, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert _soon(lambda: (folder / "0").exists() and (folder / "1").exists())
            yield process, [int((folder / name).read_text()) for name in "01"]
        finally:
            process.kill()


def _soon(condition) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_the_ranks_to_stop(tmp_path, number):
    with running(LEAVE_WHEN_ASKED, tmp_path) as (process, ranks):
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
    assert (
        output
        == "stopping: the ranks finish their step and write a checkpoint; once more kills them\n"
    )
    assert process.returncode == 0
    assert not any(map(_alive, ranks))


def test_ranks_that_are_stopped_before_they_train_have_not_failed(tmp_path):
    with running("", tmp_path) as (process, _):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
    assert output.splitlines()[1:] == [
        "stopped: the ranks were not training, so that there was nothing to save"
    ]
    assert process.returncode == 128 + signal.SIGTERM


def test_second_signal_kills_the_ranks(tmp_path):
    with running(NEVER_LEAVE, tmp_path) as (process, ranks):
        process.send_signal(signal.SIGINT)
        assert [process.stdout.readline() for _ in range(2)].count("not yet\n") == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 137
    assert not any(map(_alive, ranks))


def test_rank_whose_launcher_is_gone_already_does_not_start(tmp_path):
    nobody = "1" if os.getpid() != 1 else "2"
    argv = [sys.executable, "-S", leash.__file__, nobody, "touch", str(tmp_path / "started")]
    assert subprocess.run(argv, timeout=60).returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "started").exists()


def test_killed_launcher_leaves_no_orphans(tmp_path):
    with running(LEAVE_WHEN_ASKED, tmp_path) as (process, ranks):
        process.kill()
        assert _soon(lambda: not any(map(_alive, ranks)))
