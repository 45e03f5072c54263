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
    a hop (bytes).

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
    reduce_bytes: tuple[int, ...] = ()  # of a stage's gradient between replicas; default: nothing
    gather_bytes: tuple[int, ...] = ()  # of what replicas get back; default: as many
    tied_bytes: int = 0  # of a tied weight's gradient between the first and the last stage

    def __post_init__(self) -> None:
        no_time = (0.0,) * self.num_stages
        nothing = (0,) * self.num_stages
        self._default("gradient_bytes", self.activation_bytes)
        self._default("update_us", no_time)
        self._default("vote_us", no_time)
        self._default("python_us", no_time)
        self._default("between_us", no_time)
        self._default("reduce_bytes", nothing)
        for name in (
            "backward_us",
            "input_us",
            "weight_us",
            "update_us",
            "vote_us",
            "python_us",
            "between_us",
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

    def _default(
        self,
        name: str,
        values: tuple[float, ...],
    ) -> None:
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
        return python_us + taken_us[action.stage]

    def num_bytes(self, action: Action) -> int:
        """What a send or a receive moves; nothing for any other action."""
        if action.op in TIED:
            return self.tied_bytes
        # Of both ends: a receive moves what its send does.
        moved = self._moved_bytes.get(action.op)
        return moved[action.stage] if moved else 0

    @cached_property
    def _taken_us(
        self,
    ) -> Mapping[Op, tuple[float, ...]]:
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
    def _moved_bytes(
        self,
    ) -> Mapping[Op, tuple[int, ...]]:
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
