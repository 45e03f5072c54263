import torch
from ranks import on_ranks

from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise
from dpipe.stage.scatter import Scattered, part_spec
from dpipe.stage.stage import Stage, Tensors
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import Split
from dpipe.wire.spec import TensorSpec

B, T, D = 2, 4, 8
GIVEN = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
GRADIENT = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))


def a_stage(group: TensorGroup | None) -> Stage:
    """The second block of a GPT, alone."""
    model = gpt(
        vocab_size=16, num_layers=2, width=D, num_heads=2, context=T, dropout=0.0, tied=False
    )
    layers = {2: materialise(model, 2, 3, "cpu")}
    return Stage(
        1, layers, num_microbatches=1, split=None if group is None else Split(group, layers)
    )


def there_and_back(group: TensorGroup) -> tuple[Tensors, Tensors, Tensors]:
    """The outputs of forward, evaluation and backward on a rank, for its part of the activation and
    of the gradient.
    """
    stage = Scattered(a_stage(group), group, first=False, last=False)
    (part, gradient) = (group.part(tensor, -1).contiguous() for tensor in (GIVEN, GRADIENT))
    evaluated = stage.evaluate((part,))
    sent = stage.forward(0, (part,))
    assert stage.held == 1
    return sent, evaluated, stage.backward(0, (gradient,))


def test_ranks_send_their_parts_of_the_stages_output() -> None:
    whole = a_stage(None)
    forward, backward = whole.forward(0, (GIVEN,)), whole.backward(0, (GRADIENT,))
    sent, evaluated, back = zip(*on_ranks(2, there_and_back), strict=True)
    for parts, expected in ((sent, forward), (evaluated, forward), (back, backward)):
        assert [tuple(part.shape) for (part,) in parts] == [(B, T, D // 2)] * 2
        torch.testing.assert_close(torch.cat([part for (part,) in parts], -1), expected[0])


def test_integer_tensors_are_sent_whole() -> None:
    lengths = TensorSpec((3,), torch.int32)
    assert part_spec(lengths, 2) == lengths
    assert part_spec(TensorSpec((3, 5, 8), torch.bfloat16), 2) == TensorSpec(
        (3, 5, 4), torch.bfloat16
    )
