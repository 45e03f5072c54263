"""The interpreter of `support/warm_python.py` behaves as the real one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.warm_python import name_of, program_of

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


def test_server_that_nobody_asks_imports_nothing(tmp_path: Path) -> None:
    """It would keep the end of tests that start no process waiting."""
    server = Path(__file__).parent / "support" / "warm_server.py"
    words = (sys.executable, "-X", "importtime", str(server), str(tmp_path / "s"), "client")
    ended = run(*words, input="")
    assert (ended.returncode, ended.stdout) == (0, "ready\n")
    assert not re.search(r"\b(torch|dpipe)\b", ended.stderr)


@contextmanager
def started(python: str, code: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """The client and the program that it stands for, once that has printed a line."""
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "up\n"
        yield client, psutil.Process(program_of(python, client.pid))


def has_ended(program: psutil.Process) -> bool:
    with suppress(psutil.TimeoutExpired):
        program.wait(20)
    return not program.is_running() or program.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys; print(os.getcwd(), os.environ['OWN'], sys.argv); sys.exit(3)",
        "import sys; sys.exit('no such thing')",
        "import sys; sys.stderr.write('words'); print(1, end='')",
        "print(sum([1, 2]) / 0)",
        "import os; os.kill(os.getpid(), 15)",
    ],
)
def test_program_has_the_place_and_the_end_of_a_real_one(
    warm_python: str, tmp_path: Path, code: str
) -> None:
    where = {"cwd": tmp_path, "env": {**os.environ, "OWN": "7"}}
    warm = run(warm_python, "-c", code, "word", **where)
    real = run(sys.executable, "-c", code, "word", **where)
    assert (warm.returncode, warm.stdout) == (real.returncode, real.stdout)
    assert warm.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_program_has_imported_torch_and_prints_what_dpipe_prints(warm_python: str) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert run(warm_python, "-c", code).stdout == "True\n"
    command = ("-m", "dpipe", "--version")
    assert run(warm_python, *command).stdout == run(sys.executable, *command).stdout


def test_program_has_the_files_that_are_passed_to_it(warm_python: str) -> None:
    read, write = os.pipe()
    code = f"import os; os.write({write}, b'row')"
    run(warm_python, "-c", code, pass_fds=(write,))
    os.close(write)
    assert os.read(read, 10) == b"row"
    os.close(read)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_program_ends_with_its_client(warm_python: str, number: signal.Signals) -> None:
    with started(warm_python, SLEEP) as (client, program):
        client.send_signal(number)
        assert client.wait(20) == -number
        assert has_ended(program)


def test_program_that_is_killed_ends_its_client(warm_python: str) -> None:
    with started(warm_python, SLEEP) as (client, program):
        program.kill()
        assert client.wait(20) == -signal.SIGKILL


def test_client_that_goes_before_it_is_answered_ends_nobody_else(warm_python: str) -> None:
    """All tests share the server, and one may kill a client while the server imports."""
    place = {"argv": ["-c", ""], "environ": {}, "folder": "/", "files": [], "client": 0}
    text = json.dumps(place).encode()
    with socket.socket(socket.AF_UNIX) as gone, open("/proc/self/ns/net") as network:
        gone.connect(str(Path(warm_python).with_name("server")))
        gone.shutdown(socket.SHUT_RD)
        socket.send_fds(gone, [len(text).to_bytes(4, "big")], [network.fileno()])
        gone.sendall(text)
    assert run(warm_python, "-c", "print('next')").stdout == "next\n"


def test_client_names_no_program_once_that_has_ended(warm_python: str) -> None:
    """A later client with the same number would stand for a stranger, and a test would kill it."""
    with subprocess.Popen([warm_python, "-c", ""]) as client:
        assert client.wait(20) == 0
    assert not name_of(warm_python, client.pid).exists()


def test_script_has_its_folder_and_its_arguments(warm_python: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import sys; print(sys.argv, __name__)")
    script = tmp_path / "script.py"
    script.write_text("import beside; print(__name__, __file__)")
    warm = run(warm_python, str(script), "word")
    assert warm.stdout == run(sys.executable, str(script), "word").stdout


def test_start_with_other_options_is_that_of_the_real_interpreter(warm_python: str) -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    assert run(warm_python, "-P", "-c", code).stdout == f"{sys.executable} False\n"
