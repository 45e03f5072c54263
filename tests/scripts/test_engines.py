"""Which engine runs a cell, how it lays out a model on ranks, and a sweep without a shaped
network.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes import fake_megatron

from dpipe.baselines import fsdp, megatron, torch_replay
from dpipe.config.load import build, load
from dpipe.errors import ConfigError

CONFIG = """
    model = {{ num_layers = 4, width = 32, num_heads = 4, context = 16, vocab_size = 256 }}
    data = {{ files = ["{folder}/text.txt"], cache = "{folder}/cache" }}
    train = {{ steps = 3, batch_size = 16, num_microbatches = 4 }}
    data_parallel = {{ kind = "all-reduce" }}
    run = {{ tensorboard = false, trace_steps = 0 }}
"""
SWEEP = """
    name = "small"
    config = "config.toml"
    venue = "local"
    [[run]]
    engine = "fsdp"
    schedules = ["1f1b"]
    layouts = [{ pipeline = 2 }, { pipeline = 2, data = 2 }]
    micro_batches = [1, 2]
    [[run]]
    schedules = ["1f1b"]
    layouts = [{ tensor = 2 }]
"""
SWEEPS = Path(__file__).parents[2] / "scripts/sweeps"
SHAPES = [
    (2, 1, 1),
    (2, 1, 2),
    (4, 2, 1),
    (4, 2, 2),
    (2, 1, 4),
]  # ranks, replicas, sequences of a micro-batch
LOSSES = {
    "dpipe": [5.0, 4.0],
    "fsdp": [5.0, 4.0004],
    "megatron": [5.0, 4.2],
}  # of fake engines


@pytest.fixture
def engines(script):
    return script("engines")


@pytest.fixture
def sweep(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = script("sweep")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return module


def run(sweep, folder: Path) -> Result:
    return CliRunner().invoke(
        sweep.main, [str(folder / "sweep.toml"), "--results", str(folder / "results.jsonl")]
    )


@pytest.mark.parametrize(
    ("engine", "layers", "module"),
    [
        ("dpipe", "gpt", None),
        ("torch", "replay", torch_replay),
        ("torch", "gpt", fsdp),
        ("fsdp", "gpt", fsdp),
        ("megatron", "gpt", megatron),
    ],
)
def test_engine_is_run_by_its_baseline(engines, engine, layers, module):
    config = build({"model": {"layers": layers}})
    assert engines.module_of(engine, config) is module
    assert engines.command(engine, config) == (
        ("dpipe", "train") if module is None else (module.__name__,)
    )


def test_cells_are_layouts_by_micro_batches(sweep, tmp_path):
    cells = list(
        sweep.cells(sweep.read_table(sweep.Sweep, tmp_path / "sweep.toml"), tmp_path / "work")
    )
    found = [
        (c.config.world_size, c.config.data_parallel.replicas, c.config.microbatch_size)
        for c in cells
    ]
    assert found == SHAPES
    assert str(cells[3]) == "1 x 2 x 2, micro-batch 2 fsdp 1f1b fp32"
    assert cells[0].config.transport.shape is None


@pytest.mark.parametrize(
    ("name", "engines_of", "num_cells", "most_ranks"),
    [
        ("gpt3xl_megatron", {"megatron", "dpipe"}, 2 * (10 * 4 + 5 * 2 + 5 * 2), 8),
        ("gpt3xl_torch_pipe", {"torch", "dpipe"}, 2 * 3 * 3, 8),
        ("gpt3xl_torch_pipe_fsdp", {"fsdp", "dpipe"}, 2 * 3 * 3, 8),
        ("megatron_bert345m_scaling", {"megatron", "dpipe"}, 2 * 3, 8),
    ],
)
def test_committed_sweep_of_layouts_gives_cells_that_their_engines_take(
    script, tmp_path, monkeypatch, name, engines_of, num_cells, most_ranks
):
    fake_megatron.install(monkeypatch)
    sweep = script("sweep")
    cells = list(sweep.cells(sweep.read_table(sweep.Sweep, SWEEPS / f"{name}.toml"), tmp_path))
    assert {cell.engine for cell in cells} == engines_of
    assert len({cell.key for cell in cells}) == num_cells
    assert max(cell.config.world_size for cell in cells) == most_ranks


def test_batch_that_a_layout_does_not_divide_is_refused(engines):
    with pytest.raises(
        ConfigError,
        match="train.batch_size 64 is not divisible by 3 replicas of micro-batches of 2",
    ):
        engines.Layout(data=3).overrides(64, 2)


@pytest.mark.parametrize(("keys", "venue"), [('networks = ["near.toml"]', "local"), ("", "shaped")])
def test_machine_as_it_is_has_no_networks_and_any_other_venue_has_some(
    sweep, tmp_path, keys, venue
):
    (tmp_path / "sweep.toml").write_text(
        SWEEP.replace('venue = "local"', f'venue = "{venue}"\n{keys}')
    )
    result = run(sweep, tmp_path)
    assert result.exit_code == 2
    assert 'venue "local" takes no networks' in result.output


def test_line_of_a_layout_has_all_keys_of_the_tables(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "measure", lambda cell, at, timeout_s: {"measured_s": 1.5})
    monkeypatch.setattr(sweep, "difference_of_losses", lambda cell, at: 1e-6)
    assert run(sweep, tmp_path).exit_code == 0
    line = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[3])
    expected = {
        "mode": "real", "engine": "fsdp", "device": "CPU", "gpus": 0, "data_parallel": 2,
        "tensor_parallel": 1, "pipeline_parallel": 2, "micro_batch": 2, "batch_size": 16,
        "precision": "fp32", "recompute": "none", "predicted_s": None, "delay_ms": None,
        "loss_difference": 1e-6,
    }  # fmt: skip
    assert {key: line[key] for key in expected} == expected


def test_cells_with_too_few_gpus_are_left_out(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "measure", lambda cell, at, timeout_s: {"measured_s": 1.0})
    monkeypatch.setattr(sweep, "difference_of_losses", lambda cell, at: None)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    (tmp_path / "config.toml").write_text(
        CONFIG.format(folder=tmp_path) + 'node = { device = "cuda" }'
    )
    result = run(sweep, tmp_path)
    assert result.exit_code == 0, result.output
    assert "left out, for want of GPUs (there are 2): 2 of 5 cells" in result.output
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3


def test_machine_without_gpus_is_refused_with_the_number_needed(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 0)
    (tmp_path / "config.toml").write_text(
        CONFIG.format(folder=tmp_path) + 'node = { device = "cuda" }'
    )
    result = run(sweep, tmp_path)
    assert result.exit_code == 2
    assert "every cell that is left needs 2 GPUs at least, and torch sees 0 here" in result.output


def test_gpus_peak_memory_and_use_are_the_last_steps(sweep):
    row = {
        "step": 3,
        "gpu_memory_mb": {"0": 1500.0, "1": 2500.0},
        "gpu_use_percent": {"0": 80, "1": 91},
        "mfu": 0.41,
    }
    assert sweep.of_gpus(row) == {"memory_gb": 2.5, "gpu_use_percent": 86, "mfu": 0.41}


def test_unknown_gpu_metrics_are_none(sweep):
    metrics = sweep.of_gpus({"step": 3, "gpu_memory_mb": {"0": 1500.0}})
    assert metrics == {"memory_gb": 1.5, "gpu_use_percent": None, "mfu": None}


@pytest.fixture
def trained(engines, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Records the modules that are run; each engine has the losses of LOSSES."""
    ran: list[tuple[str, ...]] = []

    def run_to_end(path, overrides, at, *, timeout_s, module, environ):
        ran.append(module)
        assert environ == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if "megatron" in module[0] else {})
        config = load(path, overrides)
        assert (config.model.num_layers, config.world_size, config.train.steps) == (4, 2, 4)
        engine = module[0].rpartition(".")[2]
        return [{"step": n, "loss": loss} for n, loss in enumerate(LOSSES[engine])] + [
            {"held_out_loss": 9.0}
        ]

    monkeypatch.setattr(engines, "run_to_end", run_to_end)
    return ran


def test_losses_are_compared_on_a_small_model_with_the_same_layout(engines, trained, tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    given = engines.Layout(pipeline=2).overrides(16, 2)
    found = engines.difference_in_training(
        "fsdp", tmp_path / "config.toml", given, None, timeout_s=1.0
    )
    assert found == pytest.approx(4e-4)
    again = (*given, "train.num_microbatches=4")
    assert (
        engines.difference_in_training("fsdp", tmp_path / "config.toml", again, None, timeout_s=1.0)
        == found
    )
    both = [("dpipe", "train"), ("dpipe.baselines.fsdp",)]
    assert trained == both  # once, because the small model does not depend on the micro-batch
    half = (*given, "train.precision=bf16")
    engines.difference_in_training("fsdp", tmp_path / "config.toml", half, None, timeout_s=1.0)
    assert trained == both * 2  # the result in fp32 is cached


@pytest.mark.usefixtures("trained")
def test_engine_with_other_losses_is_refused(engines, tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    given = engines.Layout(pipeline=2).overrides(16, 2)
    with pytest.raises(AssertionError, match="the losses of megatron differ from ours by 0.2"):
        engines.difference_in_training(
            "megatron", tmp_path / "config.toml", given, None, timeout_s=1.0
        )


@pytest.mark.usefixtures("trained")
def test_engine_whose_first_loss_differs_is_refused(engines, tmp_path, monkeypatch):
    """Before training any parameters give a loss near that of chance, so half a thousandth is a
    large difference.
    """
    monkeypatch.setitem(LOSSES, "megatron", [5.0005, 4.0])
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    given = (
        *engines.Layout(pipeline=2).overrides(16, 2),
        "train.precision=fp16",
        "train.parameters=fp16",
    )
    with pytest.raises(
        AssertionError,
        match="with the same parameters the first loss of megatron is 5.0005, ours 5.0",
    ):
        engines.difference_in_training(
            "megatron", tmp_path / "config.toml", given, None, timeout_s=1.0
        )
