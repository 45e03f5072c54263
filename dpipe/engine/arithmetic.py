"""What the layers of the configured GPT or BERT cost by formula: `stage/flops.py` for a configuration. No torch."""

from typing import Any

from dpipe.config import Config
from dpipe.errors import ConfigError
from dpipe.stage.flops import bert_layer_flops, bert_layer_parameter_bytes, gpt_layer_flops, gpt_layer_parameter_bytes


def layer_flops(config: Config, num_sequences: int) -> tuple[float, ...]:
    """Operations of the forward pass of each layer."""
    formula = bert_layer_flops if config.model.layers == "bert" else gpt_layer_flops
    return formula(batch_size=num_sequences, **_sizes(config))


def layer_parameter_bytes(config: Config) -> tuple[int, ...]:
    """The fp32 parameters of each layer."""
    formula = bert_layer_parameter_bytes if config.model.layers == "bert" else gpt_layer_parameter_bytes
    return formula(**_sizes(config))


def vocabulary_of(config: Config) -> int:
    """Words of the configured model."""
    return config.model.vocab_size or vocabulary(config.data.tokenizer)


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary; raises `ConfigError` where the file cannot be read."""
    if tokenizer == "bytes":
        return 256
    from tokenizers import Tokenizer

    try:
        return size_of(Tokenizer.from_file(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {error}") from None


def size_of(tokenizer: Any) -> int:
    """Words that a model of it needs, of a Hugging Face tokenizer: its numbers may have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _sizes(config: Config) -> dict[str, int]:
    model = config.model
    return {
        "context": model.context,
        "width": model.width,
        "num_layers": model.num_layers,
        "vocab_size": vocabulary_of(config),
    }
