import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dpipe.errors import ConfigError
from dpipe.processes import notice


class Metadata(ThreadingHTTPServer):
    """A cloud's metadata service: what it answers, by path; 404 for others."""

    answers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata)
        answer = self.server.answers.get(self.path.partition("?")[0])
        self.send_response(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata(("127.0.0.1", 0), Handler)
    server.answers = {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


CLOUDS = {
    "aws": {
        "/latest/api/token": "token",
        "/latest/meta-data/spot/instance-action": '{"action": "terminate", "time": "soon"}',
    },
    "gcp": {"/computeMetadata/v1/instance/preempted": "TRUE"},
    "azure": {"/metadata/scheduledevents": '{"Events": [{"EventType": "Preempt"}]}'},
}
QUIET = {
    "aws": {"/latest/api/token": "token"},
    "gcp": {"/computeMetadata/v1/instance/preempted": "FALSE"},
    "azure": {"/metadata/scheduledevents": '{"Events": [{"EventType": "Reboot"}]}'},
}


@pytest.mark.parametrize(("cloud", "seconds"), [("aws", 120.0), ("gcp", 30.0), ("azure", 30.0)])
def test_notice_of_a_cloud_is_heeded_once_it_comes(
    metadata: Metadata, cloud: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "POLL_S", 0.01)
    metadata.answers = QUIET[cloud]
    ask = notice.watcher(cloud, f"http://127.0.0.1:{metadata.server_port}")
    heeded: list[float] = []
    stopped = threading.Event()
    thread = threading.Thread(target=notice.watch, args=(ask, heeded.append, stopped))
    thread.start()
    thread.join(0.2)
    assert heeded == []
    metadata.answers = CLOUDS[cloud]
    thread.join(10.0)
    stopped.set()
    assert heeded == [seconds]


@pytest.mark.parametrize(
    ("content", "seconds"), [("", 30.0), ("45\n", 45.0), ("-3", 0.0), ("soon", 30.0)]
)
def test_notice_in_a_file(tmp_path: Path, content: str, seconds: float) -> None:
    ask = notice.watcher(f"file:{tmp_path / 'notice'}")
    assert ask() is None
    (tmp_path / "notice").write_text(content)
    assert ask() == seconds


def test_notice_of_a_command() -> None:
    assert notice.watcher("command:false")() is None
    assert notice.watcher("command:echo 7")() == 7.0


@pytest.mark.parametrize("name", ["", "file:", "command:", "ibm", "aws:x"])
def test_notice_from_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is none of file:PATH, command:CMD, aws, gcp, azure"):
        notice.watcher(name)
