"""JSON in a run's folder that is damaged or absurd: an error that names the file, and no
traceback.
"""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpipe.config.load import Config
from dpipe.engine.update import LossScale
from dpipe.errors import CheckpointError, ConfigError, DpipeError
from dpipe.report.metrics import keep_rows_before, read_rows
from dpipe.report.trace import load_trace
from dpipe.stage.tensor_parallel import Shard
from dpipe.store.checkpoint import load, save
from dpipe.store.run_folder import load_configuration

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
RunRanks = Callable[..., list[BaseException | None]]

STEP = "step-00000003"
DEEP = "[" * 100_000
HUGE = "1" * 5_000  # more digits than Python turns into a number
ODD = [DEEP, '{"a": ' * 100_000, HUGE, "null", "[]", "1e999", '"\\ud800"', "", "\0"]


@pytest.fixture
def run(tiny: Make, losses: Losses, tmp_path: Path) -> Path:
    losses(tiny(run__trace_steps=1))
    return tmp_path / "run"


@pytest.mark.parametrize("text", ODD, ids=lambda text: ascii(text)[:12])
def test_configuration_of_a_run_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not the folder of a run|is not what a run writes"):
        load_configuration(tmp_path)


@pytest.mark.parametrize("text", ODD, ids=lambda text: ascii(text)[:12])
def test_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / STEP).mkdir()
    (tmp_path / STEP / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load(str(tmp_path), lambda name: True)


@pytest.mark.parametrize("text", [*ODD[:-2], '{"step": "1"}'], ids=lambda text: ascii(text)[:12])
def test_line_of_metrics_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{text}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl line 2 is damaged"):
        read_rows(tmp_path)
    keep_rows_before(path, 5)
    assert [row["step"] for row in read_rows(tmp_path)] == [0]


def test_row_of_an_absurd_step_is_dropped(tmp_path: Path) -> None:
    """No float holds it."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{{"step": {10**400}}}\n{{"step": 1e999}}\n')
    keep_rows_before(path, 5)
    assert [row["step"] for row in read_rows(tmp_path)] == [0]


@pytest.mark.parametrize("name", ["plan.json", "rank-0.json"])
@pytest.mark.parametrize("text", ODD, ids=lambda text: ascii(text)[:12])
def test_trace_is_named(run: Path, name: str, text: str) -> None:
    (run / "trace" / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} is damaged|different steps for each rank"):
        load_trace(run)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_updates", "3"),
        ("num_updates", None),
        ("num_updates", -1),
        ("num_updates", True),
        ("num_updates", 10**400),
        ("num_updates", [[[]]]),
    ],
)
def test_state_of_a_wrong_type_is_named(
    tiny: Make, run: Path, run_ranks: RunRanks, key: str, value: object
) -> None:
    path = run / "checkpoints" / STEP / "index.json"
    index = json.loads(path.read_text())
    index["state"][key] = value
    path.write_text(json.dumps(index))
    (error,) = run_ranks(tiny(train__steps=5), resume=True)
    assert isinstance(error, CheckpointError)
    assert f"the checkpoint's {key} is " in str(error)
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    "state",
    [
        {"loss_scale": "1", "good_steps": 0},
        {"loss_scale": -1.0, "good_steps": 0},
        {"loss_scale": float("nan"), "good_steps": 0},
        {"loss_scale": 2.0},
    ],
)
def test_invalid_loss_scale_is_named(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint's (loss_scale|good_steps) is"):
        LossScale(True).restore(state)


def test_moment_of_another_size_is_named(tiny: Make, run: Path, run_ranks: RunRanks) -> None:
    """The optimizer would have failed in its first step."""
    loaded = load(str(run / "checkpoints"), lambda name: True)
    moments = {**loaded.optimizer}
    name = next(name for name in moments if name.endswith(".exp_avg"))
    moments[name] = torch.zeros(7)
    url = str(run / "checkpoints")
    save(url, 4, 0, loaded.tensors, moments, loaded.state, lambda part: [part], 9, run=loaded.run)
    (error,) = run_ranks(tiny(train__steps=5), resume=True)
    assert isinstance(error, CheckpointError)
    assert f"{name} has 7 values in the checkpoint" in str(error)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 0])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/dev/zero", "layers.0.weight", "layers.0.weight[0:3]", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in `value`, outermost first."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    return [(value, key) for key in keys] + [p for key in keys for p in places(value[key])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fuzz")
    weight = {"layers.0.weight": torch.arange(6.0).reshape(2, 3)}
    moments = {
        "layers.0.weight.exp_avg[0:3]": torch.zeros(3),
        "layers.0.weight.exp_avg[3:6]": torch.ones(3),
    }
    layouts = {"layers.0.weight.exp_avg": Shard((2, 3), 0, 1, 2)}
    state = {"num_updates": 3, "loss_scale": 2.0, "good_steps": 1}
    save(str(folder), 3, 0, weight, moments, state, lambda part: [part], 1, layouts)
    return folder, json.loads((folder / STEP / "index.json").read_text())


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_index_loads_or_is_named(
    whole: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    """A whole index, in which a few values are replaced, removed or renamed."""
    folder, original = whole
    index = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(index) or [(index, "step")]))
        how = data.draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace":
            container[key] = data.draw(JSON)
        elif isinstance(container, dict) and key in container:
            value = container.pop(key)
            if how == "rename":
                container[data.draw(st.text(max_size=8))] = value
    (folder / STEP / "index.json").write_text(json.dumps(index))
    with suppress(DpipeError):
        loaded = load(str(folder), lambda name: True)
        LossScale(True).restore(loaded.state)


def test_fuzzed_index_is_loaded_where_it_is_whole(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, original = whole
    (folder / STEP / "index.json").write_text(json.dumps(original))
    moments = load(str(folder), lambda name: True).optimizer
    assert moments["layers.0.weight.exp_avg"].tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("name", ["a." * 5000, "\x1b[2J"], ids=["long", "escape"])
@pytest.mark.parametrize("table", ["weight_map", "optimizer_map"])
def test_name_of_a_tensor_is_shown_in_part_and_escaped(
    whole: tuple[Path, dict[str, Any]], table: str, name: str
) -> None:
    folder, original = whole
    index = copy.deepcopy(original)
    _, file = index[table].popitem()
    index[table][name] = file
    (folder / STEP / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is damaged") as refusal:
        load(str(folder), lambda name: True)
    assert len(str(refusal.value)) < 1000
    assert "\x1b" not in str(refusal.value)
