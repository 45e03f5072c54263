"""Replicas step by themselves and agree now and then (DiLoCo, Douillard et al. 2023).

Each replica takes `inner_steps` H of AdamW from the same parameters, the anchor. Then the mean over
replicas of (anchor - parameters) is the gradient of one outer step of SGD with Nesterov's momentum,
which moves the anchor:

    step            1   2  ..  H              H + 1 ..  2 H
    replica 0     --o---o--..--o-.   mean  .----o---..--o-.
    replica 1     --o---o--..--o--> of the --> -o---..--o-->        o  an inner step
                                 outer step

With F fragments, each a part of every stage, they take turns H / F steps apart, and less is
exchanged at once. With `overlap` the next step is computed meanwhile, and what a replica learns in
it is kept on top of the outer step's result (Streaming DiLoCo, Douillard et al. 2025, which mixes
the two). Without it replicas are bitwise equal after each outer step of all fragments.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from dpipe.dataparallel.allreduce import Averaging
from dpipe.dataparallel.background import BackgroundExchange
from dpipe.dataparallel.base import DataParallel, Layers, Moments, NamedParameter, Report, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import AdamSettings, trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.single import Single


@dataclass(frozen=True)
class OuterSettings:
    inner_steps: int
    learning_rate: float
    momentum: float
    overlap: bool = False


class LocalSgd(DataParallel):
    """`averaging[f]` is that of fragment f: each remembers what its wire has rounded off.

    A checkpoint has the parameters and moments of every replica under names such as
    `layers.3.qkv.weight.exp_avg@1`. A replica that it does not know begins at the anchor, with the
    moments of replica 0. Of a weight with copies in two stages, `tied` names those that are here.
    """

    independent = True

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: AdamSettings | None,
        outer: OuterSettings,
        averaging: Sequence[Averaging],
        *,
        uncounted: Collection[str] = (),
        tied: Collection[str] = (),
    ) -> None:
        self._outer = outer
        self._averaging = averaging
        self._replica = averaging[0].replica
        self._single = Single(stages, settings, uncounted)
        self._named = [named for stage in stages.values() for named in trained(stage)]
        self._fragments = {
            index: [Fragment(part) for part in fragments(trained(stage), len(averaging), tied)]
            for index, stage in stages.items()
        }
        self._thread = BackgroundExchange(
            {}, averaging[0].fail, lag=0, name=f"dpipe-outer-{self._replica}"
        )
        self._step = 0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._step = step
        self._single.begin(step, learning_rate, loss_scale)

    def start(self, stage: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def report(self, *, measure: bool) -> Report:
        return self._single.report(measure=measure)

    def step(self, stage: int, factor: float | None) -> bool:
        stepped = self._single.step(stage, factor)
        self._land(stage)
        for turn, fragment in enumerate(self._fragments[stage]):
            offset = turn * self._outer.inner_steps // len(self._averaging)
            if (self._step + 1 - offset) % self._outer.inner_steps == 0:
                self._launch(stage, fragment, self._averaging[turn])
        return stepped

    def finish(self, stage: int) -> None:
        if not self._outer.overlap:
            self._land(stage)

    def traffic(self) -> list[Traffic]:
        return self._thread.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        mine = {f"{name}{self._mark}": moment for name, moment in self._single.state().items()}
        if self._replica > 0:
            mine |= {f"{name}.local{self._mark}": p.detach() for name, p in self._named}
        for fragment in (f for stage in self._fragments.values() for f in stage):
            mine |= fragment.state(shared=self._replica == 0, mark=self._mark)
        return mine

    def restore(self, num_updates: int, moments: Moments) -> None:
        suffixes = ("exp_avg", "exp_avg_sq") if num_updates else ()
        names = [f"{name}.{suffix}" for name, _ in self._named for suffix in suffixes]
        self._single.restore(
            num_updates, {n: moments.get(f"{n}{self._mark}", moments[n]) for n in names}
        )
        with torch.no_grad():
            for name, parameter in self._named if self._replica > 0 else ():
                known = moments.get(f"{name}.local{self._mark}", moments.get(f"{name}.anchor"))
                if known is not None:
                    parameter.copy_(known.view_as(parameter))
        for fragment in (f for stage in self._fragments.values() for f in stage):
            fragment.restore(moments, self._mark)

    @property
    def optimizer_bytes(self) -> int:
        outer = sum(fragment.num_bytes for stage in self._fragments.values() for fragment in stage)
        return self._single.optimizer_bytes + outer

    def close(self) -> None:
        self._thread.close()

    @property
    def _mark(self) -> str:
        return f"@{self._replica}" if self._replica else ""

    def _launch(self, stage: int, fragment: "Fragment", averaging: Averaging) -> None:
        difference = fragment.take_off()
        fragment.landed = self._thread.submit(
            lambda: averaging.average(difference, stage, lambda piece: None)
        )

    def _land(self, stage: int) -> None:
        for fragment in self._fragments[stage]:
            if fragment.landed is not None:
                fragment.landed.result()  # its messages have deadlines
                fragment.land(self._outer)


class Fragment:
    """The outer optimizer of some parameters of a stage, each as one row [N] of fp32.

    `anchor` is where all replicas last agreed, `momentum` that of the outer step. Under way, `base`
    is what this replica had when it left, and `difference` becomes the mean over replicas of anchor
    - base.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.row = FlatParameters(named)
        self.anchor, self.momentum, self.base, self.difference = torch.zeros(
            4, self.row.length
        ).unbind()
        self.landed: Future[None] | None = None
        self._read(self.anchor)

    @property
    def num_bytes(self) -> int:
        return 4 * self.anchor.nbytes

    def take_off(self) -> torch.Tensor:
        self._read(self.base)
        return torch.sub(self.anchor, self.base, out=self.difference)

    @torch.no_grad()
    def land(self, outer: OuterSettings) -> None:
        """The outer step (Sutskever et al. 2013, as torch.optim.SGD has it)."""
        self.landed = None
        self.momentum.mul_(outer.momentum).add_(self.difference)
        self.anchor.sub_(
            self.difference.add_(self.momentum, alpha=outer.momentum), alpha=outer.learning_rate
        )
        for index, parameter in enumerate(self.row.parameters):
            agreed = self.row.view(self.anchor, index).to(parameter.device)
            if outer.overlap:
                parameter.add_(agreed - self.row.view(self.base, index).to(parameter.device))
            else:
                parameter.copy_(agreed)

    def state(self, *, shared: bool, mark: str) -> dict[str, torch.Tensor]:
        """`shared` is what all replicas hold alike; under way, `base` is each replica's own."""
        rows = {"anchor": self.anchor, "outer_momentum": self.momentum} if shared else {}
        if self.landed is not None:
            self.landed.result()
            rows |= {"difference": self.difference} if shared else {}
            rows |= {f"base{mark}": self.base}
        return {
            f"{name}.{key}": self.row.view(row, index)
            for index, name in enumerate(self.row.names)
            for key, row in rows.items()
        }

    def restore(self, moments: Moments, mark: str) -> None:
        """From another kind's checkpoint the parameters are the anchor."""
        self._read(self.anchor)
        self._put(self.anchor, moments, "anchor")
        self._put(self.momentum, moments, "outer_momentum")
        if self._put(self.difference, moments, "difference"):
            self.landed = Future()
            self.landed.set_result(None)
            if not self._put(self.base, moments, f"base{mark}"):
                self._read(self.base)

    def _read(self, row: torch.Tensor) -> None:
        self.row.fill(row, slice(0, self.row.length), self.row.parameters, 1.0)

    def _put(self, row: torch.Tensor, moments: Moments, key: str) -> bool:
        found = [moments.get(f"{name}.{key}") for name in self.row.names]
        if not found or any(tensor is None for tensor in found):
            return False
        self.row.fill(row, slice(0, self.row.length), found, 1.0)
        return True


def fragments(
    named: Sequence[NamedParameter], count: int, tied: Collection[str] = ()
) -> list[list[NamedParameter]]:
    """`named` in `count` runs of about the same number of values; there may be empty ones.

    What is `tied` is in the first, in every stage: copies of a weight stay equal where they agree
    at the same steps.
    """
    total = sum(p.numel() for _, p in named)
    before = 0
    runs: list[list[NamedParameter]] = [[] for _ in range(count)]
    for name, parameter in sorted(named, key=lambda pair: pair[0] not in tied):
        middle = before + parameter.numel() / 2
        turn = 0 if name in tied else min(count - 1, int(middle * count / total))
        runs[turn].append((name, parameter))
        before += parameter.numel()
    return runs


def build(setup: ReplicaSetup) -> DataParallel:
    options = setup.options
    outer = OuterSettings(
        options.inner_steps,
        options.outer_learning_rate,
        options.outer_momentum,
        overlap=options.overlap,
    )
    averaging = [setup.exchange(options.wire) for _ in range(options.fragments)]
    return LocalSgd(
        setup.stages, setup.optimizer, outer, averaging, uncounted=setup.uncounted, tied=setup.tied
    )
