"""An `Exchange`: what the replicas of one stage send each other in a step, in order, as data.

A schedule is that of one pipeline; its REDUCE_GRAD and STEP stand for an exchange with the same
stage of the other replicas. The gradient of a stage is cut by owner (who adds up that share of it)
and each share into parts, so that parts follow each other through the exchange. Three replicas, one
part, each sending in this order (`draw()`):

    direct
        0 | reduce 0 of 1 -> 1   reduce 0 of 2 -> 2   gather 0 of 0 -> 1   gather 0 of 0 -> 2
        1 | reduce 0 of 2 -> 2   reduce 0 of 0 -> 0   gather 0 of 1 -> 2   gather 0 of 1 -> 0
        2 | reduce 0 of 0 -> 0   reduce 0 of 1 -> 1   gather 0 of 2 -> 0   gather 0 of 2 -> 1
    parameter_server
        0 | reduce 0 of 3 -> 3
        1 | reduce 0 of 3 -> 3
        2 | reduce 0 of 3 -> 3
        3 | gather 0 of 3 -> 0   gather 0 of 3 -> 1   gather 0 of 3 -> 2
    chain
        0 | gather 0 of 0 -> 1
        1 | reduce 0 of 0 -> 0   gather 0 of 0 -> 2
        2 | reduce 0 of 0 -> 1

An end is a replica, or the server, which comes after the last one. It sends in its order, each
message as soon as what it `requires()` has come: the one statement of dependence, for
`dataparallel` and the simulator alike.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial

from dpipe.errors import ScheduleError

AHEAD = 8  # parts that are on their way to their owners before the first of them comes back


class Role(StrEnum):
    REDUCE = "reduce"  # gradients, towards who adds them up
    GATHER = "gather"  # what was agreed on, back


@dataclass(frozen=True, slots=True)
class Message:
    """Part `part` of what `owner` adds up, from end `source` to end `target`."""

    role: Role
    part: int
    owner: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.role} {self.part} of {self.owner} -> {self.target}"


@dataclass(frozen=True)
class Exchange:
    """`programs[end]` is what each end sends, in order.

    `owners` are the ends that each add up an equal share. What is of a role in `after_step` waits
    for the optimizer's step: GATHER where an owner holds the optimizer's state of its share alone,
    both where replicas step by themselves and agree on parameters. With `barrier` nothing is
    gathered before an owner has all that it adds up: where the step needs a number of the whole
    gradient, its norm. All this begins as soon as the gradient of the stage is final, or, not
    `overlapped`, when the pipelines have run dry.
    """

    name: str
    num_replicas: int
    num_parts: int
    owners: tuple[int, ...]
    programs: tuple[tuple[Message, ...], ...]
    after_step: frozenset[Role] = frozenset()
    barrier: bool = False
    overlapped: bool = True
    stale: bool = False

    @property
    def has_server(self) -> bool:
        return len(self.programs) > self.num_replicas

    @cached_property
    def arrivals(self) -> tuple[tuple[Message, ...], ...]:
        """What comes to each end."""
        sent = [message for program in self.programs for message in program]
        return tuple(tuple(m for m in sent if m.target == end) for end in range(len(self.programs)))

    @cached_property
    def symmetric(self) -> bool:
        """Whether every replica does what replica 0 does, with all replicas counted on from
        itself.
        """
        return not self.has_server and all(
            program == tuple(self.rotated(message, replica) for message in self.programs[0])
            for replica, program in enumerate(self.programs)
        )

    def rotated(self, message: Message, by: int) -> Message:
        """The same message between replicas that lie `by` further on."""
        owner, source, target = (
            (end + by) % self.num_replicas
            for end in (message.owner, message.source, message.target)
        )
        return Message(message.role, message.part, owner, source, target)

    def requires(self, message: Message) -> tuple[Message, ...]:
        """What must have come to the source of `message` before it may be sent:

            REDUCE   the same part from the end before, which passes it on to be added to (chain)
            GATHER   the same part from those who contribute to it here, and from who has it whole
                     (chain)

        With a `barrier` an owner waits for every part; a `stale` server for that of who gets the
        answer alone. What the source itself contributes is not a message.
        """
        if self.barrier and message.role is Role.GATHER and message.source == message.owner:
            return self.arrivals[message.source]
        comes = self._by_part.get((message.source, message.owner, message.part), ())
        if self.stale and message.role is Role.GATHER:
            comes = [m for m in comes if m.source == message.target]
        return tuple(m for m in comes if message.role is Role.GATHER or m.role is Role.REDUCE)

    @cached_property
    def waits(self) -> Mapping[Message, frozenset[Message]]:
        """`requires` of every message."""
        return {
            message: frozenset(self.requires(message))
            for program in self.programs
            for message in program
        }

    @cached_property
    def _by_part(self) -> Mapping[tuple[int, int, int], list[Message]]:
        parts = defaultdict(list)
        for message in (message for arrivals in self.arrivals for message in arrivals):
            parts[message.target, message.owner, message.part].append(message)
        return parts

    def piece(self, message: Message, length: int) -> slice:
        """Which of `length` values, or bytes, `message` carries."""
        share = self.owners.index(message.owner) * self.num_parts + message.part
        whole = len(self.owners) * self.num_parts
        return slice(length * share // whole, length * (share + 1) // whole)

    def num_bytes(self, message: Message, stage_bytes: int) -> int:
        piece = self.piece(message, stage_bytes)
        return int(piece.stop - piece.start)


def direct(num_replicas: int, num_parts: int = 1, *, sharded: bool = False) -> Exchange:
    """Every replica owns a share: it gets the others' parts of it, and gives all of them the
    average.

    The bytes of a ring, 2 (R - 1) / R of a gradient out of each replica, after two delays in place
    of 2 (R - 1); and the owner can add in replica order, whereas around a ring the order differs
    from share to share. `sharded`: between the two the owner takes the optimizer's step, and what
    it gives are parameters (ZeRO, Rajbhandari et al. 2020).
    """
    _at_least(num_replicas, num_parts)
    programs = []
    for replica in range(num_replicas):
        # The next replica first, so that they do not all send to replica 0 at once.
        others = [(replica + hop) % num_replicas for hop in range(1, num_replicas)]
        reduces = [
            [Message(Role.REDUCE, part, other, replica, other) for other in others]
            for part in range(num_parts)
        ]
        gathers = [
            [Message(Role.GATHER, part, replica, replica, o) for o in others]
            for part in range(num_parts)
        ]
        programs.append(_interleaved(reduces, gathers, num_parts if sharded else AHEAD))
    name = "sharded" if sharded else "all-reduce"
    after = frozenset({Role.GATHER}) if sharded else frozenset()
    return Exchange(
        name, num_replicas, num_parts, tuple(range(num_replicas)), tuple(programs), after_step=after
    )


def local_sgd(num_replicas: int, num_parts: int = 1) -> Exchange:
    """Replicas have stepped by themselves, and exchange parameters as they would gradients."""
    return replace(direct(num_replicas, num_parts), name="local-sgd", after_step=frozenset(Role))


def silent(num_replicas: int) -> Exchange:
    """Nothing is exchanged: a step between two at which replicas agree."""
    return Exchange("silent", num_replicas, 1, tuple(range(num_replicas)), ((),) * num_replicas)


def parameter_server(
    num_replicas: int, num_parts: int = 1, *, barrier: bool = False, stale: bool = False
) -> Exchange:
    """A server adds up everything and steps; a part goes back as soon as it is final (Li et al.
    2014).

    `stale`: to each replica as soon as its own has come; the slowest is waited for some steps
    later.
    """
    _at_least(num_replicas, num_parts)
    server = num_replicas
    replicas = range(num_replicas)
    parts = range(num_parts)
    pushes = [
        tuple(Message(Role.REDUCE, part, server, replica, server) for part in parts)
        for replica in replicas
    ]
    pulls = tuple(
        Message(Role.GATHER, part, server, server, replica)
        for part in parts
        for replica in replicas
    )
    return Exchange(
        "parameter-server",
        num_replicas,
        num_parts,
        (server,),
        (*pushes, pulls),
        barrier=barrier,
        stale=stale,
    )


def chain(num_replicas: int, num_parts: int = 1) -> Exchange:
    """Replica 0 is the server: a reduce to it and then a broadcast, each passed on from replica to
    replica.

    The arrangement of the published data-parallel rows (central parameter server over NCCL's reduce
    and broadcast): nothing comes back before everything is reduced, and nothing is overlapped.
    """
    _at_least(num_replicas, num_parts)
    parts = range(num_parts)
    last = num_replicas - 1
    programs = []
    for replica in range(num_replicas):
        reduces = [
            Message(Role.REDUCE, part, 0, replica, replica - 1) for part in parts if replica > 0
        ]
        gathers = [
            Message(Role.GATHER, part, 0, replica, replica + 1) for part in parts if replica < last
        ]
        programs.append((*reduces, *gathers))
    return Exchange(
        "central", num_replicas, num_parts, (0,), tuple(programs), barrier=True, overlapped=False
    )


# By the name that an `Exchange` has in a trace's plan.json.
PATTERNS: Mapping[str, Callable[[int, int], Exchange]] = {
    "all-reduce": direct,
    "sharded": partial(direct, sharded=True),
    "local-sgd": local_sgd,
    "silent": lambda num_replicas, num_parts: silent(num_replicas),
    "parameter-server": parameter_server,
    "central": chain,
}


def exchange(
    name: str, num_replicas: int, num_parts: int = 1, *, barrier: bool = False, stale: bool = False
) -> Exchange:
    """The exchange called `name`; raises `ScheduleError` on an unknown one.

    `barrier` and `stale` are for a server: without one they are ignored.
    """
    if name not in PATTERNS:
        raise ScheduleError(f"no exchange is called {name!r}; choose one of {', '.join(PATTERNS)}")
    pattern = PATTERNS[name](num_replicas, num_parts)
    if pattern.has_server:
        return replace(pattern, barrier=barrier, stale=stale)
    return pattern


def draw(exchange: Exchange) -> str:
    """One line an end."""
    return "\n".join(
        f"{end} | {'   '.join(map(str, program))}" for end, program in enumerate(exchange.programs)
    )


def _interleaved(
    first: list[list[Message]], then: list[list[Message]], ahead: int
) -> tuple[Message, ...]:
    """Part by part; the first kind is `ahead` parts ahead of the other."""
    order: list[Message] = []
    for turn in range(len(first) + ahead):
        order += first[turn] if turn < len(first) else []
        order += then[turn - ahead] if 0 <= turn - ahead < len(then) else []
    return tuple(order)


def _at_least(num_replicas: int, num_parts: int) -> None:
    for what, value, least in (("num_replicas", num_replicas, 2), ("num_parts", num_parts, 1)):
        if value < least:
            raise ScheduleError(f"{what} must be at least {least} for an exchange, got {value}")
