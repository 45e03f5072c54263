"""What the layers of a GPT or a BERT hold, by formula, before anything ran: all that a rank's
memory is for. No torch.

    x ──norm──qkv──core──output──+──norm──mlp_in──gelu──mlp_out──+──>        u: one activation, B T D fp32 values
      1   1    3     1           1    1     4      4                         held: 16 u (Korthikanti et al. 2022, eq. 1)

Their 34 s b h bytes are 16 values of 2 bytes and two masks of one; here a value has 4 bytes, or 2
under autocast where a product reads it, and everywhere beside fp32 masters. A fused attention keeps
no [T, T] matrix; one with dropout on a CPU keeps three, c bytes each. The working memory was
counted on fake tensors, on which tests/engine/test_memory.py holds the whole to 2 %.

Where R ranks hold a stage together, each has 1 / R of what lies between two matrices (12 u of the
16) and of the parameters, and with the sequence split between them 1 / R of all (Korthikanti et al.
2022, section 4).

u an activation whole · w a rank's part of it between two matrices · r of the one that layers pass
on · c its scores
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dpipe.config.load import Config
from dpipe.plan.memory.sizes import TransformerSizes, sizes_of
from dpipe.timeline.memory import LayerMemory

_MOMENTS = 2  # of AdamW (Loshchilov & Hutter 2019), as large as the parameters
_HALF = 2
_FLOAT = 4
_INT64 = 8
_LOOKED_UP = 9  # bytes a token: its place among a rank's words, and whether it is one of them
# bytes a token
_SPLIT_LOSS_KEEPS = 13
_SPLIT_LOSS_MAKES = 29


def layers_memory(config: Config) -> tuple[LayerMemory, ...]:
    """Of the configured transformer."""
    return transformer_memory(sizes_of(config), config.pipeline.recompute)


_Make = Callable[[TransformerSizes, str, int], LayerMemory]


def transformer_memory(sizes: TransformerSizes, recompute: str) -> tuple[LayerMemory, ...]:
    """Embedding, blocks, head. A layer's `held_bytes` include its input, which the layer before has
    made.
    """
    head = _bert_head(sizes, recompute) if sizes.bert else _head(sizes, recompute)
    embedding, block = (_before_others(make, sizes, recompute) for make in (_embedding, _block))
    layers = (embedding, *[block] * sizes.num_layers, head)
    return tuple(map(with_masters, layers)) if sizes.rounded else layers


def with_masters(layer: LayerMemory) -> LayerMemory:
    """A layer whose parameters have 16 bits, with masters of 32 that have the gradients and the
    moments.
    """
    return replace(
        layer,
        rounded_bytes=layer.parameter_bytes,
        parameter_bytes=2 * layer.parameter_bytes,
        gradient_bytes=2 * layer.gradient_bytes,
        optimizer_bytes=2 * layer.optimizer_bytes,
        update_bytes=2 * layer.update_bytes,
        backward_bytes=layer.backward_bytes
        + layer.first_bytes,  # gradients stay as they are made, each time
        first_bytes=0,
        weight_bytes=0,  # what is made is the gradient
        within=None if layer.within is None else with_masters(layer.within),
    )


def _before_others(make: _Make, sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """Behind it in one graph, another layer is done with its output, and its gradient is let go of
    in time.
    """
    within = None if recompute == "full" else make(sizes, recompute, sizes.stream)
    return replace(make(sizes, recompute, 0), within=within)


def stage_memory(
    layers: Sequence[LayerMemory], cut: Sequence[int], outputs: Sequence[int], recompute: str
) -> tuple[tuple[LayerMemory, ...], ...]:
    """The layers of each stage. `outputs[s]` bytes of stage s's output are held with it, unless it
    is made again.
    """
    starts = [sum(cut[:stage]) for stage in range(len(cut))]
    ends = [
        LayerMemory(held_bytes=0 if recompute == "full" else size, given_bytes=size)
        for size in outputs
    ]
    whole = [_stage(layers[start : start + size]) for start, size in zip(starts, cut, strict=True)]
    return (*((*stage, end) for stage, end in zip(whole, ends, strict=False)), whole[-1])


def _stage(layers: Sequence[LayerMemory]) -> tuple[LayerMemory, ...]:
    return (*(layer.within or layer for layer in layers[:-1]), *layers[-1:])


def _embedding(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """The table's gradient is dense, and made for every micro-batch. What is not among a rank's
    words is zeroed.

    `freed` are its output's bytes where that is not held, and its gradient only until another is
    made of it.
    """
    u = sizes.unit
    r = sizes.stream
    table = sizes.table
    again = sizes.sequence
    positions = sizes.context * sizes.width * sizes.value_bytes
    noise = _noise(
        sizes
    )  # its product with the gradient is made while it is there, the rest without it
    inside = sizes.context * _INT64 + noise
    if sizes.ranks == 1:
        forward = 3 * u if sizes.bert else 2 * u + positions
        early = noise
        back = table
    else:
        inside += sizes.tokens(_LOOKED_UP)
        forward = 3 * u + r * again
        early = max(noise, u + u * again)
        back = u + table - noise
    forward = max(2 * r, forward - noise)
    given = 2 * r - freed
    replaced = freed * (sizes.dropout or sizes.ranks > 1)
    backward, first = (
        given + max(early, max(2 * positions, back + kept) - replaced) for kept in (0, positions)
    )
    if recompute == "full":
        backward, first = (inside + max(worst, r + forward) for worst in (backward, first))
        inside = 0
    return of_parameters(
        table + positions + 2 * sizes.bert * sizes.width * sizes.value_bytes,
        largest=max(
            table, table // 2 + positions
        ),  # AdamW still has one copy of the words' when it makes two of these
        held_bytes=sizes.tokens(_INT64) * (1 + sizes.bert) + inside,
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
    )


def _head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """Logits, and their logarithms of probability, both in fp32 whatever the product's
    precision.
    """
    u = sizes.unit
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    given = r + sizes.tokens(_INT64)
    rounded = r // 2 + table // 2
    inside = (
        (rounded if half else r)
        + logits
        + 2 * sizes.positions(_FLOAT)
        + _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    )
    forward = _logits_made(sizes, 0)
    weight = table * 3 // 2 if half else table
    input_ = max(_given_back(sizes), sizes.gathered + 2 * u)
    backward = first = max(_given_back(sizes), sizes.gathered + u + table)
    if half:
        normed = max(2 * r, u + r // 2) - rounded - logits
        backward = max(
            _given_back(sizes), _products(sizes), u // 2 + weight - rounded - logits, normed
        )
        first = max(backward, normed + table)
        input_ = max(
            _given_back(sizes), (3 * u // 2 if sizes.sequence else 2 * r) - (logits + table) // 2
        )
    if recompute == "full":
        backward, first, input_ = (
            max(worst, forward) + inside for worst in (backward, first, input_)
        )
        forward = max(_alone_in_front(sizes), forward + logits)
        inside = 0
    return of_parameters(
        table + 2 * sizes.width * sizes.value_bytes,
        largest=table,
        held_bytes=given + inside,
        deferred_bytes=u + logits // 2 if sizes.rounded else (u + logits) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_,
        weight_bytes=weight,
        first_weight_bytes=weight - table,
    )


def _products(sizes: TransformerSizes) -> int:
    """Both gradients of the logits' product, in 16 bits; split positions are gathered once more,
    from two copies.
    """
    gathered = sizes.gathered // 2
    return max(2 * gathered, gathered + (sizes.unit + sizes.table) // 2) - sizes.logits // 2


def _logits_made(sizes: TransformerSizes, later: int) -> int:
    """In F, of a head: the loss at work; or half precision's logits, or the gathered positions, on
    their way there.

    `later` are weights of whose 16-bit copies there are none yet.
    """
    r = sizes.stream
    logits = sizes.logits
    working = _of_split_loss(sizes, _SPLIT_LOSS_MAKES)
    if not sizes.half:
        return logits * (3 if sizes.rounded else 2) // 2 + working
    gathering = r + sizes.gathered - (sizes.table + later) // 2 - logits
    return max(logits * 3 // 2 + working, r - logits // 2, gathering)


def _of_split_loss(sizes: TransformerSizes, token_bytes: int) -> int:
    """Beside chances, of cross entropy over split words: a few numbers a token."""
    return sizes.tokens(token_bytes) if sizes.ranks > 1 else 0


def _given_back(sizes: TransformerSizes) -> int:
    """The gradient of the logits, and of one process that of their logarithms."""
    return 2 * sizes.logits if sizes.ranks == 1 else sizes.logits + sizes.tokens(2 * _INT64)


def _alone_in_front(sizes: TransformerSizes) -> int:
    """The logits' product that leaves no graph, and what it is made of."""
    u = sizes.unit
    r = sizes.stream
    if sizes.half:
        gathered = sizes.gathered // 2
        return 3 * r // 2 + gathered + max(gathered, (sizes.table + sizes.logits) // 2)
    return u + sizes.logits


def _bert_head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """As `_head`, behind a transform and its norm, and beside a pooler: two matrices of `dense`
    bytes.

    In half precision the pooler is done with, and its gradient made, when the logits' product gives
    back.
    """
    u = sizes.unit
    r = sizes.stream
    logits = sizes.logits
    table = sizes.table
    half = sizes.half
    dense = sizes.width**2 * sizes.value_bytes
    given = r + sizes.tokens(_INT64)
    inside = 2 * r + table // 2 + dense if half else 4 * r
    inside += (
        logits
        + 4 * sizes.positions(_FLOAT)
        + sizes.tokens(_INT64)
        + _of_split_loss(sizes, _SPLIT_LOSS_KEEPS)
    )
    forward = _logits_made(sizes, dense)
    weight = table * 3 // 2 if half else table
    input_ = max(_given_back(sizes), r + sizes.gathered + 2 * u)
    backward = max(_given_back(sizes), r + sizes.gathered + u + table)
    first = backward + dense  # the gradient of the pooler, which is made by then
    if half:
        pooled = max(r + _products(sizes), (r + u) // 2 + table - logits) - dense // 2
        backward = max(_given_back(sizes), dense - logits // 2, pooled)
        first = max(backward, pooled + dense)
        scattered = 3 * u // 2 + r + dense // 2 if sizes.sequence else 0
        input_ = max(_given_back(sizes), max(5 * r // 2, scattered) - (logits + table) // 2 - dense)
    if recompute == "full":
        backward, first, input_ = (
            max(worst, forward) + inside for worst in (backward, first, input_)
        )
        forward = max(
            _alone_in_front(sizes) + (dense // 2 if half else r + sizes.gathered), forward + logits
        )
        inside = 0
    return of_parameters(
        table
        + 2 * dense
        + (8 * sizes.width + sizes.vocab_size // sizes.ranks + 2) * sizes.value_bytes,
        largest=table,
        held_bytes=given + inside,
        deferred_bytes=u + 2 * r + logits // 2
        if sizes.rounded
        else (u + 2 * r + logits) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_,
        weight_bytes=weight,
        first_weight_bytes=max(table // 2 - 2 * dense, dense // 2) if half else 0,
    )


def _block(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """`freed` bytes of its output are not held, nor of its gradient once that of the perceptron has
    been added.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    half = sizes.half
    matrices = 12 * sizes.width**2 // sizes.ranks
    largest = 4 * sizes.width**2 * sizes.value_bytes // sizes.ranks
    heads = sizes.num_heads // sizes.ranks
    normalisers = (
        0 if c or recompute == "selective" else sizes.tokens(_FLOAT) * heads
    )  # of a fused core
    statistics = 4 * sizes.positions(_FLOAT) + normalisers
    kept = r + statistics  # the input
    dropped = _dropout_bytes(sizes)
    if c and recompute != "selective":
        in_fp32 = (
            3 * w if sizes.rounded else 3 * w // 2 if half else 0
        )  # one process makes it of fp32 copies
        dropped += 3 * c + (in_fp32 if sizes.ranks == 1 else 0)
    inside = (6 * w + 2 * r + matrices * 2 if half else 12 * w + 3 * r) + dropped
    moments = _half_moments if half else _moments
    forward, *moments_back = moments(sizes, largest, dropped)
    backward, input_ = (moment - freed for moment in moments_back)
    first = backward
    if c:
        forward_core, *core = _core_moments(sizes, largest, recompute)
        core_back, core_input = (moment - 2 * freed for moment in core)
        forward = max(forward, forward_core)
        backward = max(backward, core_back)
        input_ = max(input_, core_input)
        first = max(backward, core_back + _other_weights(sizes))
    if recompute == "full":
        backward, first, input_ = (
            max(r + forward, worst) + inside for worst in (backward, first, input_)
        )
        forward = _alone(sizes)
        kept = r
        inside = 0
    return of_parameters(
        (matrices + 7 * sizes.width // sizes.ranks + 6 * sizes.width) * sizes.value_bytes,
        largest=largest,
        held_bytes=kept + inside,
        deferred_bytes=(4 * u + 12 * w) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first - backward,
        input_bytes=input_,
        weight_bytes=largest * 3 // 2 if half else largest,
        first_weight_bytes=3 * largest // 8
        if half
        else 0,  # the last that is made, of q, k and v, in 16 bits
        keeps_given=not (
            half or sizes.dropout or sizes.sequence
        ),  # else it is another tensor by then
    )


def _moments(sizes: TransformerSizes, largest: int, dropped: int) -> tuple[int, int, int]:
    """Of a block in F, B and I, in fp32: at the perceptron's two ends, and where the attention
    gives back.

    By then what dropout has kept, `dropped` bytes, is gone.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    if sizes.ranks == 1:
        return 2 * u, 6 * u + largest, 10 * u
    if sizes.sequence:
        given = (
            1 if sizes.dropout else 2
        ) * r  # a gradient that is gathered, times noise that is then gone
        backward = given + max(2 * u, u + 4 * w + largest, 2 * u - 4 * w + largest)
        return 2 * u + r, backward, max(given + u + 8 * w, r + 6 * u - dropped)
    backward = max(2 * u + 4 * w + largest, 3 * u - 4 * w + largest, 4 * u - 8 * w)
    return 2 * u, backward, max(2 * u + 8 * w, 4 * u)


def _half_moments(sizes: TransformerSizes, largest: int, dropped: int) -> tuple[int, int, int]:
    """As `_moments`, of products in 16 bits; a weight's gradient is cast to fp32 when its rounded
    copy is gone.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    gathered = (u - r * sizes.dropout) // 2  # its noise is gone by then
    backward = 2 * r + max(gathered + 2 * w + largest // 2, largest, r if sizes.dropout else 0)
    input_ = 2 * r + gathered + 4 * w - largest // 2
    if sizes.sequence:
        return u + r // 2, max(backward, 2 * r + u + r // 2), max(input_, r // 2 + 3 * u - dropped)
    norms = (8 if sizes.dropout else 9) * r // 2 - largest, 5 * r - 3 * largest // 2 - dropped
    return 3 * u // 2, backward, max(input_, *norms)


def _core_moments(sizes: TransformerSizes, largest: int, recompute: str) -> tuple[int, int, int]:
    """Of a block in F, B and I, where its attention is not fused: when scores are made, and made
    again.

    By then the perceptron has given back, and of half precision the rounded copies of its weights:
    what is left is less than was held. In I the factors of its weights' gradients stay.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    half = sizes.half
    again = recompute == "selective"
    made = _scores(sizes)
    copies = (
        2 * w * (sizes.num_heads > sizes.ranks)
    )  # of q and k; one head by itself lies as a product wants it
    if sizes.ranks > 1:
        before = 9 * w + 4 * r - (0 if again else copies)
        forward = made - (0 if again else 3 * c) - ((before - r) // 2 + largest if half else before)
        back = made + copies // (2 if half else 1) if again else c + w
    elif half:
        forward = int((3 if again else 0.5) * c) + _mask(sizes) - 4 * u
        back = max(7 * c // 2 + 15 * u // 2, 4 * c + 9 * u // 2) if again else c + 3 * u // 2
    else:
        forward = (3 * c if again else 0) + _mask(sizes) - 12 * u
        made_again = max(7 * c // 2 + 15 * u, 4 * c + 9 * u) if sizes.rounded else 4 * c + 4 * u
        back = made_again if again else c + u
    back -= 4 * w - r // 2 + _other_weights(sizes) // 2 if half else 8 * w + r
    return forward, back, back + (9 * w + 3 * u) // (2 if half else 1)


def _other_weights(sizes: TransformerSizes) -> int:
    """Of the matrices behind a block's attention core, in fp32: their gradients are there before
    the core's is.
    """
    return 9 * sizes.width**2 * sizes.value_bytes // sizes.ranks


def _scores(sizes: TransformerSizes) -> int:
    """Scores and chances of a rank's heads, beside the noise that is drawn for the heads of all;
    and what is later.
    """
    later = 0 if sizes.bert else sizes.context**2
    return max(2 + 2 * sizes.ranks, 4 + sizes.ranks) * sizes.matrix + later


def _alone(sizes: TransformerSizes) -> int:
    """A block's forward pass that leaves no graph."""
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    c = sizes.matrix
    half = sizes.half
    if sizes.ranks == 1:
        worst = 5 * u if half else 9 * u
        return max(worst, 3 * c + _mask(sizes) + (13 * u // 2 if half else 5 * u)) if c else worst
    made = r + 3 * w + _scores(sizes) if c else 0
    if half:
        return max(made, 4 * w + u)
    if sizes.sequence:
        return max(made, 2 * r + 2 * u + 4 * w, r + 8 * w)
    return max(made, 3 * u + 4 * w, u + 8 * w)


def _dropout_bytes(sizes: TransformerSizes) -> int:
    """The noise of a block's two dropouts; values are in 16 bits under autocast."""
    return _noise(sizes) if sizes.half and not sizes.masks else 2 * _noise(sizes)


def _noise(sizes: TransformerSizes) -> int:
    """What a dropout between layers keeps, if there is one: on a CPU values."""
    kept = sizes.stream // sizes.value_bytes if sizes.masks else sizes.stream
    return kept if sizes.dropout else 0


def _mask(sizes: TransformerSizes) -> int:
    """The causal one, where the attention is not fused."""
    return 0 if sizes.bert else (6 if sizes.half else 4) * sizes.context**2


def of_parameters(
    parameter_bytes: int, *, largest: int, keeps_given: bool = False, **moments: int
) -> LayerMemory:
    """Two copies of the largest parameter are what AdamW works with, one parameter at a time."""
    return LayerMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        optimizer_bytes=_MOMENTS * parameter_bytes,
        update_bytes=2 * largest,
        keeps_given=keeps_given,
        within=None,
        **moments,
    )
