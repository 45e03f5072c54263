"""What the layers of a GPT and a BERT cost by formula, before anything ran. No torch.

B micro-batch size · T context · D width · V vocabulary. A tuple has one value a layer: embedding,
blocks, head.
"""


def gpt_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """Operations of the forward pass of one micro-batch; a product of [m, k] and [k, n] is 2 m k n.

    A block has 24 B T D^2 for its four matrices and 4 B T^2 D for scores and mixing, the masked
    half not taken off; the head 2 B T D V (Narayanan et al. 2021, appendix A). Norms, GELU and
    softmax are left out.
    """
    tokens = batch_size * context
    block = 24 * tokens * width**2 + attention_core_flops(
        batch_size=batch_size, context=context, width=width
    )
    return (0.0, *(block for _ in range(num_layers)), float(2 * tokens * width * vocab_size))


def bert_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """A GPT's; the head has a transform of 2 B T D^2 besides, and on B first tokens a pooler and
    two logits.
    """
    *layers, head = gpt_layer_flops(
        batch_size=batch_size,
        context=context,
        width=width,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    return (*layers, head + 2 * batch_size * (context * width**2 + width**2 + 2 * width))


def attention_core_flops(*, batch_size: int, context: int, width: int) -> float:
    """The share of a block that selective recomputation runs again: 4 B T^2 D."""
    return float(4 * batch_size * context**2 * width)


def gpt_layer_parameter_bytes(
    *, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[int, ...]:
    """The fp32 parameters of each layer.

    A block: four matrices of 12 D^2 in all, their biases 9 D, two norms of 2 D each. A tied head
    has a matrix of its own that is kept equal to the embedding's.
    """
    block = 12 * width**2 + 13 * width
    values = (
        (vocab_size + context) * width,
        *(block for _ in range(num_layers)),
        (vocab_size + 2) * width,
    )
    return tuple(4 * count for count in values)


def bert_layer_parameter_bytes(
    *, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[int, ...]:
    """A GPT's, and two token types; a transform, its norm and a bias a word; a pooler and two
    logits of the pair.
    """
    embedding, *blocks, head = gpt_layer_parameter_bytes(
        context=context, width=width, num_layers=num_layers, vocab_size=vocab_size
    )
    dense = width**2 + width
    more = dense + 2 * width + vocab_size + dense + 2 * (width + 1)
    return (embedding + 4 * 2 * width, *blocks, head + 4 * more)
