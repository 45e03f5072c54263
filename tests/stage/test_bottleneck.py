import math

import pytest
import torch
from torch import nn

from dpipe.stage.bottleneck import narrow_gpt, smallest_dtype
from dpipe.stage.model import LayeredModel, materialise

WORDS = 11
CONTEXT = 6
WIDTH = 3  # of a bottleneck


def model(*, num_layers: int = 4, every: int = 1, **changes: object) -> LayeredModel:
    sizes = {
        "vocab_size": WORDS,
        "width": 8,
        "num_heads": 2,
        "context": CONTEXT,
        "dropout": 0.0,
        "tied": False,
        **changes,
    }
    return narrow_gpt(
        **sizes,  # type: ignore[arg-type]
        num_layers=num_layers,
        bottleneck_width=WIDTH,
        bottleneck_every=every,
    )


def made(the_model: LayeredModel) -> list[nn.Module]:
    return [materialise(the_model, index, 0, "cpu") for index in range(len(the_model.layers))]


def passed_on(layers: list[nn.Module], tokens: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """What each layer returns."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    inputs: tuple[torch.Tensor, ...] = (tokens,)
    for layer in layers:
        returned = layer(*inputs)
        inputs = returned if isinstance(returned, tuple) else (returned,)
        outputs.append(inputs)
    return outputs


def test_few_numbers_and_the_word_of_each_token_go_from_layer_to_layer() -> None:
    tokens = torch.arange(CONTEXT)[None]
    *narrowed, last = passed_on(made(model()), tokens)
    assert len(narrowed) == 3
    for numbers, words in narrowed:
        assert numbers.shape == (1, CONTEXT, WIDTH)
        assert words.tolist() == tokens.tolist()
        assert words.dtype == torch.uint8
    assert [tensor.shape for tensor in last] == [(1, CONTEXT, WORDS)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (256, torch.uint8),
        (257, torch.int16),
        (32768, torch.int16),
        (32769, torch.int32),
    ],
)
def test_words_travel_in_the_smallest_integers_that_hold_them(
    vocab_size: int, dtype: torch.dtype
) -> None:
    assert smallest_dtype(vocab_size) == dtype
    assert torch.tensor(vocab_size - 1).to(dtype).item() == vocab_size - 1


def test_blocks_between_two_bottlenecks_make_a_layer() -> None:
    assert [len(layer.blocks) for layer in made(model(num_layers=6, every=2))] == [2, 2, 2]


def test_bottleneck_starts_as_a_projection_onto_one_subspace_everywhere() -> None:
    layers = made(model())
    narrow = layers[0].narrow.weight
    assert torch.allclose(narrow @ narrow.T, torch.eye(WIDTH), atol=1e-6)
    for layer in layers[1:]:
        assert torch.equal(layer.widen.weight, narrow.T)


def test_later_token_changes_no_earlier_logit() -> None:
    layers = made(model())
    tokens = torch.arange(CONTEXT)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    (before,) = passed_on(layers, tokens)[-1]
    (after,) = passed_on(layers, changed)[-1]
    same = torch.isclose(before, after).all(-1)[0].tolist()
    assert same == [True, True, True, True, False, False]


def test_what_an_early_layer_has_found_reaches_the_last() -> None:
    """Through the bottlenecks, not only by the words."""
    layers = made(model())
    *_, (numbers, words), _ = passed_on(layers, torch.arange(CONTEXT)[None])
    assert not torch.isclose(layers[-1](numbers, words), layers[-1](2 * numbers, words)).all()


def test_model_learns_a_rule_over_tokens() -> None:
    """Each sequence repeats one word, so every target is the word before it."""
    torch.manual_seed(0)
    the_model = model()
    layers = made(the_model)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    adam = torch.optim.Adam(parameters, lr=1e-2)
    words = torch.arange(WORDS)[:, None].expand(WORDS, CONTEXT)
    losses = []
    for _ in range(40):
        (logits,) = passed_on(layers, words)[-1]
        loss = the_model.loss(logits, words)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(WORDS), rel=0.05)
    assert losses[-1] < 0.25 * losses[0]


def test_layer_says_whether_it_draws() -> None:
    assert [layer.draws for layer in made(model(dropout=0.1))] == [True] * 4
    assert [layer.draws for layer in made(model())] == [False] * 4


def test_tied_model_starts_with_the_embeddings_table_as_its_output() -> None:
    first, *_, last = made(model(tied=True))
    assert torch.equal(first.embedding.tokens.weight, last.head.output.weight)


def test_layers_between_the_ends_are_alike() -> None:
    alike = model().alike
    assert alike is not None
    kinds = [alike(index) for index in range(4)]
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 3


def test_names_in_checkpoints_are_stable() -> None:
    first, second, *_, last = made(model())
    names = [
        {name.split(".")[0] for name, _ in layer.named_parameters()}
        for layer in (first, second, last)
    ]
    assert names == [
        {"embedding", "blocks", "narrow"},
        {"embedding", "widen", "blocks", "narrow"},
        {"embedding", "widen", "blocks", "head"},
    ]
