"""What is trained, and on what: [model], [replay], [data]."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from dpipe.config.presets import PRESETS, filled
from dpipe.config.section import Count, CountOrZero, Fraction, Name, NotNegative, Section
from dpipe.stage.families import FAMILIES, Family, family_of


def _is_function(layers: str) -> bool:
    module, _, function = layers.partition(":")
    return bool(module and function) and not module.startswith(".")


class ModelConfig(Section):
    """The model, as a list of layers that the pipeline cuts into stages."""

    layers: Annotated[
        str, Name(FAMILIES, pattern="package.module:function", matches=_is_function)
    ] = "gpt"
    """A model of dpipe's own, "replay" (stages that wait instead of computing, see [replay]), or
    "package.module:function": your function that returns (layers, loss); outside the working folder
    it may need --trust-code."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your function. dpipe's own models take none."""

    num_layers: Annotated[int, Field(ge=1, le=2048)] = 4
    """Transformer blocks."""

    width: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Size of a token's vector between blocks (hidden size). A multiple of num_heads."""

    num_heads: Count = 4
    """Attention heads of each block."""

    context: Annotated[int, Field(ge=1, le=1 << 24)] = 128
    """Tokens in a sequence."""

    vocab_size: Annotated[int, Field(ge=1, le=1 << 28)] | None = None
    """Rows of the embedding. Left out: as many as the tokenizer has tokens."""

    dropout: Fraction = 0.0
    """Share of values that dropout sets to zero while training; 0 is no dropout."""

    tie_embeddings: bool = False
    """Whether the output layer uses the input embedding's weights. For "bert" the default is
    true."""

    preset: Annotated[str, Name(PRESETS)] | None = None
    """Sizes of a published model by its name; a size that is set as well wins. Left out: no sizes
    but those that are set."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, table: Any) -> Any:
        return filled(table) if isinstance(table, dict) else table

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width {self.width} must be a multiple of model.num_heads {self.num_heads}"
            )
        return self

    @property
    def family(self) -> Family:
        return family_of(self.layers)

    @property
    def is_transformer(self) -> bool:
        """One of dpipe's own, whose costs are known by formula."""
        return self.family.is_transformer


class ReplayConfig(Section):
    """Stages that wait instead of computing: real messages over a real network, no arithmetic.

    For model.layers = "replay". A list gives one value a stage.
    """

    forward_ms: NotNegative | list[NotNegative] = 10.0
    """Milliseconds of a stage's forward pass of one micro-batch."""

    backward_ms: NotNegative | list[NotNegative] = 20.0
    """Milliseconds of a stage's backward pass of one micro-batch."""

    input_share: Fraction = 0.5
    """Share of the backward pass that makes the input gradient; the rest makes the weight
    gradients."""

    message_bytes: Count = 1_000_000
    """Bytes of an activation, and of its gradient, between two stages, in fp32."""

    parameter_bytes: CountOrZero | list[CountOrZero] = 0
    """Bytes of a stage's gradients that replicas exchange in a step."""

    exchanges: CountOrZero = 0
    """All-reduces among a stage's tensor-parallel ranks in each forward pass, and as many in each
    backward pass. Needs tensor_parallel.size above 1."""

    exchange_bytes: Count = 1_000_000
    """Bytes of one of these all-reduces."""


class DataConfig(Section):
    """The text to train on."""

    files: tuple[str, ...] = ()
    """UTF-8 text files: globs, relative to the working folder, or "package:NAME/GLOB" inside an
    installed Python package. "replay" needs none."""

    tokenizer: str = "bytes"
    """"bytes" (each byte is a token), or the path of a Hugging Face tokenizer.json."""

    held_out: Fraction = 0.05
    """Share of the text that is kept from training, for the held-out loss."""

    cache: str = ".dpipe-cache"
    """Folder for the tokens of texts that were read before."""
