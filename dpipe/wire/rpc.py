"""How every gRPC server and channel of a run is opened: token, mutual TLS, keep-alive, bounded
messages.

All processes of a run share one token and, with TLS, one authority. Each shows a certificate that
the authority signed for the name `dpipe`, not for an address, since addresses come and go; and asks
the other side for one.
"""

import functools
import hmac
import ipaddress
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dpipe.errors import JoinError
from dpipe.wire.token import TokenFile

LOG = logging.getLogger("dpipe")
TLS_NAME = "dpipe"
MAX_MESSAGE_BYTES = 4 << 20  # gRPC's default; tensors are sent in smaller chunks
_TOKEN_KEY = "dpipe-token"  # noqa: S105 - the header's name, not a secret

_OUT_OF_DATE = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A host that is gone sends no end of its connection: pings find out, within 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
SILENCE_S = 40.0  # until a connection that answers nothing is broken; timeouts.heartbeat's default
_MOST_MS = (1 << 31) - 1
# For fewer and larger system calls.
_BULK_OPTIONS = [
    ("grpc.http2.write_buffer_size", 4 << 20),
    ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_read_chunk_size", 4 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 8 << 20),
]


@dataclass(frozen=True)
class Security:
    """The token, or the file that it is in, and, with TLS, the PEM bytes of certificate, key and
    authority.
    """

    token: str = ""
    cert: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None
    token_file: TokenFile | None = None  # in place of `token`

    @classmethod
    def load(
        cls,
        token: str,
        cert: str | None,
        key: str | None,
        ca: str | None,
        token_file: str | None = None,
    ) -> "Security":
        """Read the files. Raises `JoinError` naming one that cannot be read, or a PEM that does not
        match the others.
        """
        pem = [None if path is None else _read(path) for path in (cert, key, ca)]
        tokens = None if token_file is None else TokenFile(token_file)
        loaded = cls(token, pem[0], pem[1], pem[2], tokens)
        if cert and key and ca:
            _check(cert, key, ca)
        return loaded

    def tokens(self) -> tuple[str, ...]:
        """The token to show now, and after it the others to accept; "" where there is none."""
        return (self.token,) if self.token_file is None else self.token_file.tokens()

    def accepts(self, shown: str) -> bool:
        """In a time that depends on nothing but lengths, and on how many tokens there are."""
        # All of them, also behind one that fits: `any` alone would tell which it was.
        same = [hmac.compare_digest(shown.encode(), token.encode()) for token in self.tokens()]
        return any(same)

    @property
    def tls(self) -> bool:
        return self.cert is not None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise JoinError(
            f"cannot read {path}: {error.strerror}; check node.tls_cert, node.tls_key, node.tls_ca"
        ) from None


def _check(cert: str, key: str, ca: str) -> None:
    """Check here, where the file names are known. Else the other side refuses the certificate, or
    gRPC fails to bind as if the port were in use.
    """
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # Without `password` it would ask at the terminal.
        own.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        wrong = f"cannot be used ({error.reason or 'no PEM'}) with"
        if error.reason == "KEY_VALUES_MISMATCH":
            wrong = "does not belong to"
        raise JoinError(
            f"node.tls_key {key} {wrong} node.tls_cert {cert}; give the two of one pair, in PEM"
        ) from None
    try:
        other.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise JoinError(f"node.tls_ca {ca} holds no certificate in PEM ({error.reason})") from None
    other.check_hostname = False
    try:
        _shake_hands(own, other)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_DATE:
            raise JoinError(
                f"node.tls_cert {cert}, or node.tls_ca {ca}: {error.verify_message}"
            ) from None
    except ssl.SSLError:
        # Left to gRPC, which is stricter in some points and laxer in others.
        pass


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory, until the client has judged the server's certificate."""
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    # Hello, the server's certificate, the client's verdict on it: no step needs the network.
    for end in (client_end, server_end, client_end):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def open_channel(
    address: str,
    security: Security,
    *,
    own_connection: bool = False,
    bulk: bool = False,
    silence_s: float = SILENCE_S,
) -> grpc.Channel:
    """A channel to `host:port`. Channels to one address share a TCP connection unless
    `own_connection`. `bulk` is for tensors, and costs megabytes of buffers a connection. A
    connection that answers nothing for `silence_s` is broken.
    """
    if not security.tls:
        _warn_of_the_open(
            address.rpartition(":")[0].strip("[]"), has_token=security.tokens()[0] != ""
        )
    options = _options(bulk, silence_s)
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if security.tls:
        credentials = grpc.ssl_channel_credentials(security.ca, security.key, security.cert)
        options.append(("grpc.ssl_target_name_override", TLS_NAME))
        return grpc.secure_channel(address, credentials, options)
    return grpc.insecure_channel(address, options)


@functools.cache
def _warn_of_the_open(host: str, *, has_token: bool) -> None:
    """Once a host, where others may be on the way to it."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if is_loopback:
        return
    if has_token:
        LOG.warning(
            "the token is sent in the clear to %s, and so are the secrets with which broken "
            "connections are opened again: whoever reads them on the way can join, or take a "
            "connection over; set node.tls_cert, node.tls_key and node.tls_ca, or use a tunnel",
            host,
        )
    else:
        LOG.warning(
            "there is no token: whoever reaches %s can join, and whoever reads on the way can take "
            "a connection over; set the same DPIPE_TOKEN for every process, or node.token_file, "
            "and node.tls_cert, node.tls_key and node.tls_ca",
            host,
        )


def token_metadata(security: Security) -> tuple[tuple[str, str], ...]:
    """The metadata of a client's every call: `stub(..., metadata=token_metadata(security))`."""
    return ((_TOKEN_KEY, security.tokens()[0]),)


class _CheckToken(grpc.ServerInterceptor):
    """Refuses a call without the run's token before its handler sees a byte."""

    def __init__(self, security: Security) -> None:
        self._security = security
        # As a stream: a handler of single requests would wait for a message that may never come.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            _refuse
        )

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        token = dict(handler_call_details.invocation_metadata).get(_TOKEN_KEY, "")
        if self._security.accepts(str(token)):
            return continuation(handler_call_details)
        return self._refuse


def _refuse(request: Any, context: grpc.ServicerContext) -> None:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "wrong token: node.token must be the same on every rank"
    )


class Server:
    """A server that listens on `port`. gRPC leaves the threads of one that has stopped until Python
    next collects garbage; here they end with it.
    """

    def __init__(self, server: grpc.Server, threads: ThreadPoolExecutor, port: int) -> None:
        self._server = server
        self._threads = threads
        self._stopped: threading.Event | None = None
        self.port = port

    def stop(self, grace_s: float) -> None:
        """Take no more calls. Those under way are broken off after `grace_s`."""
        self._stopped = self._server.stop(grace_s)

    def join(self, timeout_s: float) -> None:
        """After `stop`: wait until no call is under way, for at most `timeout_s`."""
        assert self._stopped is not None
        # Before that, gRPC could still have work for them.
        if self._stopped.wait(timeout_s):
            self._threads.shutdown(wait=False)


def serve(
    handlers: Sequence[grpc.GenericRpcHandler],
    bind: str,
    port: int,
    security: Security,
    max_workers: int,
    *,
    bulk: bool = False,
    silence_s: float = SILENCE_S,
) -> Server:
    """Start a server, on a free port for 0. Raises `JoinError` where it cannot bind.

    A streaming call holds one of `max_workers` threads as long as it lives. `bulk` and `silence_s`
    as in `open_channel`.
    """
    options = _options(bulk, silence_s)
    # Else two servers could share a port and each get half the calls.
    options.append(("grpc.so_reuseport", 0))
    threads = ThreadPoolExecutor(max_workers, "call")
    server = grpc.server(
        threads,
        list(handlers),
        interceptors=[_CheckToken(security)],
        options=options,
    )
    try:
        bound = _bind(server, f"{bind}:{port}", security)
    except RuntimeError:
        raise JoinError(
            f"cannot listen on {bind}:{port}: the port is in use or the address is not this host's"
        ) from None
    server.start()
    return Server(server, threads, bound)


def _options(bulk: bool, silence_s: float) -> list[tuple[str, Any]]:
    # gRPC makes it TCP_USER_TIMEOUT too.
    silence_ms = min(round(silence_s * 1e3), _MOST_MS)
    several = _BULK_OPTIONS if bulk else []
    return [*_OPTIONS, *several, ("grpc.keepalive_timeout_ms", silence_ms)]


def _bind(server: grpc.Server, address: str, security: Security) -> int:
    if not security.tls:
        return server.add_insecure_port(address)
    assert security.key is not None
    assert security.cert is not None
    pairs = [(security.key, security.cert)]
    credentials = grpc.ssl_server_credentials(
        pairs, root_certificates=security.ca, require_client_auth=True
    )
    return server.add_secure_port(address, credentials)
