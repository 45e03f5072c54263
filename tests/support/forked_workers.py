"""pytest plugin: `--workers 5` runs the tests in five processes that are forked from the one which
has collected them. Importing torch and thousands of tests takes a core for many seconds; with
pytest-xdist each worker pays that for itself.

    collect --> fork --> worker -- which ones next? --> two files of blocks, whose places all share
                  |        |
                  |        +-- began, report, ended --+
                  |                                   v
                  +---------------------------> terminal, as if this process had run the tests

    tests     those that need a processor    marked `waits`    marked `alone`
    workers   5                              4                 1                 one after the other
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from struct import Struct
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest

from dpipe.processes.imports import imported_for_good
from support.warm_python import share_server

_FORK = get_context("fork")
_BLOCK = Struct("II")  # the number of its first test, and how many they are
_MOST_TOGETHER = 64
_LOOK_S = 1.0
_END_S = 20.0
_MOST_YOUNG = 20_000  # objects
_NUM_WAITING = 4  # that sleep beside each other, and are not late for it on two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="Run the tests in so many processes; 0: in this one."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not config.option.workers or config.option.collectonly or session.testsfailed:
        return None
    share_server(config)
    if "torch" in sys.modules:
        _import_what_torch_needs_later()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
    numbers = iter(range(sys.maxsize))
    for items, num_workers in phases_of(session.items, config.option.workers):
        Phase(session, items).run([next(numbers) for _ in range(num_workers)])
    return True


def _import_what_torch_needs_later() -> None:
    """Once, before the workers are forked: otherwise each imports it in the first test that needs
    it, and its garbage collector looks through it.
    """
    with imported_for_good():
        import sympy  # noqa: F401
        import torch._dynamo  # noqa: F401


def phases_of(
    items: Sequence[pytest.Item], num_workers: int
) -> list[tuple[list[pytest.Item], int]]:
    """Tests that run beside each other, and in how many processes."""
    alone = [item for item in items if item.get_closest_marker("alone")]
    waits = [item for item in items if item.get_closest_marker("waits")]
    apart = {*alone, *waits}
    rest = [item for item in items if item not in apart]
    return [(rest, num_workers), (waits, _NUM_WAITING), (alone, 1)]


class Blocks:
    """Numbers of tests that follow each other. Forked processes share the place in the file: each
    block is taken once.
    """

    def __init__(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this
        self._file.write(b"".join(_BLOCK.pack(*block) for block in blocks))
        self._file.seek(0)

    def __iter__(self) -> Iterator[int]:
        while block := self._file.read(_BLOCK.size):
            first, count = _BLOCK.unpack(block)
            yield from range(first, first + count)

    def skip_all(self) -> None:
        """For every process."""
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def shrinking(first: int, end: int, num_workers: int) -> list[tuple[int, int]]:
    """Blocks that get smaller, so that all workers end together: guided self-scheduling
    (Polychronopoulos and Kuck, 1987).
    """
    blocks = []
    while first < end:
        count = max(1, min(_MOST_TOGETHER, (end - first) // (4 * num_workers)))
        blocks.append((first, count))
        first += count
    return blocks


@dataclass
class Worker:
    number: int
    process: BaseProcess
    messages: Connection
    running: list[str] = field(default_factory=list)

    def interrupt(self) -> None:
        """As Ctrl-C would: what its test has begun is ended first."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGINT)
            self.process.join(_END_S)
        self.process.kill()
        self.process.join(_END_S)
        self.messages.close()


class Phase:
    """Tests that run beside each other. The first worker begins with those in a lab: they take
    long, and mostly wait.
    """

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        self._session = session
        self._items = sorted(items, key=lambda item: item.get_closest_marker("lab") is None)
        self._left = {item.nodeid: item for item in items}
        self._queues: list[Blocks] = []

    def run(self, numbers: Sequence[int]) -> None:
        if not self._items:
            return
        num_in_lab = sum(item.get_closest_marker("lab") is not None for item in self._items)
        in_lab = Blocks([(number, 1) for number in range(num_in_lab)])
        others = Blocks(shrinking(num_in_lab, len(self._items), len(numbers)))
        self._queues = [in_lab, others]
        workers = [self._forked(number, number == numbers[0]) for number in numbers]
        try:
            self._listen(workers)
        finally:
            for worker in workers:
                worker.interrupt()
            for queue in self._queues:
                queue.close()
        for item in list(self._left.values()):
            self._fail(item.nodeid, "no worker ran it")

    def _forked(self, number: int, is_first: bool) -> Worker:
        messages, own_end = _FORK.Pipe(duplex=False)
        queues = self._queues if is_first else self._queues[::-1]
        process = _FORK.Process(target=self._work, args=(number, queues, own_end))
        process.start()
        own_end.close()
        return Worker(number, process, messages)

    def _work(self, number: int, queues: Sequence[Blocks], messages: Connection) -> NoReturn:
        code = 1
        try:
            interrupts = become_worker(self._session.config, number, messages)
            taken = (self._items[number] for number in chain(*queues))
            # The next one is known before a test ends: it may need the same fixtures.
            for item, following in pairwise(chain(taken, [None])):
                assert item is not None
                interrupts.check()
                messages.send(("began", item.nodeid))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                messages.send(("ended", item.nodeid))
            code = 0
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                traceback.print_exc()
            # Labs, processes and folders of fixtures, which would stay behind.
            with suppress(Exception):
                self._session._setupstate.teardown_exact(None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # past what belongs to the process that was forked

    def _listen(self, workers: Sequence[Worker]) -> None:
        listening = {worker.messages: worker for worker in workers}
        while listening:
            ready = wait(listening, _LOOK_S)
            for messages in ready:
                assert isinstance(messages, Connection)
                if not self._heard(listening[messages]):
                    del listening[messages]
                if self._session.shouldfail or self._session.shouldstop:
                    self._end_early()
            # What a test has forked and left behind keeps the connection of a dead worker open.
            if not ready:
                for worker in list(listening.values()):
                    if not worker.process.is_alive():
                        self._died(worker)
                        del listening[worker.messages]

    def _heard(self, worker: Worker) -> bool:
        """One message; False once there is none any more."""
        try:
            kind, content = worker.messages.recv()
        except (EOFError, OSError):
            self._died(worker)
            return False
        if kind == "began":
            worker.running.append(content)
        elif kind == "ended":
            worker.running.remove(content)
            del self._left[content]
        else:
            hook = self._session.config.hook
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        return True

    def _died(self, worker: Worker) -> None:
        worker.process.join(_END_S)
        for nodeid in worker.running:
            code = worker.process.exitcode
            self._fail(nodeid, f"worker {worker.number} ended in it with exit code {code}")

    def _fail(self, nodeid: str, words: str) -> None:
        location = self._left.pop(nodeid).location
        report = pytest.TestReport(nodeid, location, {}, "failed", words, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def _end_early(self) -> None:
        for queue in self._queues:
            queue.skip_all()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        raise self._session.Interrupted(self._session.shouldstop)


class Reporter:
    """Sends what a worker's terminal would show."""

    def __init__(self, config: pytest.Config, messages: Connection) -> None:
        self._config = config
        self._messages = messages

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._messages.send(("report", data))


class Interrupts:
    """Ctrl-C ends the call of a test, and waits until a fixture has begun or ended: one that is
    ended in between would leave behind what it has begun.

        setup ──────────► call ───────────► teardown ──────► setup of the next
          '- waits ------► '- raises at once  '- waits ---------►' raises
    """

    def __init__(self) -> None:
        self._has_come = False
        self._raises_at_once = False
        # Ignored where a shell has started pytest in the background.
        signal.signal(signal.SIGINT, self._comes)

    def check(self) -> None:
        if self._has_come:
            raise KeyboardInterrupt

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._raises_at_once = True
        try:
            self.check()
            return (yield)
        finally:
            self._raises_at_once = False

    def _comes(self, *_: object) -> None:
        self._has_come = True
        if self._raises_at_once:
            self._raises_at_once = False
            raise KeyboardInterrupt


def become_worker(config: pytest.Config, number: int, messages: Connection) -> Interrupts:
    interrupts = Interrupts()
    # By default it is looked for every 700 objects, which takes 4 % of the tests' time.
    gc.set_threshold(_MOST_YOUNG)
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    # Files of its own for what tests print: places in those that are open are shared.
    capture: Any = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
    manager.register(Reporter(config, messages))
    manager.register(interrupts)
    return interrupts
