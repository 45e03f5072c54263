"""What an exchange puts on the wire: values as a codec encodes them, with or without error
feedback.

    send     e = gradient + residual        wire = encode(e)        residual = e - decode(wire)

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): the rounding error of this step's
gradient is added to the next one's, so that it is late and not lost. Without it the error of int8
adds up over a run. Residuals are in no checkpoint, because another run may be cut otherwise: a
resumed run begins without them, and its losses are close to those of one that never stopped, not
the same.
"""

from typing import Protocol

import torch

from dpipe.wire.codec import Codec, codec
from dpipe.wire.format import FORMATS
from dpipe.wire.spec import TensorSpec

Key = tuple[object, ...]


class Wire(Protocol):
    """How values look between replicas. `key` says which values of the model they are, in which
    direction.
    """

    @property
    def lossy(self) -> bool: ...
    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor: ...
    def decode(self, wire: torch.Tensor, like: TensorSpec) -> torch.Tensor: ...
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """This end's own share, as it is added to those that came from others."""

    def wire_spec(self, like: TensorSpec) -> TensorSpec: ...


class PlainWire:
    def __init__(self, coder: Codec, *, lossy: bool) -> None:
        self.lossy = lossy
        self._codec = coder

    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor:
        return self._codec.encode(values)

    def decode(self, wire: torch.Tensor, like: TensorSpec) -> torch.Tensor:
        return self._codec.decode(wire, like)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As the others would get it; `values` itself where the wire loses nothing."""
        wire = self._codec.encode(values)
        return self._codec.decode(wire, TensorSpec.of(values))

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return self._codec.wire_spec(like)


class FeedbackWire(PlainWire):
    """Keeps a residual for each key: in all as many values as are exchanged, in fp32."""

    def __init__(self, coder: Codec) -> None:
        super().__init__(coder, lossy=True)
        self._residuals: dict[Key, torch.Tensor] = {}

    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor:
        exact = values
        if key in self._residuals:
            exact = values + self._residuals[key]
        wire = self._codec.encode(exact)
        # Of what the others decode: the same code at both ends gives the same values.
        arrives = self._codec.decode(wire, TensorSpec.of(exact))
        residual = exact - arrives
        # Otherwise the step will be skipped, and the residual of the step before still holds.
        if residual.sum().isfinite():
            self._residuals[key] = residual
        return wire

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As it is: what is not rounded needs no feedback."""
        return values


def wire(name: str) -> Wire:
    """The wire of format `name`; raises `ConfigError` on an unknown one."""
    form = FORMATS.named(name)
    if form.error_feedback:
        return FeedbackWire(codec(name))
    return PlainWire(codec(name), lossy=form.lossy)
