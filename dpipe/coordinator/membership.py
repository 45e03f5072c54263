"""What the coordinator decides: who may join, when a gather is complete, who is lost, which cause
wins.

    joining ──all are here──▶ running ──────all left──────▶ (empty)
       │                         │
       └── refused, lost, late ──┴── failed, lost ──▶ over: all ranks get the same reason

Policy only: the server brings the streams, the lock and the clock (`now` is `time.monotonic()`
seconds), and calls one method at a time. A message to a member goes through its `tell`; `None` ends
its stream.
"""

import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter

from dpipe.coordinator.base import name_ranks
from dpipe.coordinator.frame import PROTOCOL
from dpipe.coordinator.limits import (
    OPEN_BYTES,
    OPEN_GATHERS,
    REASON_CHARACTERS,
    WHOLE_BYTES,
    refuse_size,
)
from dpipe.wire.text import visible
from dpipe.wire.v1 import coordinator_pb2 as pb

Tell = Callable[[pb.FromCoordinator | None], None]

# For the cause behind a symptom: the stream of a killed process breaks within milliseconds of what
# its neighbours notice.
SYMPTOM_GRACE_S = 1.0
_ADDRESS = re.compile(r"[\w.:%\[\]-]{1,255}:\d{1,5}")
# Bounds how deep it is nested, too.
_CONFIGURATION = TypeAdapter(dict[str, Any])
_SECRET_BYTES = 32
_FIELDS_SHOWN = 8  # of configurations that differ
_CHARACTERS_SHOWN = 200  # of a name or a value in them


@dataclass(eq=False)
class Member:
    """A rank that has joined."""

    join: pb.Join
    peer: str  # where its connection comes from, as gRPC writes it
    tell: Tell
    heard_at: float
    uploaded: set[str] = field(default_factory=set)  # the kinds
    # Gathers that it has given its part of, and others have not; and the bytes of those parts.
    num_open: int = 0
    open_bytes: int = 0

    @cached_property
    def shared(self) -> dict[str, Any]:
        return _CONFIGURATION.validate_json(self.join.shared)

    @property
    def rank(self) -> int:
        return self.join.rank

    @property
    def address(self) -> str:
        return self.join.advertised or host_of(self.peer)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.address})"


def host_of(peer: str) -> str:
    """The host in gRPC's `ipv4:10.0.0.7:51234` or `ipv6:%5B::1%5D:51234`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0]


class Membership:
    def __init__(self, world_size: int, *, heartbeat_s: float, join_s: float, now: float) -> None:
        self.members: dict[int, Member] = {}
        self._world_size = world_size
        self._heartbeat_s = heartbeat_s
        self._join_s = join_s
        self._join_by = now + join_s
        self._ticked_at = now
        self._complete = False
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._over: str | None = None
        self._symptom: tuple[float, str] | None = None
        self._parts: dict[str, dict[int, bytes]] = {}
        self._left: set[int] = set()

    @property
    def over(self) -> bool:
        return self._over is not None

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined; some may have left since."""
        return self._complete

    def has_left(self, rank: int) -> bool:
        """Whether it is done here: its process may join the next run at this address."""
        return rank in self._left

    # Joining

    def join(self, join: pb.Join, peer: str, tell: Tell, now: float) -> Member | None:
        """Admit a rank, or tell it why not. One that is refused while others wait for it ends the
        run for all.
        """
        reason = self._over or self._objection(join)
        if reason is None:
            member = Member(join, peer, tell, now)
            self.members[join.rank] = member
            self._welcome_or_wait()
            return member
        # In this order: what is behind None is not sent any more.
        tell(_abort(reason))
        tell(None)
        if not self._complete:
            self.end(f"rank {join.rank} at {host_of(peer)} could not join: {reason}")
        return None

    def _objection(self, join: pb.Join) -> str | None:
        if join.protocol != PROTOCOL:
            return other_protocol(join.protocol)
        if join.world_size != self._world_size:
            return f"it is one of {join.world_size} ranks, the coordinator has {self._world_size}"
        if not 0 <= join.rank < self._world_size:
            return f"rank {join.rank} is not one of 0..{self._world_size - 1}"
        if self._complete or join.rank in self.members:
            first = self.members.get(join.rank)
            where = "" if first is None else f" from {host_of(first.peer)}"
            return (
                f"rank {join.rank} has already joined{where}; two processes were given the same "
                "rank"
            )
        if join.HasField("advertised") and not _ADDRESS.fullmatch(join.advertised):
            return f"its address {_cut(join.advertised)!r} is not host:port"
        if not _is_json_object(join.shared):
            return "its configuration is not a JSON object"
        return None

    def _welcome_or_wait(self) -> None:
        difference = self._difference()
        missing = self._absent(self.members)
        if difference:
            self.end(difference)
        elif missing:
            self._tell_all(pb.FromCoordinator(missing=pb.Missing(ranks=missing)))
        else:
            self._complete = True
            ranks = range(self._world_size)
            addresses = [
                pb.Address(advertised=advertised(self.members[rank].join)) for rank in ranks
            ]
            for member in self.members.values():
                secrets_of = [self.link_secret(member.rank, rank) for rank in ranks]
                welcome = pb.Welcome(addresses=addresses, link_secrets=secrets_of)
                member.tell(pb.FromCoordinator(welcome=welcome))

    def link_secret(self, rank: int, other: int) -> bytes:
        """The same for both, and for no other pair: who dials a rank proves with it who it is."""
        lower, higher = sorted((rank, other))
        return hmac.digest(self._secret, f"{lower}|{higher}".encode(), "sha256")

    def _difference(self) -> str | None:
        """How configurations differ from rank 0's, once rank 0 is here, whoever came first."""
        if 0 not in self.members:
            return None
        reference = self.members[0].shared
        lines = [
            _compare(member, reference)
            for member in self.members.values()
            if member.shared != reference
        ]
        return "\n".join(lines) or None

    def _absent(self, present: Iterable[int]) -> list[int]:
        return sorted(set(range(self._world_size)) - set(present))

    # Running

    def part(self, member: Member, part: pb.Part) -> None:
        """Raises `DecodeError` where the member gives a part twice, or holds too many open."""
        # By key, not by order: ranks are at several gathers at once.
        parts = self._parts.setdefault(part.key, {})
        if member.rank in parts:
            raise DecodeError(f"a second part of {part.key!r}")
        parts[member.rank] = part.payload
        _count_open(member, part.key, part.payload, +1)
        refuse_size(f"parts of {part.key!r}", sum(map(len, parts.values())), WHOLE_BYTES)
        if len(parts) < self._world_size:
            return
        del self._parts[part.key]
        for other in self.members.values():
            _count_open(other, part.key, parts[other.rank], -1)
        whole = pb.Whole(key=part.key, parts=[parts[rank] for rank in sorted(parts)])
        self._tell_all(pb.FromCoordinator(whole=whole))

    def ask(self, member: Member, key: str) -> None:
        missing = pb.Missing(key=key, ranks=self._absent(self._parts.get(key, {})))
        member.tell(pb.FromCoordinator(missing=missing))

    def leave(self, member: Member) -> None:
        if self.members.get(member.rank) is member:
            del self.members[member.rank]
            self._left.add(member.rank)
        member.tell(None)

    # Ending

    def failure(self, member: Member, failure: pb.Failure, now: float) -> None:
        """A cause ends the run at once, a symptom where no cause follows in `SYMPTOM_GRACE_S`."""
        reason = f"rank {member.rank} failed: {failure.reason}"
        if not failure.symptom:
            self.end(reason)
        elif self._symptom is None:
            self._symptom = (now + SYMPTOM_GRACE_S, reason)

    def broken(self, member: Member, why: str) -> None:
        """A member's stream has ended and it has not left."""
        if self.members.get(member.rank) is member:
            self.end(f"lost {member}: {why}")

    def put_out(self, member: Member, why: str) -> None:
        """A member broke the rules of `limits.py`, or sent no message at all: the run ends without
        it.
        """
        if self.members.get(member.rank) is member:
            self.end(f"{member} was put out: it sent what dpipe does not send ({why})")

    def tick(self, now: float) -> None:
        """End the run where a deadline has passed. Call it a few times a heartbeat, and more often
        than `SYMPTOM_GRACE_S`.
        """
        # A late tick: this process itself was stopped, and signs of life wait unread.
        if now - self._ticked_at > self._heartbeat_s / 2:
            for member in self.members.values():
                member.heard_at = now
        self._ticked_at = now
        silent = [
            f"lost {member}: no sign of life for {self._heartbeat_s:g} s"
            for member in self.members.values()
            if now - member.heard_at > self._heartbeat_s
        ]
        if silent:
            self.end("\n".join(silent))
        elif self._symptom and now >= self._symptom[0]:
            self.end(self._symptom[1])
        elif not self._complete and now >= self._join_by:
            missing = name_ranks(tuple(self._absent(self.members)))
            self.end(f"{missing} of {self._world_size} did not join within {self._join_s:g} s")

    def end(self, reason: str) -> None:
        """Tell all members, and all that join from here on. The first reason stays."""
        if self._over is None:
            self._over = reason
            self._tell_all(_abort(reason))
            self._tell_all(None)
            self.members.clear()

    def _tell_all(self, message: pb.FromCoordinator | None) -> None:
        for member in self.members.values():
            member.tell(message)


def _count_open(member: Member, key: str, payload: bytes, sign: int) -> None:
    member.num_open += sign
    member.open_bytes += sign * (len(key) + len(payload))
    if member.num_open > OPEN_GATHERS or member.open_bytes > OPEN_BYTES:
        raise DecodeError(
            f"parts of {member.num_open} gathers, {member.open_bytes} bytes, that others have not "
            f"given theirs of; the most is {OPEN_GATHERS} and {OPEN_BYTES}"
        )


def _abort(reason: str) -> pb.FromCoordinator:
    return pb.FromCoordinator(abort=pb.Abort(reason=reason[:REASON_CHARACTERS]))


def other_protocol(protocol: int) -> str:
    return (
        f"it speaks protocol {protocol}, the coordinator {PROTOCOL}; install one dpipe version "
        "everywhere"
    )


def advertised(join: pb.Join) -> str | None:
    return join.advertised if join.HasField("advertised") else None


def _is_json_object(text: str) -> bool:
    try:
        _CONFIGURATION.validate_json(text)
    except ValueError:
        return False
    return True


def _compare(member: Member, ours: dict[str, Any]) -> str:
    theirs = member.shared
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    parts = [
        f"{_cut(visible(name))} is {_show(theirs, name)}, on rank 0 {_show(ours, name)}"
        for name in names[:_FIELDS_SHOWN]
    ]
    if len(names) > _FIELDS_SHOWN:
        parts.append(f"and {len(names) - _FIELDS_SHOWN} more")
    return f"the configuration of {member} differs from rank 0's: {'; '.join(parts)}"


def _show(shared: dict[str, Any], name: str) -> str:
    if name not in shared:
        return "absent"
    return _cut(json.dumps(shared[name]))


def _cut(text: str) -> str:
    if len(text) > _CHARACTERS_SHOWN:
        return text[:_CHARACTERS_SHOWN] + "..."
    return text
