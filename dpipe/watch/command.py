"""What `dpipe watch` does: a source, and who is shown it."""

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from dpipe.agent.joining import own_security
from dpipe.errors import ConfigError
from dpipe.watch.broadcast import Broadcast, PictureSource
from dpipe.watch.coordinated import CoordinatedRun
from dpipe.watch.folder import RunFolder

_TOKEN_BYTES = 24


def source_of(target: str, overrides: tuple[str, ...], *, trust_code: bool) -> PictureSource:
    """A run's folder, or a coordinator's HOST:PORT. Raises `ConfigError` for what is neither."""
    _, colon, port = target.rpartition(":")
    # A folder may be called so as well.
    if colon and port.isdecimal() and not Path(target).exists():
        return CoordinatedRun(target, own_security(overrides))
    return RunFolder(Path(target), trust_code=trust_code)


def serve_page(source: PictureSource, bind: str, *, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Raises `ConfigError` without the extra, and for an address that cannot be
    listened on.
    """
    try:
        from dpipe.watch.server import PageServer, is_loopback
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dpipe watch needs {error.name}: pip install 'dpipe[watch]', or give --text"
        ) from None
    host, port = _address(bind)
    token = None if is_loopback(host) else secrets.token_urlsafe(_TOKEN_BYTES)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    say(f"watching {_link(host, port, token)}  (Ctrl-C ends this page, not the run)")
    try:
        PageServer(Broadcast(source), token).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # uvicorn has ended what it served, and raises the signal again
    finally:
        listening.close()
        source.close()


def _link(host: str, port: int, token: str | None) -> str:
    shown = host
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared
        shown = socket.gethostname()
    elif ":" in host:
        shown = f"[{host}]"
    suffix = "" if token is None else f"?token={token}"
    return f"http://{shown}:{port}/{suffix}"


def _address(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65_536):
        raise ConfigError(f"--bind {bind!r} must be HOST:PORT, such as 127.0.0.1:7007")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    # Started again at once, it finds its old connections still closing.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # from here on a browser may dial
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); give another --bind, such as "
            f"{host}:0 for any free port"
        ) from None
    return listening
