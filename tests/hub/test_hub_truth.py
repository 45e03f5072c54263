"""Cut into stages, a published model has the loss and the gradients that transformers has."""

from itertools import accumulate

import pytest
import torch

from dpipe.config.load import build
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage

published = pytest.importorskip("hub.published")


def stages_of(model, cut, **options):
    ends = list(accumulate(cut))
    stages = []
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        layers = {layer: materialise(model, layer, 0, "cpu") for layer in range(start, end)}
        loss = model.loss if end == ends[-1] else None
        settings = {"num_microbatches": 1, "loss": loss, "frozen": model.frozen} | options
        stages.append(Stage(index, layers, **settings))
    return stages


def train_once(stages, inputs, targets):
    """Forward and backward of one micro-batch through all stages; returns the loss."""
    for stage in stages[:-1]:
        inputs = stage.forward(0, inputs)
    (loss,) = stages[-1].forward(0, inputs, targets)
    grads = ()
    for stage in reversed(stages):
        grads = stage.backward(0, grads)
    return loss


def gradients(stages):
    named = {}
    for stage in stages:
        named.update({name: parameter.grad for name, parameter in stage.named_parameters()})
    return named


@pytest.mark.some_cases(8)
@pytest.mark.parametrize("family", published.FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family, tmp_path):
    folder = published.save(family, tmp_path / "model")
    tokens = published.tokens()
    whole = published.reference(folder)
    expected = whole(tokens[:, :-1])
    # transformers shifts labels itself; these are shifted already.
    loss = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    config = build({"model": {"hf": str(folder), "context": 11}})
    from dpipe.hub.model import adapted_skeleton, source_of

    skeleton = adapted_skeleton(config, source_of(config))
    model = make_model(config)
    for cut in ((6,), (2, 4), (1, 2, 1, 2)):
        stages = stages_of(model, cut)
        found = train_once(stages, (tokens[:, :-1],), tokens[:, 1:])
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        ours = gradients(stages)
        seen = set()
        for name, gradient in ours.items():
            layer = int(name.split(".")[1])
            public = skeleton.published_name(layer, name.split(".", 2)[2])
            if model.tied is not None and name.endswith(("embed_tokens.weight", "wte.weight")):
                gradient = gradient + ours[f"layers.5.{model.tied[1]}"]
            elif model.tied is not None and public == "lm_head.weight":
                continue
            seen.add(public)
            torch.testing.assert_close(gradient, theirs[public].grad, rtol=1e-5, atol=1e-6)
        assert seen == {name for name, _ in whole.named_parameters()}


@pytest.mark.parametrize("family", ["smollm2", "gpt2", "gemma2", "mistral"])
def test_packed_samples_have_the_losses_that_they_have_alone(family, tmp_path):
    """Two samples of 7 and 4 tokens in a sequence of 12, the last position of which is padding."""
    folder = published.save(family, tmp_path / "model")
    samples = [published.tokens(1, length) for length in (8, 5)]
    config = build(
        {
            "model": {"hf": str(folder), "context": 12},
            "data": {"format": "tokens"},
            "train": {"num_microbatches": 1, "batch_size": 1},
        }
    )
    stages = stages_of(make_model(config), (3, 3))
    inputs = torch.cat([*(each[:, :-1] for each in samples), torch.zeros(1, 1, dtype=int)], 1)
    positions = torch.tensor([[*range(7), *range(4), 0]], dtype=torch.int32)
    ignored = torch.tensor([[-100]])
    targets = torch.cat([*(each[:, 1:] for each in samples), ignored, torch.tensor([[11]])], 1)
    found = train_once(stages, (inputs, positions), targets)
    whole = published.reference(folder)
    total = 0.0
    for each in samples:
        logits = whole(each[:, :-1]).logits
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), each[:, 1:].flatten(), reduction="sum"
        )
    torch.testing.assert_close(found, (total / 11).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [(6,), (2, 4)])
def test_accuracy_is_of_the_learned_tokens_alone(cut, tmp_path):
    """Of micro-batches of unequal numbers of answers, the mean is over the tokens of all."""
    folder = published.save("llama", tmp_path / "model")
    config = build(
        {
            "model": {"hf": str(folder), "context": 11},
            "data": {"format": "tokens"},
            "train": {"num_microbatches": 2, "batch_size": 4},
        }
    )
    tokens = published.tokens(4, 12)
    likeliest = published.reference(folder)(tokens[:, :-1]).logits.argmax(-1)
    targets = torch.full((4, 12), -100)
    targets[:, 3:11] = likeliest[:, 3:]  # right, but for those that follow
    targets[0, 3] += 1
    targets[3, 5:11] = -100
    learned = targets[:, :-1] != -100
    targets[:, -1] = learned.sum()
    expected = (likeliest == targets[:, :-1]).sum() / learned.sum()
    assert 0.9 < expected < 1
    stages = stages_of(make_model(config), cut, accuracy=make_model(config).accuracy)
    positions = torch.arange(11, dtype=torch.int32).expand(2, 11)
    found = []
    for half in (slice(0, 2), slice(2, 4)):
        inputs = (tokens[half, :-1], positions)
        for stage in stages[:-1]:
            inputs = stage.evaluate(inputs)
        found.append(stages[-1].evaluate(inputs, targets[half])[1])
    torch.testing.assert_close(torch.stack(found).mean(), expected)
