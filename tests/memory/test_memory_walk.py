from dataclasses import replace

import pytest

from dpipe.errors import ScheduleError
from dpipe.memory.walk import LayerMemory, RankMemory, peak_memory
from dpipe.schedule.generate import generate

LAYER = LayerMemory(
    parameter_bytes=100,
    gradient_bytes=100,
    optimizer_bytes=200,
    held_bytes=10,
    forward_bytes=3,
    backward_bytes=7,
)


def test_rank_holds_what_its_own_schedule_keeps_in_flight() -> None:
    """1F1B over three stages: three, two and one micro-batches, when a backward starts with
    gradients there.
    """
    ranks = peak_memory(generate("1f1b", 3, 6), [(LAYER,)] * 3)
    assert [rank.activations for rank in ranks] == [30, 20, 10]
    assert ranks[0] == RankMemory(
        parameters=100, gradients=100, optimizer=200, activations=30, working=7
    )


def test_first_backward_has_no_gradients_yet() -> None:
    """gpipe holds most where its first backward starts, unless gradients have buffers of their
    own.
    """
    schedule = generate("gpipe", 1, 8)
    first = LayerMemory(gradient_bytes=5, held_bytes=10, backward_bytes=7, first_bytes=1)
    assert peak_memory(schedule, [(first,)])[0] == RankMemory(0, 0, 0, 80, 8)
    assert peak_memory(schedule, [(first,)], keeps_gradients=True)[0] == RankMemory(0, 5, 0, 80, 7)


def test_weight_gradients_that_wait_keep_their_factors() -> None:
    layer = LayerMemory(held_bytes=10, deferred_bytes=16, input_bytes=4, weight_bytes=2)
    schedule = generate("zero-bubble", 2, 3)  # rank 1: F0 I0 F1 I1 F2 I2 W0 W1 W2
    assert peak_memory(schedule, [(layer,), (layer,)])[1].activations == 3 * 16


def test_layer_that_defers_nothing_does_in_a_split_backward_what_it_does_in_a_whole_one() -> None:
    schedule = generate("zero-bubble", 1, 1)  # F0 I0 W0
    layer = LayerMemory(
        gradient_bytes=5, held_bytes=10, backward_bytes=7, first_bytes=2, input_bytes=90
    )
    assert peak_memory(schedule, [(layer,)])[0] == RankMemory(0, 0, 0, 10, 9)


def test_first_weight_gradients_are_made_last_layer_first_beside_those_that_stay() -> None:
    layer = LayerMemory(gradient_bytes=5, deferred_bytes=16, weight_bytes=40, first_weight_bytes=3)
    layers = (layer, replace(layer, first_weight_bytes=9))
    assert peak_memory(generate("zero-bubble", 1, 1), [layers])[0] == RankMemory(0, 5, 0, 32, 9)
    assert peak_memory(generate("zero-bubble", 1, 2), [layers])[0].working == 40


def test_given_gradient_that_a_layer_defers_is_counted_once() -> None:
    last = LayerMemory(deferred_bytes=6, keeps_given=True)
    layers = (
        LayerMemory(held_bytes=10, deferred_bytes=10, input_bytes=20),
        last,
        LayerMemory(given_bytes=4),
    )
    assert peak_memory(generate("zero-bubble", 1, 1), [layers])[0].total == 10 + 6 + 20
    other = (layers[0], replace(last, keeps_given=False), layers[2])
    assert peak_memory(generate("zero-bubble", 1, 1), [other])[0].total == 10 + 6 + 20 + 4


def test_optimizer_works_when_nothing_is_held() -> None:
    layer = LayerMemory(parameter_bytes=1, gradient_bytes=1, held_bytes=2, update_bytes=50)
    assert peak_memory(generate("1f1b", 1, 1), [(layer,)])[0] == RankMemory(1, 1, 0, 0, 50)


def test_layers_are_given_back_last_to_first() -> None:
    """The working memory of the first layer comes when the second has gone."""
    early, late = (
        LayerMemory(held_bytes=10, backward_bytes=15),
        LayerMemory(held_bytes=10, backward_bytes=1),
    )
    assert peak_memory(generate("1f1b", 1, 1), [(early, late)])[0].total == 10 + 15


def test_gradient_that_a_stage_is_given_stays_until_it_is_done() -> None:
    """The last layer counts it as its own; the one before works beside it."""
    layers = (
        LayerMemory(held_bytes=10, backward_bytes=15),
        LayerMemory(backward_bytes=20),
        LayerMemory(given_bytes=4),
    )
    assert peak_memory(generate("1f1b", 1, 1), [layers])[0].total == 10 + 20
    assert (
        peak_memory(generate("1f1b", 1, 1), [(replace(layers[0], backward_bytes=18), *layers[1:])])[
            0
        ].total
        == 32
    )


def test_stages_that_do_not_fit_the_schedule_are_refused() -> None:
    with pytest.raises(ScheduleError, match="the schedule has 2 stages, the memory 1"):
        peak_memory(generate("1f1b", 2, 2), [(LAYER,)])


def test_gradients_in_half_precision_stay_beside_their_masters_until_the_pass_is_done() -> None:
    """Worst in the second micro-batch, where the first layer works beside the gradient of the
    other.
    """
    layer = LayerMemory(parameter_bytes=8, gradient_bytes=8, rounded_bytes=4, backward_bytes=5)
    assert peak_memory(generate("1f1b", 1, 2), [(layer, layer)])[0] == RankMemory(24, 16, 0, 4, 5)
    split = replace(layer, backward_bytes=0, deferred_bytes=10)
    assert peak_memory(generate("zero-bubble", 1, 1), [(split, split)])[0].total == 24 + 20 + 8
