"""What the layers of the configured GPT or BERT cost by formula: `stage/flops.py` for a configuration. No torch."""

from dpipe.config import Config
from dpipe.engine.memory import vocabulary_of
from dpipe.stage.flops import bert_layer_flops, bert_layer_parameter_bytes, gpt_layer_flops, gpt_layer_parameter_bytes


def layer_flops(config: Config, num_sequences: int) -> tuple[float, ...]:
    """Operations of the forward pass of each layer."""
    formula = bert_layer_flops if config.model.layers == "bert" else gpt_layer_flops
    return formula(batch_size=num_sequences, **_sizes(config))


def layer_parameter_bytes(config: Config) -> tuple[int, ...]:
    """The fp32 parameters of each layer."""
    formula = bert_layer_parameter_bytes if config.model.layers == "bert" else gpt_layer_parameter_bytes
    return formula(**_sizes(config))


def _sizes(config: Config) -> dict[str, int]:
    model = config.model
    return {
        "context": model.context,
        "width": model.width,
        "num_layers": model.num_layers,
        "vocab_size": vocabulary_of(config),
    }
