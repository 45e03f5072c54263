"""A server that speaks the protocol of the Hugging Face Hub, for the files of a folder.

    GET   /api/models/ORG/NAME/revision/REV      the commit
    GET   /api/models/ORG/NAME/tree/COMMIT       files, sizes, hashes
    HEAD  /ORG/NAME/resolve/REV/FILE             ETag, X-Repo-Commit; of a large file X-Linked-Size,
                                                 X-Linked-Etag, and the Location of the content
    GET   the same, or that location             with a Range: 206

Data sets are alike under /api/datasets and /datasets.
"""

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".gguf")  # kept apart from the repository, as by Git LFS
_API = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.*))?")
_FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BLOB = re.compile(r"/blobs/([^/]+/[^/]+)/([^/]+)/(.+)")


@dataclass
class Repository:
    folder: Path
    commit: str = "1" * 40
    token: str | None = None  # without it: 401
    gated: bool = False  # 403, with any token


@dataclass
class FakeHub:
    """`sent` counts the bytes of each file that went out."""

    repositories: dict[str, Repository]
    sent: Counter = field(default_factory=Counter)
    asked: list[str] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # bytes of the next large answers
    resets: bool = False  # whether a cut is a reset; else an early end
    down: bool = False  # 503 to all

    def __post_init__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def content_url(self) -> str:
        """Another host by its name, as the hub's own: no token may go there."""
        return self.url.replace("127.0.0.1", "localhost")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


class _Refused(Exception):  # noqa: N818
    def __init__(self, status, code, message):
        self.answer = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    hub: FakeHub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        try:
            if self.hub.down:
                raise _Refused(503, "", "the hub is being mended")
            for pattern, answer in ((_API, self._api), (_FILE, self._file), (_BLOB, self._blob)):
                match = pattern.fullmatch(path)
                if match:
                    answer(*match.groups())
                    return
            raise _Refused(404, "", f"no such address: {path}")
        except _Refused as error:
            status, code, message = error.answer
            body = json.dumps({"error": message}).encode()
            self._send(status, body, {"X-Error-Code": code, "X-Error-Message": message})

    def _repository(self, name, revision) -> Repository:
        repository = self.hub.repositories.get(name)
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hidden = repository is not None and repository.token not in (None, shown)
        if repository is None or hidden:
            # The hub does not say whether a private repository exists.
            raise _Refused(401, "RepoNotFound", "Invalid username or password.")
        if repository.gated:
            raise _Refused(403, "GatedRepo", "Access to this model is restricted")
        if revision not in (None, "main", repository.commit):
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository

    def _api(self, name, what, revision, _):
        repository = self._repository(name, revision)
        body = {"id": name, "sha": repository.commit, "private": False, "siblings": []}
        if what == "tree":
            body = [_entry(repository.folder, path) for path in _files(repository.folder)]
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, name, revision, file):
        repository = self._repository(name, revision)
        path = repository.folder / file
        commit = {"X-Repo-Commit": repository.commit}
        if not path.is_file():
            message = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._send(404, b"", commit | message)
        elif path.suffix in LARGE:
            content = path.read_bytes()
            linked = {
                "Location": f"{self.hub.content_url}/blobs/{name}/{repository.commit}/{file}",
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            }
            self._send(302, b"", commit | linked)
        else:
            self._content(name, path, commit)

    def _blob(self, name, commit, file):
        if "Authorization" in self.headers:
            raise _Refused(400, "", "a token was sent to another host")
        self._content(name, self.hub.repositories[name].folder / file, {})

    def _content(self, name, path, headers):
        content = path.read_bytes()
        headers = headers | {"ETag": f'"{_git_hash(content)}"', "Accept-Ranges": "bytes"}
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked:
            start = int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if asked else 200, content[start:], headers, counted=path.name)

    def _send(self, status, body, headers, counted=None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        large = counted is not None and counted.endswith(LARGE)
        if large and self.hub.cut_after:
            body = body[: self.hub.cut_after.pop(0)]
            self.wfile.write(body)
            self.wfile.flush()
            self._cut()
        else:
            self.wfile.write(body)
        if counted is not None:
            self.hub.sent[counted] += len(body)

    def _cut(self):
        self.close_connection = True
        if self.hub.resets:
            # Closing a socket that lingers for 0 s sends a reset; closed by its number, because
            # the server would shut it down first.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, path: Path) -> dict:
    content = path.read_bytes()
    entry = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "size": len(content),
        "oid": _git_hash(content),
    }
    if path.suffix in LARGE:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
