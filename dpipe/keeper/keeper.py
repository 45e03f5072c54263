"""`Keeper`: the copies that one process holds, of its own pieces of the state and of others'.

    this rank   hold ──────────┐
    another's   put  ──server──┼─▶ copies by step and piece ──server──▶ get   a newcomer
    this rank   get  ◀─────────┘                retire(before)

It outlives epochs. What it is sent is bounded before memory is taken for it, and asked for by whom
is behind its epoch is refused: somebody else may have gone on since.
"""

from collections.abc import Collection
from threading import Lock
from typing import Self

from dpipe.keeper.copies import PieceCopy
from dpipe.keeper.messages import Offered, Refused, Wanted
from dpipe.keeper.server import KeeperServer
from dpipe.wire.rpc import Security

_NO_SECURITY = Security()


class Keeper:
    """Copies in this process's memory, served on a port of `bind` from the constructor until
    `close`. Any thread may use it.

    `max_bytes` bounds what others may leave here; own copies do not count. `address` is where
    others reach it, by default `bind`. Raises `JoinError` if it cannot listen.
    """

    def __init__(
        self,
        *,
        security: Security = _NO_SECURITY,
        bind: str = "127.0.0.1",
        port: int = 0,
        host: str | None = None,
        max_bytes: int = 1 << 40,
    ) -> None:
        self.security = security
        self._lock = Lock()
        self._copies: dict[tuple[int, int], PieceCopy] = {}  # by step and piece
        self._of_others: set[tuple[int, int]] = set()
        self._arriving_bytes = 0  # promised to who sends now
        self._max_bytes = max_bytes
        self._epoch = 0
        # Steps that this process has said it holds whole, as has its guard: the newest, and the
        # newest of which all ranks have said so. The next epoch may have to go back to either.
        self.guarded: tuple[int, ...] = ()
        # The newest step that all ranks of this epoch have whole; 0: none yet.
        self.agreed = 0
        self._server = KeeperServer(self, security, bind, port)
        self.address = f"{host or bind}:{self._server.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and forget all copies. Safe to call twice."""
        self._server.close()
        with self._lock:
            self._copies.clear()
            self._of_others.clear()

    def fence(self, epoch: int, newest: float) -> None:
        """From here on refuse what ranks of an epoch before `epoch` send or ask for; and forget
        copies of steps after `newest` (math.inf: none), where the run has gone back: they come
        again, and where another plan runs, otherwise.
        """
        with self._lock:
            if epoch > self._epoch:
                self._epoch = epoch
                self.agreed = 0
            for key in [key for key in self._copies if key[0] > newest]:
                self._forget(key)

    def held(self) -> dict[int, list[int]]:
        """By step, the pieces that are here whole."""
        with self._lock:
            by_step: dict[int, list[int]] = {}
            for step, piece in sorted(self._copies):
                by_step.setdefault(step, []).append(piece)
        return by_step

    def fallbacks(self, resumed: int) -> set[int]:
        """The steps that a run which goes on from `resumed` may have to go back to, until a newer
        one is whole on all ranks. What is older than the last such step was retired, so that the
        oldest copy here is of that one.
        """
        oldest = sorted(self.held())[:1]
        return {resumed, *oldest, *self.guarded}

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(len(copy.content) for copy in self._copies.values())

    def hold(self, copies: list[PieceCopy]) -> None:
        """Keep copies of this process's own pieces."""
        with self._lock:
            for copy in copies:
                self._copies[copy.step, copy.piece] = copy
                self._of_others.discard((copy.step, copy.piece))

    def keep(self, pieces: Collection[int], steps: Collection[int]) -> None:
        """Of these pieces forget the copies of other steps."""
        with self._lock:
            for step, piece in tuple(self._copies):
                if piece in pieces and step not in steps:
                    self._forget((step, piece))

    def find(self, step: int, piece: int) -> PieceCopy | None:
        with self._lock:
            return self._copies.get((step, piece))

    def retire(self, before: int) -> None:
        """Forget the copies of steps before that one."""
        with self._lock:
            self._retire(before)

    def agree(self, epoch: int, step: int) -> None:
        """All ranks of `epoch` have the state of `step` whole: nobody needs an earlier one. Once
        another epoch has begun, it means nothing: that one may have gone back further.
        """
        with self._lock:
            if epoch >= self._epoch:
                self.agreed = step
                self._retire(step)

    # For the server

    def give(self, wanted: Wanted) -> PieceCopy:
        """Raises `Refused`."""
        with self._lock:
            self._check_epoch(wanted.epoch)
            copy = self._copies.get((wanted.step, wanted.piece))
        if copy is None:
            raise Refused(f"piece {wanted.piece} before step {wanted.step} is not held here")
        return copy

    def has(self, offered: Offered) -> bool:
        """Whether that very copy is here, of whomever: then its bytes need not come. Raises
        `Refused`.
        """
        with self._lock:
            self._check_epoch(offered.epoch)
        copy = self.find(offered.step, offered.piece)
        # Outside the lock: the digest may have to be made.
        if copy is None or copy.digest != offered.digest:
            return False
        with self._lock:
            # It may have been forgotten meanwhile.
            if (copy.step, copy.piece) not in self._copies:
                return False
            self._drop_earlier(copy, offered.kept)
        return True

    def make_room(self, offered: Offered) -> None:
        """Promise the bytes of a copy that is about to come. Raises `Refused`."""
        with self._lock:
            self._check_epoch(offered.epoch)
            held_bytes = sum(len(self._copies[key].content) for key in self._of_others)
            left_bytes = self._max_bytes - held_bytes - self._arriving_bytes
            if offered.size > left_bytes:
                raise Refused(
                    f"a copy of {offered.size} bytes does not fit: {left_bytes} are left here"
                )
            self._arriving_bytes += offered.size

    def take(self, offered: Offered, content: bytes | None) -> None:
        """What `make_room` promised has come; None: it has not. Raises `Refused` where it is not
        what its digest says, or of an epoch that ended meanwhile.
        """
        with self._lock:
            self._arriving_bytes -= offered.size
            if content is None:
                return
            self._check_epoch(offered.epoch)
        copy = PieceCopy(offered.step, offered.piece, content)
        if copy.digest != offered.digest:
            raise Refused(f"piece {offered.piece} arrived damaged: its digest is another")
        key = (copy.step, copy.piece)
        with self._lock:
            if key in self._copies and key not in self._of_others:
                raise Refused(f"piece {copy.piece} before step {copy.step} is of this rank itself")
            self._of_others.add(key)
            self._copies[key] = copy
            self._drop_earlier(copy, offered.kept)

    # With the lock held

    def _drop_earlier(self, copy: PieceCopy, kept: Collection[int]) -> None:
        """What its sender is done with: nobody else says so to a process that has no rank. The own
        copies of this one are not the sender's to drop.
        """
        for step, piece in tuple(self._of_others):
            if step < min(kept, default=0) or (
                piece == copy.piece and step not in (copy.step, *kept)
            ):
                self._forget((step, piece))

    def _retire(self, before: int) -> None:
        for key in [key for key in self._copies if key[0] < before]:
            self._forget(key)

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Refused(f"epoch {epoch} is over: this keeper is in epoch {self._epoch}")

    def _forget(self, key: tuple[int, int]) -> None:
        del self._copies[key]
        self._of_others.discard(key)
