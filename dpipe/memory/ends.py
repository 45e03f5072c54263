"""The formulas of an embedding and of a head; `formulas.py` says what they are. No torch.

u  an activation [B, T, D], whole       unit
r  the activation that layers pass on   stream
"""

from dataclasses import replace

from dpipe.memory.layers import Peaks, of_parameters
from dpipe.memory.sizes import TransformerSizes
from dpipe.memory.walk import LayerMemory

_FLOAT = 4
_INT64 = 8
# Bytes a token.
_LOOKED_UP = 9  # its row in one rank's part of the vocabulary, and whether it has one there
_SPLIT_LOSS_KEEPS = 13  # the target's index here, whether it is here, and its weight: 8 + 1 + 4
_SPLIT_LOSS_MAKES = 29


def embedding_memory(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """With tensor parallelism, rows of tokens outside a rank's part of the vocabulary are zeroed.

    `freed`: bytes of the output, if no layer keeps it; its gradient is freed once consumed.
    """
    table = sizes.table
    positions = _position_bytes(sizes)
    inside = sizes.context * _INT64 + sizes.noise
    if sizes.ranks > 1:
        inside += sizes.tokens(_LOOKED_UP)
    peaks = _embedding_peaks(sizes, freed)
    if recompute == "full":
        making = sizes.stream + peaks.forward
        peaks = replace(peaks.remade(inside, making, peaks.forward), input=0)
        inside = 0
    token_types = 2 * sizes.width * sizes.value_bytes if sizes.bert else 0
    return of_parameters(
        table + positions + token_types,
        # AdamW still has one copy of the table when it makes two of the positions.
        largest=max(table, table // 2 + positions),
        held_bytes=sizes.tokens(_INT64) * (2 if sizes.bert else 1) + inside,
        peaks=peaks,
    )


def _position_bytes(sizes: TransformerSizes) -> int:
    """The embedding of positions."""
    return sizes.context * sizes.slices * sizes.width * sizes.value_bytes


def _embedding_peaks(sizes: TransformerSizes, freed: int) -> Peaks:
    """The table's gradient is dense, and made for every micro-batch.

    Backward first multiplies the gradient by the noise, `early`, and then frees the noise.
    """
    u = sizes.unit
    r = sizes.stream
    positions = _position_bytes(sizes)
    noise = sizes.noise
    if sizes.ranks == 1:
        forward = 3 * u if sizes.bert else 2 * u + positions
        early = noise
        table_made = sizes.table
    else:
        forward = 3 * u + (r if sizes.sequence else 0)
        early = max(noise, u + sizes.gathered)
        table_made = u + sizes.table - noise
    replaces_gradient = sizes.dropout or sizes.ranks > 1
    replaced = freed if replaces_gradient else 0
    given = 2 * r - freed
    return Peaks(
        forward=max(2 * r, forward - noise),
        backward=given + max(early, max(2 * positions, table_made) - replaced),
        first=given + max(early, max(2 * positions, table_made + positions) - replaced),
    )


def head_memory(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """Logits and their log probabilities, both in fp32 whatever the precision of the product."""
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    inside = logits + 2 * sizes.positions(_FLOAT) + _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    inside += r // 2 + table // 2 if half else r
    peaks = _half_head_peaks(sizes) if half else _head_peaks(sizes)
    if recompute == "full":
        forward = max(_product_alone(sizes), peaks.forward + logits)
        peaks = peaks.remade(inside, peaks.forward, forward)
        inside = 0
    return of_parameters(
        table + 2 * sizes.width * sizes.value_bytes,
        largest=table,
        held_bytes=r + sizes.tokens(_INT64) + inside,
        deferred_bytes=_product_factors(sizes, sizes.unit),
        weight_bytes=table * 3 // 2 if half else table,
        first_weight_bytes=table // 2 if half else 0,
        peaks=peaks,
    )


def _head_peaks(sizes: TransformerSizes) -> Peaks:
    u = sizes.unit
    given_back = _given_back(sizes)
    backward = max(given_back, sizes.gathered + u + sizes.table)
    return Peaks(
        forward=_logits_made(sizes, 0),
        backward=backward,
        first=backward,
        input=max(given_back, sizes.gathered + 2 * u),
    )


def _half_head_peaks(sizes: TransformerSizes) -> Peaks:
    """Under autocast, which keeps 16-bit copies of the norm's output and of the matrix."""
    u = sizes.unit
    r = sizes.stream
    table = sizes.table
    given_back = _given_back(sizes)
    freed = r // 2 + table // 2 + sizes.logits
    norm = max(2 * r, u + r // 2) - freed
    weight = u // 2 + table * 3 // 2 - freed
    backward = max(given_back, _products(sizes), weight, norm)
    gathered = 3 * u // 2 if sizes.sequence else 2 * r
    return Peaks(
        forward=_logits_made(sizes, 0),
        backward=backward,
        first=max(backward, norm + table),
        input=max(given_back, gathered - (sizes.logits + table) // 2),
    )


def bert_head_memory(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """As `head_memory`, behind a transform and its norm, and beside a pooler: two matrices of
    `dense` bytes.
    """
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    dense = _dense_bytes(sizes)
    inside = 2 * r + table // 2 + dense if half else 4 * r
    inside += logits + 4 * sizes.positions(_FLOAT) + sizes.tokens(_INT64)
    inside += _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    peaks = _half_bert_head_peaks(sizes) if half else _bert_head_peaks(sizes)
    if recompute == "full":
        transform = dense // 2 if half else r + sizes.gathered
        forward = max(_product_alone(sizes) + transform, peaks.forward + logits)
        peaks = peaks.remade(inside, peaks.forward, forward)
        inside = 0
    # Biases of transform, pooler, words and pair; the pair's matrix, 2 D; two norms of 2 D each.
    biases_and_norms = 8 * sizes.width + sizes.vocab_size // sizes.ranks + 2
    return of_parameters(
        table + 2 * dense + biases_and_norms * sizes.value_bytes,
        largest=table,
        held_bytes=r + sizes.tokens(_INT64) + inside,
        deferred_bytes=_product_factors(sizes, sizes.unit + 2 * r),
        weight_bytes=table * 3 // 2 if half else table,
        first_weight_bytes=max(table // 2 - 2 * dense, dense // 2) if half else 0,
        peaks=peaks,
    )


def _dense_bytes(sizes: TransformerSizes) -> int:
    """A [D, D] matrix of BERT's head, which every rank has whole."""
    return sizes.width**2 * sizes.value_bytes


def _bert_head_peaks(sizes: TransformerSizes) -> Peaks:
    u = sizes.unit
    r = sizes.stream
    given_back = _given_back(sizes)
    backward = max(given_back, r + sizes.gathered + u + sizes.table)
    return Peaks(
        forward=_logits_made(sizes, _dense_bytes(sizes)),
        backward=backward,
        first=backward + _dense_bytes(sizes),  # the pooler's gradient, which is made by then
        input=max(given_back, r + sizes.gathered + 2 * u),
    )


def _half_bert_head_peaks(sizes: TransformerSizes) -> Peaks:
    """Under autocast. The pooler's backward is over, and its gradient made, when the logits'
    product begins its own.
    """
    u = sizes.unit
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    dense = _dense_bytes(sizes)
    given_back = _given_back(sizes)
    product = max(r + _products(sizes), (r + u) // 2 + table - logits) - dense // 2
    backward = max(given_back, dense - logits // 2, product)
    scattered = 3 * u // 2 + r + dense // 2 if sizes.sequence else 0
    transform = max(5 * r // 2, scattered) - (logits + table) // 2 - dense
    return Peaks(
        forward=_logits_made(sizes, dense),
        backward=backward,
        first=max(backward, product + dense),
        input=max(given_back, transform),
    )


def _product_factors(sizes: TransformerSizes, inputs: int) -> int:
    """In I, of a head: `inputs` of its matrices and the logits' gradient, kept for W."""
    if sizes.rounded:
        return inputs + sizes.logits // 2
    return (inputs + sizes.logits) // (2 if sizes.half else 1)


def _products(sizes: TransformerSizes) -> int:
    """Both gradients of the logits' product, in 16 bits; split positions are gathered once more,
    from two copies.
    """
    gathered = sizes.gathered // 2
    made = gathered + (sizes.unit + sizes.table) // 2
    return max(2 * gathered, made) - sizes.logits // 2


def _logits_made(sizes: TransformerSizes, later: int) -> int:
    """In F, of a head: the loss at work; or under autocast, 16-bit logits or gathered positions
    before that.

    `later` are bytes of weights that have no 16-bit copies yet.
    """
    r = sizes.stream
    logits = sizes.logits
    loss = _of_split_loss(sizes, _SPLIT_LOSS_MAKES)
    if sizes.rounded:
        return 3 * logits // 2 + loss
    if not sizes.half:
        return logits + loss
    gathering = r + sizes.gathered - (sizes.table + later) // 2 - logits
    return max(logits * 3 // 2 + loss, r - logits // 2, gathering)


def _of_split_loss(sizes: TransformerSizes, token_bytes: int) -> int:
    """Of cross entropy over a split vocabulary, beside the probabilities: a few numbers a token."""
    return sizes.tokens(token_bytes) if sizes.ranks > 1 else 0


def _given_back(sizes: TransformerSizes) -> int:
    """The gradient of the logits; on one rank also that of their log probabilities."""
    if sizes.ranks == 1:
        return 2 * sizes.logits
    return sizes.logits + sizes.tokens(2 * _INT64)


def _product_alone(sizes: TransformerSizes) -> int:
    """The logits' product without a graph, and its operands."""
    u = sizes.unit
    r = sizes.stream
    if not sizes.half:
        return u + sizes.logits
    gathered = sizes.gathered // 2
    return 3 * r // 2 + gathered + max(gathered, (sizes.table + sizes.logits) // 2)
