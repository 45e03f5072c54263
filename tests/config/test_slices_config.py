"""What `pipeline.sequence_slices` goes with."""

from typing import Any

import pytest

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast

REPLAY = {"model": {"layers": "replay"}, "replay": {"message_bytes": 4004}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"pipeline": {"schedule": "zero-bubble"}},
        'set pipeline.schedule to "gpipe" or "1f1b" or "auto"',
    ),
    (
        {"pipeline": {"schedule": "auto", "stages": 4, "stages_per_rank": 2}},
        "one stage on each rank",
    ),
    ({"model": {"context": 130}}, "model.context to be a multiple of it, not 130"),
    ({"model": {"dropout": 0.1}}, "model.dropout 0"),
    ({"model": {"layers": "bert"}}, 'needs model.layers "gpt", not "bert"'),
    ({"tensor_parallel": {"size": 2}}, "tensor_parallel.size 1"),
    ({"train": {"compile": True}}, "train.compile = false"),
    (REPLAY, "replay.message_bytes to be a multiple of 16"),
]


def with_slices(table: dict[str, Any], number: int = 4) -> dict[str, Any]:
    return {**table, "pipeline": {**table.get("pipeline", {}), "sequence_slices": number}}


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_what_does_not_go_with_slices_says_what_to_change(
    table: dict[str, Any], message: str
) -> None:
    build({**table})
    with pytest.raises(ConfigError, match=message):
        build(with_slices(table))


def test_a_later_slice_is_predicted_to_take_longer_and_all_less_than_the_whole() -> None:
    model = {"width": 64, "context": 1024, "vocab_size": 100}
    table = {"model": model, "pipeline": {"stages": 2}}
    whole = forecast(build(table)).cost
    cut = forecast(build(with_slices(table))).cost
    assert cut.later_forward_us[0] > 0
    assert cut.later_backward_us[0] == 2 * cut.later_forward_us[0]
    assert cut.activation_bytes[0] * 4 == whole.activation_bytes[0]
    in_slices_us = sum(cut.forward_us[0] + n * cut.later_forward_us[0] for n in range(4))
    # The keys behind a slice are left out: of the attention, 5 / 8 is left.
    assert 5 / 8 < in_slices_us / whole.forward_us[0] < 1


def test_replayed_slices_take_and_send_their_share() -> None:
    table = {"model": {"layers": "replay"}, "pipeline": {"stages": 2}}
    whole = forecast(build(table)).cost
    cut = forecast(build(with_slices(table))).cost
    assert [4 * us for us in cut.backward_us] == pytest.approx(whole.backward_us)
    assert cut.activation_bytes[0] * 4 == whole.activation_bytes[0]
