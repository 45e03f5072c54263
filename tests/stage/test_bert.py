import math

import pytest
import torch
from torch import nn

from dpipe.stage.bert import IGNORED, bert, masked_and_pair_loss
from dpipe.stage.model import LayeredModel, materialise

CONTEXT, WORDS = 6, 11


def model(dropout: float = 0.0, *, tied: bool = True) -> LayeredModel:
    return bert(
        vocab_size=WORDS,
        num_layers=2,
        width=8,
        num_heads=2,
        context=CONTEXT,
        dropout=dropout,
        tied=tied,
    )


def layers(**options: float) -> list[nn.Module]:
    the_model = model(**options)
    return [materialise(the_model, index, 0, "cpu") for index in range(len(the_model.layers))]


def outputs(
    tokens: list[int], types: list[int] | None = None, length: int = CONTEXT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token logits [T, V] and pair logits [2] of one sequence."""
    tensors = (
        torch.tensor([tokens]),
        torch.tensor([types or [0] * CONTEXT]),
        torch.tensor([length], dtype=torch.int32),
    )
    for layer in layers():
        tensors = layer(*tensors)
    logits, pair = tensors
    return logits[0], pair[0]


def same(first: torch.Tensor, second: torch.Tensor) -> list[bool]:
    return torch.isclose(first, second, atol=1e-7).all(-1).tolist()


def test_token_changes_every_logit_and_the_pairs() -> None:
    (logits, pair), (others, other_pair) = outputs([0, 1, 2, 3, 4, 5]), outputs([0, 1, 2, 3, 9, 5])
    assert same(logits, others) == [False] * CONTEXT
    assert not torch.isclose(pair, other_pair, atol=1e-7).all()


def test_padding_changes_nothing_in_front_of_it() -> None:
    (logits, pair), (others, other_pair) = (
        outputs([0, 1, 2, 3, pad, pad], length=4) for pad in (0, 7)
    )
    assert same(logits, others)[:4] == [True] * 4
    assert torch.equal(pair, other_pair)


def test_token_type_changes_the_output() -> None:
    (logits, _), (others, _) = (
        outputs([0, 1, 2, 3, 4, 5], [0, 0, 0, second, 1, 1]) for second in (0, 1)
    )
    assert not any(same(logits, others))


def test_initial_guess_is_uniform_over_tokens_and_pairs() -> None:
    logits, pair = outputs([0, 1, 2, 3, 4, 5])
    loss = masked_and_pair_loss(
        logits[None], pair[None], torch.tensor([[1, IGNORED, 4, IGNORED, 2, IGNORED]])
    )
    assert math.isclose(loss.item(), math.log(WORDS) + math.log(2), rel_tol=0.05)


def test_loss_is_the_mean_over_masked_words_and_over_pairs() -> None:
    """Two sequences with one and two masked tokens: the three count equally, and other logits do
    not matter.
    """
    logits, pair = torch.zeros(2, 3, 4), torch.zeros(2, 2)
    logits[0, 1, 3] = logits[1, 1, 0] = pair[0, 1] = 100.0  # right, wrong, right
    targets = torch.tensor([[1, 3, IGNORED], [0, 2, 1]])
    expected = (0 + 100 + math.log(4)) / 3 + (0 + math.log(2)) / 2
    assert masked_and_pair_loss(logits, pair, targets).item() == pytest.approx(expected)
    logits[0, 0] = logits[0, 2] = torch.tensor([9.0, -9.0, 0.0, 1.0])
    assert masked_and_pair_loss(logits, pair, targets).item() == pytest.approx(expected)


def test_masked_token_loss_reaches_every_token_of_the_sequence_and_no_padding() -> None:
    embedding, *blocks, head = layers()
    tokens = torch.arange(CONTEXT)[None]
    x, lengths = embedding(tokens, torch.zeros_like(tokens), torch.tensor([4], dtype=torch.int32))
    x = x.detach().requires_grad_()
    inside = x, lengths
    for block in blocks:
        inside = block(*inside)
    targets = torch.tensor([[0, IGNORED, 7, IGNORED, IGNORED, IGNORED]])
    words, _ = head(*inside)
    masked_and_pair_loss(words, torch.zeros(1, 2), targets).backward()
    assert x.grad is not None
    assert x.grad[0].any(-1).tolist() == [True] * 4 + [False] * 2


def test_masked_tokens_are_learned_from_their_context() -> None:
    """Each sequence repeats one word. With its context it is known; without, the loss is log(WORDS
    - 1).
    """
    mask, draws = WORDS - 1, torch.Generator().manual_seed(0)
    the_model = bert(
        vocab_size=WORDS,
        num_layers=1,
        width=64,
        num_heads=2,
        context=CONTEXT,
        dropout=0.0,
        tied=True,
    )
    learning, losses = (
        [materialise(the_model, index, 0, "cpu") for index in range(3)],
        list[float](),
    )
    adam = torch.optim.Adam(
        [parameter for layer in learning for parameter in layer.parameters()], lr=3e-3
    )
    for _ in range(40):
        words = torch.randint(mask, (32, 1), generator=draws).expand(32, CONTEXT)
        masked = torch.rand(32, CONTEXT, generator=draws) < 0.3
        tensors = (
            words.where(~masked, mask),
            torch.zeros_like(words),
            torch.full((32,), CONTEXT, dtype=torch.int32),
        )
        for layer in learning:
            tensors = layer(*tensors)
        targets = words.where(masked, IGNORED)
        targets[:, 0] = 0
        loss = masked_and_pair_loss(tensors[0], tensors[1], targets)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.25 * math.log(mask)


def test_logits_come_from_the_embeddings_table() -> None:
    embedding, *_, head = layers()
    assert torch.equal(embedding.tokens.weight, head.output.weight)
    assert head.output.bias is not None


def test_layer_says_whether_it_draws() -> None:
    assert [layer.draws for layer in layers(dropout=0.1)] == [True, True, True, False]
    assert [layer.draws for layer in layers()] == [False] * 4


def test_names_in_checkpoints_are_stable() -> None:
    embedding, layer, _, head = layers()
    assert [name for name, _ in embedding.named_parameters()] == [
        "tokens.weight",
        "positions.weight",
        "types.weight",
    ]
    assert next(layer.named_parameters())[0] == "block.attention_norm.weight"
    assert {name.split(".")[0] for name, _ in head.named_parameters()} == {
        *("norm", "transform", "transform_norm", "output", "pooler", "pair")
    }
