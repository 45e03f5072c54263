import pytest
import torch
from fakes.fake_megatron import BertModel, GPTModel, TransformerConfig
from torch import nn

from dpipe.baselines.megatron_weights import BERT, GPT, Source, load, parameters_by_layer, part
from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise

OURS = ["q0", "q1", "q2", "q3", "k0", "k1", "k2", "k3", "v0", "v1", "v2", "v3"]
THEIRS = [["q0", "k0", "v0", "q1", "k1", "v1"], ["q2", "k2", "v2", "q3", "k3", "v3"]]  # by rank


def test_rows_of_a_head_are_together_on_one_rank():
    """Four heads of width one on two ranks."""
    source = Source("attention.qkv.bias", 0, by_head=True)
    rows = [
        part(torch.arange(12), source, num_heads=4, rank=rank, size=2).tolist() for rank in (0, 1)
    ]
    assert [[OURS[row] for row in of_rank] for of_rank in rows] == THEIRS


@pytest.mark.parametrize(
    ("dim", "second"),
    [(0, [[4, 5, 6, 7]]), (1, [[2, 3], [6, 7]]), (None, [[0, 1, 2, 3], [4, 5, 6, 7]])],
)
def test_matrix_is_split_along_its_dimension(dim, second):
    assert (
        part(torch.arange(8).view(2, 4), Source("mlp_in.weight", dim), 1, 1, 2).tolist() == second
    )


@pytest.fixture
def model() -> GPTModel:
    return GPTModel(TransformerConfig(2, 8, 2), "local", 16, 4)


def test_every_parameter_of_every_layer_is_found(model: GPTModel):
    for theirs, names in (
        (model, GPT),
        (BertModel(TransformerConfig(2, 8, 2), 2, "local", 16, 4), BERT),
    ):
        found = dict(parameters_by_layer(theirs, names, 2))
        assert sorted(found) == [0, 1, 2, 3]
        assert sum(len(given) for given in found.values()) == len(list(theirs.parameters()))


def test_loaded_model_gives_our_outputs(model: GPTModel):
    ours = gpt(
        vocab_size=16, num_layers=2, width=8, num_heads=2, context=4, dropout=0.0, tied=False
    )
    layers = [materialise(ours, index, 0, "cpu") for index in range(4)]
    for index, given in parameters_by_layer(model, GPT, 2):
        load(given, layers[index], 2, 0, 1)
    tokens = torch.arange(4)[None]
    logits = nn.Sequential(*layers)(tokens)
    losses = model(tokens, tokens, None, labels=tokens)
    assert torch.allclose(losses.mean(), ours.loss(logits, tokens), rtol=1e-6)


def test_unknown_parameter_is_named(model: GPTModel):
    model.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(KeyError, match="extra.weight have no counterpart"):
        list(parameters_by_layer(model, GPT, 2))
