"""The promises of every kind that steps by the mean gradient: with any number of replicas, any
wire, delayed or not.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.layered import (
    ADAM,
    RATE,
    Layered,
    Make,
    mean_gradients,
    one_step,
    train,
    with_replicas,
)

from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.base import DataParallel, Report
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.paramserver.server import ParameterServer
from dpipe.paramserver.spec import StepRule
from dpipe.paramworker.client import ServerAccess
from dpipe.paramworker.kind import ParameterServerWorker
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links

RUNS = itertools.count()
PART_BYTES = 40  # a few parts in such a small vector
WHOLE_BYTES = 2 * 4 * (5 * 7 + 3 + 11 * 2)  # of the optimizer's state of a stage
DELAYABLE = ("all-reduce", "sharded")
KINDS = (*DELAYABLE, "parameter-server")
PORT: list[int] = []


@pytest.fixture(autouse=True, scope="module")
def _server() -> Iterator[None]:
    """One server for all tests of this file: each run takes the stage over from the previous
    one.
    """
    server = ParameterServer()
    PORT.append(server.port)
    yield
    server.close()
    PORT.clear()


def of_kind(
    name: str, replicas: int, wire_name: str = "none", lag: int = 0, uncounted: tuple[str, ...] = ()
) -> Make:
    calls = itertools.count(next(RUNS) * 1000 * replicas)

    def make(stage: Layered, links: Links, replica: int) -> DataParallel:
        def exchange(wire_name: str) -> DirectExchange:
            return DirectExchange(
                links, replica, range(replicas), wire(wire_name), part_bytes=PART_BYTES
            )

        if name == "parameter-server":
            worker = ServerAccess(
                f"127.0.0.1:{PORT[0]}",
                f"{next(calls) // replicas}",
                replica,
                replica,
                connections=2,
            )
            rule = StepRule(tuple(range(replicas)), ADAM.weight_decay, ADAM.betas, wire_name)
            return ParameterServerWorker(
                {0: stage},
                rule,
                {0: worker},
                eager=False,
                chunk_bytes=PART_BYTES,
                uncounted=uncounted,
            )
        if name == "all-reduce":
            return AllReduce({0: stage}, ADAM, exchange(wire_name), lag=lag, uncounted=uncounted)
        return Sharded(
            {0: stage}, ADAM, exchange(wire_name), exchange("none"), lag=lag, uncounted=uncounted
        )

    return make


def alone(replicas: int, steps: int) -> Layered:
    """One process that steps by the mean gradient."""
    stage = Layered()
    single = Single({0: stage}, ADAM)
    for step in range(steps):
        for parameter, gradient in zip(
            stage.parameters, mean_gradients(stage, step, replicas), strict=True
        ):
            parameter.grad = gradient
        one_step(single, stage, step)
    return stage


def equal(one: Layered, other: Layered) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


@pytest.mark.some_cases(15)
@pytest.mark.parametrize(
    ("kind", "lag"), [(kind, 0) for kind in KINDS] + [(kind, 1) for kind in DELAYABLE]
)
@pytest.mark.parametrize("wire_name", ["none", "bf16", "int8"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_are_equal_to_the_last_bit(
    kind: str, replicas: int, wire_name: str, lag: int
) -> None:
    first, *others = train(of_kind(kind, replicas, wire_name, lag), replicas)
    assert all(equal(first, other) for other in others)
    assert not equal(first, Layered())


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_step_by_the_mean_gradient_to_the_last_bit(kind: str, replicas: int) -> None:
    assert equal(train(of_kind(kind, replicas), replicas)[0], alone(replicas, steps=3))


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_steps_a_parameter_without_gradient_as_replicas_do(kind: str) -> None:
    """In the second of three steps: its moments and its weights decay."""

    def run(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for step in range(3):
            stage.set_gradients(step, 0)
            if step == 1:
                stage.parameters[0].grad = None
            one_step(kind, stage, step)
        return stage

    stage = Layered()
    assert equal(
        with_replicas(of_kind(kind, 2), 2, run)[0], run(Single({0: stage}, ADAM), stage, 0)
    )


@pytest.mark.parametrize("kind", DELAYABLE)
def test_delayed_replicas_step_by_the_mean_gradient_of_the_step_before(kind: str) -> None:
    assert equal(train(of_kind(kind, 3, lag=1), 3, steps=4)[0], alone(3, steps=3))


@pytest.mark.parametrize(("wire_name", "apart"), [("bf16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_lossy_wire_steps_approximately_by_the_mean_gradient(
    kind: str, wire_name: str, apart: float
) -> None:
    lossy, exact = train(of_kind(kind, 3, wire_name), 3)[0], alone(3, steps=3)
    for one, other in zip(lossy.parameters, exact.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=apart)
    assert not equal(lossy, exact)


@pytest.mark.parametrize("wire_name", ["none", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_run_repeats_itself_to_the_last_bit(kind: str, wire_name: str) -> None:
    make = of_kind(kind, 3, wire_name)
    assert equal(train(make, 3)[0], train(make, 3)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_reports_add_up_to_the_norm_of_the_mean_gradient_without_its_loss_scale(kind: str) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> Report:
        stage.set_gradients(0, replica, scale=1024.0)
        kind.begin(0, RATE, 1024.0)
        kind.start(0)
        return kind.report(measure=True)

    reports = with_replicas(of_kind(kind, 3, uncounted=("layers.4.matrix",)), 3, run)
    matrix, vector, _ = mean_gradients(Layered(), 0, 3)
    squares = [sum(r.squares.get(layer, 0.0) for r in reports) for layer in (3, 4)]
    assert squares == pytest.approx(
        [float(matrix.square().sum() + vector.square().sum()), 0.0], rel=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_step_multiplies_by_the_factor(kind: str) -> None:
    """AdamW's step hardly depends on the norm of a gradient, but its moments do."""

    def moments(
        kind: DataParallel, stage: Layered, replica: int, factor: float
    ) -> dict[str, torch.Tensor]:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0, factor)
        return kind.state()

    whole, half = (
        with_replicas(of_kind(kind, 2), 2, partial(moments, factor=f)) for f in (1.0, 0.5)
    )
    for name, moment in whole[0].items():
        torch.testing.assert_close(
            half[0][name], moment * (0.5 if name.split("[")[0].endswith("avg") else 0.25)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_step_changes_nothing(kind: str) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> tuple[Layered, str | None]:
        stage.set_gradients(0, replica)
        if replica == 1:
            stage.parameters[1].grad[2] = torch.nan
        kind.begin(0, RATE, 1.0)
        kind.start(0)
        bad = kind.report(measure=True).bad
        assert not kind.step(0, None)
        kind.finish(0)
        return stage, bad

    stages, bad = zip(*with_replicas(of_kind(kind, 2), 2, run), strict=True)
    assert bad == (None, "layers.3.vector")
    assert all(equal(stage, Layered()) for stage in stages)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_that_is_not_finite_leaves_no_trace_in_the_feedback(kind: str) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        stage.set_gradients(0, replica)
        stage.parameters[0].grad[0, 0] = torch.inf
        one_step(kind, stage, 0, factor=None)
        stage.set_gradients(1, replica)
        one_step(kind, stage, 1)
        return stage

    for stage in with_replicas(of_kind(kind, 2, "int8"), 2, run):
        assert all(parameter.isfinite().all() for parameter in stage.parameters)


def whole(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parts of all replicas joined as in a checkpoint."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in ((n, t) for state in states for n, t in state.items()):
        base, _, span = name.partition("[")
        parts.setdefault(base, []).append(
            (int(span.split(":")[0] or 0) if span else 0, tensor.reshape(-1))
        )
    return {
        name: torch.cat([t for _, t in sorted(found, key=lambda f: f[0])])
        for name, found in parts.items()
    }


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("first", "then"), [("sharded", "all-reduce"), ("all-reduce", "sharded"), ("sharded",) * 2]
)
def test_another_kind_and_number_of_replicas_continues_from_the_state(
    first: str, then: str, lag: int
) -> None:
    """Three replicas for two steps, then one step of two replicas, each with the same gradient as
    its three.
    """

    def begin(
        kind: DataParallel, stage: Layered, replica: int
    ) -> tuple[Layered, dict[str, torch.Tensor]]:
        for step in range(2):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        return stage, {name: tensor.clone() for name, tensor in kind.state().items()}

    began = with_replicas(of_kind(first, 3, lag=lag), 3, begin)
    saved, reached = whole([state for _, state in began]), began[0][0]

    def resume(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for parameter, value in zip(stage.parameters, reached.parameters, strict=True):
            parameter.data.copy_(value)
        kind.restore(2 - lag, saved)
        for parameter, gradient in zip(stage.parameters, mean_gradients(stage, 2, 3), strict=True):
            parameter.grad = gradient
        one_step(kind, stage, 2)
        return stage

    resumed = with_replicas(of_kind(then, 2, lag=lag), 2, resume)
    assert equal(resumed[0], resumed[1])
    assert equal(resumed[0], alone(3, steps=3 - lag))


def test_sharded_state_takes_its_share_of_the_memory() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> int:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0)
        return kind.optimizer_bytes

    assert with_replicas(of_kind("all-reduce", 3), 3, run) == [WHOLE_BYTES] * 3
    assert with_replicas(of_kind("sharded", 3), 3, run) == [WHOLE_BYTES // 3] * 3


@pytest.mark.parametrize(("wire_name", "value_bytes"), [("none", 4), ("bf16", 2)])
def test_all_reduce_sends_twice_its_share_of_the_gradient(wire_name: str, value_bytes: int) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> dict[int, int]:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0)
        sent: dict[int, int] = {}
        for message in kind.traffic():
            sent[message.peer] = sent.get(message.peer, 0) + message.moved.num_bytes
        return sent

    sent = with_replicas(of_kind("all-reduce", 4, wire_name), 4, run)
    assert sent == [
        {peer: 2 * 15 * value_bytes for peer in range(4) if peer != replica} for replica in range(4)
    ]
