import torch
from support.layered import ADAM, RATE, Layered, gradients

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.optimizer import Optimizer, trained, whole


def test_optimizer_without_settings_changes_nothing() -> None:
    """A replay stage: no arithmetic, no moments, and no step to take ahead."""
    stage = Layered()
    idle = Optimizer(whole(trained(stage)), None, whole=True)
    ahead = LookAhead(idle)
    ahead.remember(gradients(stage, 0, 0), 1.0)
    ahead.go(RATE)
    stage.set_gradients(0, 0)
    idle.step(RATE)
    assert all((a == b).all() for a, b in zip(stage.parameters, Layered().parameters, strict=True))
    assert (idle.learns, idle.num_bytes, idle.state()) == (False, 0, {})


def test_look_ahead_gives_the_stepped_parameters_and_keeps_the_moments() -> None:
    there, here = Layered(), Layered()
    steps, looks = (Optimizer(whole(trained(stage)), ADAM, whole=True) for stage in (there, here))
    for stage, optimizer in ((there, steps), (here, looks)):
        stage.set_gradients(0, 0)
        optimizer.step(RATE)
    before = {name: moment.clone() for name, moment in looks.state().items()}
    there.set_gradients(1, 0)
    steps.step(RATE)
    looks.look_ahead(gradients(here, 1, 0), RATE)
    assert all((a == b).all() for a, b in zip(here.parameters, there.parameters, strict=True))
    assert all((moment == before[name]).all() for name, moment in looks.state().items())


def test_steps_are_those_of_torch_adamw_to_the_last_bit() -> None:
    """Also for a parameter without a gradient in a step."""
    stage, twin = Layered(), Layered()
    named = trained(twin)
    ours = Optimizer(whole(trained(stage)), ADAM, whole=True)
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": ADAM.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=RATE, betas=ADAM.betas)
    for step in range(3):
        for layered in (stage, twin):
            layered.set_gradients(step, 0)
            if step == 0:
                trained(layered)[0][1].grad = None
        ours.step(RATE)
        theirs.step()
        for name, p in named:
            moment = theirs.state[p].get("exp_avg_sq")
            assert (f"{name}.exp_avg_sq" in ours.state()) == (moment is not None)
            assert moment is None or torch.equal(ours.state()[f"{name}.exp_avg_sq"], moment)
    for p, expected in zip(stage.parameters, twin.parameters, strict=True):
        assert torch.equal(p, expected)
