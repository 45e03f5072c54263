"""pytest plugin: an interpreter that has imported torch and dpipe already. Importing them takes two
seconds of processor time, and a test that starts three ranks would pay it three times.

    test ── runs ──► client ── arguments, environment, open files ──► server   has imported torch
                       │ ◄───────────── exit status ───────────────     │ fork
                       └── signals ───────────────────────────────► program

The client stands for the program: it passes on the signals that it can catch, ends as the program
ends, and where it is killed the server kills the program. What the server cannot run (with other
options, or what measures the imports themselves) the client gives to the real interpreter.

The workers of `forked_workers` share one server, and it imports once the first of them asks.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import set_executable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_NAMED_S = 30.0
_IMPORTED_S = 100.0  # beside much other work
_SHARED = pytest.StashKey[str]()

# `-m dpipe`, torchrun, `-c CODE` or a script; a start that is itself looked at is a real one.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

words = sys.argv[1:]
if words[0] == "-u":  # as torchrun starts its ranks
    os.environ["PYTHONUNBUFFERED"] = words.pop(0)
knows = words[0] == "-m" and words[1].startswith(("dpipe", "torch.distributed.run"))
knows = knows or words[0] == "-c" or words[0].endswith(".py")
if not knows or "PYTHONPROFILEIMPORTTIME" in os.environ:
    os.execv({python!r}, [{python!r}, *words])
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
extra = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
files = [0, 1, 2]
for fd in extra:
    try:
        files += [fd] if os.get_inheritable(fd) else []
    except OSError:  # the listing's own
        pass
place = dict(argv=words, environ=dict(os.environ), folder=os.getcwd(), files=files)
place["client"] = os.getpid()
network = os.open("/proc/self/ns/net", os.O_RDONLY)  # of a lab, it may be another
text = json.dumps(place).encode()
socket.send_fds(server, [len(text).to_bytes(4, "big")], [network, *files])
server.sendall(text)
program = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
for number in PASSED:
    signal.signal(number, lambda number, frame: os.kill(program, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
ended = server.recv(4, socket.MSG_WAITALL)
code = os.waitstatus_to_exitcode(int.from_bytes(ended, "big")) if ended else 1
if -code in PASSED:
    signal.signal(-code, signal.SIG_DFL)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def _server() -> Iterator[str]:
    """The path of its client."""
    with TemporaryDirectory(prefix="dpipe-warm-") as folder:  # short: an address has 107 bytes
        address = f"{folder}/server"
        client = Path(folder) / "python"
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("warm_server.py"), address, client],
            stdin=subprocess.PIPE,  # its end tells the server to end
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield str(client)
        server.communicate(timeout=20)


def share_server(config: pytest.Config) -> None:
    """Before workers are forked, by the process that outlives them."""
    until_the_end = ExitStack()
    config.add_cleanup(until_the_end.close)
    config.stash[_SHARED] = until_the_end.enter_context(_server())


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest) -> Iterator[str]:
    """The path of the client, to start in place of `sys.executable`."""
    shared = request.config.stash.get(_SHARED, None)
    with nullcontext(shared) if shared else _server() as client:
        # The first program waits for the imports, and no test's deadline is for them.
        subprocess.run([client, "-c", ""], check=True, timeout=_IMPORTED_S)
        yield client


def name_of(warm_python: str, client: int) -> Path:
    """The file that has the number of a client's program, for as long as that runs: a later client
    may get the number of an earlier one.
    """
    return Path(warm_python).with_name(f"server.{client}")


def program_of(warm_python: str, client: int) -> int:
    """The process that a client stands for, to send it a signal that no process can catch."""
    path = name_of(warm_python, client)
    deadline = time.monotonic() + _NAMED_S
    # The program may have begun, and have said so, before the server has written its number.
    while not path.exists():
        assert time.monotonic() < deadline, f"nothing runs that client {client} stands for"
        time.sleep(0.01)
    return int(path.read_text())


@pytest.fixture
def warm_spawn(warm_python: str) -> Iterator[None]:
    """`multiprocessing` starts its processes by the warm interpreter."""
    set_executable(warm_python)
    yield
    set_executable(sys.executable)


@pytest.fixture
def warm_ranks(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dpipe.launch` starts its ranks by the warm interpreter."""
    monkeypatch.setattr(sys, "executable", warm_python)
