"""How large the tensors of a GPT or a BERT are, in bytes: what the formulas count with. No torch.

B micro-batch size · T context · D width · N heads · V vocabulary
"""

from dataclasses import dataclass

from dpipe.config.load import Config
from dpipe.tokenizer.tokenizer import vocabulary_of

_HALF = 2
_FLOAT = 4


@dataclass(frozen=True)
class TransformerSizes:
    """What decides the memory of a transformer's layers, and the sizes that the formulas share."""

    batch_size: int  # of a micro-batch
    context: int  # tokens of a sequence
    width: int  # of a token's vector between blocks
    num_heads: int  # of attention, in each block
    num_layers: int  # blocks
    vocab_size: int  # rows of the embedding
    dropout: bool = False  # whether it drops anything
    masks: bool = False  # dropout keeps a mask of one byte a value, as on a GPU
    keeps_matrices: bool = False  # attention is not fused, as with dropout on a CPU
    half: bool = False  # autocast to 16 bits
    rounded: bool = False  # parameters and activations have 16 bits, logits and softmax have 32
    ranks: int = 1  # of the tensor-parallel group
    sequence: bool = False  # sequence parallelism: they split the positions between the matrices
    bert: bool = False  # has token types, and a transform in front of the logits
    slices: int = 1  # that a sequence is cut into; `context` are the tokens of one

    @property
    def value_bytes(self) -> int:
        return _HALF if self.rounded else _FLOAT

    @property
    def unit(self) -> int:
        """An activation [B, T, D], whole: u."""
        return self.batch_size * self.context * self.width * self.value_bytes

    @property
    def keys_values(self) -> int:
        """Keys and values of the whole sequences, where they are cut into slices."""
        if self.slices == 1:
            return 0
        # Under autocast they have 16 bits.
        pair = self.part if self.half else 2 * self.part
        return self.slices * pair

    @property
    def part(self) -> int:
        """One rank's part of an activation between two matrices: w."""
        return self.unit // self.ranks

    @property
    def stream(self) -> int:
        """What one rank has of the activation that layers pass on: r."""
        return self.part if self.sequence else self.unit

    @property
    def gathered(self) -> int:
        """An activation put together from split positions; nothing without sequence
        parallelism.
        """
        return self.unit if self.sequence else 0

    @property
    def matrix(self) -> int:
        """Attention scores of one rank's heads, if attention is not fused: c.

        A single process computes them in fp32 even under autocast.
        """
        if not self.keeps_matrices:
            return 0
        heads = self.num_heads // self.ranks
        in_half = (self.half or self.rounded) and self.ranks > 1
        value_bytes = _HALF if in_half else _FLOAT
        return self.batch_size * heads * self.context**2 * value_bytes

    @property
    def logits(self) -> int:
        """One rank's part of the logits [B, T, V], in fp32."""
        return self.batch_size * self.context * self.vocab_size * _FLOAT // self.ranks

    @property
    def table(self) -> int:
        """One rank's part of the embedding table [V, D]."""
        return self.vocab_size * self.width * self.value_bytes // self.ranks

    @property
    def noise(self) -> int:
        """What one dropout between layers keeps: on a GPU a byte a value, on a CPU a value."""
        if not self.dropout:
            return 0
        return self.stream // self.value_bytes if self.masks else self.stream

    def tokens(self, value_bytes: int) -> int:
        """A value of `value_bytes` for each token of the micro-batch."""
        return self.batch_size * self.context * value_bytes

    def positions(self, value_bytes: int) -> int:
        """As `tokens`, of the positions that one rank has."""
        shares = self.ranks if self.sequence else 1
        return self.tokens(value_bytes) // shares


def sizes_of(config: Config) -> TransformerSizes:
    """Of the configured transformer. Attention is fused, but for dropout on a CPU or with tensor
    parallelism.
    """
    model = config.model
    train = config.train
    group = config.tensor_parallel
    dropout = model.dropout > 0
    rounded = train.parameters != "fp32"
    on_cpu = config.node.device == "cpu"
    return TransformerSizes(
        batch_size=config.microbatch_size,
        context=model.context // config.pipeline.sequence_slices,
        slices=config.pipeline.sequence_slices,
        width=model.width,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        vocab_size=vocabulary_of(config),
        dropout=dropout,
        masks=not on_cpu,
        keeps_matrices=dropout and (on_cpu or group.size > 1),
        half=train.precision != "fp32" and not rounded,
        rounded=rounded,
        ranks=group.size,
        sequence=group.sequence_parallel,
        bert=model.family.reads_pairs,
    )
