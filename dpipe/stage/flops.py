"""What a GPT's layers cost by formula, before anything ran. No torch.

B micro-batch size · T context · D width · V vocabulary. A tuple has one value a layer: embedding, blocks, head.
"""


def gpt_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """Operations of the forward pass of one micro-batch; a product of [m, k] and [k, n] is 2 m k n.

    A block has 24 B T D^2 for its four matrices and 4 B T^2 D for scores and mixing, the masked half not taken off; the
    head 2 B T D V (Narayanan et al. 2021, appendix A). Norms, GELU and softmax are left out.
    """
    tokens = batch_size * context
    block = 24 * tokens * width**2 + attention_core_flops(batch_size=batch_size, context=context, width=width)
    return (0.0, *(block for _ in range(num_layers)), float(2 * tokens * width * vocab_size))


def attention_core_flops(*, batch_size: int, context: int, width: int) -> float:
    """The share of a block that selective recomputation runs again: 4 B T^2 D."""
    return float(4 * batch_size * context**2 * width)


def gpt_layer_parameter_bytes(*, context: int, width: int, num_layers: int, vocab_size: int) -> tuple[int, ...]:
    """The fp32 parameters of each layer.

    A block: four matrices of 12 D^2 in all, their biases 9 D, two norms of 2 D each. A tied head has a matrix of its
    own that is kept equal to the embedding's.
    """
    block = 12 * width**2 + 13 * width
    values = ((vocab_size + context) * width, *(block for _ in range(num_layers)), (vocab_size + 2) * width)
    return tuple(4 * count for count in values)
