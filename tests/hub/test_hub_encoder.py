"""Encoders that find masked words: as transformers computes them, in every cut, and back."""

from pathlib import Path

import pytest
import torch
from hub.test_hub_truth import gradients, stages_of, train_once
from safetensors.torch import load_file, save_file

from dpipe.config.load import build
from dpipe.data.feed import feed_of
from dpipe.errors import ConfigError, DataError
from dpipe.export.run import export_folder
from dpipe.plan.run_plan import make_model, read_text
from dpipe.run.generate import generate_text

published = pytest.importorskip("hub.published")
transformers = published.transformers
SIZES = {**published.SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", SIZES),
    "xlm-roberta": ("XLMRobertaConfig", SIZES),
    "camembert": ("CamembertConfig", {**SIZES, "tie_word_embeddings": False}),
    "distilbert": ("DistilBertConfig", {**SIZES, "dropout": 0.0, "attention_dropout": 0.0}),
}
LETTERS = [chr(code) for code in range(32, 32 + 92)]


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save(family: str, folder: Path, special=SPECIAL, **changes) -> str:
    name, sizes = ENCODERS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**sizes, **changes})
    model = transformers.AutoModelForMaskedLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate([*special, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=False))
    marks = {f"{name}_token": token for name, token in names.items()}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(
        folder
    )
    return str(folder)


def reference(folder):
    return transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).train()


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_has_the_loss_and_gradients_of_transformers(family, tmp_path):
    from dpipe.hub.model import adapted_skeleton, source_of

    folder = save(family, tmp_path / "model")
    whole = reference(folder)
    tokens = published.tokens(2, 12)
    targets = torch.full_like(tokens, -100)
    targets[:, [2, 7]] = tokens[:, [2, 7]]
    loss = whole(tokens, labels=targets).loss
    loss.backward()
    config = build({"model": {"hf": folder, "context": 12}})
    skeleton = adapted_skeleton(config, source_of(config))
    model = make_model(config)
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for cut in ((6,), (2, 4), (1, 2, 1, 2)):
        stages = stages_of(model, cut)
        found = train_once(stages, (tokens,), targets)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        ours = gradients(stages)
        if model.tied is not None:
            first, last = model.tied
            ours[f"layers.0.{first}"] += ours.pop(f"layers.5.{last}")
        seen = set()
        for name, gradient in ours.items():
            _, layer, rest = name.split(".", 2)
            parameter = theirs[skeleton.published_name(int(layer), rest)]
            seen.add(id(parameter))
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
        # Untied, a bias of Camembert's is read by nobody.
        learning = (parameter for parameter in whole.parameters() if parameter.grad is not None)
        assert seen == {id(parameter) for parameter in learning}


def job(folder, tmp_path, stages=1, adapter=None, **model):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return build(
        {
            "model": {"hf": folder, "context": 16, **model},
            "adapter": adapter or {},
            "data": {"files": [str(tmp_path / "text.txt")], "cache": str(tmp_path / "cache")},
            "train": {"steps": 4, "batch_size": 4, "num_microbatches": 2, "learning_rate": 1e-2},
            "pipeline": {"stages": stages},
            "run": {"tensorboard": False, "folder": str(tmp_path / f"run-{stages}")},
            "timeouts": {"join": 80},
        }
    )


def test_encoder_learns_alike_in_any_cut_and_continues_no_text(losses, tmp_path):
    folder = save("bert", tmp_path / "model")
    whole = losses(job(folder, tmp_path))
    assert whole[-1] < whole[0]
    assert losses(job(folder, tmp_path, 2)) == whole
    run = tmp_path / "run-2"
    with pytest.raises(ConfigError, match="an encoder, which finds words and continues no text"):
        generate_text(run, "the", tokens=2, temperature=0, seed=0)
    export_folder(run, tmp_path / "out")
    before = reference(folder)(published.tokens()).logits
    assert not torch.equal(reference(tmp_path / "out")(published.tokens()).logits, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapter_of_an_encoder_opens_in_peft_as_it_learned(losses, tmp_path):
    peft = pytest.importorskip("peft")
    folder = save("bert", tmp_path / "model")
    config = job(folder, tmp_path, 2, adapter={"kind": "lora"})
    learned = losses(config)
    assert learned[-1] < learned[0]
    run = tmp_path / "run-2"
    export_folder(run, tmp_path / "merged")
    export_folder(run, tmp_path / "adapter", only_adapter=True)
    tokens = published.tokens()
    before = reference(folder).eval()(tokens).logits
    merged = reference(tmp_path / "merged").eval()(tokens).logits
    adapted = peft.PeftModel.from_pretrained(reference(folder), tmp_path / "adapter").eval()
    assert not torch.allclose(merged, before, atol=1e-3)
    torch.testing.assert_close(adapted(tokens).logits, merged, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_that_has_not_learned_goes_out_to_the_bit(family, tmp_path):
    from dpipe.export.folder import export_run

    folder = save(family, tmp_path / "model")
    export_run(job(folder, tmp_path), None, tmp_path / "out")
    tokens = published.tokens()
    expected = reference(folder)(tokens).logits
    assert torch.equal(reference(tmp_path / "out")(tokens).logits, expected)


def test_oldest_files_of_bert_are_read(tmp_path):
    """They call a norm's values gamma and beta, as TensorFlow does."""
    folder = save("bert", tmp_path / "model")
    inputs = (published.tokens(1, 12), torch.full((1, 12), 5))
    expected = train_once(
        stages_of(make_model(job(folder, tmp_path)), (6,)), (inputs[0],), inputs[1]
    )
    path = tmp_path / "model" / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        renamed[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
    save_file(renamed, path)
    found = train_once(stages_of(make_model(job(folder, tmp_path)), (6,)), (inputs[0],), inputs[1])
    assert torch.equal(found, expected)


def test_words_are_masked_alike_for_any_number_of_replicas(tmp_path):
    config = job(save("bert", tmp_path / "model"), tmp_path)
    text = read_text(config)
    whole = feed_of(config, text).training(3)
    parts = [feed_of(config, text, replica, 2).training(3) for replica in range(2)]
    for column in ("inputs", "targets"):
        together = [part for each in parts for part in getattr(each, column)]
        if column == "inputs":
            together = [tokens for (tokens,) in together]
            expected = torch.cat([tokens for (tokens,) in whole.inputs])
        else:
            expected = torch.cat(list(whole.targets))
        assert torch.equal(torch.cat(together), expected)
    (tokens,), targets = whole.inputs[0], whole.targets[0]
    assert (tokens[:, 0] == 2).all() and (tokens[:, -1] == 3).all()
    # 15 % of 16 tokens, in each.
    assert ((targets != -100).sum(1) == 2).all() and (targets[:, [0, -1]] == -100).all()
    assert not torch.equal(feed_of(config, text).training(4).inputs[0][0], tokens)
    assert torch.equal(feed_of(config, text).held_out(1).inputs[0][0][:, 0], tokens[:, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, "heads that classify are not"),
        ({"is_decoder": True}, "is_decoder = true.*take a decoder"),
    ],
)
def test_encoder_of_another_kind_is_refused(change, message, tmp_path):
    folder = save("bert", tmp_path / "model")
    config = transformers.BertConfig(**SIZES)
    for key, value in change.items():
        setattr(config, key, value)
    config.save_pretrained(folder)
    with pytest.raises(ConfigError, match=message):
        make_model(job(folder, tmp_path))


def test_what_an_encoder_cannot_read_is_refused(tmp_path):
    folder = save("bert", tmp_path / "model")
    rows = job(folder, tmp_path).with_(data__format="chat")
    with pytest.raises(ConfigError, match='learns masked words of a text.*data.format = "text"'):
        make_model(rows)
    with pytest.raises(ConfigError, match="context 65 is longer than the 64 positions.*lower it"):
        make_model(job(folder, tmp_path, context=65))
    with pytest.raises(DataError, match="context 2 has no room.*raise it to 3"):
        read_text(job(folder, tmp_path, context=2))
    bare = save("bert", tmp_path / "bare", special=("[PAD]", "[UNK]", "[CLS]"))
    with pytest.raises(DataError, match="has no sep_token, mask_token.*copy the one"):
        read_text(job(bare, tmp_path))
