"""The kinds of data parallelism, each declared once. No torch.

Configuration, forecast, memory and composition read a kind's properties; none of them asks for one
by name.

                      replicas send             late by      the optimizer's state is
    none              nothing: there is one     -            on its ranks
    all-reduce        gradients                 delay        on every replica
    sharded           gradients, parameters     delay        1 / R on every replica
    parameter-server  gradients, to a server    staleness    on the server
    local-sgd         parameters, now and then  overlap      on every replica
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dpipe.choices import Choices


@dataclass(frozen=True)
class HeldVectors:
    """Memory beside parameters, gradients and the optimizer's state, in vectors: a stage's
    parameters in fp32 each.
    """

    working: int  # in host memory, unless torch.distributed exchanges them
    # with data_parallel.delay, besides one more of the above; where the parameters are
    delayed: int = 0
    delayed_shards: int = 0  # the same, of 1 / R of a vector each
    # with data_parallel.reject, this replica's gradient beside the mean; where the parameters are,
    # unless the vectors above are there
    own_gradient: int = 0
    pieces: bool = True  # whether each piece that other replicas send has a place of its own


@dataclass(frozen=True)
class Kind:
    """What the rest of dpipe needs to know of a kind, without building one.

    `builder` is called with a `dataparallel.setup.ReplicaSetup`, and where there is a server also
    with a `paramworker.client.ServerAccess` by stage. It returns a `base.DataParallel`.
    """

    name: str
    builder: str  # "package.module:function", imported when a rank is built
    # what replicas send each other: a name in `schedule.exchange.PATTERNS`; None: nothing
    pattern: str | None
    held: HeldVectors
    # the key of [data_parallel] by which what is exchanged may be used later; None: never
    late_by: Literal["delay", "overlap", "staleness"] | None
    late_pattern: str | None = None  # what is sent with `late_by`, where that differs
    # whether replicas talk to a server instead of each other; it also has the optimizer
    has_server: bool = False
    # whether each replica takes data_parallel.inner_steps by itself between two exchanges
    has_inner_steps: bool = False
    # whether each replica has all of the optimizer's state (`whole_state` of `base.py`), undelayed
    same_state: bool = False
    shards_optimizer: bool = False  # whether each replica holds 1 / R of the optimizer's state
    rounds_answer: bool = True  # whether data_parallel.wire rounds what comes back too
    # whether data_parallel.group "torch" can take the place of dpipe's own exchange
    torch_group: bool = False
    # whether data_parallel.reject can leave a replica out of the mean: `leave_out` of `base.py`
    leaves_out: bool = False

    @property
    def synchronous(self) -> bool:
        """Whether replicas step by one mean gradient, which they exchange among themselves."""
        return self.pattern is not None and not self.has_server and not self.has_inner_steps


KINDS = Choices[Kind](
    "data_parallel.kind",
    Kind(
        "none",
        builder="dpipe.dataparallel.single:build",
        pattern=None,
        held=HeldVectors(0, pieces=False),
        # with one replica the key has no effect
        late_by="delay",
    ),
    Kind(
        "all-reduce",
        builder="dpipe.dataparallel.allreduce:build",
        pattern="all-reduce",
        # delayed: what is agreed, and a gradient
        held=HeldVectors(1, delayed=2, own_gradient=1),
        late_by="delay",
        torch_group=True,
        leaves_out=True,
        same_state=True,
    ),
    Kind(
        "sharded",
        builder="dpipe.dataparallel.sharded:build",
        pattern="sharded",
        # one vector for gradients and parameters in turns; delayed: a gradient, and two shards
        held=HeldVectors(1, delayed=1, delayed_shards=2),
        late_by="delay",
        shards_optimizer=True,
        rounds_answer=False,  # what comes back are parameters, in which rounding would add up
        leaves_out=True,
    ),
    Kind(
        "parameter-server",
        builder="dpipe.paramworker.kind:build",
        pattern="parameter-server",
        # what came, and a gradient; each step of staleness is a gradient more
        held=HeldVectors(2, pieces=False),
        late_by="staleness",
        has_server=True,
    ),
    Kind(
        "local-sgd",
        builder="dpipe.dataparallel.local_sgd:build",
        pattern="local-sgd",
        # overlapped, parameters do not wait for a step's end any more
        late_pattern="all-reduce",
        # anchor, momentum, base, difference
        held=HeldVectors(4),
        late_by="overlap",
        has_inner_steps=True,
    ),
)


def names_where(is_meant: Callable[[Kind], bool]) -> str:
    """The kinds that `is_meant` is true of, as a message lists them: `"sharded" or "local-sgd"`."""
    *first, last = [f'"{kind.name}"' for kind in KINDS.values() if is_meant(kind)]
    return f"{', '.join(first)} or {last}" if first else last
