"""scripts/watching.py: what its ratios compare."""

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def watching(script):
    return script("watching")


class Served(BaseHTTPRequestHandler):
    asked: list[str]
    go_on: threading.Event
    port: int

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        if self.path == "/events":
            type(self).go_on.wait(30)
            self.wfile.write(b"event: picture\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[type[Served]]:
    class Here(Served):
        asked = []  # noqa: RUF012 - of this server alone
        go_on = threading.Event()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    Here.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Here
    Here.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_each_watched_turn_is_between_two_that_are_not(watching) -> None:
    assert watching.turns_of(2) == [0, 1, 0, 5, 0, 1, 0, 5, 0]


def test_ratio_is_to_the_mean_of_both_neighbours(watching) -> None:
    """A machine that slows down from 1 to 2 is not taken for a cost."""
    turns = [
        watching.Turn(pages, step_s, 2 * step_s, 0.001)
        for pages, step_s in ((0, 1.0), (1, 1.5), (0, 2.0), (5, 2.2), (0, 2.0))
    ]
    one, five = watching.rows_of(turns)
    assert (one["pages"], one["time"], one["processor_time"]) == (1, 1.0, 1.0)
    assert (five["pages"], five["time"], five["time_quartiles"]) == (5, 1.1, [1.1, 1.1])
    assert one["watcher_share_of_a_core"] == round(0.001 / 1.5, 5)
    assert len(list(watching.table([one, five]))) == 3


def test_processor_time_is_that_of_all_threads_also_of_those_that_ended(watching) -> None:
    """The sum over /proc/PID/task fell when a thread ended."""
    before_s = watching.processor_s([os.getpid()])
    worker = threading.Thread(target=sum, args=(range(3_000_000),))
    own_s = time.thread_time()
    worker.start()
    worker.join()
    own_s = time.thread_time() - own_s
    assert watching.processor_s([os.getpid()]) - before_s > own_s + 0.01


def test_turn_opens_as_many_pages_and_a_scrape(watching, served, monkeypatch) -> None:
    monkeypatch.setattr(watching, "_SCRAPE_S", 0.01)
    watchers = watching.Watchers(f"http://127.0.0.1:{served.port}/", served.port)
    watchers.open(5)
    until = threading.Event()
    while served.asked.count("/events") < 5 or "/metrics" not in served.asked:
        assert not until.wait(0.01)
    served.go_on.set()
    watchers.close()
    assert served.asked.count("/events") == 5
    watchers.open(0)
    assert not watchers._threads


def test_page_that_ends_by_itself_is_an_error(watching, served) -> None:
    served.go_on.set()
    watchers = watching.Watchers(f"http://127.0.0.1:{served.port}/", served.port)
    watchers.open(1)
    for thread in watchers._threads[1:]:
        thread.join(30)
    watchers.close()
    assert watchers.failed == ["_read: the page's events ended"]
