"""When the links of a rank have nothing to send: then copies of its layers leave."""

import time
from collections.abc import Callable, Collection
from threading import Lock

import torch

from dpipe.transport.base import Directory, Transport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Pending

_LOOK_S = 0.002
_PATIENCE = 100  # a link that is never idle gives one part in so many


class WatchedLinks(Transport):
    """`links`, which it says of whether they are sending."""

    def __init__(self, links: Transport) -> None:
        self._links = links
        self._leaving: list[Pending[None]] = []
        self._lock = Lock()

    def is_sending(self) -> bool:
        with self._lock:
            self._leaving = [pending for pending in self._leaving if not pending.done()]
            return bool(self._leaving)

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Pending[None]:
        pending = self._links.send(tensor, peer, tag)
        # Looked through here too: nobody may ask for long.
        self.is_sending()
        with self._lock:
            self._leaving.append(pending)
        return pending

    @property
    def rank(self) -> int:
        return self._links.rank

    @property
    def port(self) -> int:
        return self._links.port

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> Pending[torch.Tensor]:
        return self._links.recv(like, peer, tag, into)

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        self._links.prepare(directory, peers)

    def rehearse(self, step: Callable[[], None]) -> None:
        self._links.rehearse(step)

    def fail(self, error: Exception) -> None:
        self._links.fail(error)

    def close(self) -> None:
        self._links.close()


class IdleTime:
    """`wait` before each piece of what is sent beside messages: until `is_busy` is false. Where it
    never is, pieces take their share of the time all the same.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._went_on_at: float | None = None

    def wait(self) -> None:
        now = time.monotonic()
        piece_s = 0.0 if self._went_on_at is None else now - self._went_on_at
        deadline = now + _PATIENCE * piece_s
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._went_on_at = time.monotonic()
