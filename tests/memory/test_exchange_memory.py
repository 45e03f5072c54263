"""The predicted memory of each kind beside the tensors that its objects hold during a step."""

import gc
import threading
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dpipe.config.load import Config, build
from dpipe.dataparallel.base import DataParallel
from dpipe.errors import ConfigError
from dpipe.memory.exchange import exchange_bytes
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision
from dpipe.plan.forecast import forecast
from dpipe.run.agreement import data_parallel
from dpipe.transport.local import LocalHub, LocalTransport

NUM_VALUES = 1 << 18
BYTES = 4 * NUM_VALUES
STEPS = 3
SMALL_MODEL = {"num_layers": 2, "width": 32, "num_heads": 2, "context": 16}


class OneMatrix:
    """A stage of one large parameter."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(NUM_VALUES))

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        return {0: [("layers.0.weight", self.weight)]}


def configured(kind: str, replicas: int = 2, **settings: Any) -> Config:
    chosen = {"kind": kind, "replicas": replicas, "chunk_bytes": 1 << 14, **settings}
    train = {"clip_norm": 0.0, "batch_size": 12, "num_microbatches": 2}
    return build(
        {"data_parallel": chosen, "train": train, "model": SMALL_MODEL, "pipeline": {"stages": 1}}
    )


def held_in_step(config: Config) -> int:
    """Bytes of replica 0's object right after a step has begun, but for AdamW's moments."""
    hub, count = (
        LocalHub(config.data_parallel.replicas, transfer_timeout_s=80),
        config.data_parallel.replicas,
    )
    held: list[int] = [0] * count
    moments = 2 * BYTES // (count if config.data_parallel.kind == "sharded" else 1)

    def replica_main(replica: int) -> None:
        stage = OneMatrix()
        nobody: Any = None
        kind = data_parallel(
            config, config.ranks_of(replica), {0: stage}, hub.transport(replica), nobody, ()
        )
        for step in range(STEPS):
            a_step(kind, stage, step)
        kind.begin(STEPS, 0.1, 1.0)
        held[replica] = reachable(kind, but=stage) - moments
        kind.close()

    threads = [threading.Thread(target=replica_main, args=(replica,)) for replica in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert all(held)
    return held[0]


def a_step(kind: DataParallel, stage: OneMatrix, step: int) -> None:
    kind.begin(step, 0.1, 1.0)
    stage.weight.grad = torch.full((NUM_VALUES,), 0.3)
    kind.start(0)
    kind.wait()
    kind.step(0, 1.0)
    stage.weight.grad = None
    kind.finish(0)


def reachable(top: object, *, but: OneMatrix | None = None) -> int:
    """Bytes of the tensors that are reachable from `top`; those of other replicas are behind the
    links.
    """
    storages, seen = dict[int, int](), set[int]()
    found: list[object] = [top]
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(
            item, type | ModuleType | LocalTransport | threading.Thread
        ):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        else:
            found += (
                list(item.__closure__ or ())
                if isinstance(item, FunctionType)
                else gc.get_referents(item)
            )
    if but is not None:
        storages.pop(but.weight.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "all-reduce"},
        {"kind": "all-reduce", "wire": "int8"},
        {"kind": "all-reduce", "delay": True},
        {"kind": "all-reduce", "replicas": 3, "wire": "bf16"},
        {"kind": "sharded"},
        {"kind": "sharded", "delay": True},
        {"kind": "local-sgd", "inner_steps": 2},
        {"kind": "local-sgd", "inner_steps": 2, "wire": "int8"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_kind_uses_the_predicted_memory(settings: dict[str, Any]) -> None:
    """With a delay a gradient may be on its way into its row, or there already; a shard's own comes
    later.
    """
    config = configured(**settings)
    (counted,) = exchange_bytes(config, [BYTES], ())
    later = (
        BYTES * config.data_parallel.delay * (1.5 if config.data_parallel.kind == "sharded" else 1)
    )
    assert counted - later - 0.15 * BYTES <= held_in_step(config) <= counted + 0.03 * BYTES


@pytest.mark.parametrize("wire", ["none", "bf16"])
def test_server_uses_the_predicted_memory(wire: str) -> None:
    config = configured("parameter-server", wire=wire)
    on_server = exchange_bytes(config, [BYTES], (0,))[0] - exchange_bytes(config, [BYTES], ())[0]
    row = FlatSpec(
        (ParameterSpec("layers.0.weight", 0, NUM_VALUES, decays=True),),
        chunk_values=NUM_VALUES // 8,
    )
    rule = StepRule((0, 1), 0.1, (0.9, 0.95), wire)
    state = StageTensors.zeros(NUM_VALUES, lossy=rule.lossy_parameters)
    stage_state = StageState(row, rule, state, step=0, num_updates=0)
    for replica in range(2):
        for chunk in range(8):
            stage_state.add(0, replica, chunk, torch.ones(NUM_VALUES // 8))
        stage_state.decide(0, replica, StepDecision(0.1, 1.0))
    stage_state.commit()
    # The rest are chunks as they went out.
    assert reachable(stage_state) == pytest.approx(on_server, rel=0.08)


def test_worker_of_a_server_keeps_no_moments() -> None:
    rank = forecast(configured("parameter-server", address=["10.0.0.1:7000"])).memory[0]
    assert rank.optimizer == 0
    assert rank.exchange == 2 * rank.parameters


def test_server_is_counted_on_its_rank() -> None:
    config = configured("parameter-server").with_(pipeline__stages=2)
    first, second = forecast(config).memory
    assert first.exchange == 2 * first.parameters + 7 * (first.parameters + second.parameters)
    assert second.exchange == 2 * second.parameters


@pytest.mark.parametrize(("servers", "parts"), [("one", 2), ("per-stage", 1)])
def test_server_in_a_rank_holds_the_parts_of_all_or_of_that_rank(servers: str, parts: int) -> None:
    config = configured("parameter-server", servers=servers).with_(tensor_parallel__size=2)
    (first,) = forecast(config).memory
    assert first.exchange == (2 + 7 * parts) * first.parameters


def test_one_replica_exchanges_nothing() -> None:
    assert exchange_bytes(configured("all-reduce", replicas=1), [BYTES], ()) == (0,)


def test_rows_in_host_memory_are_not_counted_on_a_gpu() -> None:
    on_gpu = configured("all-reduce", delay=True).with_(node__device="cuda")
    assert exchange_bytes(on_gpu, [BYTES], ()) == (2 * BYTES,)  # what is agreed, and a gradient


def test_run_that_fits_but_for_its_exchange_is_refused() -> None:
    alone = forecast(configured("all-reduce", replicas=1)).memory[0].total / 1e9
    with pytest.raises(ConfigError, match=r"exchange 0\.001"):
        forecast(configured("local-sgd").with_(pipeline__memory_gb=alone * 1.05))
