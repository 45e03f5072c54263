"""Which codec a send and its receive use.

stage 0 --forward 0--> stage 1 --forward 1--> stage 2
        <-backward 0--         <-backward 1--
"""

import pytest
import torch

from dpipe.engine.hop_codecs import HopCodecs
from dpipe.schedule.action import parse_action
from dpipe.schedule.links import counterpart
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

FORMATS = HopFormats(forward=("none", "bf16"), backward=("int8", "int4"))
LIKE = TensorSpec((64,), torch.float32)


@pytest.mark.parametrize(
    ("send", "num_bytes"),
    [("0SEND_F3", 256), ("1SEND_F3", 128), ("1SEND_B3", 68), ("2SEND_B3", 36)],
)
def test_both_ends_of_a_hop_use_its_format_in_that_direction(send: str, num_bytes: int) -> None:
    action = parse_action(send)
    for end in (action, counterpart(action, num_stages=3)):
        assert HopCodecs(FORMATS).of(end, 0).wire_spec(LIKE).num_bytes == num_bytes


def test_codec_is_kept_for_the_next_micro_batch_and_not_for_other_tensors() -> None:
    codecs = HopCodecs(FORMATS)
    first = codecs.of(parse_action("0SEND_F0"), 0)
    assert codecs.of(parse_action("0SEND_F1"), 0) is first
    assert codecs.of(parse_action("0SEND_F0"), 1) is not first
    assert codecs.without_memory().of(parse_action("0SEND_F0"), 0) is not first


def size(codecs: HopCodecs, action: str) -> int:
    return codecs.of(parse_action(action), 0).wire_spec(LIKE).num_bytes


def test_evaluation_has_a_format_of_its_own_and_what_trains_alone_keeps_that_of_training() -> None:
    """Also where the evaluation is rehearsed, by a rank alone."""
    codecs = HopCodecs(FORMATS, in_evaluation=HopFormats.alike("int8", 2))
    for ours in (codecs, codecs.without_memory()):
        assert size(ours, "1SEND_F3") == 128
        assert size(ours.for_evaluation(), "1SEND_F3") == 68


def test_evaluation_has_the_formats_of_training_where_none_is_given() -> None:
    assert size(HopCodecs(FORMATS).for_evaluation(), "1SEND_F3") == 128
