"""What the tensors of a GPT or a BERT take, in bytes: what `memory.py` counts with. No torch.

B micro-batch size · T context · D width · N heads · V vocabulary
"""

from dataclasses import dataclass

from dpipe.config.load import Config
from dpipe.data.tokenizer import vocabulary_of

_HALF = 2
_FLOAT = 4


@dataclass(frozen=True)
class TransformerSizes:
    """`keeps_matrices`: the attention is not fused, which is so with dropout on a CPU. `half`:
    autocast to 16 bits; `rounded`: parameters and all that they make have 16 bits, but for logits
    and chances. `masks`: what dropout keeps has a byte a value, as on a GPU.

    `ranks` hold a layer together; with `sequence` they split the positions between the matrices.
    `bert` adds token types, and a transform in front of the logits.
    """

    batch_size: int
    context: int
    width: int
    num_heads: int
    num_layers: int
    vocab_size: int
    dropout: bool = False
    masks: bool = False
    keeps_matrices: bool = False
    half: bool = False
    rounded: bool = False
    ranks: int = 1
    sequence: bool = False
    bert: bool = False

    @property
    def value_bytes(self) -> int:
        return _HALF if self.rounded else _FLOAT

    @property
    def unit(self) -> int:
        """What enters and leaves a matrix, whole: u."""
        return self.batch_size * self.context * self.width * self.value_bytes

    @property
    def part(self) -> int:
        """One rank's part of an activation between two matrices."""
        return self.unit // self.ranks

    @property
    def stream(self) -> int:
        """What one rank has of the activation that layers pass on."""
        return self.part if self.sequence else self.unit

    @property
    def gathered(self) -> int:
        """What split positions take when they are put together; nothing where they are not
        split.
        """
        return self.unit if self.sequence else 0

    @property
    def matrix(self) -> int:
        """Scores of a rank's heads, which one process makes in fp32 even under autocast."""
        heads = self.num_heads // self.ranks
        value_bytes = _HALF if (self.half or self.rounded) and self.ranks > 1 else _FLOAT
        return self.batch_size * heads * self.context**2 * value_bytes if self.keeps_matrices else 0

    @property
    def logits(self) -> int:
        return self.batch_size * self.context * self.vocab_size * _FLOAT // self.ranks

    @property
    def table(self) -> int:
        """A rank's words."""
        return self.vocab_size * self.width * self.value_bytes // self.ranks

    def tokens(self, value_bytes: int) -> int:
        return self.batch_size * self.context * value_bytes

    def positions(self, value_bytes: int) -> int:
        """As `tokens`, of those that one rank has."""
        return self.tokens(value_bytes) // (self.ranks if self.sequence else 1)


def sizes_of(config: Config) -> TransformerSizes:
    """Of the configured transformer. Attention is taken to be fused, but for dropout on a CPU or in
    split heads.
    """
    model = config.model
    train = config.train
    split = config.tensor_parallel
    return TransformerSizes(
        config.microbatch_size,
        model.context,
        model.width,
        model.num_heads,
        model.num_layers,
        vocabulary_of(config),
        dropout=model.dropout > 0,
        masks=config.node.device != "cpu",
        keeps_matrices=model.dropout > 0 and (config.node.device == "cpu" or split.size > 1),
        half=train.precision != "fp32" and train.parameters == "fp32",
        rounded=train.parameters != "fp32",
        ranks=split.size,
        sequence=split.sequence_parallel,
        bert=model.family.reads_pairs,
    )
