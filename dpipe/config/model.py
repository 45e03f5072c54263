"""What is trained, and on what: [model], [replay], [data]."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpipe.config.presets import PRESETS, filled
from dpipe.config.section import (
    Count,
    CountOrZero,
    Fraction,
    Name,
    NotNegative,
    Positive,
    Section,
)
from dpipe.stage.families import FAMILIES, HUB, Family, family_of

# What config.json says of a published model.
_SIZES = ("num_layers", "width", "num_heads", "vocab_size", "dropout", "tie_embeddings", "preset")


def _is_function(layers: str) -> bool:
    if layers == HUB.name:
        return True  # checked against model.hf, which sets it
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

    hf: str | None = None
    """A model of transformers: its name on the hub ("Qwen/Qwen3-1.7B"), a folder that
    save_pretrained has written, or a GGUF file. Sizes and weights are its own. Left out: none."""

    revision: str | None = None
    """Branch, tag or commit of model.hf on the hub. Left out: its main branch."""

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
    """Whether the output layer uses the input embedding's weights; "bert"'s does by default."""

    bottleneck_width: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """A GPT made for narrow links: so many numbers a token go from stage to stage, not model.width,
    beside the token itself. To train from scratch. Left out: a plain model."""

    bottleneck_every: Count = 1
    """Blocks between two bottlenecks. The model can be cut into stages at bottlenecks alone."""

    preset: Annotated[str, Name(PRESETS)] | None = None
    """Sizes of a published model by its name; a size that is set as well wins. Left out: none."""

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
        self._check_bottlenecks()
        if (self.hf is None) != (self.layers != HUB.name):
            raise ValueError(
                f"model.hf and model.layers {self.layers!r} exclude each other: leave one out"
            )
        if self.hf is not None:
            # By its value: a configuration that was written out has all keys.
            fields = type(self).model_fields
            own = [key for key in _SIZES if getattr(self, key) != fields[key].default]
            if own:
                raise ValueError(
                    f"model.{own[0]} is model.hf's own and cannot be set; leave it out"
                )
        return self

    def _check_bottlenecks(self) -> None:
        width = self.bottleneck_width
        every = self.bottleneck_every
        if width is None:
            if every != 1:
                raise ValueError(
                    "model.bottleneck_every is for models with bottlenecks: set "
                    "model.bottleneck_width, or leave it out"
                )
            return
        if family_of(self.layers).narrow is None:
            raise ValueError(
                'model.bottleneck_width is for model.layers "gpt", not '
                f'"{self.layers}"; leave it out'
            )
        if width >= self.width:
            raise ValueError(
                f"model.bottleneck_width {width} must be less than model.width {self.width}"
            )
        if self.num_layers % every or self.num_layers == every:
            raise ValueError(
                f"model.num_layers {self.num_layers} must be a multiple of model.bottleneck_every "
                f"{every}, and at least twice it: there is a bottleneck between so many blocks and "
                "the next"
            )

    @property
    def family(self) -> Family:
        family = family_of(self.layers)
        if self.bottleneck_width is None or family.narrow is None:
            return family
        return family.narrow

    @property
    def is_transformer(self) -> bool:
        """One of dpipe's own, whose costs are known by formula."""
        return self.family.is_transformer


class AdapterConfig(Section):
    """What learns of model.hf: all of it, or an adapter beside it (Hu et al. 2021)."""

    kind: Literal["none", "lora"] = "none"
    """"none": all parameters learn. "lora": two small matrices beside each adapted one."""

    r: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """The rank of these matrices."""

    alpha: Positive = 32.0
    """Their product counts alpha / r times."""

    dropout: Fraction = 0.0
    """Share of the adapter's inputs that are set to zero while training."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """Which modules are adapted, as peft has it: "all-linear", the ends of their names, or a
    regular expression."""

    target_parameters: tuple[str, ...] = ()
    """The ends of the names of parameters that are adapted besides, as peft has it: such as
    "mlp.experts.down_proj", which has all experts of a layer."""

    layers: tuple[CountOrZero, ...] = ()
    """Numbers of the decoder layers that are adapted, from 0. Left out: all of them."""

    dora: bool = False
    """Whether the lengths of the columns learn apart (DoRA, Liu et al. 2024)."""

    rslora: bool = False
    """Whether alpha counts by the square root of r (rsLoRA, Kalajdzievski 2023)."""

    base: Literal["full", "int8", "nf4"] = "full"
    """In what the adapted model keeps the matrices of its blocks: as train.parameters has it, or in
    8 or 4 bits a value (QLoRA, Dettmers et al. 2023)."""

    start: str | None = None
    """Folder of an adapter that was trained before, as peft or `dpipe export --adapter` writes it,
    to go on from. Left out: a new one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.start is not None and self.kind == "none":
            raise ValueError(
                'adapter.start goes on from an adapter: set adapter.kind = "lora", or leave it out'
            )
        if self.base != "full" and self.kind == "none":
            raise ValueError(
                f'adapter.base "{self.base}" quantises what does not learn, and without an '
                'adapter everything learns: set adapter.kind = "lora", or leave it out'
            )
        return self


class ReplayConfig(Section):
    """Stages that wait instead of computing: real messages over a real network, no arithmetic.

    For model.layers = "replay". A list gives one value a stage.
    """

    forward_ms: NotNegative | list[NotNegative] = 10.0
    """Milliseconds of a stage's forward pass of one micro-batch."""

    backward_ms: NotNegative | list[NotNegative] = 20.0
    """Milliseconds of a stage's backward pass of one micro-batch."""

    input_share: Fraction = 0.5
    """Share of the backward pass that makes the input gradient, not weight gradients."""

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
    installed Python package. "replay" needs none. Rows may also lie at URLs that fsspec reads."""

    hub: str | None = None
    """A data set on the Hugging Face Hub in place of files: "org/name:split", or
    "org/name@revision:split". Left out: files."""

    tokenizer: str = "bytes"
    """"bytes" (each byte is a token), or the path of a Hugging Face tokenizer.json."""

    held_out: Fraction | tuple[str, ...] = 0.05
    """Share of the text that is kept from training, for the held-out loss. Or files of their own,
    as in data.files, on which nothing is trained."""

    cache: str = ".dpipe-cache"
    """Folder for the tokens of texts that were read before."""

    format: Literal["text", "chat", "instruction", "completion", "tokens"] = "text"
    """What the files hold: plain text or, for model.hf, rows in jsonl, json, csv or parquet. "chat"
    has messages, "instruction" an instruction, input and output, "completion" a text, "tokens"
    input_ids. Only answers are learned, and whole texts."""

    packing: bool = True
    """Whether several samples share a sequence; none of them sees another. false: one sample a
    sequence, and the rest of it is padding."""

    shuffle: Literal["all", "none"] | Count = "all"
    """In which order samples are learned: all shuffled, as they lie, or so many at a time shuffled
    as they come. Of a stream "all" is 1,000 at a time."""

    streaming: bool = False
    """Whether rows are read while the run trains; only what is held out is kept on this disk."""

    too_long: Literal["refuse", "truncate", "split"] = "refuse"
    """What becomes of a sample of more than model.context tokens; "split" makes several of it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.streaming:
            self._check_stream()
        if self.hub is None:
            return self
        if self.files:
            raise ValueError("data.hub and data.files exclude each other: leave one out")
        if not self.has_samples:
            raise ValueError('data.hub holds rows: set data.format to "chat", "instruction" or so')
        return self

    def _check_stream(self) -> None:
        if not self.has_samples:
            raise ValueError('data.streaming is of rows: set data.format to "chat" or so')
        if isinstance(self.held_out, float) and self.held_out:
            raise ValueError(
                f"data.held_out {self.held_out} is a share of rows, and how many a stream has is "
                'not known: name files (held_out = ["validation.jsonl"]), or set it to 0'
            )

    @property
    def has_samples(self) -> bool:
        """Rows of their own, not windows of one text."""
        return self.format != "text"
