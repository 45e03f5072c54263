"""The parameters that each rank counts in a norm, on two tensor-parallel ranks with a whole GPT and
a tied embedding.
"""

from typing import Any

from dpipe.ranks import ParallelRanks
from dpipe.run.stages import counted_elsewhere
from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage
from dpipe.stage.tensor_parallel import Split

COPY = "layers.2.output.weight"


class OneOf:
    """One of two ranks; only its number is used."""

    size, sequence = 2, False

    def __init__(self, rank: int) -> None:
        self.rank = rank


def a_stage(rank: int) -> Stage:
    model = gpt(vocab_size=8, num_layers=1, width=8, num_heads=2, context=4, dropout=0.0, tied=True)
    layers = {index: materialise(model, index, 0, "cpu") for index in range(3)}
    group: Any = OneOf(rank)
    return Stage(
        0, layers, num_microbatches=1, loss=model.loss_on(group), split=Split(group, layers)
    )


def counted(rank: int) -> list[str]:
    stage = a_stage(rank)
    parameters = dict(stage.named_parameters())
    elsewhere = counted_elsewhere(
        {0: stage}, {-1: (COPY, parameters[COPY])}, ParallelRanks(rank, tp_size=2)
    )
    return [name for name in parameters if name not in elsewhere]


def test_replicated_parameter_is_counted_by_the_first_rank() -> None:
    cut = [
        "layers.0.tokens.weight",
        *(
            "layers.1.attention.qkv.weight",
            "layers.1.attention.qkv.bias",
            "layers.1.attention.output.weight",
        ),
        *("layers.1.mlp_in.weight", "layers.1.mlp_in.bias", "layers.1.mlp_out.weight"),
    ]
    assert counted(1) == cut
    assert set(counted(0)) - set(cut) == {
        "layers.0.positions.weight",
        *(
            f"layers.1.{norm}_norm.{key}"
            for norm in ("attention", "mlp")
            for key in ("weight", "bias")
        ),
        *("layers.1.attention.output.bias", "layers.1.mlp_out.bias"),
        *("layers.2.norm.weight", "layers.2.norm.bias"),
    }


def test_copy_of_a_shared_weight_is_counted_by_its_first_end() -> None:
    assert COPY not in counted(0)
    assert COPY not in counted(1)
