"""What the layers of a GPT or a BERT hold, by formula, before anything ran: all that a rank's memory is for. No torch.

    x ──norm──qkv──core──output──+──norm──mlp_in──gelu──mlp_out──+──>        u: one activation, B T D fp32 values
      1   1    3     1           1    1     4      4                         held: 16 u (Korthikanti et al. 2022, eq. 1)

Their 34 s b h bytes are 16 values of 2 bytes and two masks of one; here a value has 4 bytes, or 2 under autocast where
a product reads it. A fused attention keeps no [T, T] matrix; one with dropout on a CPU keeps three, c bytes each. The
working memory was counted on fake tensors, on which tests/engine/test_memory.py holds the whole to 2 %.

Where R ranks hold a stage together, each has 1 / R of what lies between two matrices (12 u of the 16) and of the
parameters, and with the sequence split between them 1 / R of all (Korthikanti et al. 2022, section 4).

B micro-batch size · T context · D width · N heads · V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dpipe.config import Config
from dpipe.errors import ConfigError
from dpipe.timeline.memory import LayerMemory

_MOMENTS = 2  # of AdamW (Loshchilov & Hutter 2019), as large as the parameters
_FLOAT, _INT64 = 4, 8


@dataclass(frozen=True)
class TransformerSizes:
    """`keeps_matrices`: the attention is not fused, which is so with dropout on a CPU. `half`: autocast to 16 bits.

    `ranks` hold a layer together; with `sequence` they split the positions between the matrices. `bert` adds token
    types, and a transform in front of the logits.
    """

    batch_size: int
    context: int
    width: int
    num_heads: int
    num_layers: int
    vocab_size: int
    dropout: bool = False
    keeps_matrices: bool = False
    half: bool = False
    ranks: int = 1
    sequence: bool = False
    bert: bool = False

    @property
    def unit(self) -> int:
        """What enters and leaves a matrix, whole: u."""
        return self.batch_size * self.context * self.width * _FLOAT

    @property
    def part(self) -> int:
        """One rank's part of an activation between two matrices."""
        return self.unit // self.ranks

    @property
    def stream(self) -> int:
        """What one rank has of the activation that layers pass on."""
        return self.part if self.sequence else self.unit

    @property
    def matrix(self) -> int:
        """Scores of a rank's heads, which are made in fp32 even under autocast."""
        heads = self.num_heads // self.ranks
        return self.batch_size * heads * self.context**2 * _FLOAT if self.keeps_matrices else 0

    @property
    def logits(self) -> int:
        return self.batch_size * self.context * self.vocab_size * _FLOAT // self.ranks

    @property
    def table(self) -> int:
        """A rank's words."""
        return self.vocab_size * self.width * _FLOAT // self.ranks

    def tokens(self, value_bytes: int) -> int:
        return self.batch_size * self.context * value_bytes

    def positions(self, value_bytes: int) -> int:
        """As `tokens`, of those that one rank has."""
        return self.tokens(value_bytes) // (self.ranks if self.sequence else 1)


def layers_memory(config: Config) -> tuple[LayerMemory, ...]:
    """Of the configured transformer. A fused attention is taken for granted on anything but a CPU."""
    model, pipeline = config.model, config.pipeline
    sizes = TransformerSizes(
        config.microbatch_size,
        model.context,
        model.width,
        model.num_heads,
        model.num_layers,
        vocabulary_of(config),
        dropout=model.dropout > 0,
        keeps_matrices=model.dropout > 0 and config.node.device == "cpu",
        half=config.train.precision != "fp32",
        ranks=config.tensor_parallel.size,
        sequence=config.tensor_parallel.sequence_parallel,
        bert=model.layers == "bert",
    )
    return transformer_memory(sizes, pipeline.recompute)


def vocabulary_of(config: Config) -> int:
    """Words of the configured model."""
    return config.model.vocab_size or vocabulary(config.data.tokenizer)


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary; raises `ConfigError` where the file cannot be read."""
    if tokenizer == "bytes":
        return 256
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_file(tokenizer).get_vocab_size())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {error}") from None


def transformer_memory(sizes: TransformerSizes, recompute: str) -> tuple[LayerMemory, ...]:
    """Embedding, blocks, head. A layer's `held_bytes` include its input, which the layer before has made."""
    head = _bert_head(sizes, recompute) if sizes.bert else _head(sizes, recompute)
    return (_embedding(sizes), *(_block(sizes, recompute) for _ in range(sizes.num_layers)), head)


def stage_memory(
    layers: Sequence[LayerMemory], cut: Sequence[int], outputs: Sequence[int], recompute: str
) -> tuple[tuple[LayerMemory, ...], ...]:
    """The layers of each stage. `outputs[s]` bytes of stage s's output are held with it, unless it is made again."""
    starts = [sum(cut[:stage]) for stage in range(len(cut))]
    ends = [LayerMemory(held_bytes=0 if recompute == "full" else size) for size in outputs]
    whole = [tuple(layers[start : start + size]) for start, size in zip(starts, cut, strict=True)]
    return (*((*stage, end) for stage, end in zip(whole, ends, strict=False)), whole[-1])


def _embedding(sizes: TransformerSizes) -> LayerMemory:
    table = sizes.table  # its gradient is dense, and made whole for every micro-batch
    noise = sizes.stream if sizes.dropout else 0
    return of_parameters(
        table + (sizes.context + 2 * sizes.bert) * sizes.width * _FLOAT,
        largest=table,
        held_bytes=sizes.tokens(_INT64) * (1 + sizes.bert) + sizes.context * _INT64 + noise,
        forward_bytes=2 * sizes.unit,
        backward_bytes=sizes.unit + table,
        input_bytes=sizes.unit + table,
    )


def _head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """Logits, and their logarithms of probability, both in fp32 whatever the product's precision."""
    u, r, logits, table, half = sizes.unit, sizes.stream, sizes.logits, sizes.table, sizes.half
    given = r + sizes.tokens(_INT64)
    inside = (r // 2 + table // 2 if half else r) + logits + 2 * sizes.positions(_FLOAT)
    forward = logits * 3 // 2 if half else logits
    weight = table * 3 // 2 if half else table
    backward = max(2 * logits if sizes.ranks == 1 else logits, weight, 2 * u)
    if recompute == "full":
        forward, backward, inside = max(u, forward) + logits, backward + inside, 0
    return of_parameters(
        table + 2 * sizes.width * _FLOAT,
        largest=table,
        held_bytes=given + inside,
        deferred_bytes=(u + logits) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        input_bytes=backward,
        weight_bytes=weight,
    )


def _bert_head(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    """As `_head`, behind a transform and its norm, and beside a pooler: two matrices of `dense` bytes.

    With the table's gradient made, the logits are given back, and in half precision what was rounded.
    """
    u, r, logits, table, half = sizes.unit, sizes.stream, sizes.logits, sizes.table, sizes.half
    dense, given = sizes.width**2 * _FLOAT, r + sizes.tokens(_INT64)
    inside = 2 * r + table // 2 + dense if half else 4 * r
    inside += logits + 4 * sizes.positions(_FLOAT) + sizes.tokens(_INT64)
    later = table - logits - 3 * u if half else table + 2 * u
    first = later + (dense if half else 2 * dense - logits - 2 * u)
    forward = logits * 3 // 2 if half else logits
    input_ = max(2 * logits if sizes.ranks == 1 else logits, 2 * u)
    backward = max(input_, later)
    first_more = max(0, first - backward)
    if recompute == "full":
        forward, backward, input_, inside = max(u, forward) + logits, backward + inside, input_ + inside, 0
    return of_parameters(
        table + 2 * dense + (8 * sizes.width + sizes.vocab_size // sizes.ranks + 2) * _FLOAT,
        largest=table,
        held_bytes=given + inside,
        deferred_bytes=(3 * u + logits) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=first_more,
        input_bytes=input_,
        weight_bytes=table * 3 // 2 if half else table,
    )


def _block(sizes: TransformerSizes, recompute: str) -> LayerMemory:
    u, w, r, c, half = sizes.unit, sizes.part, sizes.stream, sizes.matrix, sizes.half
    matrices = 12 * sizes.width**2 // sizes.ranks
    largest = 4 * sizes.width**2 * _FLOAT // sizes.ranks
    heads = sizes.num_heads // sizes.ranks
    normalisers = 0 if c or recompute == "selective" else sizes.tokens(_FLOAT) * heads  # of a fused core
    statistics = 4 * sizes.positions(_FLOAT) + normalisers
    kept = r + statistics  # the input
    inside = (6 * w + 2 * r + matrices * 2 if half else 12 * w + 3 * r) + _dropout_bytes(sizes)
    if c and recompute != "selective":
        inside += 3 * c + (3 * w // 2 if half else 0)
    backward, input_, forward = _working(sizes, largest, cores_again=recompute == "selective")
    if recompute == "full":
        forward = max(4 * w + u if half else 8 * w + u, c and 3 * c + _mask(sizes) + (13 * u // 2 if half else 5 * u))
        backward, input_, kept, inside = backward + inside, input_ + inside, r, 0
    return of_parameters(
        (matrices + 7 * sizes.width // sizes.ranks + 6 * sizes.width) * _FLOAT,
        largest=largest,
        held_bytes=kept + inside,
        deferred_bytes=(4 * u + 12 * w) // (2 if half else 1),
        forward_bytes=forward,
        backward_bytes=backward,
        first_bytes=max(0, 2 * u + largest - max(2 * u, largest * 3 // 2)) if half else min(4 * w, largest),
        input_bytes=input_,
        weight_bytes=largest * 3 // 2 if half else largest,
    )


def _working(sizes: TransformerSizes, largest: int, *, cores_again: bool) -> tuple[int, int, int]:
    """Of a block in B, I and F: the worse of the perceptron's moment and, where it keeps matrices, the core's."""
    u, w, r, c, half = sizes.unit, sizes.part, sizes.stream, sizes.matrix, sizes.half
    # When a weight's gradient is cast to fp32, the rounded weight, half as large, is gone already.
    backward = 2 * u + (u // 2 + max(2 * w, largest) if half else max(4 * w, largest))
    gathered = 2 * u if sizes.sequence else 0
    input_ = (4 * r + 2 * u + 7 * w + gathered) // 2 - largest // 2 if half else r + 2 * u + 7 * w + gathered
    forward = 3 * u // 2 if half else 2 * u
    if c:
        core = 4 * c + 3 * u if cores_again else c
        backward = max(backward, core - (3 if half else 8) * u)
        input_ = max(input_, core + (3 if half else 4) * u)
        once = (3 if cores_again else 0.5) * c if half else (3 * c if cores_again else 0)
        forward = max(forward, int(once) + _mask(sizes) - (4 if half else 12) * u)
    return backward, input_, forward


def _dropout_bytes(sizes: TransformerSizes) -> int:
    """The noise of a block's two dropouts, which a CPU keeps as values."""
    return (sizes.stream if sizes.half else 2 * sizes.stream) if sizes.dropout else 0


def _mask(sizes: TransformerSizes) -> int:
    """The causal one, where the attention is not fused."""
    return 0 if sizes.bert else (6 if sizes.half else 4) * sizes.context**2


def of_parameters(parameter_bytes: int, *, largest: int, **moments: int) -> LayerMemory:
    """Two copies of the largest parameter are what AdamW works with, one parameter at a time."""
    return LayerMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        optimizer_bytes=_MOMENTS * parameter_bytes,
        update_bytes=2 * largest,
        **moments,
    )
