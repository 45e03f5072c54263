"""The page over HTTP, without a browser: who may see it, and what it sends."""

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import append, row, write_config

from dpipe.errors import ConfigError
from dpipe.watch.broadcast import Broadcast
from dpipe.watch.command import _address, _link, _listen
from dpipe.watch.folder import RunFolder
from dpipe.watch.server import PageServer, is_loopback, page_files

TOKEN = "a-token"


@pytest.fixture(params=[None, TOKEN], ids=["loopback", "token"])
def token(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture
def port(tmp_path: Path, token: str | None) -> Iterator[int]:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0))
    source = RunFolder(folder)
    listening = _listen("127.0.0.1", 0)
    server = PageServer(Broadcast(source, 0), token, 0.02)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    source.close()


def ask(
    port: int, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers or {})
    return connection.getresponse(), connection


def status(port: int, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> int:
    answer, connection = ask(port, path, headers, method)
    with answer:  # else a stream that goes on keeps its socket
        connection.close()
        return answer.status


@pytest.fixture
def allowed(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Cookie": f"dpipe_watch={token}"}


def test_page_and_its_files_are_served_with_a_strict_policy(
    port: int, allowed: dict[str, str]
) -> None:
    answer, connection = ask(port, "/", allowed)
    page = answer.read().decode()
    connection.close()
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    names = re.findall(r'(?:src|href)="/page/([^"]+)"', page)
    assert len(names) == 6
    for name in names:
        assert status(port, f"/page/{name}", allowed) == 200
    assert status(port, "/page/absent.js", allowed) == 404
    assert status(port, "/page/..%2fserver.py", allowed) == 404


def test_events_bring_points_picture_and_what_comes_later(
    port: int, allowed: dict[str, str], tmp_path: Path
) -> None:
    answer, connection = ask(port, "/events", allowed)
    assert answer.headers["Content-Type"].startswith("text/event-stream")

    def next_event(wanted: str) -> object:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if answer.readline() == f"event: {wanted}\n".encode():
                return json.loads(answer.readline().removeprefix(b"data: "))
        raise AssertionError(f"no event {wanted}")

    assert next_event("begin")[0][:3] == [0, 0.5, 4.0]
    assert next_event("picture")["step"] == 1
    append(tmp_path / "run", row(1))
    assert [point[0] for point in next_event("points")] == [1]
    answer.close()
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("token", [None], ids=["loopback"], indirect=True)
def test_page_can_only_be_read(port: int, method: str) -> None:
    assert status(port, "/", method=method) == 405


@pytest.mark.parametrize("token", [None], ids=["loopback"], indirect=True)
def test_loopback_answers_only_to_its_own_names(port: int) -> None:
    """A name of somebody else's that resolves to 127.0.0.1 is another origin's."""
    for host in ("localhost", "127.0.0.1", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80"):
        assert status(port, "/events", {"Host": host}) == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "::1.evil", ""):
        assert status(port, "/events", {"Host": host}) == 421, host


@pytest.mark.parametrize("token", [TOKEN], ids=["token"], indirect=True)
def test_token_of_the_link_becomes_a_cookie_and_leaves_the_address(port: int) -> None:
    answer, connection = ask(port, f"/?token={TOKEN}")
    connection.close()
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert status(port, "/", {"Cookie": cookie.partition(";")[0]}) == 200
    assert status(port, "/", {"Authorization": f"Bearer {TOKEN}"}) == 200


@pytest.mark.parametrize("token", [TOKEN], ids=["token"], indirect=True)
@pytest.mark.parametrize("path", ["/", "/events", "/page/watch.js", "/?token=wrong", "/?token="])
def test_without_the_token_nothing_is_shown(port: int, path: str) -> None:
    for headers in ({}, {"Cookie": "dpipe_watch="}, {"Cookie": "dpipe_watch=\xe9"}):
        assert status(port, path, headers) == 401
    assert status(port, path, {"Authorization": "Bearer wrong"}) == 401


def test_no_file_of_the_page_names_another_address() -> None:
    """It works without a network, and tells nobody."""
    for name, content in page_files().items():
        text = content.decode()
        addresses = re.findall(r"https?://[\w./-]+|[\"'(]//\w", text)
        # the name of a format, and a comment of uPlot's: none is loaded
        foreign = [
            address
            for address in addresses
            if not address.startswith(("http://www.w3.org/", "https://github.com/leeoniya/uPlot"))
        ]
        assert not foreign, name
        assert "innerHTML" not in text or name.startswith("uPlot")


@pytest.mark.parametrize(
    ("bind", "expected"), [("127.0.0.1:7007", ("127.0.0.1", 7007)), ("[::1]:0", ("::1", 0))]
)
def test_address_is_read(bind: str, expected: tuple[str, int]) -> None:
    assert _address(bind) == expected


@pytest.mark.parametrize("bind", ["7007", "host", ":7007", "host:", "host:99999", "host:-1"])
def test_address_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        _address(bind)


def test_port_that_is_taken_is_said() -> None:
    with _listen("127.0.0.1", 0) as listening:
        taken = listening.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken}.*127.0.0.1:0"):
            _listen("127.0.0.1", taken)


def test_link_holds_the_token_and_a_name_that_can_be_reached() -> None:
    assert _link("::1", 80, None) == "http://[::1]:80/"
    assert _link("0.0.0.0", 80, "t").endswith(":80/?token=t")
    assert "0.0.0.0" not in _link("0.0.0.0", 80, "t")
    assert is_loopback("127.9.9.9") and is_loopback("[::1]") and is_loopback("localhost")
    assert not is_loopback("10.0.0.1") and not is_loopback("localhost.evil")
