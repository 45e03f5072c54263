"""Sequences in slices against whole sequences: the same losses and gradients, up to rounding."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from dpipe.passes.slices import slice_of
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel, materialise
from dpipe.stage.stage import Stage

B, T, VOCABULARY, M = 2, 24, 17, 2
SEED = 3
FP32_ROUNDING = 2e-6  # of the largest gradient of a parameter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model() -> LayeredModel:
    return gpt(
        vocab_size=VOCABULARY,
        num_layers=3,
        width=16,
        num_heads=2,
        context=T,
        dropout=0.0,
        tied=False,
    )


def made(layers: range, num_slices: int, recompute: str = "none", precision: str = "fp32") -> Stage:
    layered = model()
    last = layers.stop == len(layered.layers)
    return Stage(
        layers.start,
        {index: materialise(layered, index, SEED, "cpu") for index in layers},
        num_microbatches=M,
        num_slices=num_slices,
        loss=layered.loss if last else None,
        recompute=recompute,
        precision=precision,
        splits_backward=False,
    )


def tokens(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    text = torch.randint(VOCABULARY, (B, T + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def step(stages: list[Stage], num_slices: int) -> tuple[list[float], Mapping[str, torch.Tensor]]:
    """As gpipe: the loss of each micro-batch, and the gradients."""
    losses = []
    for microbatch in range(M):
        inputs, targets = tokens(microbatch)
        of_slices = []
        for number in range(num_slices):
            piece = microbatch * num_slices + number
            passed = (slice_of(inputs, number, num_slices),)
            for stage in stages:
                passed = stage.forward(piece, passed, slice_of(targets, number, num_slices))
            of_slices.append(passed[0].item())
        losses.append(sum(of_slices) / num_slices)
    for microbatch in range(M):
        for number in reversed(range(num_slices)):
            grads: tuple[torch.Tensor, ...] = ()
            for stage in reversed(stages):
                grads = stage.backward(microbatch * num_slices + number, grads)
    found = {}
    for stage in stages:
        assert stage.held == 0
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad
    return losses, found


@pytest.mark.parametrize("num_slices", [2, 3, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_losses_and_gradients_are_those_of_whole_sequences(num_slices: int, recompute: str) -> None:
    whole_losses, whole = step([made(range(5), 1)], 1)
    cut = [made(range(2), num_slices, recompute), made(range(2, 5), num_slices, recompute)]
    losses, gradients = step(cut, num_slices)
    assert losses == pytest.approx(whole_losses, rel=1e-6)
    assert gradients.keys() == whole.keys()
    for name, gradient in gradients.items():
        off = (gradient - whole[name]).abs().max() / whole[name].abs().max()
        assert off < FP32_ROUNDING, name


def test_where_a_model_is_cut_changes_no_bit_of_a_slice() -> None:
    losses, together = step([made(range(5), 3)], 3)
    losses_apart, apart = step([made(range(2), 3), made(range(2, 5), 3)], 3)
    assert losses_apart == losses
    for name, gradient in apart.items():
        assert torch.equal(gradient, together[name]), name


def test_bf16_keeps_keys_and_values_in_16_bits_and_learns_nearly_the_same() -> None:
    _, whole = step([made(range(5), 1, precision="bf16")], 1)
    _, gradients = step([made(range(5), 4, precision="bf16")], 4)
    for name, gradient in gradients.items():
        off = (gradient - whole[name]).abs().max() / whole[name].abs().max()
        assert off < 0.1, name


def test_a_slice_reads_what_is_before_it_and_not_what_is_behind() -> None:
    stage = made(range(5), 2)
    inputs, targets = tokens(0)
    first = slice_of(targets, 0, 2)
    losses = []
    for piece, last_word in ((0, 0), (2, 1)):
        text = inputs.clone()
        text[:, -1] = last_word
        loss = stage.forward(piece, (slice_of(text, 0, 2),), first)[0]
        losses.append(loss.item())
    assert losses[0] == losses[1]
    second = slice_of(targets, 1, 2)
    after_other = []
    for piece, first_word in ((4, 0), (6, 1)):
        text = inputs.clone()
        text[:, 0] = first_word
        stage.forward(piece, (slice_of(text, 0, 2),), first)
        loss = stage.forward(piece + 1, (slice_of(text, 1, 2),), second)[0]
        after_other.append(loss.item())
    assert after_other[0] != after_other[1]


def test_an_evaluation_between_slices_is_of_whole_sequences() -> None:
    stage = made(range(5), 4)
    inputs, targets = tokens(1)
    alone = made(range(5), 1).evaluate((inputs,), targets)[0]
    stage.forward(0, (slice_of(inputs, 0, 4),), slice_of(targets, 0, 4))
    assert torch.equal(stage.evaluate((inputs,), targets)[0], alone)


def test_an_aborted_step_can_be_run_again() -> None:
    stage = made(range(5), 3)
    inputs, targets = tokens(1)
    stage.forward(0, (slice_of(inputs, 0, 3),), slice_of(targets, 0, 3))
    stage.clear()
    again = step([stage], 3)
    fresh = step([made(range(5), 3)], 3)
    assert again[0] == fresh[0]
    assert all(torch.equal(again[1][name], fresh[1][name]) for name in fresh[1])
