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
was counted on fake tensors, where tests/plan/memory/test_memory.py compares the whole.
`measured.py` counts so for any model, but takes torch, which `dpipe simulate` of a GPT or a BERT
does not.

    u  an activation [B, T, D], whole            unit
    w  one rank's part of it, between matrices   part
    r  the activation that layers pass on        stream
    c  the attention scores of one rank          matrix
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dpipe.config.load import Config
from dpipe.plan.memory.layers import of_parameters, with_ends, with_masters
from dpipe.plan.memory.sizes import TransformerSizes, sizes_of
from dpipe.timeline.memory import LayerMemory, StageMemory

_HALF = 2
_FLOAT = 4
_INT64 = 8
# Bytes a token.
_LOOKED_UP = 9  # its row in one rank's part of the vocabulary, and whether it has one there
_SPLIT_LOSS_KEEPS = 13
_SPLIT_LOSS_MAKES = 29

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
    embedding = _alone_and_followed(_embedding, sizes, recompute)
    block = _alone_and_followed(_block, sizes, recompute)
    head = _bert_head(sizes, recompute) if sizes.bert else _head(sizes, recompute)
    layers = (embedding, *[block] * sizes.num_layers, head)
    return tuple(map(with_masters, layers)) if sizes.rounded else layers


def stage_memory(
    layers: Sequence[LayerMemory], cut: Sequence[int], outputs: Sequence[int], recompute: str
) -> tuple[StageMemory, ...]:
    """The layers of each stage. `outputs[s]` are the bytes of stage s's output."""
    stages = []
    for size, end in zip(cut, accumulate(cut), strict=True):
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


def _embedding(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """The table's gradient is dense, and made for every micro-batch. With tensor parallelism, rows
    of tokens outside a rank's part of the vocabulary are zeroed.

    `freed`: bytes of the output, if no layer keeps it; its gradient is freed once consumed.
    """
    u = sizes.unit
    r = sizes.stream
    table = sizes.table
    positions = sizes.context * sizes.width * sizes.value_bytes
    noise = _noise(sizes)
    inside = sizes.context * _INT64 + noise
    # Backward multiplies the gradient by the noise first, `early`, and then frees the noise.
    if sizes.ranks == 1:
        forward = 3 * u if sizes.bert else 2 * u + positions
        early = noise
        table_made = table
    else:
        inside += sizes.tokens(_LOOKED_UP)
        forward = 3 * u + (r if sizes.sequence else 0)
        early = max(noise, u + sizes.gathered)
        table_made = u + table - noise
    forward = max(2 * r, forward - noise)
    given = 2 * r - freed
    is_replaced = sizes.dropout or sizes.ranks > 1
    replaced = freed if is_replaced else 0
    backward = given + max(early, max(2 * positions, table_made) - replaced)
    first = given + max(early, max(2 * positions, table_made + positions) - replaced)
    if recompute == "full":
        backward = inside + max(backward, r + forward)
        first = inside + max(first, r + forward)
        inside = 0
    token_types = 2 * sizes.width * sizes.value_bytes if sizes.bert else 0
    return of_parameters(
        table + positions + token_types,
        # AdamW still has one copy of the table when it makes two of the positions.
        largest=max(table, table // 2 + positions),
        held_bytes=sizes.tokens(_INT64) * (2 if sizes.bert else 1) + inside,
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
    )


def _head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """Logits and their log probabilities, both in fp32 whatever the precision of the product."""
    u = sizes.unit
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    rounded = r // 2 + table // 2  # 16-bit copies of the input and the matrix
    inside = logits + 2 * sizes.positions(_FLOAT) + _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    inside += rounded if half else r
    forward = _logits_made(sizes, 0)
    given_back = _given_back(sizes)
    if half:
        normed = max(2 * r, u + r // 2) - rounded - logits
        weights = u // 2 + table * 3 // 2 - rounded - logits
        backward = max(given_back, _products(sizes), weights, normed)
        first = max(backward, normed + table)
        gathered = 3 * u // 2 if sizes.sequence else 2 * r
        input_bytes = max(given_back, gathered - (logits + table) // 2)
    else:
        backward = max(given_back, sizes.gathered + u + table)
        first = backward
        input_bytes = max(given_back, sizes.gathered + 2 * u)
    if recompute == "full":
        backward = inside + max(backward, forward)
        first = inside + max(first, forward)
        input_bytes = inside + max(input_bytes, forward)
        forward = max(_product_alone(sizes), forward + logits)
        inside = 0
    return of_parameters(
        table + 2 * sizes.width * sizes.value_bytes,
        largest=table,
        held_bytes=r + sizes.tokens(_INT64) + inside,
        deferred_bytes=_product_factors(sizes, u),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_bytes,
        weight_bytes=table * 3 // 2 if half else table,
        first_weight_bytes=table // 2 if half else 0,
    )


def _bert_head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """As `_head`, behind a transform and its norm, and beside a pooler: two matrices of `dense`
    bytes.

    Under autocast the pooler's backward is over, and its gradient made, when the logits' product
    begins its own.
    """
    u = sizes.unit
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    dense = sizes.width**2 * sizes.value_bytes
    inside = 2 * r + table // 2 + dense if half else 4 * r
    inside += logits + 4 * sizes.positions(_FLOAT) + sizes.tokens(_INT64)
    inside += _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    forward = _logits_made(sizes, dense)
    given_back = _given_back(sizes)
    if half:
        pooled = max(r + _products(sizes), (r + u) // 2 + table - logits) - dense // 2
        backward = max(given_back, dense - logits // 2, pooled)
        first = max(backward, pooled + dense)
        scattered = 3 * u // 2 + r + dense // 2 if sizes.sequence else 0
        transformed = max(5 * r // 2, scattered) - (logits + table) // 2 - dense
        input_bytes = max(given_back, transformed)
    else:
        backward = max(given_back, r + sizes.gathered + u + table)
        first = backward + dense  # the pooler's gradient, which is made by then
        input_bytes = max(given_back, r + sizes.gathered + 2 * u)
    if recompute == "full":
        backward = inside + max(backward, forward)
        first = inside + max(first, forward)
        input_bytes = inside + max(input_bytes, forward)
        transform = dense // 2 if half else r + sizes.gathered
        forward = max(_product_alone(sizes) + transform, forward + logits)
        inside = 0
    biases_and_norms = 8 * sizes.width + sizes.vocab_size // sizes.ranks + 2
    return of_parameters(
        table + 2 * dense + biases_and_norms * sizes.value_bytes,
        largest=table,
        held_bytes=r + sizes.tokens(_INT64) + inside,
        deferred_bytes=_product_factors(sizes, u + 2 * r),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_bytes,
        weight_bytes=table * 3 // 2 if half else table,
        first_weight_bytes=max(table // 2 - 2 * dense, dense // 2) if half else 0,
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


@dataclass(frozen=True)
class _BlockPeaks:
    """Working memory of a block, above what is held."""

    forward: int
    backward: int
    input: int  # of a backward pass that leaves the weight gradients

    def without(self, freed: int) -> "_BlockPeaks":
        return replace(self, backward=self.backward - freed, input=self.input - freed)


def _block(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """`freed`: bytes of the output, if no layer keeps it; its gradient is freed once that of the
    MLP is added.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    half = sizes.half
    matrices = 12 * sizes.width**2 // sizes.ranks
    largest = 4 * sizes.width**2 * sizes.value_bytes // sizes.ranks
    dropped = _dropout_bytes(sizes)
    if c and recompute != "selective":
        dropped += 3 * c + _fp32_heads(sizes)
    kept = r + _statistics(sizes, recompute)
    inside = (6 * w + 2 * r + matrices * 2 if half else 12 * w + 3 * r) + dropped
    peaks_of = _half_mlp_peaks if half else _mlp_peaks
    mlp = peaks_of(sizes, largest, dropped).without(freed)
    forward = mlp.forward
    backward = mlp.backward
    first = backward
    input_bytes = mlp.input
    if c:
        core = _core_peaks(sizes, largest, recompute).without(2 * freed)
        forward = max(forward, core.forward)
        backward = max(backward, core.backward)
        first = max(backward, core.backward + _other_weights(sizes))
        input_bytes = max(input_bytes, core.input)
    if recompute == "full":
        again = r + forward
        backward = inside + max(again, backward)
        first = inside + max(again, first)
        input_bytes = inside + max(again, input_bytes)
        forward = _forward_alone(sizes)
        kept = r
        inside = 0
    biases_and_norms = 7 * sizes.width // sizes.ranks + 6 * sizes.width
    return of_parameters(
        (matrices + biases_and_norms) * sizes.value_bytes,
        largest=largest,
        held_bytes=kept + inside,
        deferred_bytes=(4 * u + 12 * w) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_bytes,
        weight_bytes=largest * 3 // 2 if half else largest,
        # The last that is made, of q, k and v, in 16 bits.
        first_weight_bytes=3 * largest // 8 if half else 0,
        # Otherwise the given gradient has been copied by then.
        keeps_given=not (half or sizes.dropout or sizes.sequence),
    )


def _statistics(sizes: TransformerSizes, recompute: str) -> int:
    """Mean and deviation of two norms, and the normalisers of a fused attention."""
    norms = 4 * sizes.positions(_FLOAT)
    if sizes.matrix or recompute == "selective":
        return norms
    return norms + sizes.tokens(_FLOAT) * (sizes.num_heads // sizes.ranks)


def _fp32_heads(sizes: TransformerSizes) -> int:
    """The fp32 copies of q, k and v from which a single process makes 16-bit attention."""
    if sizes.ranks > 1:
        return 0
    if sizes.rounded:
        return 3 * sizes.part
    return 3 * sizes.part // 2 if sizes.half else 0


def _mlp_peaks(sizes: TransformerSizes, largest: int, dropped: int) -> _BlockPeaks:
    """In fp32: at both ends of the MLP, and where the attention's backward ends.

    By then the `dropped` bytes that dropout kept are freed. `largest`: bytes of the largest matrix.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    if sizes.ranks == 1:
        return _BlockPeaks(forward=2 * u, backward=6 * u + largest, input=10 * u)
    if not sizes.sequence:
        backward = max(2 * u + 4 * w + largest, 3 * u - 4 * w + largest, 4 * u - 8 * w)
        return _BlockPeaks(forward=2 * u, backward=backward, input=max(2 * u + 8 * w, 4 * u))
    # A gradient that is gathered, times noise that is then freed.
    given = r if sizes.dropout else 2 * r
    return _BlockPeaks(
        forward=2 * u + r,
        backward=given + max(2 * u, u + 4 * w + largest, 2 * u - 4 * w + largest),
        input=max(given + u + 8 * w, r + 6 * u - dropped),
    )


def _half_mlp_peaks(sizes: TransformerSizes, largest: int, dropped: int) -> _BlockPeaks:
    """As `_mlp_peaks`, of products in 16 bits; a weight's gradient is cast to fp32 once its 16-bit
    copy is freed.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    noise = r if sizes.dropout else 0
    gathered = (u - noise) // 2  # its noise is freed by then
    backward = 2 * r + max(gathered + 2 * w + largest // 2, largest, noise)
    input_bytes = 2 * r + gathered + 4 * w - largest // 2
    if sizes.sequence:
        return _BlockPeaks(
            forward=u + r // 2,
            backward=max(backward, 2 * r + u + r // 2),
            input=max(input_bytes, r // 2 + 3 * u - dropped),
        )
    mlp_norm = (8 if sizes.dropout else 9) * r // 2 - largest
    attention_norm = 5 * r - 3 * largest // 2 - dropped
    return _BlockPeaks(
        forward=3 * u // 2,
        backward=backward,
        input=max(input_bytes, mlp_norm, attention_norm),
    )


def _core_peaks(sizes: TransformerSizes, largest: int, recompute: str) -> _BlockPeaks:
    """Of an attention that is not fused: when its scores are made, and when they are made again.

    By then the backward of the MLP is over, and autocast's 16-bit copies of its weights are freed:
    less is left than was held. In I the factors of its weight gradients stay.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    again = recompute == "selective"
    if sizes.ranks > 1:
        forward, backward = _split_core(sizes, largest, again=again)
    elif sizes.half:
        forward, backward = _half_core(sizes, again=again)
    else:
        forward, backward = _whole_core(sizes, again=again)
    if sizes.half:
        backward -= 4 * w - r // 2 + _other_weights(sizes) // 2
        input_bytes = backward + (9 * w + 3 * u) // 2
    else:
        backward -= 8 * w + r
        input_bytes = backward + 9 * w + 3 * u
    return _BlockPeaks(forward, backward, input_bytes)


def _split_core(sizes: TransformerSizes, largest: int, *, again: bool) -> tuple[int, int]:
    """Forward and backward with tensor parallelism."""
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    made = _scores(sizes)
    # Copies of q and k; a single head already lies in memory as a product wants it.
    copies = 2 * w if sizes.num_heads > sizes.ranks else 0
    before = 9 * w + 4 * r
    forward = made
    if not again:
        before -= copies
        forward -= 3 * c
    forward -= (before - r) // 2 + largest if sizes.half else before
    if not again:
        return forward, c + w
    return forward, made + copies // (2 if sizes.half else 1)


def _half_core(sizes: TransformerSizes, *, again: bool) -> tuple[int, int]:
    """Forward and backward on one rank under autocast."""
    u = sizes.unit
    c = sizes.matrix
    causal = _causal_mask(sizes) - 4 * u
    if again:
        return 3 * c + causal, max(7 * c // 2 + 15 * u // 2, 4 * c + 9 * u // 2)
    return c // 2 + causal, c + 3 * u // 2


def _whole_core(sizes: TransformerSizes, *, again: bool) -> tuple[int, int]:
    """Forward and backward on one rank without autocast."""
    u = sizes.unit
    c = sizes.matrix
    causal = _causal_mask(sizes) - 12 * u
    if not again:
        return causal, c + u
    if sizes.rounded:
        return 3 * c + causal, max(7 * c // 2 + 15 * u, 4 * c + 9 * u)
    return 3 * c + causal, 4 * c + 4 * u


def _other_weights(sizes: TransformerSizes) -> int:
    """The matrices behind a block's attention, in fp32: their gradients are made before
    attention's backward.
    """
    return 9 * sizes.width**2 * sizes.value_bytes // sizes.ranks


def _scores(sizes: TransformerSizes) -> int:
    """Scores and probabilities of one rank's heads, beside the noise drawn for the heads of all
    ranks, and the causal mask.
    """
    causal = 0 if sizes.bert else sizes.context**2
    return max(2 + 2 * sizes.ranks, 4 + sizes.ranks) * sizes.matrix + causal


def _forward_alone(sizes: TransformerSizes) -> int:
    """A block's forward pass without a graph."""
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    half = sizes.half
    if sizes.ranks == 1:
        mlp = 5 * u if half else 9 * u
        if not c:
            return mlp
        attention = 13 * u // 2 if half else 5 * u
        return max(mlp, 3 * c + _causal_mask(sizes) + attention)
    core = r + 3 * w + _scores(sizes) if c else 0
    if half:
        return max(core, 4 * w + u)
    if sizes.sequence:
        return max(core, 2 * r + 2 * u + 4 * w, r + 8 * w)
    return max(core, 3 * u + 4 * w, u + 8 * w)


def _dropout_bytes(sizes: TransformerSizes) -> int:
    """What a block's two dropouts keep; under autocast on a CPU they keep 16-bit values."""
    if sizes.half and not sizes.masks:
        return _noise(sizes)
    return 2 * _noise(sizes)


def _noise(sizes: TransformerSizes) -> int:
    """What one dropout between layers keeps: on a GPU a byte a value, on a CPU a value."""
    if not sizes.dropout:
        return 0
    return sizes.stream // sizes.value_bytes if sizes.masks else sizes.stream


def _causal_mask(sizes: TransformerSizes) -> int:
    """Of an attention that is not fused."""
    if sizes.bert:
        return 0
    return (6 if sizes.half else 4) * sizes.context**2
