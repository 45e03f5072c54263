"""A published model with an adapter, trained on chats: whole runs, resumed and exported."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpipe.config.load import build
from dpipe.export.run import export_folder
from dpipe.report.trace import load_inputs
from dpipe.run.generate import generate_text

published = pytest.importorskip("hub.published")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def chats(tmp_path):
    """`chats(stages)`: LoRA on a tiny model and sixty chats, in that many stages."""
    published.save("smollm2", tmp_path / "model")
    published.save_tokenizer(tmp_path / "model")
    rows = []
    for number in range(60):
        turns = [
            {"role": "user", "content": f"what is {number}?"},
            {"role": "assistant", "content": "it is " + "x" * (number % 4)},
        ]
        rows.append(json.dumps({"messages": turns}))
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    table = {
        "model": {"hf": str(tmp_path / "model"), "context": 64},
        "adapter": {"kind": "lora", "r": 4},
        "data": {
            "files": [str(tmp_path / "chats.jsonl")],
            "format": "chat",
            "cache": str(tmp_path / "cache"),
        },
        "train": {"steps": 4, "batch_size": 4, "num_microbatches": 2, "learning_rate": 1e-2},
        "run": {"tensorboard": False, "folder": str(tmp_path / "run-1")},
        "timeouts": {"join": 80},
    }

    def make(stages, **overrides):
        folder = str(tmp_path / f"run-{stages}")
        return build(table).with_(pipeline__stages=stages, run__folder=folder, **overrides)

    return make


def test_cut_changes_no_bit_and_only_the_adapter_is_kept(chats, losses, tmp_path):
    whole = losses(chats(1))
    assert whole[-1] < whole[0]
    assert losses(chats(2)) == whole
    (checkpoint,) = (tmp_path / "run-2" / "checkpoints").glob("step-*")
    names = [name for path in checkpoint.glob("model-*") for name in load_file(path)]
    assert names and all("lora_" in name for name in names)
    # Of two attention blocks' worth of parameters and more, some thousands learn.
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) < 200_000


@pytest.mark.slow
def test_evaluation_tells_how_many_answers_are_right_in_any_cut(chats, losses, tmp_path):
    """Held out is a file of its own."""
    kept = tmp_path / "kept.jsonl"
    kept.write_text((tmp_path / "chats.jsonl").read_text().replace("xx", "x"))
    evaluated = []
    for stages in (1, 2):
        config = chats(stages, data__held_out=(str(kept),), train__eval_every=4)
        losses(config)
        rows = map(json.loads, Path(config.run.folder, "metrics.jsonl").read_text().splitlines())
        evaluated.append([row for row in rows if "held_out_loss" in row])
    assert evaluated[0] == evaluated[1]
    first, last = (row["held_out_accuracy"] for row in evaluated[0])
    assert 0 <= first < last <= 1


@pytest.mark.slow
def test_stages_that_do_not_learn_get_no_gradient(chats, losses, tmp_path):
    upper = {"adapter__layers": (2, 3), "train__clip_norm": 0}
    whole = losses(chats(1, **upper))
    assert losses(chats(3, pipeline__split=(2, 2, 2), **upper)) == whole
    inputs = load_inputs(tmp_path / "run-3" / "trace")
    sent = {str(action) for program in inputs.schedule.programs for action in program}
    assert {"1SEND_F0", "2SEND_B0"} < sent and "1SEND_B0" not in sent
    assert inputs.cost.backward_us[0] == 0 and inputs.cost.gradient_bytes[0] == 0


def test_run_goes_on_at_the_very_sample(chats, losses):
    straight = losses(chats(1, train__decay="none"))
    losses(chats(2, train__steps=2, train__decay="none"))
    assert losses(chats(2, train__decay="none"), resume=True) == straight


@pytest.mark.slow
def test_streamed_rows_have_the_losses_of_rows_that_are_kept(chats, losses):
    """In their order, and also where the run was stopped and goes on."""
    same = {"train__decay": "none", "data__shuffle": "none", "data__held_out": 0.0}
    kept = losses(chats(1, **same))
    same["data__streaming"] = True
    losses(chats(2, train__steps=2, **same))
    assert losses(chats(2, **same), resume=True) == kept


def test_answer_of_a_run_is_that_of_its_export(chats, losses, tmp_path):
    config = chats(1)
    losses(config)
    run = Path(config.run.folder)
    answer = generate_text(run, "what is 2?", tokens=6, temperature=0, seed=0, chat=True)
    assert export_folder(run, tmp_path / "out") == 4
    whole = published.reference(tmp_path / "out").eval()
    tokenizer = published.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    turns = [{"role": "user", "content": "what is 2?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, return_tensors="pt")
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, whole(ids).logits[:, -1:].argmax(-1)], dim=1)
    theirs = ids[0, -6:].tolist()
    if tokenizer.eos_token_id in theirs:
        theirs = theirs[: theirs.index(tokenizer.eos_token_id)]
    assert answer == tokenizer.decode(theirs)


@pytest.mark.slow
def test_base_of_4_bits_answers_as_it_was_trained_and_goes_out_whole(chats, losses, tmp_path):
    bf16 = {"train__parameters": "bf16", "train__precision": "bf16"}
    config = chats(2, adapter__base="nf4", train__eval_every=4, **bf16)
    first, *_, last = losses(config)
    assert last < first
    run = Path(config.run.folder)
    generate_text(run, "what is 2?", tokens=2, temperature=0, seed=0, chat=True)
    export_folder(run, tmp_path / "out")
    # What the adapter leaves alone is as it was published.
    for name, value in published.reference(tmp_path / "out").named_parameters():
        if "norm" in name or "embed" in name:
            original = published.reference(tmp_path / "model").get_parameter(name)
            assert torch.equal(value, original)
