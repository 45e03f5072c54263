"""Copies of a rank's pieces of the state, every few steps: here, and on machines that are lost
for other reasons.

    step     17        18        19        20        21   ...   30
    here     copy 17                       copy 20              copy 30    before that step
    there       ──17──▶ in the idle time of the links ──20──▶              whole on every guard
    ballots  -         17        17        17        20   ...   20         what this rank has whole
    retired  -                   < 17                     < 20             once all ranks said so

The copies that an epoch begins with (here of step 17) are sent first of all: its guards are others
than those of the epoch before, and a second loss would find them empty. A guard that has a copy
already says so, and is sent nothing.

A copy counts when every rank's is whole: all hear so in the same verdict, forget earlier ones, and
take the next. As long as one is under way, none is begun, by anybody.
"""

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread

from dpipe.engine.update import Verdict
from dpipe.errors import DpipeError
from dpipe.keeper.client import KeeperClient
from dpipe.keeper.copies import PieceCopy
from dpipe.keeper.keeper import Keeper
from dpipe.wire.rpc import Security

Vouch = Callable[[int, dict[int, str]], None]  # a step; by piece its digest

LOG = logging.getLogger("dpipe")
_RETRY_S = 5.0  # before a guard that could not be reached is tried again
_STOP_S = 5.0


class Guard:
    """Takes copies before each `every`-th step with `take(step)`, holds them in `keeper`, and sends
    them to each of `addresses`. `before_chunk` waits until the link is free. `every` may be set at
    any step, on all ranks alike.

    `vouch` gets, on a thread of the guard, the step and the digests of the pieces that go there.
    `resumed` is the step that the epoch goes on from, and may have to go back to; `copies` are
    those that it goes on from, of all ranks or of none.

    Made by the thread that trains, which calls everything but `close`.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        epoch: int,
        every: int,
        addresses: Sequence[str],
        security: Security,
        take: Callable[[int], list[PieceCopy]],
        resumed: int = 0,
        copies: Sequence[PieceCopy] = (),
        before_chunk: Callable[[], None] = lambda: None,
        vouch: Vouch = lambda step, digests: None,
    ) -> None:
        self._keeper = keeper
        self._epoch = epoch
        self.every = every
        self._addresses = addresses
        self._security = security
        self._take = take
        self._before_chunk = before_chunk
        self._say_digests = vouch
        self._taken = -1  # the newest step before which a copy was taken
        self._whole: int | None = None  # the newest that is whole here and there
        self._agreed = -1  # the newest that is whole on all ranks
        # The steps that the run may go back to, as long as no newer one is agreed
        self._kept = keeper.fallbacks(resumed)
        self._queue: SimpleQueue[tuple[list[PieceCopy], list[int]] | None] = SimpleQueue()
        self._closing = Event()
        self._client: KeeperClient | None = None
        self._thread = Thread(target=self._send_all, name="guard", daemon=True)
        if addresses:
            self._thread.start()
        if copies:
            self._send(resumed, list(copies))

    @property
    def whole(self) -> int | None:
        return self._whole

    def after_step(self, next_step: int, verdict: Verdict | None) -> None:
        """All ranks decide alike: by the step, and by what all have said in their ballots."""
        if verdict is not None:
            self._hear(verdict)
        if next_step % self.every or self._taken > self._agreed:
            return
        copies = self._take(next_step)
        self._keeper.hold(copies)
        self._send(next_step, copies)

    def close(self) -> None:
        """End what is under way."""
        self._closing.set()
        client = self._client
        if client is not None:
            client.cancel()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _send(self, step: int, copies: list[PieceCopy]) -> None:
        self._taken = step
        if self._addresses:
            self._queue.put((copies, sorted(self._kept)))
        else:
            self._vouch(step)

    def _hear(self, verdict: Verdict) -> None:
        steps = [report.guarded for report in verdict.reports if report.guarded is not None]
        if len(steps) < len(verdict.reports) or min(steps) <= self._agreed:
            return
        self._agreed = min(steps)
        self._kept = {self._agreed}
        self._keeper.agree(self._epoch, self._agreed)

    def _vouch(self, step: int) -> None:
        self._keeper.guarded = (min(self._kept), step)
        self._whole = step

    def _send_all(self) -> None:
        while (sending := self._queue.get()) is not None:
            copies, kept = sending
            # First: what is there before it is known could be anybody's.
            self._say_digests(copies[0].step, {copy.piece: copy.digest for copy in copies})
            for address in self._addresses:
                self._send_until_there(address, copies, kept)
            if self._closing.is_set():
                return
            self._vouch(copies[0].step)

    def _send_until_there(self, address: str, copies: list[PieceCopy], kept: list[int]) -> None:
        while not self._closing.is_set():
            try:
                with KeeperClient(address, self._security) as self._client:
                    for copy in copies:
                        self._client.put(self._epoch, copy, self._chunk, kept)
                return
            except (OSError, ValueError, DpipeError) as error:
                if self._closing.is_set():
                    return
                # Until it is there no newer copy is taken, and the old ones stay.
                LOG.warning(
                    "the copy of step %d cannot be sent to %s: %s; trying again",
                    copies[0].step,
                    address,
                    error,
                )
                self._closing.wait(_RETRY_S)

    def _chunk(self) -> None:
        if self._closing.is_set():
            raise ConnectionError("the epoch has ended")
        self._before_chunk()
