"""What a GPT's layers cost by formula, before anything ran. No torch.

B micro-batch size · T context · D width · V vocabulary. Each tuple has one value a layer: embedding, blocks, head.
"""

_VALUE_BYTES, _TOKEN_BYTES = 4, 8


def gpt_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """Operations of the forward pass of one micro-batch; a product of [m, k] and [k, n] is 2 m k n.

    A block has 24 B T D^2 for its four matrices and 4 B T^2 D for scores and mixing, the masked half not taken off; the
    head 2 B T D V (Narayanan et al. 2021, appendix A). Norms, GELU and softmax are left out.
    """
    tokens = batch_size * context
    block = float(24 * tokens * width**2 + 4 * tokens * context * width)
    return (0.0, *(block for _ in range(num_layers)), float(2 * tokens * width * vocab_size))


def gpt_layer_activation_bytes(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[int, ...]:
    """What each layer holds of one micro-batch between forward and backward, in fp32 without dropout or recomputation.

    A block: the 34 s b h bytes of Korthikanti et al. 2022 (equation 1) are 32 without dropout's two masks, that is
    16 values a token and width; the fused attention keeps no [T, T] matrix. The head: its input, normalised or not,
    and the logarithms of the probabilities.
    """
    tokens = batch_size * context
    block, head = 16 * tokens * width * _VALUE_BYTES, tokens * (2 * width + vocab_size) * _VALUE_BYTES
    return (tokens * _TOKEN_BYTES, *(block for _ in range(num_layers)), head)


def gpt_layer_parameter_bytes(*, context: int, width: int, num_layers: int, vocab_size: int) -> tuple[int, ...]:
    """The fp32 parameters of each layer.

    A block: four matrices of 12 D^2 in all, their biases 9 D, two norms of 2 D each. A tied head has a matrix of its
    own that is kept equal to the embedding's.
    """
    block = 12 * width**2 + 13 * width
    values = ((vocab_size + context) * width, *(block for _ in range(num_layers)), (vocab_size + 2) * width)
    return tuple(_VALUE_BYTES * count for count in values)
