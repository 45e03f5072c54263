import time

import pytest
import torch

from dpipe.errors import TransferError
from dpipe.stage.replay import ReplayStage, wait

BYTES = 400


def make(
    first: bool = False, last: bool = False, forward_s: float = 0.0, backward_s: float = 0.0
) -> ReplayStage:
    return ReplayStage(
        1,
        num_microbatches=2,
        forward_s=forward_s,
        backward_s=backward_s,
        input_share=0.25,
        message_bytes=BYTES,
        first=first,
        last=last,
    )


def shapes(tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


MESSAGE = (torch.zeros(BYTES // 4),)


@pytest.mark.parametrize(
    ("first", "last", "inputs", "output", "grads", "input_grads"),
    [
        (False, False, MESSAGE, [(100,)], MESSAGE, [(100,)]),
        (True, False, (), [(100,)], MESSAGE, []),
        (False, True, MESSAGE, [()], (), [(100,)]),
    ],
)
def test_stage_receives_and_returns_real_tensors(
    first: bool,
    last: bool,
    inputs: tuple[torch.Tensor, ...],
    output: list[tuple[int, ...]],
    grads: tuple[torch.Tensor, ...],
    input_grads: list[tuple[int, ...]],
) -> None:
    stage = make(first, last)
    assert shapes(stage.forward(0, inputs)) == output
    assert shapes(stage.backward(0, grads)) == input_grads
    assert shapes(stage.evaluate(inputs)) == output
    assert stage.held == 0


def test_message_of_another_size_is_refused() -> None:
    with pytest.raises(
        TransferError, match=r"replay stage 1 expected \['float32\[100\]'\] as its input"
    ):
        make().forward(0, (torch.zeros(7),))


def test_held_counts_like_a_real_stage() -> None:
    stage = make()
    stage.forward(0, MESSAGE)
    stage.forward(1, MESSAGE)
    held = [stage.held]
    stage.backward_input(0, MESSAGE)
    held.append(stage.held)
    stage.backward_weight(0)
    held.append(stage.held)
    stage.clear()
    assert [*held, stage.held] == [2, 2, 1, 0]


def test_parts_of_the_backward_pass_take_their_shares_of_the_wait() -> None:
    stage = make(backward_s=0.04)
    stage.forward(0, MESSAGE)
    times = [time.perf_counter()]
    stage.backward_input(0, MESSAGE)
    times.append(time.perf_counter())
    stage.backward_weight(0)
    times.append(time.perf_counter())
    assert times[1] - times[0] >= 0.01
    assert times[2] - times[1] >= 0.03


def test_ranks_of_a_stage_exchange_in_each_forward_and_each_input_gradient() -> None:
    done: list[str] = []
    kind = {
        "forward_s": 0.0,
        "backward_s": 0.0,
        "input_share": 0.5,
        "message_bytes": BYTES,
        "first": False,
        "last": False,
    }
    stage = ReplayStage(
        1, num_microbatches=2, **kind, exchange=lambda: done.append("."), num_exchanges=3
    )
    counts = []
    stage.forward(0, MESSAGE)
    counts.append(len(done))
    stage.backward(0, MESSAGE)
    counts.append(len(done))
    stage.forward(1, MESSAGE)
    stage.backward_input(1, MESSAGE)
    counts.append(len(done))
    stage.backward_weight(1)
    assert [*counts, len(done)] == [3, 6, 12, 12]


def test_stage_has_nothing_to_train() -> None:
    stage = make()
    stage.begin_step(3, loss_scale=2.0)
    stage.zero_grad()
    assert list(stage.named_parameters()) == list(stage.parameters()) == []
    assert stage.layer_parameters() == {}


def test_wait_never_ends_early_and_uses_little_of_the_core() -> None:
    began, used = time.perf_counter(), time.thread_time()
    for _ in range(10):
        wait(0.01)
    assert time.perf_counter() - began >= 0.1
    assert time.thread_time() - used < 0.02


def test_gradient_is_final_after_the_last_weight_gradient() -> None:
    stage = ReplayStage(
        1,
        num_microbatches=2,
        forward_s=0,
        backward_s=0,
        input_share=0.5,
        message_bytes=BYTES,
        parameter_bytes=80,
        first=True,
        last=True,
    )
    assert [(name, p.numel()) for name, p in stage.layer_parameters()[1]] == [
        ("layers.1.weight", 20)
    ]
    for step in range(2):
        stage.begin_step(step)
        for microbatch in range(2):
            assert stage.parameters()[0].grad is None
            stage.forward(microbatch, ())
            stage.backward_input(microbatch, ())
            stage.backward_weight(microbatch)
        assert stage.parameters()[0].grad is not None
        stage.zero_grad()


def test_stage_without_parameters_has_no_gradients_to_exchange() -> None:
    assert make().layer_parameters() == {}
