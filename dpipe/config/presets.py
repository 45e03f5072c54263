"""Sizes of published models, by name: what `model.preset` stands for."""

from typing import Any

from dpipe.stage.families import HUB, family_of


def _gpt(
    num_layers: int, width: int, num_heads: int, context: int = 2048, vocab_size: int = 51200
) -> dict[str, Any]:
    sizes = {"num_layers": num_layers, "width": width, "num_heads": num_heads}
    return sizes | {"context": context, "vocab_size": vocab_size}


# BERT as Megatron's published tables size it, with the words of Devlin et al. 2019; GPT-2 and GPT-3
# as their papers do (Radford et al. 2019, Brown et al. 2020; the latter's 24 heads as the 16 of the
# published tables); and table 1 of Narayanan et al. 2021.
PRESETS = {
    "bert-345m": _gpt(24, 1024, 16, 512, 30522) | {"layers": "bert"},
    "gpt2-345m": _gpt(24, 1024, 16, 1024, 50257),
    "gpt3-xl": _gpt(24, 2048, 16, 2048, 50257),
    "sc21-1.7b": _gpt(24, 2304, 24),
    "sc21-3.6b": _gpt(30, 3072, 32),
    "sc21-7.5b": _gpt(36, 4096, 32),
    "sc21-18.4b": _gpt(40, 6144, 48),
    "sc21-39.1b": _gpt(48, 8192, 64),
    "sc21-76.1b": _gpt(60, 10240, 80),
    "sc21-145.6b": _gpt(80, 12288, 96),
    "sc21-310.1b": _gpt(96, 16384, 128),
    "sc21-529.6b": _gpt(105, 20480, 128),
    "sc21-1008b": _gpt(128, 25600, 160),
}


def filled(table: dict[str, Any]) -> dict[str, Any]:
    """The keys of `[model]` with those of its preset, where they are not set. A preset that is
    not known adds none. The family says whether embeddings are tied.
    """
    preset = table.get("preset")
    # Before anything is validated: what is of another type, the sections refuse by themselves.
    if isinstance(preset, str):
        table = PRESETS.get(preset, {}) | table
    if isinstance(table.get("hf"), str):
        table = {"layers": HUB.name} | table
    layers = table.get("layers")
    if isinstance(layers, str) and family_of(layers).ties_embeddings:
        return {"tie_embeddings": True} | table
    return table
