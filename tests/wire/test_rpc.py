import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dpipe.errors import JoinError
from dpipe.wire import rpc
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata


def echo_handler() -> grpc.GenericRpcHandler:
    unary = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    stream = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([b"first"]))
    return grpc.method_handlers_generic_handler("Test", {"Unary": unary, "Stream": stream})


@pytest.fixture
def port():
    server = serve([echo_handler()], "127.0.0.1", 0, Security("secret"), 2)
    yield server.port
    server.stop(0)
    server.join(5)


@pytest.mark.parametrize("kind", ["Unary", "Stream"])
@pytest.mark.parametrize("token", ["secret", "guess", ""])
def test_call_is_served_with_the_token_and_refused_at_once_without(port, kind, token) -> None:
    security, unsaid = Security(token), SimpleQueue()
    with open_channel(f"127.0.0.1:{port}", security) as channel:
        metadata = token_metadata(security)
        try:
            if kind == "Unary":
                answer = channel.unary_unary("/Test/Unary")(b"first", metadata=metadata, timeout=5)
            else:
                silent = iter(unsaid.get, None)
                answer = next(
                    channel.stream_stream("/Test/Stream")(silent, metadata=metadata, timeout=5)
                )
        except grpc.RpcError as error:
            answer = (error.code(), error.details())
        unsaid.put(None)
    refused = (
        grpc.StatusCode.UNAUTHENTICATED,
        "wrong token: node.token must be the same on every rank",
    )
    assert answer == (b"first" if token == "secret" else refused)


def test_threads_of_a_server_end_with_it() -> None:
    before = set(threading.enumerate())
    gc.disable()
    try:
        server = serve([echo_handler()], "127.0.0.1", 0, Security(), 2)
        with open_channel(f"127.0.0.1:{server.port}", Security()) as channel:
            channel.unary_unary("/Test/Unary")(b"first", timeout=5)
        answering = set(threading.enumerate()) - before
        server.stop(0)
        server.join(5)
        for thread in answering:
            thread.join(5)
    finally:
        gc.enable()
    assert answering
    assert not any(thread.is_alive() for thread in answering)


def test_two_servers_cannot_share_a_port(port) -> None:
    with pytest.raises(JoinError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
        serve([], "127.0.0.1", port, Security(), 1)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Security], list[str]]:
    """`stored(security)`: the paths of certificate, key and authority in files."""

    def write(security: Security) -> list[str]:
        paths = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
        for path, content in zip(paths, (security.cert, security.key, security.ca), strict=True):
            path.write_bytes(content or b"")
        return list(map(str, paths))

    return write


def test_security_loads_the_files_it_is_given(authority, stored) -> None:
    made = authority().security("token")
    loaded = Security.load("token", *stored(made))
    assert loaded == made
    assert loaded.tls
    assert not Security.load("token", None, None, None).tls


def test_security_names_a_mismatched_pair(authority, stored) -> None:
    """gRPC reported it as a port in use."""
    signer = authority()
    pair = replace(signer.security(), key=signer.security().key)
    with pytest.raises(
        JoinError, match=r"node\.tls_key .*key\.pem does not belong to node\.tls_cert .*cert\.pem"
    ):
        Security.load("", *stored(pair))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"cert": b"no"},
            r"node\.tls_key .*key\.pem cannot be used .* with node\.tls_cert .*cert\.pem",
        ),
        ({"ca": b"no"}, r"node\.tls_ca .*ca\.pem holds no certificate in PEM"),
    ],
    ids=["cert", "ca"],
)
def test_security_names_a_file_that_is_not_pem(
    authority, stored, wrong: dict[str, bytes], message: str
) -> None:
    with pytest.raises(JoinError, match=message):
        Security.load("", *stored(replace(authority().security(), **wrong)))


def test_security_says_that_a_certificate_has_expired(authority, stored) -> None:
    with pytest.raises(
        JoinError, match=r"node\.tls_cert .*cert\.pem, or .*: certificate has expired"
    ):
        Security.load("", *stored(authority().security(valid_hours=-0.5)))


def test_security_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        JoinError, match=r"cannot read .*missing.pem: No such file .*node\.tls_cert"
    ):
        Security.load("", str(tmp_path / "missing.pem"), None, None)


@pytest.mark.parametrize(
    ("address", "warns"),
    [
        ("10.1.2.3:4000", True),
        ("[2001:db8::1]:4000", True),
        ("gpu-7:4000", True),
        ("127.0.0.2:4000", False),
        ("[::1]:4000", False),
        ("localhost:4000", False),
    ],
)
def test_token_in_the_clear_is_reported_outside_loopback(
    address: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rpc._warn_of_the_open.cache_clear()
    for _ in range(2):
        open_channel(address, Security("open sesame")).close()
    said = [record.message for record in caplog.records]
    assert len(said) == warns
    assert all("the token is sent in the clear to" in line for line in said)
    assert all("the secrets with which broken connections are opened" in s for s in said)
    assert "open sesame" not in caplog.text
    caplog.clear()
    open_channel(address, Security()).close()
    said = [record.message for record in caplog.records]
    assert len(said) == warns
    assert all("there is no token: whoever reaches" in line for line in said)


def test_token_under_tls_is_not_reported_as_clear(authority, caplog) -> None:
    rpc._warn_of_the_open.cache_clear()
    open_channel("10.1.2.3:4000", authority().security("open sesame")).close()
    assert caplog.text == ""


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a refusal reveals nothing about the token."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return False

    monkeypatch.setattr(rpc.hmac, "compare_digest", compare)
    call: Any = SimpleNamespace(invocation_metadata=token_metadata(Security("guess")))
    refused = rpc._CheckToken(Security("open sesame")).intercept_service(lambda details: None, call)
    assert compared == [(b"guess", b"open sesame")]
    assert refused is not None
