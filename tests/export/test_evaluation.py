"""The tasks of lm-evaluation-harness: what it is told, and what becomes of its answer.

A stand-in is asked here; the real one too with `scripts/test -m daemon`.
"""

import json
import math
import re
import sys
from fnmatch import filter as matching
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from export.test_export_folder import save_checkpoint
from hub.test_hub_encoder import save as save_encoder

from dpipe.cli.main import main
from dpipe.config.load import build
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise
from dpipe.store.run_folder import save_configuration

published = pytest.importorskip("hub.published")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/capitals.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
CITIES = {"france": "paris", "italy": "rome", "spain": "madrid"}


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose adapter has learned something."""
    model = published.save("smollm2", tmp_path / "model")
    published.save_tokenizer(model)
    config = build({"model": {"hf": str(model), "context": 16}, "adapter": {"kind": "lora"}})
    layers = make_model(config)
    tensors = {}
    for index in range(len(layers.layers)):
        for name, parameter in materialise(layers, index, 0, "cpu").named_parameters():
            tensors[f"layers.{index}.{name}"] = torch.full_like(parameter, 0.1)
    folder = tmp_path / "run"
    folder.mkdir()
    save_configuration(folder, config)
    save_checkpoint(folder / "checkpoints", tensors)
    return folder


@pytest.fixture
def lm_eval(monkeypatch):
    """A stand-in for the library; `lm_eval.asked` is what it was asked for."""
    library = ModuleType("lm_eval")
    library.tasks = ModuleType("lm_eval.tasks")
    library.asked = []

    class TaskManager:
        all_tasks = ("capitals", "rivers", "river_lengths")

        def __init__(self, include_path):
            self.include_path = include_path

        def match_tasks(self, names):
            return [task for name in names for task in matching(self.all_tasks, name)]

    def simple_evaluate(**asked):
        if "rivers" in asked["tasks"]:
            raise ConnectionError("Couldn't reach\n 'rivers' on the Hub")
        folder = asked["model_args"]["pretrained"]
        weights = published.reference(folder).model.layers[0].mlp.up_proj.weight
        library.asked.append(asked)
        return {
            "results": {
                "capitals": {
                    "alias": "capitals",
                    "acc,none": float(weights.detach().mean()),
                    "acc_stderr,none": 0.25,
                    "exact_match,strict": 0.5,
                    "exact_match_stderr,strict": "N/A",
                }
            },
            "n-samples": {"capitals": {"original": 9, "effective": 4}},
            "config": {"model_dtype": torch.float32},
        }

    library.tasks.TaskManager = TaskManager
    library.simple_evaluate = simple_evaluate
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", library.tasks)
    return library


def evaluate(run, *arguments):
    return CliRunner().invoke(main, ["eval", str(run), *map(str, arguments)])


def test_eval_shows_the_model_before_and_after_its_training(run, lm_eval):
    result = evaluate(run, "--tasks", "capitals", "--published", "--limit", 4)
    assert result.exit_code == 0, result.output
    for text in ("published", "step-3", "exact_match (strict)", "± 0.2500", " 4 "):
        assert text in result.stdout
    (path,) = (run / "eval").iterdir()
    assert f"written to {path}" in result.stdout
    written = json.loads(path.read_text())
    before, after = (rows[0]["value"] for rows in written["scores"].values())
    assert before != after
    assert written["lm_eval"]["step-3"]["config"]["model_dtype"] == "torch.float32"
    # What was exported for it takes the room of a model.
    assert not list(run.glob("eval-*"))


def test_eval_tells_lm_eval_what_it_is_told(run, lm_eval, tmp_path):
    (tmp_path / "tasks").mkdir()
    options = ("--num-fewshot", 2, "--batch-size", 8, "--chat", "--exported", tmp_path / "model")
    place = ("--include-path", tmp_path / "tasks")
    result = evaluate(run, "--tasks", "capitals, cap*", *options, *place)
    assert result.exit_code == 0, result.output
    (asked,) = lm_eval.asked
    assert asked["model_args"]["pretrained"] == str(tmp_path / "model")
    assert asked["task_manager"].include_path == str(tmp_path / "tasks")
    expected = {
        "tasks": ["capitals", "cap*"],
        "num_fewshot": 2,
        "batch_size": 8,
        "apply_chat_template": True,
        "limit": None,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    assert {name: asked[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--tasks", "river"), 2, "no task 'river', .*did you mean rivers"),
        (("--tasks", "xyz"), 2, "no task 'xyz', .*lm_eval ls tasks lists its own"),
        (("--tasks", " , "), 2, "give the name of a task"),
        (("--tasks", "rivers"), 1, "rivers: ConnectionError: Couldn't reach 'rivers' on .*files"),
        (("--tasks", "capitals", "--include-path", "nowhere"), 2, "nowhere is not a folder"),
        (("--tasks", "capitals", "--exported", "nowhere"), 2, "nowhere holds no config.json"),
    ],
)
def test_eval_refuses_what_cannot_be_evaluated(run, lm_eval, arguments, code, said):
    result = evaluate(run, *arguments)
    assert result.exit_code == code
    assert re.search(said, result.stderr)
    assert not (run / "eval").exists()


def test_eval_refuses_an_encoder(lm_eval, tmp_path):
    model = save_encoder("bert", tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    save_configuration(run, build({"model": {"hf": str(model), "context": 16}}))
    result = evaluate(run, "--tasks", "capitals")
    assert result.exit_code == 2
    assert "run is a run of an encoder, and lm_eval's tasks ask how a text goes on" in result.stderr
    assert not lm_eval.asked


def test_eval_says_which_extra_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = evaluate(run, "--tasks", "capitals")
    assert result.exit_code == 2
    assert "dpipe eval needs lm_eval: pip install 'dpipe[eval]'" in result.stderr


@pytest.mark.daemon
@pytest.mark.filterwarnings("ignore")
def test_harness_scores_a_task_of_ones_own_as_transformers_would(run, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs scripts/setup dev,eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "capitals.yaml").write_text(TASK.format(folder=folder))
    cities = list(CITIES.values())
    rows = []
    for number, country in enumerate(CITIES):
        rows.append({"question": f"{country}:", "choices": cities, "answer": number})
    (folder / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = evaluate(run, "--tasks", "capitals", "--include-path", folder, "--published")
    assert result.exit_code == 0, result.output
    (path,) = (run / "eval").iterdir()
    scores = json.loads(path.read_text())["scores"]
    (accuracy,) = (row["value"] for row in scores["published"] if row["metric"] == "acc")
    assert math.isclose(accuracy, share_right(tmp_path / "model"))


@torch.no_grad()
def share_right(folder):
    """Of the capitals, those that transformers' own model finds likelier than the others."""
    model = published.reference(folder).eval()
    tokenizer = published.transformers.AutoTokenizer.from_pretrained(folder)
    right = 0
    for country, capital in CITIES.items():
        likelihoods = {}
        for city in CITIES.values():
            asked = tokenizer.encode(f"{country}:", add_special_tokens=False)
            answer = tokenizer.encode(f" {city}", add_special_tokens=False)
            logits = model(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
            likelihoods[city] = float(chosen.sum())
        right += max(likelihoods, key=likelihoods.get) == capital
    return right / len(CITIES)
