import math

import torch
from torch import nn

from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise


def make(dropout: float = 0.0, num_layers: int = 2, width: int = 8) -> list[nn.Module]:
    model = gpt(
        vocab_size=11,
        num_layers=num_layers,
        width=width,
        num_heads=2,
        context=6,
        dropout=dropout,
        tied=False,
    )
    return [materialise(model, index, 0, "cpu") for index in range(len(model.layers))]


def test_later_token_changes_no_earlier_logit() -> None:
    model = nn.Sequential(*make())
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    same = torch.isclose(model(tokens), model(changed)).all(-1)[0].tolist()
    assert same == [True, True, True, True, False, False]


def test_position_changes_the_output() -> None:
    logits = nn.Sequential(*make())(torch.zeros(1, 6, dtype=torch.int64))
    assert not torch.isclose(logits[0, 0], logits[0, 1]).all()


def test_initial_guess_is_uniform() -> None:
    model = gpt(
        vocab_size=11, num_layers=2, width=8, num_heads=2, context=6, dropout=0.0, tied=False
    )
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    loss = model.loss(nn.Sequential(*make())(tokens), tokens)
    assert math.isclose(loss.item(), math.log(11), rel_tol=0.01)


def test_weights_start_as_in_gpt2() -> None:
    block = make(num_layers=8, width=64)[1]
    assert math.isclose(block.mlp_in.weight.std().item(), 0.02, rel_tol=0.05)
    assert math.isclose(block.mlp_out.weight.std().item(), 0.02 / math.sqrt(16), rel_tol=0.05)
    assert math.isclose(
        block.attention.output.weight.std().item(), 0.02 / math.sqrt(16), rel_tol=0.05
    )
    assert not block.mlp_in.bias.any()


def test_layer_says_whether_it_draws() -> None:
    assert [layer.draws for layer in make(dropout=0.1)] == [True, True, True, False]
    assert [layer.draws for layer in make(dropout=0.0)] == [False] * 4


def test_names_of_a_block_are_stable() -> None:
    """Checkpoints use these names."""
    assert [name for name, _ in make()[1].named_parameters()] == [
        *("attention_norm.weight", "attention_norm.bias"),
        *(
            "attention.qkv.weight",
            "attention.qkv.bias",
            "attention.output.weight",
            "attention.output.bias",
        ),
        *("mlp_norm.weight", "mlp_norm.bias"),
        *("mlp_in.weight", "mlp_in.bias", "mlp_out.weight", "mlp_out.bias"),
    ]
