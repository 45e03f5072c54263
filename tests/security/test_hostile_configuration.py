"""A foreign configuration is refused with an error or predicted quickly."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.bounds import quickly

from dpipe.config.load import Config, build, load
from dpipe.errors import ConfigError, DpipeError, ProfileError
from dpipe.network.profile import load_network
from dpipe.plan.forecast import forecast
from dpipe.plan.run_plan import draft
from dpipe.processes.environment import ProcessInfo
from dpipe.run.build import run_rank
from dpipe.run.start import launch_ranks
from dpipe.toml import MAX_BYTES

Make = Callable[..., Config]
MANY = 1_000_000_000


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{'a.' * 100_000}a = 1", "a key has 100001 parts"),
        (f"[{'a.' * 100_000}a]", "a key has 100001 parts"),
        (f"a = {{ {'a . ' * 100_000}a = 1 }}", "a key has 100001 parts"),
        ("\n".join(f"k{n} = 1" for n in range(30_000)), "and 29980 more"),
        ("\n".join(f"[k{n}]" for n in range(30_000)), "and 29980 more"),
        (f"a = {'[' * 100_000}", "nested too deeply"),
        (f"a = {'{a = ' * 100_000}", "nested too deeply"),
        (f"train.steps = {'1' * 5000}", "is not TOML"),
        (f"train.steps = 1{'0' * 4000}", "train.steps must be between"),
        (f"train.seed = 1{'0' * 4000}", "train.seed must be between"),
        (f"train = '{'x' * 1_000_000}'", "train must have at most 65536 characters"),
        (f"'{'x' * 1_000_000}' = 1", "unknown key"),
        (f"run.sample = '{'x' * 1_000_000}'", "run.sample must have at most 65536 characters"),
        (f"data.files = ['{'x' * 1_000_000}']", "data.files must have at most 65536 characters"),
        ('run.folder = "a\\u0000b"', "run.folder must not hold a NUL"),
        ('run.checkpoint_url = "a\\u0000b"', "run.checkpoint_url must not hold a NUL"),
        ('data.files = ["a\\u0000b"]', "data.files must not hold a NUL"),
        ('data.tokenizer = "a\\u0000b"', "data.tokenizer must not hold a NUL"),
        ('data.cache = "a\\u0000b"', "data.cache must not hold a NUL"),
        ('predict.network = "a\\u0000b"', "predict.network must not hold a NUL"),
        ('node.tls_cert = "a\\u0000b"', "node.tls_cert must not hold a NUL"),
        ("train = { num_microbatches = 1000000, batch_size = 1000000 }", "too many"),
        ("pipeline = { stages = 1000000000 }", "1000000000 stages are too many"),
        (f"pipeline = {{ stages = {MANY}, stages_per_rank = {MANY} }}", "one stage a rank"),
        (
            "train = { batch_size = 4000000 }\n"
            "data_parallel = { kind = 'all-reduce', replicas = 1000000 }",
            "computations a step, too many",
        ),
        (
            "train = { batch_size = 60000, num_microbatches = 1 }\n"
            "data_parallel = { kind = 'all-reduce', replicas = 60000 }",
            "messages a step, too many",
        ),
        ("model.num_layers = 1000000000", "model.num_layers: Input should be less"),
        ("model = { width = 1000000000, num_heads = 1 }", "model.width: Input should be less"),
        ("model.context = 1000000000", "model.context: Input should be less"),
        ("model.vocab_size = 1000000000000", "model.vocab_size: Input should be less"),
        ("transport.connections = 1000000000", "transport.connections"),
        ("node.threads = 1000000000", "node.threads"),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_configuration_that_no_run_has_is_refused_at_once(
    tmp_path: Path, text: str, words: str
) -> None:
    with quickly(), pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert words in str(caught.value)
    assert "\0" not in str(caught.value)
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["list", "object"])
def test_deep_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not JSON"):
        load(tmp_path / "config.json")


def test_deep_value_of_a_key_is_shown_in_part(tmp_path: Path) -> None:
    deep = f"{'[' * 150}{']' * 150}"
    with pytest.raises(ConfigError, match="train.steps: Input should be a valid integer"):
        load(written(tmp_path, f"train.steps = {deep}"))
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match="got a list"):
        build({"train": {"steps": value}})


def test_deep_override_is_a_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.steps"):
        load(written(tmp_path, ""), (f"train.steps={'[' * 100_000}",))


@pytest.mark.parametrize("name", ["job.toml", "job.json"])
def test_file_without_an_end_is_not_read_to_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with quickly(), pytest.raises(ConfigError, match=f"more than {MAX_BYTES} bytes"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delay_ms = 1\nbandwidth_gbps = 1\nname = 3", "name must be a text, got 3"),
        (f"delay_ms = 1{'0' * 400}\nbandwidth_gbps = 1", "delay_ms is too large"),
        (f"delay_ms = '{'x' * 100_000}'", "delay_ms, a number"),
        (f"[[link]]\nfrom = '{'x' * 100_000}'", "a rank"),
        (f"{'a.' * 100_000}a = 1", "a key has 100001 parts"),
        (f"a = {'[' * 100_000}", "nested too deeply"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_network_profile_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with quickly(), pytest.raises(ProfileError) as caught:
        load_network(written(tmp_path, text))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_network_profile_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A trace names its profile: it may be of anything."""
    os.mkfifo(tmp_path / "network.toml")
    with pytest.raises(ProfileError, match="not a regular file"):
        load_network(tmp_path / "network.toml")


PLANS: list[dict[str, Any]] = [
    {
        "model": {"preset": "sc21-529.6b", "vocab_size": 51200},
        "pipeline": {"stages": 8},
        "tensor_parallel": {"size": 8},
        "data_parallel": {"kind": "all-reduce", "replicas": 8},
        "train": {"batch_size": 512, "num_microbatches": 64},
    },
    {
        "model": {"vocab_size": 512, "num_heads": 8},
        "pipeline": {"stages": 2},
        "tensor_parallel": {"size": 8},
        "data_parallel": {"kind": "sharded", "replicas": 32},
        "train": {"batch_size": 64, "num_microbatches": 2},
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("table", PLANS, ids=["8 x 8 x 8", "2 x 8 x 32 replicas"])
def test_plan_for_512_gpus_is_predicted(table: dict[str, Any]) -> None:
    """On a machine of any size."""
    with quickly(120, 2500):
        predicted = forecast(build(table))
    assert predicted.step_us > 0


HUGE = {
    "model__num_layers": 100,
    "model__width": 1 << 17,
    "model__num_heads": 128,
    "pipeline__stages": 2,
    "train__steps": 1,
}


def as_json(config: Config, folder: Path) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    return str(path)


def test_model_that_no_machine_holds_is_not_built(tiny: Make, tmp_path: Path) -> None:
    """3,584 TB: `launch` started to build them."""
    job = as_json(tiny(**HUGE), tmp_path)
    with (
        quickly(60),
        pytest.raises(
            ConfigError,
            match=r"the 2 ranks on this machine would hold [\d,.]+ GB, and its memory is",
        ),
    ):
        launch_ranks(job, (), num_ranks=None, resume=None, fallback=False, say=print)
    assert not (tmp_path / "run").exists()


def test_rank_that_its_machine_does_not_hold_is_not_built(tiny: Make, tmp_path: Path) -> None:
    config = tiny(**HUGE)
    process = ProcessInfo(1, 2, 1, "127.0.0.1:9", token="secret")
    with pytest.raises(ConfigError, match="rank 1 on this machine would hold"):
        run_rank(config, process)
    assert not (tmp_path / "run").exists()


def test_memory_limit_of_the_user_overrides_the_prediction(tiny: Make) -> None:
    from dpipe.plan.machine import refuse_more_than_machine

    config = tiny(**HUGE)
    refuse_more_than_machine(draft(config.with_(pipeline__memory_gb=1e9)), range(2))


@pytest.mark.slow
def test_sizes_within_bounds_end_in_words_or_in_a_plan() -> None:
    most = {"num_layers": 2048, "width": 1 << 20, "num_heads": 1, "context": 1 << 24}
    config = build({"model": {**most, "vocab_size": 1 << 28}, "pipeline": {"stages": 8}})
    with quickly(60), suppress(DpipeError):
        assert forecast(config).step_us > 0
