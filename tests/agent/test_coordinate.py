from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpipe.agent.coordinate import PlannedJob, _folder_of, coordinate, parse_address, parse_ports
from dpipe.agent.joining import own_settings
from dpipe.agent.server import ElasticServer
from dpipe.config.load import Config
from dpipe.config.run import NodeConfig
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.epoch.preparation import prepare
from dpipe.errors import CheckpointError, ConfigError, DataError, RunError
from dpipe.memory.copies import state_bytes
from dpipe.plan.forecast import without_search
from dpipe.plan.machine import held_bytes
from dpipe.plan.run_plan import RunPlan, draft
from dpipe.store.run_folder import opened, save_configuration


@pytest.fixture
def kept(tiny: Callable[..., Config]) -> Config:
    """The configuration of a run that has a journal, and no process."""
    config = tiny(pipeline__stages=4)
    with opened(config, resume=False, rank=0) as folder:
        save_configuration(folder, config)
        RunJournal(folder / NAME).close()
    return config


def start(config: Config) -> None:
    options: dict[str, Any] = {"patience_s": 1.0, "say": lambda text: None}
    coordinate(config, (), "127.0.0.1:0", **options)  # type: ignore[arg-type]


def test_second_coordinator_of_a_run_is_refused(kept: Config) -> None:
    with (
        _folder_of(kept),
        pytest.raises(ConfigError, match="another coordinator has the run in .*: stop it"),
    ):
        start(kept)


def test_run_that_is_over_is_refused(kept: Config) -> None:
    journal = RunJournal(Path(kept.run.folder) / NAME)
    journal.put("over", "finished")
    journal.close()
    with pytest.raises(ConfigError, match="is over; choose another run.folder"):
        start(kept)


def test_damaged_journal_is_refused_and_left_as_it_is(kept: Config) -> None:
    path = Path(kept.run.folder) / NAME
    damaged = path.read_bytes()[:1000]
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="the journal .* is damaged .*: put back a copy"):
        start(kept)
    assert path.read_bytes() == damaged


def test_another_job_is_refused_the_folder(kept: Config) -> None:
    with pytest.raises(ConfigError, match="train.seed"):
        start(kept.with_(train__seed=7))


@pytest.mark.parametrize("address", ["", "7000", "host:", "host:port", "host:70000", ":7000"])
def test_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        parse_address(address)


@pytest.mark.parametrize(
    "ports", ["", "7001", "7001-7001", "7002-7001", "0-5", "7001-70000", "a-b"]
)
def test_ports_that_are_no_range_of_two_are_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match="must be FIRST-LAST"):
        parse_ports(ports)


def test_ports_of_epochs() -> None:
    assert list(parse_ports("7001-7003")) == [7001, 7002, 7003]
    assert list(parse_ports("0")) == [0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "data_parallel__kind": "parameter-server",
                "data_parallel__replicas": 2,
                "data_parallel__staleness": 1,
                "train__clip_norm": 0.0,
            },
            "leave it out",
        ),
        ({"pipeline__split": "measured", "pipeline__stages": 2}, "before anything is measured"),
        ({"pipeline__wire": "int8+feedback", "pipeline__stages": 2}, "does not send the same"),
    ],
)
def test_job_that_no_epoch_can_run_is_refused_at_once(
    tiny: Callable[..., Config], changes: dict[str, Any], words: str
) -> None:
    config = tiny(**changes)
    with pytest.raises(ConfigError, match=words):
        start(config)
    assert not Path(config.run.folder).exists()


def test_machine_that_lacks_the_text_is_told_before_it_joins(kept: Config) -> None:
    run_plan = draft(kept, choose=without_search, predicts_memory=False)
    with ExitStack() as stack:
        job = PlannedJob(run_plan, Path(kept.run.folder), stack)
        table = job.config(4)
        costs = job.layer_costs(4)
    prepare(table, costs, NodeConfig(), trust_code=False)
    table["data"]["files"] = ["not-here.txt"]
    with pytest.raises(DataError, match=r"not-here\.txt"):
        prepare(table, costs, NodeConfig(), trust_code=False)


def test_machine_that_joins_sets_its_own_keys_alone() -> None:
    assert own_settings(("node.threads=2",)).node.threads == 2
    with pytest.raises(ConfigError, match="is the coordinator's to say"):
        own_settings(("train.steps=3",))


SERVED = {"data_parallel__kind": "parameter-server", "data_parallel__replicas": 2}


def test_server_that_has_moved_is_in_the_job_of_later_epochs(tiny: Callable[..., Config]) -> None:
    """Also where the job is cut anew: of several servers those of the stages that are left."""
    before = ("10.0.0.5:7100", "10.0.0.6:7100")
    config = tiny(
        pipeline__stages=2,
        data_parallel__servers="per-stage",
        data_parallel__address=before,
        **SERVED,
    )
    with opened(config, resume=False, rank=0) as folder, ExitStack() as stack:
        run_plan = draft(config, choose=without_search, predicts_memory=False)
        job = PlannedJob(run_plan, folder, stack)
        assert job.config(2)["data_parallel"]["address"] == ["10.0.0.5:7100"]
        job.move_servers(("10.0.0.9:7100", "10.0.0.6:7100"))
        assert job.config(4)["data_parallel"]["address"] == ["10.0.0.9:7100", "10.0.0.6:7100"]
        assert job.config(2)["data_parallel"]["address"] == ["10.0.0.9:7100"]
        costs = job.layer_costs(4)
        prepare(job.config(4), costs, NodeConfig(), trust_code=False)


def test_job_is_planned_anew_for_those_who_are_left(kept: Config) -> None:
    run_plan = draft(kept, choose=without_search, predicts_memory=False)
    with ExitStack() as stack:
        job = PlannedJob(run_plan, Path(kept.run.folder), stack)
        assert [job.fewer(num_agents) for num_agents in (6, 4, 3, 1, 0)] == [4, 4, 3, 1, None]
        assert job.config(3)["pipeline"]["stages"] == 3
        assert job.memory_bytes(2) > job.memory_bytes(4) > 0
        assert not job.pays(3, 4, steps_left=1)
        assert job.checkpoint() is None


def test_rank_needs_memory_for_copies_too(kept: Config) -> None:
    run_plan = draft(kept, choose=without_search, predicts_memory=False)
    sizes = run_plan.forecast.cost.reduce_bytes
    for copies, states in ((0, 3), (1, 5)):
        # Of its own state there are three, and two of each that another rank leaves there.
        needed = [
            held_bytes(run_plan, rank) + states * state_bytes(size, "adamw")
            for rank, size in enumerate(sizes)
        ]
        with ExitStack() as stack:
            guarded = replaced_guard(run_plan, copies)
            job = PlannedJob(guarded, Path(kept.run.folder), stack)
            assert job.memory_bytes(4) == max(needed)


def replaced_guard(run_plan: RunPlan, copies: int) -> RunPlan:
    return replace(run_plan, config=run_plan.config.with_(guard__copies=copies))


def test_run_that_has_failed_is_said_so(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(ElasticServer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.finish("it failed 3 times at step 0")

    monkeypatch.setattr("dpipe.agent.coordinate.ElasticServer", Failing)
    config = tiny(pipeline__stages=2)
    with pytest.raises(RunError, match="has failed: it failed 3 times at step 0"):
        start(config)
    # Also to whoever starts it again.
    with pytest.raises(ConfigError, match="is over"):
        start(config)


def test_replicas_stay_as_many_as_they_are(tiny: Callable[..., Config]) -> None:
    config = tiny(pipeline__stages=2, data_parallel__replicas=2, data_parallel__kind="all-reduce")
    with opened(config, resume=False, rank=0) as folder, ExitStack() as stack:
        job = PlannedJob(draft(config, choose=without_search), folder, stack)
        assert [job.fewer(num_agents) for num_agents in (4, 3, 2, 1)] == [4, 2, 2, None]
        assert job.config(2)["data_parallel"]["replicas"] == 2
