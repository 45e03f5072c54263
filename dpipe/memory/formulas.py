"""What the layers of a GPT or a BERT hold, by formula, before anything runs. No torch.

    x ──norm──qkv──core──output──+──norm──mlp_in──gelu──mlp_out──+──>     an activation has u bytes,
      1   1    3     1           1    1     4      4                      16 u are held

That is equation 1 of Korthikanti et al. (2022). Their 34 s b h bytes are 16 values of 2 bytes and
two masks of 1. Here a value has 4 bytes; under autocast it has 2 where a matrix product reads it,
and beside fp32 masters everywhere. A fused attention keeps no [T, T] matrix; one with dropout on a
CPU keeps three, of c bytes each.

With tensor parallelism each of R ranks has 1 / R of the parameters and of what lies between two
matrices (12 u of the 16); sequence parallelism splits all of it (Korthikanti et al. 2022, section
4).

The working memory of forward and backward is that of the operation at which most is allocated. It
was counted on fake tensors, where tests/memory/test_memory.py compares the whole.
`probe/measured.py` counts so for any model, but takes torch, which `dpipe simulate` of a GPT or a
BERT does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from dpipe.config.load import Config
from dpipe.memory.block import block_memory
from dpipe.memory.ends import bert_head_memory, embedding_memory, head_memory
from dpipe.memory.layers import with_ends, with_masters
from dpipe.memory.sizes import TransformerSizes, sizes_of
from dpipe.memory.walk import LayerMemory, StageMemory

_Formula = Callable[[TransformerSizes, str, int], LayerMemory]


def transformer_stages(config: Config, cut: Sequence[int]) -> tuple[StageMemory, ...]:
    """What the stages of the configured transformer hold; `cut` are layers a stage."""
    sizes = sizes_of(config)
    recompute = config.pipeline.recompute
    layers = transformer_memory(sizes, recompute)
    return stage_memory(layers, cut, [sizes.stream] * (len(cut) - 1), recompute)


def transformer_memory(sizes: TransformerSizes, recompute: str) -> tuple[LayerMemory, ...]:
    """Embedding, blocks, head. A layer's `held_bytes` include its input, which the layer before
    made.
    """
    embedding = _alone_and_followed(embedding_memory, sizes, recompute)
    block = _alone_and_followed(block_memory, sizes, recompute)
    head = bert_head_memory(sizes, recompute) if sizes.bert else head_memory(sizes, recompute)
    layers = (embedding, *[block] * sizes.num_layers, head)
    return tuple(map(with_masters, layers)) if sizes.rounded else layers


def stage_memory(
    layers: Sequence[LayerMemory],
    cut: Sequence[int],
    outputs: Sequence[int],
    recompute: str,
) -> tuple[StageMemory, ...]:
    """The layers of each stage. `outputs[s]` are the bytes of stage s's output."""
    stages = []
    for size, end in zip(cut, accumulate(cut), strict=True):
        # The last one's output goes over a link, and is counted with the stage's end.
        *followed, last = layers[end - size : end]
        stages.append((*(layer.within or layer for layer in followed), last))
    return with_ends(stages, outputs, recompute)


def _alone_and_followed(formula: _Formula, sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """A layer that ends a stage, and `within` it as it is where another layer follows in the same
    graph: its output and its output's gradient are then freed early.
    """
    alone = formula(sizes, recompute, 0)
    if recompute == "full":  # a graph for each layer
        return alone
    return replace(alone, within=formula(sizes, recompute, sizes.stream))
