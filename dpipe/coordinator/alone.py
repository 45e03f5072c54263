"""`Alone`: the coordinator of a run of one rank, without server, threads and waits."""

from collections.abc import Callable, Collection

from dpipe.coordinator.base import Coordination, Gathered
from dpipe.errors import RunAborted


class Alone(Coordination):
    """See `base.Coordination`. `on_upload` is what `CoordinatorServer` calls `on_upload`."""

    rank = 0
    world_size = 1
    clock_offset_ns = 0

    def __init__(
        self,
        advertised: str | None = None,
        on_upload: Callable[[int, str, bytes], None] | None = None,
    ) -> None:
        self.addresses: dict[int, str | None] = {0: advertised}
        self.link_secrets: dict[int, bytes] = {}
        self.relayed: tuple[tuple[int, int], ...] = ()
        self._on_upload = on_upload
        self._over: RunAborted | None = None
        self._callbacks: list[Callable[[RunAborted], None]] = []

    def gather(self, key: str, payload: bytes) -> Gathered:
        # Nobody is ever missing, so that the question is never asked.
        gathered = Gathered(key, lambda: None)
        if self._over:
            gathered.parts.set_exception(self._over)
        else:
            gathered.parts.set_result((payload,))
        return gathered

    def routes(self, here: str, peers: Collection[int], timeout_s: float) -> dict[int, str | None]:
        return {}  # there is nobody to dial

    def abort(self, reason: str, *, symptom: bool = False) -> RunAborted:
        self.give_up(RunAborted(f"rank 0 failed: {reason}"))
        assert self._over is not None
        return self._over

    def give_up(self, error: RunAborted) -> None:
        if self._over is None:
            self._over = error
            for callback in self._callbacks:
                callback(error)

    def on_abort(self, callback: Callable[[RunAborted], None]) -> None:
        if self._over:
            callback(self._over)
        else:
            self._callbacks.append(callback)

    def upload(self, kind: str, payload: bytes) -> None:
        if self._over:
            raise self._over
        if self._on_upload:
            self._on_upload(0, kind, payload)

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
