"""The optimizers, each declared once. No torch.

Configuration, memory and data parallelism read an optimizer's properties; none of them asks for one
by name.

              state, bytes a value   a step looks at
    adamw     8                      each value by itself
    sgd       4                      each value by itself
    lion      4                      each value by itself
    adamw_8bit  2                    256 values together
    adafactor all but none           a whole matrix
    muon      4, 8 of the ends       a whole matrix
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from dpipe.choices import Choices
from dpipe.errors import ConfigError


@dataclass(frozen=True)
class OptimizerKind:
    """What the rest of dpipe needs to know of an optimizer, without building one.

    `builder` is called with an `OptimizerSettings`, and returns a `rule.UpdateRule`.
    """

    name: str
    builder: str  # "package.module:function", imported when a rank is built
    # bytes of state for each value of a parameter in fp32
    state_bytes: float
    # working memory of a step, in fp32 copies of the parameter that it is at
    step_copies: float
    # what a step looks at together: each value, a whole parameter, or parameters of all stages,
    # which no pipeline can step
    couples: Literal["nothing", "parameter", "stages"] = "nothing"
    # of the first and the last layer, where they step by another rule
    end_state_bytes: float | None = None
    # whether a parameter server, which has a step of its own, takes the same one
    on_server: bool = False
    library: str | None = None  # that it needs besides torch
    extra: str = ""  # of dpipe, that installs it

    def state_of(self, num_bytes: int, *, is_end: bool = False) -> int:
        """Bytes of state for `num_bytes` of parameters, counted in fp32."""
        a_value = self.state_bytes
        if is_end and self.end_state_bytes is not None:
            a_value = self.end_state_bytes
        return round(num_bytes / 4 * a_value)


@dataclass(frozen=True)
class OptimizerSettings:
    """How one run steps. `last_layer` is the number of the model's last."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    name: str = "adamw"
    last_layer: int | None = None

    @property
    def kind(self) -> OptimizerKind:
        return OPTIMIZERS.named(self.name)

    def is_end(self, layer: int) -> bool:
        """Whether a layer has the embedding or the head."""
        return layer in (0, self.last_layer)


OPTIMIZERS = Choices[OptimizerKind](
    "train.optimizer",
    OptimizerKind(
        "adamw",
        builder="dpipe.optimizers.adamw:build",
        state_bytes=8,
        step_copies=2,
        on_server=True,
    ),
    OptimizerKind(
        "adamw_8bit",
        builder="dpipe.optimizers.eight_bits:build",
        # two codes, and a scale of 4 bytes for 256 of each
        state_bytes=2 + 2 * 4 / 256,
        # both moments in fp32, what the step makes, and the codes' indices of 8 bytes
        step_copies=7,
        couples="parameter",
        library="torchao",
        extra="quantised",
    ),
    OptimizerKind(
        "sgd",
        builder="dpipe.optimizers.rules:sgd_rule",
        state_bytes=4,
        step_copies=1,
    ),
    OptimizerKind(
        "lion",
        builder="dpipe.optimizers.rules:lion_rule",
        state_bytes=4,
        step_copies=1,
    ),
    OptimizerKind(
        "adafactor",
        builder="dpipe.optimizers.rules:adafactor_rule",
        # a value for each row and each column of a matrix
        state_bytes=0,
        step_copies=1,
        couples="parameter",
    ),
    OptimizerKind(
        "muon",
        builder="dpipe.optimizers.rules:muon_rule",
        state_bytes=4,
        end_state_bytes=8,
        step_copies=3,
        couples="parameter",
    ),
)


def names_where(is_meant: Callable[[OptimizerKind], bool]) -> str:
    """The optimizers that `is_meant` is true of, as a message lists them."""
    *first, last = [f'"{kind.name}"' for kind in OPTIMIZERS.values() if is_meant(kind)]
    return f"{', '.join(first)} or {last}" if first else last


def check_library(name: str) -> None:
    """Raises `ConfigError` where the library of an optimizer is not installed. It is not imported,
    which takes a second.
    """
    kind = OPTIMIZERS[name]
    if kind.library is not None and find_spec(kind.library) is None:
        raise missing_library(kind)


def missing_library(kind: OptimizerKind) -> ConfigError:
    return ConfigError(
        f'train.optimizer "{kind.name}" needs {kind.library}: pip install '
        f"'dpipe[{kind.extra}]', or take another optimizer"
    )
