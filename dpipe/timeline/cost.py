"""What each stage takes, and what each hop carries."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self, assert_never

from dpipe.errors import ConfigError
from dpipe.schedule.action import COMPUTE, TIED, Action, Op
from dpipe.schedule.exchange import Role


@dataclass(frozen=True)
class Cost:
    """What each stage takes, one value a stage (microseconds), and what each hop carries, one value
    a hop (bytes). All is of one micro-batch or, with `num_slices`, of its first slice.

    Hop s is between stages s and s + 1. Raises `ConfigError` where the lengths do not fit each
    other.
    """

    forward_us: tuple[float, ...]  # of F
    backward_us: tuple[float, ...]  # of a whole B
    input_us: tuple[float, ...]  # of I, where a schedule splits B
    weight_us: tuple[float, ...]  # of W, the other half
    activation_bytes: tuple[int, ...]  # forward over each hop
    gradient_bytes: tuple[int, ...] = ()  # backward over each hop; default: as many
    update_us: tuple[float, ...] = ()  # of the optimizer's step; default: nothing
    vote_us: tuple[float, ...] = ()  # of a ballot's way through the coordinator; default: nothing
    python_us: tuple[float, ...] = ()  # ahead of each computation: Python's own; default: nothing
    between_us: tuple[float, ...] = ()  # of a rank's first stage: between two steps, data and log
    # Where a tensor-parallel group shares cores: what its exchanges in an F, and in a B or an I,
    # take of a core, on all its ranks together; default: nothing.
    exchange_forward_us: tuple[float, ...] = ()
    exchange_backward_us: tuple[float, ...] = ()
    exchanges: tuple[int, ...] = ()  # how many there are in either
    num_slices: int = 1  # of each sequence
    # What a slice takes more in F, and in a B or an I, for each one before it in its sequence,
    # whose keys its queries meet; default: nothing.
    later_forward_us: tuple[float, ...] = ()
    later_backward_us: tuple[float, ...] = ()
    reduce_bytes: tuple[int, ...] = ()  # of a stage's gradient between replicas; default: nothing
    gather_bytes: tuple[int, ...] = ()  # of what replicas get back; default: as many
    tied_bytes: int = 0  # of a tied weight's gradient between the first and the last stage
    frozen: int = 0  # stages in front of the first that learns, which get no gradient

    def __post_init__(self) -> None:
        no_time = (0.0,) * self.num_stages
        nothing = (0,) * self.num_stages
        self._default("gradient_bytes", self.activation_bytes)
        self._default("update_us", no_time)
        self._default("vote_us", no_time)
        self._default("python_us", no_time)
        self._default("between_us", no_time)
        self._default("exchange_forward_us", no_time)
        self._default("exchange_backward_us", no_time)
        self._default("exchanges", nothing)
        self._default("later_forward_us", no_time)
        self._default("later_backward_us", no_time)
        self._default("reduce_bytes", nothing)
        for name in (
            "backward_us",
            "input_us",
            "weight_us",
            "update_us",
            "vote_us",
            "python_us",
            "between_us",
            "exchange_forward_us",
            "exchange_backward_us",
            "exchanges",
            "later_forward_us",
            "later_backward_us",
        ):
            self._expect(name, self.num_stages)
        self._expect("reduce_bytes", self.num_stages)
        if self.gather_bytes:
            self._expect("gather_bytes", self.num_stages)
        for name in (
            "activation_bytes",
            "gradient_bytes",
        ):
            self._expect(name, self.num_stages - 1)

    def _default(self, name: str, values: tuple[float, ...]) -> None:
        if not getattr(self, name):
            object.__setattr__(self, name, values)  # the way into a frozen dataclass

    def _expect(self, name: str, length: int) -> None:
        if len(getattr(self, name)) != length:
            raise ConfigError(
                f"{name} must have {length} values for {self.num_stages} stages, got "
                f"{getattr(self, name)}"
            )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_us: float,
        backward_us: float,
        message_bytes: int,
        input_share: float = 0.5,
        update_us: float = 0.0,
    ) -> Self:
        """Every stage and every hop alike; `input_share` of the backward pass makes the input
        gradient.
        """
        return cls(
            forward_us=(forward_us,) * num_stages,
            backward_us=(backward_us,) * num_stages,
            input_us=(backward_us * input_share,) * num_stages,
            weight_us=(backward_us * (1 - input_share),) * num_stages,
            activation_bytes=(message_bytes,) * (num_stages - 1),
            update_us=(update_us,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward_us)

    def duration_us(self, action: Action) -> float:
        """How long `action` keeps its rank; moving bytes keeps nobody."""
        taken_us = self._taken_us.get(action.op)
        if taken_us is None:
            return 0.0
        python_us = self.python_us[action.stage] if action.op in COMPUTE else 0.0
        own_us = taken_us[action.stage]
        later_us = self._later_us(action)
        exchange_us = self.exchange_us(action)
        return python_us + own_us + later_us + exchange_us

    def _later_us(self, action: Action) -> float:
        if self.num_slices == 1 or action.microbatch is None:
            return 0.0
        # Of the same sequence; its queries meet the keys of each of them.
        num_before = action.microbatch % self.num_slices
        match action.op:
            case Op.F:
                return num_before * self.later_forward_us[action.stage]
            case Op.B | Op.I:
                return num_before * self.later_backward_us[action.stage]
            case _:
                return 0.0

    def exchange_us(self, action: Action) -> float:
        """What of that are exchanges in a tensor-parallel group, one thread at a time."""
        match action.op:
            case Op.F:
                return self.exchange_forward_us[action.stage]
            case Op.B | Op.I:
                return self.exchange_backward_us[action.stage]
            case _:
                return 0.0

    def num_bytes(self, action: Action) -> int:
        """What a send or a receive moves; nothing for any other action."""
        if action.op in TIED:
            return self.tied_bytes
        # Of both ends: a receive moves what its send does.
        moved = self._moved_bytes.get(action.op)
        return moved[action.stage] if moved else 0

    @cached_property
    def _taken_us(self) -> Mapping[Op, tuple[float, ...]]:
        """By op and stage."""
        return {
            Op.F: self.forward_us,
            Op.B: self.backward_us,
            Op.I: self.input_us,
            Op.W: self.weight_us,
            Op.VOTE: self.vote_us,
            Op.STEP: self.update_us,
        }

    @cached_property
    def _moved_bytes(self) -> Mapping[Op, tuple[int, ...]]:
        """By op and stage: hop s is behind stage s, and before the stage after it."""
        return {
            Op.SEND_F: self.activation_bytes,
            Op.RECV_F: (0, *self.activation_bytes),
            Op.SEND_B: (0, *self.gradient_bytes),
            Op.RECV_B: self.gradient_bytes,
        }

    def exchanged_bytes(self, stage: int, role: Role) -> int:
        """What all of a stage is on the wire, in one direction of its exchange."""
        match role:
            case Role.REDUCE:
                return self.reduce_bytes[stage]
            case Role.GATHER:
                return (self.gather_bytes or self.reduce_bytes)[stage]
        assert_never(role)
