"""Arithmetic and parameters of a GPT's and a BERT's layers, by formula. No torch.

B micro-batch size · T context · D width · V vocabulary. A tuple has one value a layer: embedding,
blocks, head.
"""


def gpt_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """FLOPs of the forward pass of one micro-batch; a product of [m, k] and [k, n] is 2 m k n.

    A block has 24 B T D^2 for its four matrices and 4 B T^2 D for attention, the masked half
    included; the head 2 B T D V (Narayanan et al. 2021, appendix A). Norms, GELU and softmax are
    left out.
    """
    tokens = batch_size * context
    core = attention_core_flops(batch_size=batch_size, context=context, width=width)
    block = 24 * tokens * width**2 + core
    head = float(2 * tokens * width * vocab_size)
    return (0.0, *[block] * num_layers, head)


def bert_layer_flops(
    *, batch_size: int, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[float, ...]:
    """As a GPT's. The head has a transform of 2 B T D^2 besides and, on the B first tokens, a
    pooler and two logits.
    """
    *layers, head = gpt_layer_flops(
        batch_size=batch_size,
        context=context,
        width=width,
        num_layers=num_layers,
        vocab_size=vocab_size,
    )
    transform = 2 * batch_size * context * width**2
    pooler = 2 * batch_size * width**2
    pair_logits = 2 * batch_size * 2 * width
    return (*layers, head + transform + pooler + pair_logits)


def attention_core_flops(*, batch_size: int, context: int, width: int) -> float:
    """What selective recomputation runs again of a block: 4 B T^2 D."""
    return float(4 * batch_size * context**2 * width)


def gpt_layer_parameter_bytes(
    *, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[int, ...]:
    """Bytes of each layer's parameters in fp32.

    A block: four matrices of 12 D^2 in all, their biases 9 D, two norms of 2 D each. A tied head
    has a matrix of its own that is kept equal to the embedding's.
    """
    embedding = (vocab_size + context) * width
    block = 12 * width**2 + 13 * width
    head = (vocab_size + 2) * width
    return (4 * embedding, *[4 * block] * num_layers, 4 * head)


def bert_layer_parameter_bytes(
    *, context: int, width: int, num_layers: int, vocab_size: int
) -> tuple[int, ...]:
    """As a GPT's, and two token types in the embedding.

    The head has besides: a transform, its norm, a bias a word, a pooler, and the pair's two logits.
    """
    embedding, *blocks, head = gpt_layer_parameter_bytes(
        context=context, width=width, num_layers=num_layers, vocab_size=vocab_size
    )
    types = 2 * width
    transform = width**2 + width
    norm = 2 * width
    pooler = width**2 + width
    pair = 2 * (width + 1)
    more = transform + norm + vocab_size + pooler + pair
    return (embedding + 4 * types, *blocks, head + 4 * more)
