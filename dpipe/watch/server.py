"""The page over HTTP: who may see it, and its events.

    GET /          the page            GET /page/NAME    its files, all from this package
    GET /events    server-sent events: `begin` all points, `points` new ones, `picture` all else

Nothing can be changed through it. On loopback it answers only who calls it by a name of loopback: a
page of somebody else's, whose name resolves to 127.0.0.1, must not read it (DNS rebinding).
Elsewhere it asks for a token, which the link that `dpipe watch` prints leaves in a cookie.
"""

import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dpipe.watch.assets import page_files
from dpipe.watch.broadcast import Broadcast, Seen

_COOKIE = "dpipe_watch"
_MOST_WATCHERS = 64  # at once: each asks once a second
_ALIVE_S = 15.0  # between two signs of life on a quiet stream
_GOODBYE_S = 5  # for streams that are open at the end, which look once a second
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
}
# The page loads nothing from elsewhere, sends nothing elsewhere, and runs no script that is in it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class PageServer(uvicorn.Server):
    """Runs until SIGINT or SIGTERM, or until `should_exit` is set. `token` is None on loopback."""

    def __init__(self, broadcast: Broadcast, token: str | None, interval_s: float = 1.0) -> None:
        self._broadcast = broadcast
        # An access log would be a line a second, and hold the token.
        config = uvicorn.Config(
            application(broadcast, token, interval_s),
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_GOODBYE_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First: it waits for the streams, which end only where they are told.
        self._broadcast.over.set()
        await super().shutdown(sockets)


def application(broadcast: Broadcast, token: str | None, interval_s: float = 1.0) -> ASGIApp:
    contents = page_files()
    watchers = anyio.CapacityLimiter(_MOST_WATCHERS)

    def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content = contents.get(name)
        media_type = _TYPES.get(name[name.rfind(".") :], "text/plain")
        if content is None:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(content, media_type=media_type)

    # Async: a stream holds no thread between two looks.
    async def events(request: Request) -> Response:
        if watchers.available_tokens < 1:
            return PlainTextResponse(f"{_MOST_WATCHERS} pages are open already\n", 503)
        stream = _stream(broadcast, watchers, interval_s)
        return StreamingResponse(stream, media_type="text/event-stream")

    routes = [
        Route("/", file),
        Route("/page/{name}", file),
        Route("/events", events),
    ]
    return _Guard(Starlette(routes=routes), token)


async def _stream(
    broadcast: Broadcast, watchers: anyio.CapacityLimiter, interval_s: float
) -> AsyncIterator[str]:
    seen = Seen()
    async with watchers:
        quiet_s = 0.0
        yield "retry: 2000\n\n"
        while not broadcast.over.is_set():
            # In a thread: it reads files.
            news = await anyio.to_thread.run_sync(broadcast.news, seen)
            for name, content in news:
                yield f"event: {name}\ndata: {content}\n\n"
            quiet_s = 0.0 if news else quiet_s + interval_s
            if quiet_s >= _ALIVE_S:
                quiet_s = 0.0
                yield ": still here\n\n"
            await anyio.sleep(interval_s)


class _Guard:
    """Lets through who may read the page, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """What is answered in place of the page; None for who may see it."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page can only be read\n", 405)
        if self._token is None:
            name = Headers(scope=scope).get("host", "").rpartition(":")
            # The port is another on each start; "[::1]" has colons of its own.
            host = name[0] if name[2].isdecimal() and name[0] else name[0] + name[1] + name[2]
            if is_loopback(host):
                return None
            return PlainTextResponse("call this page by 127.0.0.1 or localhost\n", 421)
        return self._without_token(scope, self._token)

    def _without_token(self, scope: Scope, token: str) -> Response | None:
        connection = HTTPConnection(scope)
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if _same(shown, token):
            # Out of the address: that is kept in histories, and sent on by copying it.
            answer = RedirectResponse(scope["path"] if scope["path"] == "/" else "/", 303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        bearer = connection.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(connection.cookies.get(_COOKIE, ""), token) or _same(bearer, token):
            return None
        return PlainTextResponse(
            "this page needs the token: open the link that dpipe watch has printed\n", 401
        )


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())
