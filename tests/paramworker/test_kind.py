"""The error feedback of a worker that pushes to a parameter server."""

import threading

import torch
from support.layered import Layered, in_threads

from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import trained
from dpipe.paramworker.kind import _OutgoingGradient, flat_spec
from dpipe.wire.codec import codec
from dpipe.wire.feedback import FeedbackWire, Key


class Slow(FeedbackWire):
    """Blocks the encoding of the first chunk until another chunk is encoded, or a timeout."""

    def __init__(self) -> None:
        super().__init__(codec("int8"))
        self._other_came = threading.Event()
        self.num_encoded = 0

    def encode(self, values: torch.Tensor, key: Key) -> torch.Tensor:
        self.num_encoded += 1
        if self.num_encoded > 1:
            self._other_came.set()
        self._other_came.wait(0.3)
        return super().encode(values, key)


def test_chunk_that_a_broken_push_still_encodes_is_not_encoded_again() -> None:
    """gRPC's thread of the broken push still runs, and the error feedback would be added twice."""
    stage, wire = Layered(), Slow()
    stage.set_gradients(0, 0)
    spec = flat_spec(stage, 1000, ())
    pushed = _OutgoingGradient(
        0, spec, FlatParameters(trained(stage)), wire, torch.empty(spec.length), 1.0
    )
    first, second = in_threads(2, lambda thread: pushed.encode(0))
    assert wire.num_encoded == 1
    assert first is second
