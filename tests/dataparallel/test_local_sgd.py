"""Replicas that take steps on their own and average now and then."""

import pytest
import torch
from support.layered import ADAM, RATE, Layered, Make, gradients, one_step, train, with_replicas
from torch import nn

from dpipe.dataparallel.base import DataParallel
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.local_sgd import LocalSgd, OuterSettings, fragments
from dpipe.dataparallel.single import Single
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links

MEAN = {"learning_rate": 1.0, "momentum": 0.0}
DILOCO = {"learning_rate": 0.7, "momentum": 0.9}


def local_sgd(
    replicas: int,
    inner_steps: int,
    *,
    num_fragments: int = 1,
    wire_name: str = "none",
    **outer: float | bool,
) -> Make:
    def make(stage: Layered, links: Links, replica: int) -> DataParallel:
        averaging = [
            DirectExchange(links, replica, range(replicas), wire(wire_name), part_bytes=40)
            for _ in range(num_fragments)
        ]
        return LocalSgd(
            {0: stage}, ADAM, OuterSettings(inner_steps, **{**MEAN, **outer}), averaging
        )

    return make


def alone(replica: int, steps: int) -> Layered:
    """The parameters of a replica that never averages with the others."""
    stage = Layered()
    single = Single({0: stage}, ADAM)
    for step in range(steps):
        stage.set_gradients(step, replica)
        one_step(single, stage, step)
    return stage


def equal(one: Layered, other: Layered) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


def assert_close(one: Layered, values: list[torch.Tensor]) -> None:
    for a, b in zip(one.parameters, values, strict=True):
        torch.testing.assert_close(a.data, b, rtol=0, atol=1e-6)


def mean(stages: list[Layered]) -> list[torch.Tensor]:
    return [
        torch.stack([p.data for p in same]).mean(0)
        for same in zip(*(s.parameters for s in stages), strict=True)
    ]


@pytest.mark.parametrize("wire_name", ["none", "bf16", "int8"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_are_equal_to_the_last_bit_after_an_outer_step(
    replicas: int, wire_name: str
) -> None:
    make = local_sgd(replicas, 2, wire_name=wire_name, **DILOCO)
    first, *others = train(make, replicas, steps=4)
    assert all(equal(first, other) for other in others)
    assert not equal(first, Layered())


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_outer_step_without_momentum_at_rate_1_is_the_mean_of_the_replicas(replicas: int) -> None:
    reached = train(local_sgd(replicas, 3), replicas, steps=3)[0]
    assert_close(reached, mean([alone(replica, steps=3) for replica in range(replicas)]))


def test_replicas_differ_between_outer_steps() -> None:
    stages = train(local_sgd(2, 5), 2, steps=4)
    assert [equal(stage, alone(replica, steps=4)) for replica, stage in enumerate(stages)] == [
        True,
        True,
    ]
    assert not equal(*stages)


def test_outer_step_is_that_of_torchs_sgd_with_nesterovs_momentum() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> list[list[torch.Tensor]]:
        """Parameters before and after each outer step; replicas have the same gradients, so they
        move alike.
        """
        seen = []
        for step in range(3):
            stage.set_gradients(step, 0)
            kind.begin(step, RATE, 1.0)
            kind.step(0, 1.0)
            seen.append([p.detach().clone() for p in stage.parameters])
            kind.finish(0)
            seen.append([p.detach().clone() for p in stage.parameters])
        return seen

    seen = with_replicas(local_sgd(2, 1, **DILOCO), 2, run)[0]
    anchors = [nn.Parameter(p.detach().clone()) for p in Layered().parameters]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    for rounds, (before, after) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        for anchor, reached in zip(anchors, before, strict=True):
            anchor.grad = anchor.detach() - reached
        # Not 0: torch would forget the first gradient.
        outer.param_groups[0]["momentum"] = max(1e-9, rounds / (rounds + 3))
        outer.step()
        for anchor, reached in zip(anchors, after, strict=True):
            torch.testing.assert_close(anchor.data, reached, rtol=0, atol=1e-6)


def test_fragments_take_turns() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> list[int]:
        sent = []
        for step in range(6):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
            sent.append(sum(message.moved.num_bytes for message in kind.traffic()))
        return sent

    # matrix 3 of 35 values; vector and matrix 4 of 25: half of each goes out, and half comes back
    # as the mean
    whole = with_replicas(local_sgd(2, 4), 2, run)
    turns = with_replicas(local_sgd(2, 4, num_fragments=2), 2, run)
    assert whole[0] == [0, 0, 0, 60 * 4, 0, 0]
    assert turns[0][1] + turns[1][1] == 2 * 25 * 4
    assert turns[0][3] + turns[1][3] == 2 * 35 * 4
    assert [turns[0][step] for step in (0, 2, 4)] == [0, 0, 0]


def test_overlapped_outer_step_keeps_the_inner_steps_taken_meanwhile() -> None:
    stages = train(local_sgd(2, 2, overlap=True), 2, steps=3)
    after_two, after_three = ([alone(replica, steps) for replica in range(2)] for steps in (2, 3))
    for replica, stage in enumerate(stages):
        learnt = [
            now.data - before.data
            for now, before in zip(
                after_three[replica].parameters, after_two[replica].parameters, strict=True
            )
        ]
        # Weight decay of the third step acts on other values: 1 % of a difference of a few tenths.
        for p, agreed, more in zip(stage.parameters, mean(after_two), learnt, strict=True):
            torch.testing.assert_close(p.data, agreed + more, rtol=0, atol=5e-3)


def test_skipped_inner_step_changes_nothing_but_the_outer_step_comes() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for step, factor in enumerate((1.0, None)):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step, factor)
        return stage

    assert_close(
        with_replicas(local_sgd(2, 2), 2, run)[0], mean([alone(replica, 1) for replica in range(2)])
    )


def test_clipping_is_by_each_replicas_own_norm() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> dict[int, float]:
        stage.set_gradients(0, replica)
        kind.begin(0, RATE, 1.0)
        assert kind.independent
        return dict(kind.report(measure=True).squares)

    for replica, squares in enumerate(with_replicas(local_sgd(2, 2), 2, run)):
        matrix, vector, other = gradients(Layered(), 0, replica)
        assert squares == pytest.approx(
            {
                3: float(matrix.square().sum() + vector.square().sum()),
                4: float(other.square().sum()),
            },
            rel=1e-6,
        )


def saved_after(
    make: Make, replicas: int, steps: int
) -> tuple[list[Layered], dict[str, torch.Tensor]]:
    def begin(
        kind: DataParallel, stage: Layered, replica: int
    ) -> tuple[Layered, dict[str, torch.Tensor]]:
        for step in range(steps):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        return stage, {name: tensor.clone() for name, tensor in kind.state().items()}

    stages, states = zip(*with_replicas(make, replicas, begin), strict=True)
    names = [name for state in states for name in state]
    assert len(names) == len(set(names)), "two replicas write the same name"
    return list(stages), {name: tensor for state in states for name, tensor in state.items()}


def resumed(
    make: Make, replicas: int, first: Layered, saved: dict[str, torch.Tensor], steps: range
) -> list[Layered]:
    def resume(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for parameter, value in zip(stage.parameters, first.parameters, strict=True):
            parameter.data.copy_(value)
        kind.restore(steps.start, saved)
        for step in steps:
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        return stage

    return with_replicas(make, replicas, resume)  # type: ignore[return-value]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resumed_replicas_continue_to_the_last_bit(
    stop: int, num_fragments: int, overlap: bool
) -> None:
    make = local_sgd(3, 4, num_fragments=num_fragments, overlap=overlap, **DILOCO)
    stages, saved = saved_after(make, 3, stop)
    went_on = resumed(make, 3, stages[0], saved, range(stop, 9))
    assert [equal(a, b) for a, b in zip(went_on, train(make, 3, steps=9), strict=True)] == [
        True
    ] * 3


def test_replica_that_is_not_in_the_checkpoint_begins_at_the_anchor() -> None:
    stages, saved = saved_after(local_sgd(2, 4), 2, steps=5)
    anchors = [saved[f"{name}.anchor"] for _, name, _ in stages[0].weights]

    def start(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for parameter, value in zip(stage.parameters, stages[0].parameters, strict=True):
            parameter.data.copy_(value)
        kind.restore(5, saved)
        return stage

    first, second, third = with_replicas(local_sgd(3, 4), 3, start)
    assert equal(first, stages[0])
    assert equal(second, stages[1])
    assert all(
        torch.equal(p.data, anchor) for p, anchor in zip(third.parameters, anchors, strict=True)
    )


def test_run_of_another_kind_continues_with_its_parameters_as_the_anchor() -> None:
    single = alone(0, steps=2)
    moments = {
        f"{name}.{key}": torch.zeros_like(p)
        for _, name, p in single.weights
        for key in ("exp_avg", "exp_avg_sq")
    }
    went_on = resumed(local_sgd(2, 4), 2, single, moments, range(2, 4))
    assert equal(went_on[0], went_on[1])


def test_memory_of_the_outer_optimizer_is_counted() -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> int:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0)
        return kind.optimizer_bytes

    assert with_replicas(local_sgd(2, 4), 2, run) == [(2 + 4) * 60 * 4] * 2


def test_fragments_are_runs_of_about_the_same_size() -> None:
    named = [(str(size), nn.Parameter(torch.zeros(size))) for size in (50, 30, 20, 40, 60)]
    assert [[name for name, _ in run] for run in fragments(named, 2)] == [
        ["50", "30", "20"],
        ["40", "60"],
    ]
    assert [[name for name, _ in run] for run in fragments(named[:1], 3)] == [[], ["50"], []]


def test_tied_weight_is_in_the_first_fragment_of_its_stage() -> None:
    named = [(str(size), nn.Parameter(torch.zeros(size))) for size in (50, 30, 20, 40, 60)]
    assert [[name for name, _ in run] for run in fragments(named, 2, tied={"60"})] == [
        ["60", "50"],
        ["30", "20", "40"],
    ]
