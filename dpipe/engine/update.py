"""The optimizer step: what all ranks agree on before it, and the step itself.

    every rank    ballot: loss, squared gradient norm of each layer, wish to stop, report
                     |  gather (one round trip to the coordinator)
    every rank    verdict: loss, norm over all stages, finite or not, stop or not  -- the same on all

With clipping or fp16 the verdict is waited for before the parameters change. Otherwise nobody waits: it is read one
step later, and what it asks for (a stop) happens one step later on every rank.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dpipe.config import Train
from dpipe.errors import NumericError

INITIAL_LOSS_SCALE = 2.0**16
_MOMENTS = ("exp_avg", "exp_avg_sq")
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale doubles, as torch.amp.GradScaler


class Gathering(Protocol):
    def wait(self, timeout_s: float) -> Sequence[bytes]: ...


class Layers(Protocol):
    """What the update asks of a stage."""

    def layer_parameters(self) -> Mapping[int, Sequence[tuple[str, torch.nn.Parameter]]]: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of a step. `reports[rank]` is what each said of itself; `norm` is None where unmeasured."""

    step: int
    loss: float
    norm: float | None
    stop: bool
    culprit: str | None  # the first rank and layer whose gradient is not finite
    reports: tuple[dict[str, Any], ...] = field(default=())


def learning_rate(train: Train, step: int) -> float:
    """Linear warm-up to `learning_rate`, then decay to `min_learning_rate` at the last step."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    match train.decay:
        case "none":
            share = 1.0
        case "linear":
            share = 1.0 - done
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * done))
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * share


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018); 1 where the precision needs none."""

    def __init__(self, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = INITIAL_LOSS_SCALE if dynamic else 1.0
        self.good_steps = 0

    def learn(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0


class Update:
    """AdamW (Loshchilov and Hutter 2019) on the stages of one rank, in step with all other ranks.

    `gather(key, payload)` exchanges bytes with every rank; `tied_here` are the two ends of a shared weight where both
    live on this rank, `tied_copy` the name that the norm must not count twice.
    """

    def __init__(
        self,
        stages: Mapping[int, Layers],
        train: Train,
        *,
        gather: Callable[[str, bytes], Gathering],
        timeout_s: float,
        tied_here: tuple[torch.nn.Parameter, torch.nn.Parameter] | None = None,
        tied_copy: str | None = None,
    ) -> None:
        self._stages, self._train = stages, train
        self._gather, self._timeout_s = gather, timeout_s
        self._tied_here, self._tied_copy = tied_here, tied_copy
        self._optimizers = {index: _adamw(stage, train) for index, stage in stages.items() if _named(stage)}
        self._waits = train.clip_norm > 0 or train.precision == "fp16"
        self._pending: tuple[int, Gathering] | None = None
        self._verdict: Verdict | None = None
        self._ready = False
        self._skip = False
        self.loss_scale = LossScale(train.precision == "fp16")
        self.num_updates = 0

    def begin(self, step: int, wants_stop: Callable[[], bool], report: Callable[[], dict[str, Any]]) -> None:
        """`wants_stop` and `report` are asked when the ballot is cast, at this step's first STEP."""
        self._step, self._wants_stop, self._report = step, wants_stop, report
        self._ready = self._skip = False

    def __call__(self, stage: int, loss: float | None) -> None:
        """STEP of one stage. The first one of a step settles it for all stages of this rank."""
        if not self._ready:
            self._settle(loss)
            self._ready = True
        if not self._skip and stage in self._optimizers:
            self._optimizers[stage].step()
        self._stages[stage].zero_grad()

    def end(self) -> Verdict | None:
        """After a step: the newest verdict, this step's where ranks wait for it, else the one before's."""
        self.num_updates += not self._skip
        verdict, self._verdict = self._verdict, None
        return verdict

    def drain(self) -> Verdict | None:
        """After the last step: the verdict that nobody has waited for yet."""
        return self._collect()

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """For a checkpoint: plain numbers, and the moments by layer-global name."""
        scale = self.loss_scale
        numbers = {"num_updates": self.num_updates, "loss_scale": scale.value, "good_steps": scale.good_steps}
        moments = {}
        for index, stage in self._stages.items():
            for name, parameter in _named(stage):
                for key in _MOMENTS:
                    if key in self._optimizers[index].state[parameter]:  # none before the first update
                        moments[f"{name}.{key}"] = self._optimizers[index].state[parameter][key]
        return numbers, moments

    def restore(self, numbers: Mapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        self.num_updates = numbers["num_updates"]
        self.loss_scale.value, self.loss_scale.good_steps = numbers["loss_scale"], numbers["good_steps"]
        for index, stage in self._stages.items():
            for name, parameter in _named(stage) if self.num_updates else ():
                self._optimizers[index].state[parameter] = {
                    "step": torch.tensor(float(self.num_updates)),
                    **{key: moments[f"{name}.{key}"].to(parameter.device, copy=True) for key in _MOMENTS},
                }

    def _settle(self, loss: float | None) -> None:
        self._add_tied()
        norms = self._squared_norms() if self._waits else {}
        ballot = {"loss": loss, "norms": norms, "stop": self._wants_stop(), "report": self._report()}
        earlier = self._collect()
        self._pending = self._step, self._gather(f"step/{self._step}", json.dumps(ballot).encode())
        self._verdict = self._collect() if self._waits else earlier
        self._set_learning_rate()
        if self._waits and self._verdict is not None:
            self._apply(self._verdict)

    def _apply(self, verdict: Verdict) -> None:
        """Unscale and clip in one multiplication; an overflow skips the step on every rank."""
        self._skip = verdict.culprit is not None
        factor = 1.0 / self.loss_scale.value
        self.loss_scale.learn(overflow=self._skip)
        if self._skip:
            return
        assert verdict.norm is not None
        if self._train.clip_norm > 0:
            factor *= min(1.0, self._train.clip_norm / (verdict.norm + 1e-6))
        for parameter in (p for stage in self._stages.values() for _, p in _named(stage)):
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _add_tied(self) -> None:
        """As two ranks would: the first layer's gradient and the last's, one sum for both copies."""
        if self._tied_here is not None:
            first, last = self._tied_here
            assert first.grad is not None
            assert last.grad is not None
            first.grad += last.grad
            last.grad.copy_(first.grad)

    def _squared_norms(self) -> dict[str, float]:
        return {
            str(layer): sum(_squared_norm(p) for name, p in parameters if name != self._tied_copy)
            for stage in self._stages.values()
            for layer, parameters in stage.layer_parameters().items()
        }

    def _collect(self) -> Verdict | None:
        if self._pending is None:
            return None
        (step, gathering), self._pending = self._pending, None
        ballots = [json.loads(ballot) for ballot in gathering.wait(self._timeout_s)]
        verdict = count(step, ballots, self.loss_scale.value)
        if verdict.culprit is not None and not self.loss_scale.dynamic:
            raise NumericError(
                f"step {step}: {verdict.culprit} is not finite; lower train.learning_rate, clip with train.clip_norm, "
                "or resume from the last checkpoint"
            )
        return verdict

    def _set_learning_rate(self) -> None:
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self._train, self._step)


def count(step: int, ballots: Sequence[dict[str, Any]], loss_scale: float = 1.0) -> Verdict:
    """The verdict of a step's ballots, by rank. Norms are added in layer order, so that no cut changes a bit."""
    losses = [ballot["loss"] for ballot in ballots if ballot["loss"] is not None]
    assert len(losses) == 1, f"step {step}: {len(losses)} ranks report a loss, one should"
    owners = {int(layer): rank for rank, ballot in enumerate(ballots) for layer in ballot["norms"]}
    squares = {int(layer): value for ballot in ballots for layer, value in ballot["norms"].items()}
    bad = [layer for layer in sorted(squares) if not math.isfinite(squares[layer])]
    culprit = f"the gradient of layer {bad[0]} on rank {owners[bad[0]]}" if bad else None
    if culprit is None and not math.isfinite(losses[0]):
        culprit = "the loss"
    norm = math.sqrt(sum(squares[layer] for layer in sorted(squares))) / loss_scale if squares else None
    stop = any(ballot["stop"] for ballot in ballots)
    return Verdict(step, losses[0], norm, stop, culprit, tuple(ballot["report"] for ballot in ballots))


def _adamw(stage: Layers, train: Train) -> torch.optim.AdamW:
    """Matrices decay; norms, biases and other vectors do not."""
    parameters = [p for _, p in _named(stage)]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas)


def _named(stage: Layers) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for pairs in stage.layer_parameters().values() for pair in pairs if pair[1].requires_grad]


def _squared_norm(parameter: torch.nn.Parameter) -> float:
    if parameter.grad is None:
        return 0.0
    return float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
