"""A machine that keeps copies of others' layers and gives something else: it is named, and the next
source is asked.
"""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from dpipe.errors import RunError
from dpipe.keeper import client as client_room
from dpipe.keeper import server
from dpipe.keeper.client import Fetching, KeeperClient
from dpipe.keeper.copies import PieceCopy, pack
from dpipe.keeper.keeper import Keeper
from dpipe.keeper.messages import Answer, Refused
from dpipe.session import greeting
from dpipe.wire.message import framed
from dpipe.wire.rpc import Security

TOKEN = Security(token="secret")
Serve = Callable[[socket.socket], None]


def copy_of(value: float, step: int = 5, layer: int = 0) -> PieceCopy:
    tensors = {f"layers.{layer}.weight": torch.full((200, 2), value)}
    (copy,) = pack(step, tensors, {}, {"num_updates": step}, [layer])
    return copy


GOOD = copy_of(1.0)


@pytest.fixture
def honest() -> Iterator[Keeper]:
    with Keeper(security=TOKEN) as keeper:
        keeper.hold([GOOD])
        yield keeper


@contextmanager
def evil(serve: Serve) -> Iterator[str]:
    """The address of a keeper that knows the token, and answers the first request with `serve`."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def run() -> None:
        sock, _ = listener.accept()
        with sock:
            deadline = time.monotonic() + 10
            dialler = greeting.answer(sock, lambda hello: (b"secret",), deadline)
            greeting.welcome(sock, dialler, deadline)
            sock.settimeout(10)
            server.read_framed(sock)
            try:
                serve(sock)
                over.wait(10)
            except OSError:
                pass  # the asker has hung up

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        over.set()
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


def say(sock: socket.socket, content: bytes, size: int | None = None) -> None:
    digest = hashlib.sha256(content).hexdigest()
    answer = Answer(size=len(content) if size is None else size, digest=digest)
    server._say(sock, answer)
    sock.sendall(content)


def dribble(sock: socket.socket) -> None:
    say(sock, b"", size=1 << 20)
    while True:
        sock.sendall(b"a")
        time.sleep(0.01)


def cut_short(sock: socket.socket) -> None:
    say(sock, b"x", size=100)
    sock.close()


UNTRUE = copy_of(2.0)
ATTACKS: dict[str, Serve] = {
    "another layer, with its digest": lambda sock: say(sock, UNTRUE.content),
    "bytes of no layer": lambda sock: say(sock, b"x" * 100),
    "2^50 bytes": lambda sock: say(sock, b"", size=1 << 50),
    "fewer bytes than it said": cut_short,
    "nothing": lambda sock: None,
    "a byte now and then": dribble,
    "no answer of a keeper": lambda sock: sock.sendall(framed(b"[]")),
    "an endless answer": lambda sock: sock.sendall(b"\xff" * 4096),
}


@pytest.mark.parametrize("serve", ATTACKS.values(), ids=ATTACKS.keys())
def test_keeper_that_gives_something_else_is_named_and_the_next_one_is_asked(
    honest: Keeper,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for room in (server, client_room):
        monkeypatch.setattr(room, "SILENCE_S", 0.3)
    with evil(serve) as address, Fetching(1, TOKEN, lambda client: None) as fetching:
        assert fetching.fetch(5, 0, (address, honest.address), [GOOD.digest]) == GOOD
        assert f"the keeper at {address} is asked no more" in caplog.text
        with pytest.raises(RunError, match=f"layer 0 before step 5 .*{address}"):
            fetching.fetch(5, 0, (address,), [GOOD.digest])


def test_layer_of_unknown_digest_must_be_one(honest: Keeper) -> None:
    """It was taken, and ended the run as it was unpacked, without a word of whose it was."""
    with (
        evil(lambda sock: say(sock, b"x" * 100)) as address,
        Fetching(1, TOKEN, lambda client: None) as fetching,
    ):
        assert fetching.fetch(5, 0, (address, honest.address)) == GOOD


def test_nobody_replaces_or_drops_what_a_rank_keeps_of_its_own(honest: Keeper) -> None:
    with KeeperClient(honest.address, TOKEN) as client:
        with pytest.raises(Refused, match="is of this rank itself"):
            client.put(1, UNTRUE)
        client.put(1, copy_of(2.0, step=9), kept=[10**9])
        client.put(1, copy_of(2.0, step=9, layer=1), kept=[10**9])
    assert honest.find(5, 0) == GOOD
