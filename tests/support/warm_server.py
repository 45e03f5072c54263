"""`python warm_server.py ADDRESS CLIENT`: imports torch and dpipe when the first client asks at the
socket ADDRESS, then forks a program for each. Ends, and kills what still runs, when its input ends.

Has one thread: a fork of several would lose all but one, and what they had locked.
"""

import atexit
import ctypes
import fcntl
import json
import multiprocessing.spawn
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_ABOVE = 200  # no program has so many open files
_CLONE_NEWNET = 0x40000000


class Program(NamedTuple):
    number: int  # its process id
    named: Path  # the file that has this number, by that of its client


def main(address: str, client: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(address)
        listening.listen(64)
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        if any(key.fileobj is sys.stdin for key, _ in selector.select()):
            return  # no test has asked
        import_all()
        serve(listening, selector, client)


def import_all() -> None:
    """What a rank imports, at its start and in its first step."""
    from dpipe.processes.environment import set_up_grpc
    from dpipe.processes.imports import imported_for_good

    set_up_grpc()
    with imported_for_good():
        import sympy  # noqa: F401 - torch does at the first backward
        import torch._dynamo  # noqa: F401 - torch does for tensors without memory

        import dpipe.cli.main
        import dpipe.run.start  # noqa: F401


def serve(listening: socket.socket, selector: selectors.DefaultSelector, client: str) -> None:
    """Until the input ends. Of a program the selector has its pidfd and its client."""
    programs: dict[socket.socket, Program] = {}
    while True:
        # New programs last: one may need the port of another whose client was killed before.
        for key, _ in sorted(selector.select(), key=lambda event: event[0].fileobj is listening):
            if key.fileobj is sys.stdin:
                for program in programs.values():
                    os.kill(program.number, signal.SIGKILL)
                return
            if key.fileobj is listening:
                asked, _ = listening.accept()
                program = start(asked, client)
                programs[asked] = program
                selector.register(os.pidfd_open(program.number), selectors.EVENT_READ, asked)
                selector.register(asked, selectors.EVENT_READ)
            elif isinstance(key.fileobj, socket.socket):
                # The client was killed: it never speaks again otherwise. If its program has just
                # ended as well, both are gone already.
                if key.fileobj in programs:
                    selector.unregister(key.fileobj)
                    number = programs[key.fileobj].number
                    os.kill(number, signal.SIGKILL)
                    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)  # its ports are free now
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                program = programs.pop(key.data)
                program.named.unlink()  # before the client ends and its number is another's
                _, status = os.waitpid(program.number, 0)
                with suppress(KeyError):
                    selector.unregister(key.data)
                with suppress(BrokenPipeError), key.data:
                    key.data.sendall(status.to_bytes(4, "big"))


def start(asked: socket.socket, client: str) -> Program:
    """Fork the program that a client asks for."""
    size, files, _, _ = socket.recv_fds(asked, 4, 64)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += asked.recv(1 << 20)
    place = json.loads(text)
    number = os.fork()
    if number == 0:
        become(place, files, client)
    for fd in files:
        os.close(fd)
    named = Path(asked.getsockname()).with_suffix(f".{place['client']}")
    unseen = named.with_suffix(f"{named.suffix}.new")
    unseen.write_text(str(number))
    unseen.rename(named)  # whoever sees it sees the whole number
    with suppress(BrokenPipeError):  # a client that has gone is seen to, as one that goes later
        asked.sendall(number.to_bytes(4, "big"))
    return Program(number, named)


def become(place: dict[str, Any], files: list[int], client: str) -> NoReturn:
    """Run the program as the interpreter would, in the place of its client."""
    network, *files = files
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert ctypes.CDLL(None).setns(network, _CLONE_NEWNET) == 0
    # First out of the way: a file may have come as the number that another is to get.
    files = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in files]
    os.closerange(3, _ABOVE)
    for fd, number in zip(files, place["files"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(place["environ"])
    os.chdir(place["folder"])
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *filter(None, more)]
    sys.executable = client
    multiprocessing.spawn.set_executable(client)
    code: object = 0
    try:
        run(place["argv"])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    end_with(code)


def run(words: list[str]) -> None:
    """`-m MODULE`, `-c CODE` or a script, each with its arguments."""
    option, *rest = words
    if option == "-m":
        sys.argv = [option, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = [option, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(option)
        runpy.run_path(option, run_name="__main__")


def end_with(code: object) -> NoReturn:
    """As the interpreter ends, short of taking itself apart: what is below this call belongs to the
    server, whose files this process has closed.
    """
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    os._exit(0)  # whoever closed the input waits, and taking torch apart takes a second
