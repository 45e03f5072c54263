import threading
import time
from contextlib import contextmanager

import pytest
import torch
from support.layered import ADAM, Layered, in_threads, mean_gradients, one_step

from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.single import Single
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.errors import PeerLost, RunAborted
from dpipe.streams import HostStreams
from dpipe.wire.collective import open_store

HOST = "127.0.0.1"


def alone(replicas: int) -> Layered:
    """One process that takes two steps with the mean gradient."""
    stage = Layered()
    single = Single({0: stage}, ADAM)
    for step in range(2):
        for parameter, gradient in zip(
            stage.parameters, mean_gradients(stage, step, replicas), strict=True
        ):
            parameter.grad = gradient
        one_step(single, stage, step)
    return stage


def run(replicas: int, wire: str = "none", dies: int | None = None) -> list[Layered | Exception]:
    """The stage of each replica after two steps over gloo; replica `dies` leaves before the
    second.
    """
    master = open_store(HOST, 0, 20, master=True)

    def replica_main(replica: int) -> Layered:
        group = TorchGroup(
            open_store(HOST, master.port, 20, master=False),
            replica,
            replicas,
            host=HOST,
            wire=wire,
            part_bytes=40,
            timeout_s=8,
        )
        stage = Layered()
        kind = AllReduce({0: stage}, ADAM, group)
        for step in range(2):
            if step == 1 and replica == dies:
                group.fail(SystemError("killed"))
                return stage
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        kind.close()
        return stage

    return in_threads(replicas, replica_main)


@pytest.mark.parametrize(("wire", "apart"), [("none", 1e-5), ("bf16", 0.02)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_group_steps_all_replicas_by_the_mean_gradient(
    replicas: int, wire: str, apart: float
) -> None:
    first, *others = (*run(replicas, wire), *run(replicas, wire))
    for other in others:
        assert all(
            torch.equal(a, b) for a, b in zip(first.parameters, other.parameters, strict=True)
        )
    for parameter, expected in zip(first.parameters, alone(replicas).parameters, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=apart)


def test_group_that_loses_a_replica_raises_and_stops() -> None:
    survivors = [result for replica, result in enumerate(run(3, dies=1)) if replica != 1]
    assert all(isinstance(error, PeerLost) for error in survivors)
    assert "the 3 replicas of stage 0" in str(survivors[0])


class Drawing(HostStreams):
    """Records the stream of the exchange and what it waits for."""

    def __init__(self, late: bool) -> None:
        self.log: list[str] = []
        self.stream, self._late = "compute", late

    def mark(self) -> str:
        self.log.append(f"{self.stream}: mark")
        return f"what was on {self.stream}"

    def wait(self, mark: str) -> None:
        self.log.append(f"{self.stream}: wait for {mark}")

    def block(self, mark: str, timeout_s: float) -> None:
        self.log.append(f"host: wait for {mark}")
        if self._late:
            raise TimeoutError("the device has not reached an event within 8 s")

    @contextmanager
    def receiving(self):
        self.stream = "own"
        yield
        self.stream = "compute"


def averaged_alone(streams: Drawing) -> None:
    group = TorchGroup(
        open_store(HOST, 0, 8, master=True), 0, 1, host=HOST, timeout_s=8, streams=streams
    )
    group.average(torch.ones(4), 0, lambda piece: streams.log.append(f"{streams.stream}: ready"))


def test_exchange_waits_for_its_gradients_and_compute_does_not_wait_for_the_exchange() -> None:
    streams = Drawing(late=False)
    averaged_alone(streams)
    assert streams.log == [
        "compute: mark",
        "own: wait for what was on compute",
        "own: ready",
        "own: mark",
        "host: wait for what was on own",
    ]


def test_exchange_that_does_not_finish_on_the_device_loses_the_group() -> None:
    with pytest.raises(PeerLost, match="stage 0: the device has not reached"):
        averaged_alone(Drawing(late=True))


def test_failure_elsewhere_ends_an_exchange() -> None:
    """The other replica is alive, and does not take part: it was stopped, or is cut off."""
    over = threading.Event()
    master = open_store(HOST, 0, 20, master=True)

    def replica_main(replica: int) -> None:
        store = open_store(HOST, master.port, 20, master=False)
        group = TorchGroup(store, replica, 2, host=HOST, timeout_s=20)
        if replica == 1:
            over.wait(20)
            return
        threading.Timer(0.1, group.fail, [RunAborted("rank 7 failed")]).start()
        began_at = time.monotonic()
        with pytest.raises(RunAborted, match="rank 7 failed"):
            group.average(torch.ones(4), 0, lambda piece: None)
        over.set()
        assert time.monotonic() - began_at < 10, "not after timeout_s"

    for result in in_threads(2, replica_main):
        if isinstance(result, Exception):
            raise result
