"""The formulas of a transformer block; `formulas.py` says what they are. No torch.

u  an activation [B, T, D], whole            unit
w  one rank's part of it, between matrices   part
r  the activation that layers pass on        stream
c  the attention scores of one rank          matrix
"""

from dataclasses import dataclass, replace

from dpipe.memory.layers import Peaks, of_parameters
from dpipe.memory.sizes import TransformerSizes
from dpipe.memory.walk import LayerMemory

_FLOAT = 4


def block_memory(sizes: TransformerSizes, recompute: str, freed: int) -> LayerMemory:
    """`freed`: bytes of the output, if no layer keeps it; its gradient is freed once that of the
    MLP is added.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    half = sizes.half
    matrices = 12 * sizes.width**2 // sizes.ranks  # values: qkv 3, output 1, and 4 + 4 of the MLP
    largest = _largest_matrix(sizes)
    kept = r + _statistics(sizes, recompute)
    inside = _dropped_bytes(sizes, recompute)
    inside += 6 * w + 2 * r + matrices * 2 if half else 12 * w + 3 * r
    if sizes.slices > 1:
        # Keys and values lie with those of the other slices.
        own_bytes = sizes.keys_values // sizes.slices
        inside -= own_bytes
    peaks = _block_peaks(sizes, recompute, freed)
    if recompute == "full":
        peaks = peaks.remade(inside, r + peaks.forward, _forward_alone(sizes))
        kept = r
        inside = 0
    # Of qkv and mlp_in, which are cut; and whole, of the other two matrices and of two norms.
    biases_and_norms = 7 * sizes.width // sizes.ranks + 6 * sizes.width
    block = of_parameters(
        (matrices + biases_and_norms) * sizes.value_bytes,
        largest=largest,
        held_bytes=kept + inside,
        # What the four matrices read, 2 u + 5 w, and the gradients of what they make, 2 u + 7 w.
        deferred_bytes=(4 * u + 12 * w) // (2 if half else 1),
        # A product in 16 bits, and then the same in fp32.
        weight_bytes=largest * 3 // 2 if half else largest,
        # The last that is made, of q, k and v, in 16 bits.
        first_weight_bytes=3 * largest // 8 if half else 0,
        # Otherwise the given gradient has been copied by then.
        keeps_given=not (half or sizes.dropout or sizes.sequence),
        peaks=peaks,
    )
    return replace(
        block,
        sequence_bytes=sizes.keys_values,
        shared_bytes=_slice_masks(sizes),
    )


def _largest_matrix(sizes: TransformerSizes) -> int:
    """One rank's part of a matrix of the MLP."""
    return 4 * sizes.width**2 * sizes.value_bytes // sizes.ranks


def _block_peaks(sizes: TransformerSizes, recompute: str, freed: int) -> Peaks:
    """The worse of the MLP's and the attention's, less what no other layer holds by then."""
    dropped = _dropped_bytes(sizes, recompute)
    mlp = _half_mlp_peaks(sizes, dropped) if sizes.half else _mlp_peaks(sizes, dropped)
    backward = mlp.backward - freed
    if not sizes.matrix:
        return Peaks(mlp.forward, backward, backward, mlp.input - freed)
    core = _core_peaks(sizes, recompute)
    core_backward = core.backward - 2 * freed
    backward = max(backward, core_backward)
    return Peaks(
        forward=max(mlp.forward, core.forward),
        backward=backward,
        first=max(backward, core_backward + _other_weights(sizes)),
        input=max(mlp.input - freed, core.input - 2 * freed),
    )


def _dropped_bytes(sizes: TransformerSizes, recompute: str) -> int:
    """What a block keeps for its dropouts, and for an attention that is not fused."""
    dropped = _dropout_bytes(sizes)
    if sizes.matrix and recompute != "selective":
        dropped += 3 * sizes.matrix + _fp32_heads(sizes)
    return dropped


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


@dataclass(frozen=True)
class _PartPeaks:
    """Working memory of a part of a block, as in `Peaks`."""

    forward: int
    backward: int
    input: int


def _mlp_peaks(sizes: TransformerSizes, dropped: int) -> _PartPeaks:
    """In fp32: at both ends of the MLP, and where the attention's backward ends, when the `dropped`
    bytes that dropout kept are freed.
    """
    largest = _largest_matrix(sizes)
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    if sizes.ranks == 1:
        return _PartPeaks(
            forward=2 * u,
            backward=6 * u + largest,
            input=10 * u,
        )
    if not sizes.sequence:
        backward = max(
            2 * u + 4 * w + largest,
            3 * u - 4 * w + largest,
            4 * u - 8 * w,
        )
        return _PartPeaks(
            forward=2 * u,
            backward=backward,
            input=max(2 * u + 8 * w, 4 * u),
        )
    # A gradient that is gathered, times noise that is then freed.
    given = r if sizes.dropout else 2 * r
    return _PartPeaks(
        forward=2 * u + r,
        backward=given
        + max(
            2 * u,
            u + 4 * w + largest,
            2 * u - 4 * w + largest,
        ),
        input=max(given + u + 8 * w, r + 6 * u - dropped),
    )


def _half_mlp_peaks(sizes: TransformerSizes, dropped: int) -> _PartPeaks:
    """As `_mlp_peaks`, of products in 16 bits; a weight's gradient is cast to fp32 once its 16-bit
    copy is freed.
    """
    largest = _largest_matrix(sizes)
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    noise = r if sizes.dropout else 0
    gathered = (u - noise) // 2  # its noise is freed by then
    backward = 2 * r + max(
        gathered + 2 * w + largest // 2,
        largest,
        noise,
    )
    input_bytes = 2 * r + gathered + 4 * w - largest // 2
    if sizes.sequence:
        return _PartPeaks(
            forward=u + r // 2,
            backward=max(backward, 2 * r + u + r // 2),
            input=max(input_bytes, r // 2 + 3 * u - dropped),
        )
    mlp_norm = (8 if sizes.dropout else 9) * r // 2 - largest
    attention_norm = 5 * r - 3 * largest // 2 - dropped
    return _PartPeaks(
        forward=3 * u // 2,
        backward=backward,
        input=max(input_bytes, mlp_norm, attention_norm),
    )


def _core_peaks(sizes: TransformerSizes, recompute: str) -> _PartPeaks:
    """Of an attention that is not fused: when its scores are made, and when they are made again.

    By then the backward of the MLP is over, and autocast's 16-bit copies of its weights are freed:
    less is left than was held. In I the factors of its weight gradients stay.
    """
    u = sizes.unit
    w = sizes.part
    r = sizes.stream
    again = recompute == "selective"
    if sizes.ranks > 1:
        forward, backward = _split_core(sizes, again=again)
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
    return _PartPeaks(forward, backward, input_bytes)


def _split_core(sizes: TransformerSizes, *, again: bool) -> tuple[int, int]:
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
    forward -= (before - r) // 2 + _largest_matrix(sizes) if sizes.half else before
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
        return max(
            core,
            2 * r + 2 * u + 4 * w,
            r + 8 * w,
        )
    return max(core, 3 * u + 4 * w, u + 8 * w)


def _dropout_bytes(sizes: TransformerSizes) -> int:
    """What a block's two dropouts keep; under autocast on a CPU they keep 16-bit values."""
    if sizes.half and not sizes.masks:
        return sizes.noise
    return 2 * sizes.noise


def _slice_masks(sizes: TransformerSizes) -> int:
    """What each slice but the first of a sequence may read, in the type of its queries."""
    value_bytes = 2 if sizes.half else sizes.value_bytes
    later = range(2, sizes.slices + 1)
    num_keys = sizes.context * sum(later)
    return sizes.context * num_keys * value_bytes


def _causal_mask(sizes: TransformerSizes) -> int:
    """Of an attention that is not fused."""
    if sizes.bert:
        return 0
    return (6 if sizes.half else 4) * sizes.context**2
