"""Tokens: compared in constant time, changed during a run, with a warning if sent in the clear."""

import ast
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config, build
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import ConfigError, JoinError, TransferError
from dpipe.paramserver.server import ParameterServer
from dpipe.processes.environment import ProcessInfo
from dpipe.run.join import security_of
from dpipe.session import greeting
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire import rpc
from dpipe.wire.rpc import Security
from dpipe.wire.token import TokenFile
from dpipe.wire.v1.transport_pb2 import Hello

Make = Callable[..., Config]
ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """One machine's token file."""

    def __init__(self, folder: Path, name: str, *tokens: str) -> None:
        self.path = folder / f"{name}.tokens"
        self.hold(*tokens)
        self.security = Security(token_file=TokenFile(str(self.path)))

    def hold(self, *tokens: str) -> None:
        self.path.write_text("\n".join(tokens))


def test_token_is_changed_while_the_coordinator_goes_on(tmp_path: Path) -> None:
    first, second = (Machine(tmp_path, name, "old") for name in ("first", "second"))

    def meet(rank: int, machine: Machine) -> Coordinator:
        address = f"127.0.0.1:{server.port}"
        return Coordinator.join(address, rank, 1, shared={}, security=machine.security, join_s=5)

    server = CoordinatorServer(1, security=first.security, heartbeat_s=30, join_s=60)
    try:
        stranger = Machine(tmp_path, "stranger", "guess")
        with pytest.raises(JoinError, match="wrong token"):
            meet(0, stranger)
        second.hold("new")
        with pytest.raises(JoinError, match="wrong token"):
            meet(0, second)
        first.hold("old", "new")
        rank = meet(0, second)
        # Members stay; a newcomer with the old token is refused once only the new one is accepted.
        first.hold("new")
        second.hold("old")
        with pytest.raises(JoinError, match="wrong token"):
            meet(0, second)
        assert rank.gather("still here", b"yes").wait(5) == (b"yes",)
        rank.leave()
        rank.close()
    finally:
        server.close(wait_s=0)


@pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])
def test_links_open_with_either_token(tmp_path: Path, kind: type) -> None:
    """Rank 0 dials rank 1; after the change rank 2 dials it, in the same run."""
    machines = [Machine(tmp_path, str(rank), "old") for rank in range(3)]
    ends = [kind(rank, security=machine.security) for rank, machine in enumerate(machines)]
    addresses = {rank: f"127.0.0.1:{end.port}" for rank, end in enumerate(ends)}

    def link(low: int, high: int) -> None:
        pair = {rank: addresses[rank] for rank in (low, high)}
        other = threading.Thread(target=ends[high].connect, args=(pair, [low]))
        other.start()
        ends[low].connect(pair, [high])
        other.join(20)

    try:
        link(0, 1)
        machines[1].hold("old", "new")
        machines[2].hold("new", "old")
        link(1, 2)
    finally:
        for end in ends:
            end.close()


def test_answer_over_tcp_is_a_proof_of_the_token_that_was_shown() -> None:
    tokens = (b"one", b"two", b"three")
    for token in (*tokens, b"four"):
        here, there = socket.socketpair()
        raised: list[Exception] = []

        def answer(there: socket.socket = there, raised: list[Exception] = raised) -> None:
            deadline = time.monotonic() + 5
            try:
                dialler = greeting.answer(there, lambda _: tokens, deadline)
                greeting.welcome(there, dialler, deadline)
            except TransferError as error:
                raised.append(error)

        with here, there:
            thread = threading.Thread(target=answer)
            thread.start()
            if token in tokens:
                greeting.call(here, Hello(), token, time.monotonic() + 5)
            else:
                with pytest.raises(JoinError, match="wrong token"):
                    greeting.call(here, Hello(), token, time.monotonic() + 5)
            thread.join(5)
        assert bool(raised) == (token not in tokens)


def test_configuration_names_the_file_or_the_token(tmp_path: Path, tiny: Make) -> None:
    path = tmp_path / "tokens"
    path.write_text("of the file")
    process = ProcessInfo(token="of the environment")
    assert security_of(tiny(node__token_file=str(path)), process).tokens() == ("of the file",)
    assert security_of(tiny(node__token="of the key"), process).tokens() == ("of the key",)
    assert security_of(tiny(), process).tokens() == ("of the environment",)
    with pytest.raises(ConfigError, match=r"node\.token and node\.token_file exclude each other"):
        build({"node": {"token": "a", "token_file": "b"}})


def test_run_uses_a_token_file(
    tiny: Make, losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("a token\nanother\n")
    own = {"node__token_file": str(tmp_path / "tokens"), "pipeline__stages": 2}
    assert len(losses(tiny(**own))) == 3
    (tmp_path / "others").write_text("another\na token\n")
    config = tiny(**own, run__folder=str(tmp_path / "again"))
    of_rank = {1: config.with_(node__token_file=str(tmp_path / "others"))}
    assert len(losses(config, of_rank=of_rank)) == 3


SECRET = ("token", "proof", "secret", "password")


def comparisons(source: str) -> list[str]:
    """Where something named as a secret is compared by `==`, `!=` or `in`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        if not any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops):
            continue
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]
        last = [each.id if isinstance(each, ast.Name) else each.attr for each in names]
        if any(name.strip("_") in SECRET for name in last):
            found.append(ast.unparse(node))
    return found


def test_secrets_are_compared_in_constant_time() -> None:
    assert comparisons("if shown == self._token: pass") == ["shown == self._token"]
    assert comparisons("hmac.compare_digest(shown, token)") == []
    wrong = {
        f"{path.relative_to(ROOT)}: {comparison}"
        for path in (ROOT / "dpipe").rglob("*.py")
        if path.parent.name != "data"  # where tokens are those of a text
        for comparison in comparisons(path.read_text(encoding="utf-8"))
    }
    assert not wrong


def test_every_kind_of_connection_says_that_its_token_goes_in_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All channels are opened by `open_channel`, which warns; TCP links prove the token and never
    send it.
    """
    opening = {
        str(path.relative_to(ROOT / "dpipe"))
        for path in (ROOT / "dpipe").rglob("*.py")
        if "secure_channel(" in path.read_text(encoding="utf-8")
    }
    assert opening == {"wire/rpc.py"}
    seen: list[tuple[str, bool]] = []

    def warn(host: str, *, has_token: bool) -> None:
        seen.append((host, has_token))

    monkeypatch.setattr(rpc, "_warn_of_the_open", warn)
    server = ParameterServer(security=Security("secret"))
    server.close()
    rpc.open_channel("10.0.0.9:7000", Security("secret")).close()
    rpc.open_channel("[2001:db8::1]:7000", Security()).close()
    assert seen == [("10.0.0.9", True), ("2001:db8::1", False)]


@pytest.mark.slow
def test_python_sets_grpc_up_before_it_is_imported(tmp_path: Path) -> None:
    """`dpipe.train` imported grpc first, which reads its settings then."""
    program = (
        "import os, sys, dpipe\n"
        "train = dpipe.train\n"
        "assert 'grpc' not in sys.modules\n"
        "try:\n"
        "    train('job.json')\n"
        "except dpipe.InputError:\n"
        "    pass\n"
        "assert 'grpc' in sys.modules\n"
        "print(os.environ['GRPC_POLL_STRATEGY'])\n"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    job = tmp_path / "job.json"
    job.write_text('{"pipeline": {"stages": 2}}')
    done = subprocess.run(
        [sys.executable, "-c", program.replace("job.json", str(job))],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "poll\n", done.stderr
