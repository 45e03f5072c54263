from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from dpipe.errors import JoinError
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata


def echo_handler() -> grpc.GenericRpcHandler:
    unary = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    stream = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([b"first"]))
    return grpc.method_handlers_generic_handler("Test", {"Unary": unary, "Stream": stream})


@pytest.fixture
def port():
    server, port = serve([echo_handler()], "127.0.0.1", 0, Security("secret"), 2)
    yield port
    server.stop(None).wait(5)


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
                answer = next(channel.stream_stream("/Test/Stream")(silent, metadata=metadata, timeout=5))
        except grpc.RpcError as error:
            answer = (error.code(), error.details())
        unsaid.put(None)
    refused = (grpc.StatusCode.UNAUTHENTICATED, "wrong token: node.token must be the same on every rank")
    assert answer == (b"first" if token == "secret" else refused)


def test_two_servers_cannot_share_a_port(port) -> None:
    with pytest.raises(JoinError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
        serve([], "127.0.0.1", port, Security(), 1)


def test_security_loads_the_files_it_is_given(tmp_path: Path) -> None:
    for name in ("cert", "key", "ca"):
        (tmp_path / name).write_bytes(name.encode())
    loaded = Security.load("token", *(str(tmp_path / name) for name in ("cert", "key", "ca")))
    assert loaded == Security("token", b"cert", b"key", b"ca")
    assert loaded.tls
    assert not Security.load("token", None, None, None).tls


def test_security_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JoinError, match=r"cannot read .*missing.pem: No such file .*node\.tls_cert"):
        Security.load("", str(tmp_path / "missing.pem"), None, None)
