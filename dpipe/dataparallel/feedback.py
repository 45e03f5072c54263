"""What an exchange puts on the wire: numbers as a codec writes them, with or without error
feedback.

    send     e = gradient + residual        wire = encode(e)        residual = e - decode(wire)

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): what rounding took from this step's
gradient is added to the next one's, so that it is late and not lost. Without it the error of int8
adds up over a run. What is owed is in no checkpoint, whose cut need not be that of the run which
takes it up: a resumed run owes nothing at first, and its losses are near those of one that never
stopped, not the same.
"""

from typing import Protocol

import torch

from dpipe.wire.codec import Codec, codec
from dpipe.wire.format import FORMATS
from dpipe.wire.spec import TensorSpec

Key = tuple[object, ...]


class Wire(Protocol):
    """How numbers look between replicas. `key` says which numbers of the model they are, in which
    direction.
    """

    @property
    def lossy(self) -> bool: ...
    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor: ...
    def decode(self, wire: torch.Tensor, like: TensorSpec) -> torch.Tensor: ...
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What of this end's own is added to what came from others."""

    def wire_spec(self, like: TensorSpec) -> TensorSpec: ...


class PlainWire:
    def __init__(self, coder: Codec, *, lossy: bool) -> None:
        self._codec = coder
        self.lossy = lossy

    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor:
        return self._codec.encode(values)

    def decode(self, wire: torch.Tensor, like: TensorSpec) -> torch.Tensor:
        return self._codec.decode(wire, like)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As the others would get it; `values` itself where the wire loses nothing."""
        return self._codec.decode(self._codec.encode(values), TensorSpec.of(values))

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return self._codec.wire_spec(like)


class FeedbackWire(PlainWire):
    """Keeps a residual for each key: in all as many numbers as the row that is exchanged, in
    fp32.
    """

    def __init__(self, coder: Codec) -> None:
        super().__init__(coder, lossy=True)
        self._residuals: dict[Key, torch.Tensor] = {}

    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor:
        owed = self._residuals.get(key)
        exact = values if owed is None else values + owed
        wire = self._codec.encode(exact)
        residual = exact - self._codec.decode(wire, TensorSpec.of(exact))
        if (
            residual.sum().isfinite()
        ):  # else the step will be skipped, and what was owed before still is
            self._residuals[key] = residual
        return wire

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As it is: nothing is lost that would have to be made good."""
        return values


def wire(name: str) -> Wire:
    """The wire of format `name`; raises `ConfigError` on an unknown one."""
    form = FORMATS.named(name)
    if form.error_feedback:
        return FeedbackWire(codec(name))
    return PlainWire(codec(name), lossy=form.lossy)
