"""Which streams the executor uses; on a GPU it never waits for the device before STEP."""

from contextlib import contextmanager

import pytest
import torch

from dpipe.data.batch import Batch
from dpipe.dataparallel.single import Single
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage
from dpipe.streams import CudaStreams, HostStreams
from dpipe.transport.local import LocalHub
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Moved

NUMBER = TensorSpec((1,), torch.float32)


class Drawing(HostStreams):
    """Records what is queued on which stream; marks are named after what precedes them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = "compute"

    def add(self, what: str) -> None:
        self.log.append(f"{self.stream:8}{what}")

    def mark(self) -> str:
        return next(
            (line.split()[-1] for line in reversed(self.log) if line.startswith("compute")), "start"
        )

    def ns(self, mark: str) -> int:
        return 0

    @contextmanager
    def sending(self, after, tensors):
        self.stream = "send"
        self.add(f"wait {after}")
        yield
        self.stream = "compute"


class Forward:
    held = 0

    def __init__(self, streams: Drawing) -> None:
        self._streams = streams

    def forward(self, m, inputs, targets=None):
        self._streams.add(f"1F{m}")
        return inputs

    def backward(self, m, grads):
        self._streams.add(f"1B{m}")
        return grads

    def complete(self):
        pass


class Late:
    """A transfer that is usable on the stream at once, and on the host when it is settled."""

    moved = Moved(0, 0, 0)

    def __init__(self, streams: Drawing, tag: str, tensor: torch.Tensor | None = None) -> None:
        self._streams, self._tag, self._tensor = streams, tag, tensor

    def wait(self):
        self._streams.add(f"wait {self._tag}")
        return self._tensor

    def settle(self) -> None:
        self._streams.add(f"settle {self._tag}")

    def done(self) -> bool:
        return False


class Wires:
    rank = 1

    def __init__(self, streams: Drawing) -> None:
        self._streams = streams

    def send(self, tensor, peer, tag):
        self._streams.add(tag)
        return Late(self._streams, tag)

    def recv(self, like, peer, tag):
        return Late(self._streams, tag, torch.zeros(1))

    def fail(self, error) -> None:
        pass


def test_host_runs_ahead_until_the_vote_and_settles_there() -> None:
    """The middle of three stages: sends wait for what they send alone, compute for what arrives,
    the host for nothing before it is about to change parameters.
    """
    streams = Drawing()
    parts = Parts(
        1,
        {1: Forward(streams)},
        Wires(streams),
        HopCodecs(HopFormats.alike("none", 9)),
        [(NUMBER,)] * 2,
        Single(),
        Recorder(1),
        streams=streams,
    )
    Executor(parts).run(lower(generate("1f1b", 3, 2)), Batch())
    assert "\n".join(streams.log) == (
        """\
compute wait 0SEND_F0
compute 1F0
send    wait 1F0
send    1SEND_F0
compute wait 0SEND_F1
compute 1F1
send    wait 1F1
send    1SEND_F1
compute wait 2SEND_B0
compute 1B0
send    wait 1B0
send    1SEND_B0
compute wait 2SEND_B1
compute 1B1
send    wait 1B1
send    1SEND_B1
compute settle 0SEND_F0
compute settle 0SEND_F1
compute settle 2SEND_B0
compute settle 2SEND_B1
compute settle 1SEND_F0
compute settle 1SEND_F1
compute settle 1SEND_B0
compute settle 1SEND_B1"""
    )


class WatchedStage(Stage):
    """Ends torch's watch where the host may wait: behind the last COMPLETE the loss is read."""

    def complete(self) -> None:
        super().complete()
        if self.index == 1:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("wire", ["none", "bf16"])
def test_nothing_synchronises_the_device_before_the_gradients_are_complete(wire: str) -> None:
    """A training step of a GPT, all but its end under torch's own watch; what is sent goes through
    host memory.
    """
    streams = CudaStreams(torch.device("cuda"))
    model = gpt(
        vocab_size=64, num_layers=2, width=64, num_heads=2, context=32, dropout=0.0, tied=False
    )
    layers = [materialise(model, index, 0, streams.device) for index in range(4)]
    stages = {
        s: WatchedStage(
            s,
            {i: layers[i] for i in (2 * s, 2 * s + 1)},
            num_microbatches=2,
            loss=model.loss if s else None,
            precision="bf16",
            device=streams.device,
        )
        for s in (0, 1)
    }
    boundary = (TensorSpec((2, 32, 64), torch.float32),)
    hub = LocalHub(1, streams=streams)
    plan = lower(generate("gpipe", 2, 2, stages_per_rank=2))
    parts = Parts(
        0,
        stages,
        hub.transport(0),
        HopCodecs(HopFormats.alike(wire, 9)),
        (boundary,),
        Single(),
        Recorder(0, streams),
        streams=streams,
    )
    tokens = torch.randint(64, (2, 32))
    batch = Batch([(tokens,)] * 2, [tokens] * 2)
    for stage in stages.values():
        stage.begin_step(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        Executor(parts).run(plan, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
