"""What the replicas of one stage send each other in a step, and in which order: an `Exchange`, as
data.

A schedule is that of one pipeline; its REDUCE_GRAD and STEP stand for an exchange with the same
stage of the other replicas. The gradient of a stage is cut into shares, each averaged by one owner,
and each share into parts, so that parts follow each other through the exchange. Three replicas, one
part; each end sends in this order, "reduce 0 of 2 -> 1" being part 0 of owner 2's share (`draw()`):

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

To add an exchange: a function here that returns one, and its name in `PATTERNS`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial

from dpipe.errors import ScheduleError

AHEAD = 8  # parts that are on their way to their owners before the first of them comes back


class Role(StrEnum):
    REDUCE = "reduce"  # gradients, to the owner
    GATHER = "gather"  # their mean, or parameters, from the owner


@dataclass(frozen=True, slots=True)
class Message:
    """Part `part` of the share of `owner`, from end `source` to end `target`."""

    role: Role
    part: int
    owner: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.role} {self.part} of {self.owner} -> {self.target}"


@dataclass(frozen=True)
class Exchange:
    """The messages of one stage's exchange."""

    name: str  # in `PATTERNS`
    num_replicas: int  # ends of the exchange, without the server
    num_parts: int  # that each owner's share is cut into
    owners: tuple[int, ...]  # the ends that each average an equal share
    programs: tuple[tuple[Message, ...], ...]  # by end, what it sends, in order
    # messages of these roles wait for the optimizer's step: GATHER where an owner alone has the
    # optimizer's state of its share, both where replicas step by themselves
    after_step: frozenset[Role] = frozenset()
    # an owner gathers nothing before its share is complete: the step needs the gradient's norm
    barrier: bool = False
    # begins as soon as the gradient of the stage is final, not when the pipelines have run dry
    overlapped: bool = True
    stale: bool = False  # the server answers each replica as soon as its own part has come

    @property
    def has_server(self) -> bool:
        return len(self.programs) > self.num_replicas

    @cached_property
    def arrivals(self) -> tuple[tuple[Message, ...], ...]:
        """By end, what it receives."""
        arrivals: list[list[Message]] = [[] for _ in self.programs]
        for program in self.programs:
            for message in program:
                arrivals[message.target].append(message)
        return tuple(map(tuple, arrivals))

    @cached_property
    def symmetric(self) -> bool:
        """Whether every replica does what replica 0 does, if it counts the replicas from
        itself.
        """
        if self.has_server:
            return False
        for replica, program in enumerate(self.programs):
            expected = [self.rotated(message, replica) for message in self.programs[0]]
            if list(program) != expected:
                return False
        return True

    def rotated(self, message: Message, by: int) -> Message:
        """The same message between replicas that lie `by` further on."""
        owner = (message.owner + by) % self.num_replicas
        source = (message.source + by) % self.num_replicas
        target = (message.target + by) % self.num_replicas
        return Message(message.role, message.part, owner, source, target)

    def requires(self, message: Message) -> tuple[Message, ...]:
        """What must have come to the source of `message` before it may be sent:

            REDUCE   the same part, from an end that passes it on (chain)
            GATHER   the same part, from all that contribute to it, or from the end that has it
                     whole (chain)

        With a `barrier` an owner waits for every part. A `stale` server waits for that of the
        receiver alone. What the source itself contributes is not a message.
        """
        part = (message.source, message.owner, message.part)
        arrivals = self._by_part.get(part, [])
        if message.role is Role.REDUCE:
            return tuple(m for m in arrivals if m.role is Role.REDUCE)
        if self.barrier and message.source == message.owner:
            return self.arrivals[message.source]
        if self.stale:
            return tuple(m for m in arrivals if m.source == message.target)
        return tuple(arrivals)

    @cached_property
    def waits(self) -> Mapping[Message, frozenset[Message]]:
        """`requires` of every message; one set for all that wait for the same."""
        waits = {}
        known: dict[tuple[object, ...], frozenset[Message]] = {}
        for program in self.programs:
            for message in program:
                receiver = message.target if self.stale else None
                same = (message.role, message.source, message.owner, message.part, receiver)
                if same not in known:
                    known[same] = frozenset(self.requires(message))
                waits[message] = known[same]
        return waits

    @cached_property
    def _by_part(self) -> Mapping[tuple[int, int, int], list[Message]]:
        """What comes, by target, owner and part."""
        parts = defaultdict(list)
        for arrivals in self.arrivals:
            for message in arrivals:
                parts[message.target, message.owner, message.part].append(message)
        return parts

    def piece(self, message: Message, length: int) -> slice:
        """Which of `length` values, or bytes, `message` carries."""
        # An owner's parts lie side by side: together they are its share.
        index = self.owners.index(message.owner) * self.num_parts + message.part
        count = len(self.owners) * self.num_parts
        start = length * index // count
        stop = length * (index + 1) // count
        return slice(start, stop)

    def num_bytes(self, message: Message, stage_bytes: int) -> int:
        piece = self.piece(message, stage_bytes)
        return int(piece.stop - piece.start)


def direct(
    num_replicas: int,
    num_parts: int = 1,
    *,
    sharded: bool = False,
) -> Exchange:
    """Every replica owns a share: it receives the others' parts of it, and sends all of them the
    mean.

    The bytes of a ring, 2 (R - 1) / R of a gradient out of each replica, after two delays in place
    of 2 (R - 1). The owner can add in replica order; around a ring the order differs from share to
    share. With `sharded` the owner takes the optimizer's step in between, and what it sends are
    parameters (ZeRO, Rajbhandari et al. 2020).
    """
    _at_least(num_replicas, num_parts)
    programs = []
    for replica in range(num_replicas):
        # The next replica first, so that they do not all send to replica 0 at once.
        others = [(replica + hop) % num_replicas for hop in range(1, num_replicas)]
        reduces = []
        gathers = []
        for part in range(num_parts):
            to_owners = []
            to_others = []
            for other in others:
                to_owners.append(Message(Role.REDUCE, part, other, replica, other))
                to_others.append(Message(Role.GATHER, part, replica, replica, other))
            reduces.append(to_owners)
            gathers.append(to_others)
        # Sharded, the optimizer's step lies between the two: nothing is gathered before it.
        ahead = num_parts if sharded else AHEAD
        programs.append(_interleaved(reduces, gathers, ahead))
    return Exchange(
        "sharded" if sharded else "all-reduce",
        num_replicas,
        num_parts,
        tuple(range(num_replicas)),
        tuple(programs),
        after_step=frozenset({Role.GATHER}) if sharded else frozenset(),
    )


def local_sgd(num_replicas: int, num_parts: int = 1) -> Exchange:
    """Replicas have stepped by themselves, and average parameters as they would gradients."""
    pattern = direct(num_replicas, num_parts)
    return replace(pattern, name="local-sgd", after_step=frozenset(Role))


def silent(num_replicas: int) -> Exchange:
    """Nothing is exchanged: a step between two exchanges of local SGD."""
    owners = tuple(range(num_replicas))
    nothing: tuple[Message, ...] = ()
    return Exchange("silent", num_replicas, 1, owners, (nothing,) * num_replicas)


def parameter_server(
    num_replicas: int,
    num_parts: int = 1,
    *,
    barrier: bool = False,
    stale: bool = False,
) -> Exchange:
    """A server averages everything and steps; a part goes back as soon as it is final (Li et al.
    2014).

    With `stale` it goes to each replica as soon as that replica's own has come; the slowest is
    waited for some steps later.
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

    This is what the published data-parallel rows ran (a central parameter server over NCCL's reduce
    and broadcast): nothing comes back before everything is reduced, and nothing is overlapped.
    """
    _at_least(num_replicas, num_parts)
    parts = range(num_parts)
    last = num_replicas - 1
    programs = []
    for replica in range(num_replicas):
        reduces = []
        gathers = []
        for part in parts:
            if replica > 0:
                reduces.append(Message(Role.REDUCE, part, 0, replica, replica - 1))
            if replica < last:
                gathers.append(Message(Role.GATHER, part, 0, replica, replica + 1))
        programs.append((*reduces, *gathers))
    return Exchange(
        "central",
        num_replicas,
        num_parts,
        (0,),
        tuple(programs),
        barrier=True,
        overlapped=False,
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
    name: str,
    num_replicas: int,
    num_parts: int = 1,
    *,
    barrier: bool = False,
    stale: bool = False,
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
    lines = []
    for end, program in enumerate(exchange.programs):
        messages = "   ".join(map(str, program))
        lines.append(f"{end} | {messages}")
    return "\n".join(lines)


def _interleaved(
    first: list[list[Message]],
    then: list[list[Message]],
    ahead: int,
) -> tuple[Message, ...]:
    """The messages part by part; those of `first` are `ahead` parts ahead of `then`."""
    order: list[Message] = []
    for turn in range(len(first) + ahead):
        if turn < len(first):
            order += first[turn]
        if 0 <= turn - ahead < len(then):
            order += then[turn - ahead]
    return tuple(order)


def _at_least(num_replicas: int, num_parts: int) -> None:
    bounds = (
        ("num_replicas", num_replicas, 2),
        ("num_parts", num_parts, 1),
    )
    for what, value, least in bounds:
        if value < least:
            raise ScheduleError(f"{what} must be at least {least} for an exchange, got {value}")
