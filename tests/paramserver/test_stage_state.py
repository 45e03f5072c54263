"""The server's copy of a stage: whole steps or none, and the same bits in whatever order chunks
arrive.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import NumericError, TransferError
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision
from dpipe.wire.codec import codec
from dpipe.wire.spec import TensorSpec

SPEC = FlatSpec(
    (
        ParameterSpec("layers.0.weight", 0, 300, True),
        ParameterSpec("layers.0.bias", 0, 7, False),
        ParameterSpec("layers.1.copy", 1, 20, True, counts=False),
    ),
    chunk_values=128,
)
RULE = StepRule(ranks=(0, 4), weight_decay=0.1, betas=(0.9, 0.95))
GO = StepDecision(1e-2, 1.0)
PIECES = [(replica, chunk) for replica in range(2) for chunk in range(SPEC.num_chunks)]


def normal(seed: int, length: int = SPEC.length) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def state(**rule: object) -> StageState:
    made = replace(RULE, **rule)  # type: ignore[arg-type]
    state = StageTensors.zeros(SPEC.length, lossy=made.lossy_parameters)
    state.values += normal(0)
    if state.held is not None:
        state.held += normal(0)
    return StageState(SPEC, made, state, step=0, num_updates=0)


def gradient(step: int, replica: int) -> torch.Tensor:
    return normal(100 + 10 * step + replica)


def push(to: StageState, step: int, replica: int, chunks: range | None = None) -> None:
    for chunk in chunks or range(SPEC.num_chunks):
        to.add(step, replica, chunk, gradient(step, replica)[SPEC.chunk(chunk)])


def decide(to: StageState, step: int, verdict: StepDecision = GO) -> None:
    for replica in range(2):
        to.decide(step, replica, verdict)


def take(of: StageState, step: int) -> list[torch.Tensor]:
    """Every chunk as a worker receives it."""
    given_out = [of.give(step, 0, chunk) for chunk in range(SPEC.num_chunks)]
    return [chunk.wire.clone() for chunk in given_out if chunk is not None]


def one_step(of: StageState, step: int, verdict: StepDecision = GO) -> list[torch.Tensor]:
    push(of, step, 0)
    push(of, step, 1)
    decide(of, step, verdict)
    out = take(of, step)
    of.commit()
    return out


def rows(of: StageState) -> list[torch.Tensor]:
    return [vector.clone() for vector in of.now.by_name().values()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def torch_adamw(steps: int, factor: float) -> torch.Tensor:
    """The parameters after torch's optimizer with the same mean gradients."""
    whole = [
        torch.nn.Parameter(normal(0)[start : start + p.num_values])
        for start, p in zip(SPEC.starts, SPEC.parameters, strict=True)
    ]
    groups = [
        {
            "params": [
                p for p, spec in zip(whole, SPEC.parameters, strict=True) if spec.decays == decays
            ],
            "weight_decay": d,
        }
        for decays, d in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(steps):
        mean = (gradient(step, 0) + gradient(step, 1)) / 2 * factor
        for parameter, start in zip(whole, SPEC.starts, strict=True):
            parameter.grad = mean[start : start + parameter.numel()]
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in whole])


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_steps_are_those_of_torch_adamw_to_the_last_bit(factor: float) -> None:
    stage = state()
    for step in range(3):
        one_step(stage, step, StepDecision(1e-2, factor))
    assert torch.equal(stage.now.values, torch_adamw(3, factor))


@given(
    st.permutations(PIECES),
    st.lists(st.sampled_from(PIECES), max_size=4),
    st.integers(0, len(PIECES)),
)
def test_order_repetition_and_time_of_the_verdict_change_no_bit(
    order: list[tuple[int, int]], again: list[tuple[int, int]], decided_after: int
) -> None:
    plain, shuffled = state(), state()
    one_step(plain, 0)
    for turn, (replica, chunk) in enumerate([*order, *again]):
        if turn == decided_after:
            decide(shuffled, 0, GO)
        shuffled.add(0, replica, chunk, gradient(0, replica)[SPEC.chunk(chunk)])
        shuffled.give(0, 0, turn % SPEC.num_chunks)
    decide(shuffled, 0, GO)
    take(shuffled, 0)
    shuffled.commit()
    assert equal(rows(shuffled), rows(plain))


def test_chunk_goes_out_as_soon_as_every_replica_has_pushed_it() -> None:
    stage = state()
    decide(stage, 0, GO)
    push(stage, 0, 0)
    push(stage, 0, 1, range(1))
    assert [stage.give(0, 0, chunk) is not None for chunk in range(SPEC.num_chunks)] == [
        True,
        False,
        False,
    ]
    assert not stage.complete


def test_push_that_ends_in_the_middle_changes_nothing() -> None:
    stage = state()
    before = rows(stage)
    decide(stage, 0, GO)
    push(stage, 0, 0)
    push(stage, 0, 1, range(2))
    take(stage, 0)
    assert equal(rows(stage), before)
    assert (stage.step, stage.num_updates, stage.complete) == (0, 0, False)


def test_skipped_step_changes_no_parameter() -> None:
    stage = state()
    before = rows(stage)
    decide(stage, 0, StepDecision(1e-2, None))
    assert stage.complete
    stage.commit()
    push(stage, 0, 0)
    assert equal(rows(stage), before)
    assert (stage.step, stage.num_updates) == (1, 0)


@pytest.mark.parametrize("wire", ["none", "bf16", "int8"])
def test_workers_have_the_values_that_the_server_assumes(wire: str) -> None:
    stage, worker = state(wire=wire), normal(0)
    for step in range(3):
        push(stage, step, 0)
        push(stage, step, 1)
        decide(stage, step, GO)
        for chunk in range(SPEC.num_chunks):
            out, part = stage.give(step, 0, chunk), worker[SPEC.chunk(chunk)]
            assert out is not None
            if out.whole:
                part.copy_(out.wire)
            else:
                part += codec(wire).decode(out.wire, TensorSpec.of(part))
        stage.commit()
    held = stage.now.held if wire != "none" else stage.now.values
    assert held is not None
    assert torch.equal(worker, held)


def test_rounded_differences_do_not_add_up() -> None:
    stage = state(wire="int8")
    for step in range(20):
        one_step(stage, step)
    assert stage.now.held is not None
    off = (stage.now.held - stage.now.values).abs().max()
    assert (
        0 < off < 2e-2 * 2 / 127
    )  # one step's rounding: the largest difference is a step of about 1e-2


def test_replayed_steps_are_the_same_to_the_last_bit() -> None:
    lived, replayed = state(wire="int8"), state(wire="int8")
    for step, verdict in enumerate([GO, StepDecision(1e-2, None), StepDecision(5e-3, 0.3)]):
        push(lived, step, 0)
        push(lived, step, 1)
        decide(lived, step, verdict)
        if verdict.factor is not None:
            take(lived, step)
        written, average = lived.completed_step()
        average = average.clone()
        lived.commit()
        replayed.replay(written, average)
    assert equal(rows(lived), rows(replayed))
    assert (lived.step, lived.num_updates) == (replayed.step, replayed.num_updates) == (3, 2)


def test_committed_chunks_go_out_again_and_whole_where_the_differences_are_gone() -> None:
    lived = state(wire="bf16")
    sent = one_step(lived, 0)
    assert equal(take(lived, 0), sent)
    restarted = StageState(
        lived.spec, lived.rule, lived.now, step=lived.step, num_updates=lived.num_updates
    )
    again = restarted.give(0, 0, 1)
    assert again is not None
    assert again.whole
    assert lived.now.held is not None
    assert torch.equal(again.wire, lived.now.held[SPEC.chunk(1)])


def test_norms_are_the_mean_gradients_and_count_no_copy() -> None:
    stage = state()
    push(stage, 0, 0)
    push(stage, 0, 1)
    mean = ((gradient(0, 0) + gradient(0, 1)) / 2).double()
    assert stage.norms(0) == pytest.approx({0: float((mean[:307] ** 2).sum()), 1: 0.0})


def test_norms_of_a_step_that_is_not_final_are_refused() -> None:
    stage = state()
    push(stage, 0, 0)
    with pytest.raises(TransferError, match="norms of step 0"):
        stage.norms(0)


def test_infinite_gradient_stops_the_step_and_is_named() -> None:
    stage = state()
    before = rows(stage)
    bad = gradient(0, 1)
    bad[303] = float("inf")
    push(stage, 0, 0)
    for chunk in range(SPEC.num_chunks):
        stage.add(0, 1, chunk, bad[SPEC.chunk(chunk)])
    decide(stage, 0, GO)
    with pytest.raises(
        NumericError, match=r"step 0: the gradient of layers\.0\.bias on rank 4 is not finite"
    ):
        take(stage, 0)
    assert equal(rows(stage), before)


@pytest.mark.parametrize("step", [-3, -2, 1, 7])
def test_wrong_step_is_refused(step: int) -> None:
    with pytest.raises(
        TransferError, match=f"gradient of step {step} came where step 0 is in progress"
    ):
        push(state(), step, 1)


def test_replicas_that_disagree_get_an_error() -> None:
    stage = state()
    stage.decide(0, 0, GO)
    with pytest.raises(TransferError, match="replica 1 decided step 0 as"):
        stage.decide(0, 1, StepDecision(1e-2, 0.5))


def test_step_is_complete_only_when_every_replica_has_requested_it() -> None:
    stage = state()
    push(stage, 0, 0)
    push(stage, 0, 1)
    stage.decide(0, 1, GO)
    take(stage, 0)
    assert not stage.complete
    assert stage.missing() == [0]
    stage.decide(0, 0, GO)
    assert stage.complete


def test_rank_that_has_not_pushed_all_of_it_is_missing() -> None:
    stage = state()
    push(stage, 0, 0)
    push(stage, 0, 1, range(2))
    assert stage.missing() == [4]


@pytest.mark.parametrize("staleness", [1, 2])
def test_worker_may_be_ahead_by_the_staleness_and_no_more(staleness: int) -> None:
    """
    replica 0   0 1 2 |         pushes ahead, gets parameters before the slowest pushes
    replica 1   0               until the bound
    """
    stage = state(staleness=staleness)
    for step in range(staleness + 1):
        push(stage, step, 0)
        decide(stage, step, GO)
        assert (stage.give(step, 0, 0) is not None) == (step < staleness)
    with pytest.raises(TransferError, match=f"data_parallel.staleness is {staleness}"):
        push(stage, staleness + 1, 0)
    push(stage, 0, 1)
    assert stage.complete
    stage.commit()
    assert stage.give(staleness, 0, 0) is not None


def test_stale_steps_are_still_by_the_mean_of_all_replicas() -> None:
    stage = state(staleness=2)
    for step in range(3):
        push(stage, step, 0)
        decide(stage, step, GO)
    for step in range(3):
        push(stage, step, 1)
        stage.commit()
    assert torch.equal(stage.now.values, torch_adamw(3, 1.0))


def test_stale_worker_gets_parameters_with_its_own_gradients_at_once() -> None:
    """The other replica has pushed nothing: all gradients of the two open steps are this
    replica's.
    """
    stage, alone = state(staleness=2), state(ranks=(0,))
    for step in range(2):
        push(stage, step, 0)
        stage.decide(step, 0, GO)
        push(alone, step, 0)
        alone.decide(step, 0, GO)
        expected = take(alone, step)
        alone.commit()
        assert equal(take(stage, step), expected)
    assert equal(rows(stage), rows(state(staleness=2)))


def test_stale_worker_gets_the_mean_if_all_gradients_have_arrived() -> None:
    stage, prompt = state(staleness=1), state()
    for of in (stage, prompt):
        push(of, 0, 0)
        push(of, 0, 1)
        decide(of, 0)
    assert equal(take(stage, 0), take(prompt, 0))


def test_stale_worker_waits_for_its_own_gradient_alone() -> None:
    stage = state(staleness=1)
    push(stage, 0, 0, range(1))
    stage.decide(0, 0, GO)
    assert [stage.give(0, 0, chunk) is not None for chunk in range(SPEC.num_chunks)] == [
        True,
        False,
        False,
    ]


def test_stale_worker_gets_an_error_for_an_infinite_gradient() -> None:
    stage = state(staleness=1)
    stage.add(0, 0, 0, torch.full((128,), torch.inf))
    stage.decide(0, 0, GO)
    with pytest.raises(NumericError, match="layers.0.weight on rank 0"):
        stage.give(0, 0, 0)
