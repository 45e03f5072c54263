"""Each optimizer steps as the one that it is named after."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toy_optimizer
from support.layered import RATE, Layered, one_step, with_replicas

from dpipe.config.load import Config, build
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.optimizer import Optimizer, trained, whole
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.errors import CheckpointError, ConfigError
from dpipe.optimizers import kinds
from dpipe.optimizers.kinds import OPTIMIZERS, OptimizerSettings
from dpipe.plan.run_plan import draft
from dpipe.transport.base import Transport
from dpipe.wire.feedback import wire

Make = Callable[..., Config]
NAMES = [name for name in OPTIMIZERS if name != "adamw_8bit"]


def settings(name: str, last_layer: int | None = None) -> OptimizerSettings:
    return OptimizerSettings(RATE, 0.1, (0.9, 0.95), name=name, last_layer=last_layer)


def stepped(name: str, last_layer: int | None = None, steps: int = 3) -> tuple[Layered, Optimizer]:
    stage = Layered()
    optimizer = Optimizer(whole(trained(stage)), settings(name, last_layer), whole=True)
    for step in range(steps):
        stage.set_gradients(step, 0)
        optimizer.step(RATE)
    return stage, optimizer


def stepped_by_torch(make: Callable[[list[dict[str, object]]], torch.optim.Optimizer]) -> Layered:
    stage = Layered()
    groups: list[dict[str, object]] = [
        {"params": [p for p in stage.parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in stage.parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = make([group for group in groups if group["params"]])
    for step in range(3):
        stage.set_gradients(step, 0)
        optimizer.step()
    return stage


def same(a: Layered, b: Layered) -> bool:
    pairs = zip(a.parameters, b.parameters, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_sgd_steps_as_torch_does() -> None:
    theirs = stepped_by_torch(lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9))
    assert same(stepped("sgd")[0], theirs)


def test_adafactor_steps_as_torch_does() -> None:
    theirs = stepped_by_torch(lambda groups: torch.optim.Adafactor(groups, lr=RATE))
    assert same(stepped("adafactor")[0], theirs)


def test_muon_steps_matrices_as_torch_does_and_the_rest_by_adamw() -> None:
    """Layer 4 is the last: its matrix is a head."""
    ours, optimizer = stepped("muon", last_layer=4)
    twin = Layered()
    inner, vector, head = twin.parameters
    muon = torch.optim.Muon(
        [inner], lr=RATE, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": [head], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for step in range(3):
        twin.set_gradients(step, 0)
        muon.step()
        adamw.step()
    assert same(ours, twin)
    assert {name.partition(".matrix.")[2] for name in optimizer.state() if "matrix" in name} == {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
    }


def test_lion_moves_by_the_sign_of_its_momentum() -> None:
    """Algorithm 2 of Chen et al. 2023, step by step."""
    ours, _ = stepped("lion")
    twin = Layered()
    momenta = [torch.zeros_like(each) for each in twin.parameters]
    with torch.no_grad():
        for step in range(3):
            twin.set_gradients(step, 0)
            for index, each in enumerate(twin.parameters):
                assert each.grad is not None
                decay = 0.1 if each.ndim >= 2 else 0.0
                update = torch.sign(0.9 * momenta[index] + 0.1 * each.grad)
                each -= RATE * (update + decay * each)
                momenta[index] = 0.95 * momenta[index] + 0.05 * each.grad
    for one, other in zip(ours.parameters, twin.parameters, strict=True):
        torch.testing.assert_close(one, other)


def large(seed: int = 1) -> torch.nn.Parameter:
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(64, 128, generator=draw))


def test_moments_of_8_bits_take_a_quarter_and_step_nearly_as_adamw() -> None:
    pytest.importorskip("torchao")
    found = {}
    for name in ("adamw", "adamw_8bit"):
        values = large()
        optimizer = Optimizer(whole([("layers.1.w", values)]), settings(name), whole=True)
        for step in range(5):
            values.grad = large(2 + step).detach()
            optimizer.step(RATE)
        found[name] = values.detach(), optimizer.num_bytes
    exact, rounded = found["adamw"], found["adamw_8bit"]
    assert rounded[1] == OPTIMIZERS["adamw_8bit"].state_of(exact[0].nbytes)
    assert rounded[1] < 0.26 * exact[1]
    moved = (exact[0] - large()).norm()
    assert 0 < (rounded[0] - exact[0]).norm() < 0.05 * moved


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_optimizer_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(name: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    values = large()
    optimizer = Optimizer(whole([("layers.1.w", values)]), settings(name), whole=True)
    resumed = Optimizer(optimizer.slices, settings(name), whole=True)
    values.grad = large(2).detach()
    optimizer.step(RATE)
    saved = {key: value.clone() for key, value in optimizer.state().items()}
    kept = values.detach().clone()
    resumed.restore(1, saved)
    after = []
    for each in (optimizer, resumed):
        with torch.no_grad():
            values.copy_(kept)
        values.grad = large(3).detach()
        each.step(RATE)
        after.append(values.detach().clone())
    assert torch.equal(*after)


def test_checkpoint_of_another_optimizer_is_refused() -> None:
    _, adamw = stepped("adamw")
    lion = Optimizer(whole(trained(Layered())), settings("sgd"), whole=True)
    with pytest.raises(CheckpointError, match="no layers.3.matrix.momentum_buffer.*take the opti"):
        lion.restore(3, adamw.state())


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_shards_step_as_the_whole(name: str) -> None:
    def make(stage: Layered, links: Transport, replica: int) -> Sharded:
        exchanges = [exchange(links, replica) for _ in range(2)]
        return Sharded({0: stage}, settings(name), *exchanges)

    def exchange(links: Transport, replica: int) -> DirectExchange:
        return DirectExchange(links, replica, (0, 1), wire("none"), part_bytes=64)

    def run(kind: Sharded, stage: Layered, replica: int) -> Layered:
        for step in range(3):
            stage.set_gradients(step, 0)
            one_step(kind, stage, step)
        return stage

    for stage in with_replicas(make, 2, run):
        for one, other in zip(stage.parameters, stepped(name)[0].parameters, strict=True):
            torch.testing.assert_close(one, other)


def test_look_ahead_moves_as_a_step_and_keeps_the_state() -> None:
    there, stepping = stepped("muon", last_layer=4)
    here, looking = stepped("muon", last_layer=4)
    before = {key: value.clone() for key, value in looking.state().items()}
    there.set_gradients(5, 0)
    here.set_gradients(5, 0)
    stepping.step(RATE)
    own = [each.grad.clone() for each in here.parameters if each.grad is not None]
    looking.look_ahead(own, RATE)
    assert same(here, there)
    assert all(torch.equal(value, before[key]) for key, value in looking.state().items())


@pytest.mark.parametrize("name", NAMES)
def test_declared_bytes_of_state_are_those_that_are_kept(name: str) -> None:
    values = torch.nn.Parameter(torch.ones(512, 512))
    for layer, is_end in ((1, False), (4, True)):
        single = Single()
        slices = whole([(f"layers.{layer}.w", values)])
        single.optimizers[0] = Optimizer(slices, settings(name, 4), whole=True)
        values.grad = torch.ones_like(values)
        single.optimizers[0].step(RATE)
        declared = OPTIMIZERS[name].state_of(values.nbytes, is_end=is_end)
        assert single.optimizer_bytes == pytest.approx(declared, abs=0.005 * values.nbytes)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_losses_are_the_same_in_every_cut(
    name: str, tiny: Make, losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    found = []
    for stages in (1, 2):
        folder = str(tmp_path / f"cut{stages}")
        config = tiny(
            pipeline__stages=stages, train__optimizer=name, run__folder=folder, run__trace_steps=0
        )
        found.append(losses(config))
    assert found[0] == found[1]
    assert found[0] != losses(tiny())  # those of adamw


def test_optimizer_declared_in_one_file_trains(
    tiny: Make, losses: Callable[..., list[float]]
) -> None:
    with toy_optimizer.declared():
        first, *_, last = losses(tiny(train__optimizer="toy", train__learning_rate=0.1))
    assert last < first


def test_optimizer_that_couples_stages_is_refused_where_they_are_cut() -> None:
    table = {"train": {"optimizer": "toy"}, "pipeline": {"stages": 2}}
    with toy_optimizer.declared(couples="stages"):
        with pytest.raises(ConfigError, match="couples parameters of different stages"):
            build(table)
        build({"train": {"optimizer": "toy"}, "pipeline": {"stages": 1}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tensor_parallel": {"size": 2}}, "tensor_parallel.size 2: a rank has part of a matrix"),
        ({"data_parallel": {"kind": "sharded", "replicas": 2}}, '"sharded": a replica steps part'),
        (
            {"data_parallel": {"kind": "parameter-server", "replicas": 2}},
            'whose server has a step of its own; take "adamw"',
        ),
    ],
)
def test_optimizer_of_whole_matrices_is_refused_where_they_are_cut(
    sections: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"train": {"optimizer": "muon"}, **sections})


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.quant_utils", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"needs torchao: pip install 'dpipe\[quantised\]'"):
        Optimizer([], settings("adamw_8bit"), whole=True)


def test_library_that_is_missing_is_an_error_before_a_rank_is_built(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchao: pip install 'dpipe\[quantised\]'"):
        draft(tiny(train__optimizer="adamw_8bit"))
