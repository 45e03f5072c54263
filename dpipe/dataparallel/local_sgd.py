"""Replicas step by themselves, and average now and then (DiLoCo, Douillard et al. 2023).

Each replica takes `inner_steps` H of its optimizer from the same parameters, the anchor. Then the
mean over replicas of (anchor - parameters) is the gradient of one outer step of SGD with Nesterov
momentum, which moves the anchor:

    step            1   2  ..  H              H + 1 ..  2 H
    replica 0     --o---o--..--o-.   mean  .----o---..--o-.
    replica 1     --o---o--..--o--> of the --> -o---..--o-->        o  an inner step
                                 outer step

With F fragments, each a part of every stage, they take turns H / F steps apart, and less is
exchanged at once. With `overlap` the next step is computed meanwhile, and what a replica learns in
it is added to the outer step's result (Streaming DiLoCo, Douillard et al. 2025, which mixes the
two). Without it replicas are bitwise equal after each outer step of all fragments.

The momentum grows with the outer steps, as n / (n + 3) (Nesterov 1983). In the first ones, while
the learning rate warms up, parameters move far, and a momentum of 0.9 would carry them on in that
direction for ten outer steps more.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from dpipe.dataparallel.allreduce import Averaging
from dpipe.dataparallel.background import BackgroundExchange
from dpipe.dataparallel.base import DataParallel, Layers, Moments, NamedParameter, Report, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.single import Single
from dpipe.optimizers.kinds import OptimizerSettings

_GROWTH = 3  # of Nesterov's momentum n / (n + 3)


@dataclass(frozen=True)
class OuterSettings:
    inner_steps: int
    learning_rate: float
    momentum: float  # once it has grown
    overlap: bool = False

    def momentum_in(self, rounds: int) -> float:
        """Of the outer step of this round, from 1."""
        steps_before = max(0, rounds - 1)
        growing = steps_before / (steps_before + _GROWTH)
        return min(self.momentum, growing)


def build(setup: ReplicaSetup) -> DataParallel:
    options = setup.options
    outer = OuterSettings(
        options.known_inner_steps,
        options.outer_learning_rate,
        options.outer_momentum,
        overlap=options.overlap,
    )
    # one for each fragment: each keeps the rounding errors of its own exchange
    averaging = []
    for _ in range(options.fragments):
        exchange = setup.exchange(options.wire)
        averaging.append(exchange)
    return LocalSgd(
        setup.stages, setup.optimizer, outer, averaging, uncounted=setup.uncounted, tied=setup.tied
    )


class LocalSgd(DataParallel):
    """`averaging[f]` is that of fragment f. Of a weight with copies in two stages, `tied` names
    those that are here.

    A checkpoint has the parameters and moments of every replica under names such as
    `layers.3.qkv.weight.exp_avg@1`. A replica that it does not know begins at the anchor, with the
    moments of replica 0.
    """

    independent = True

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: OptimizerSettings | None,
        outer: OuterSettings,
        averaging: Sequence[Averaging],
        *,
        uncounted: Collection[str] = (),
        tied: Collection[str] = (),
    ) -> None:
        self._outer = outer
        self._averaging = averaging
        self._replica = averaging[0].replica
        self._mark = f"@{self._replica}" if self._replica else ""
        self._single = Single(stages, settings, uncounted)
        self._named: list[NamedParameter] = []
        self._fragments: dict[int, list[Fragment]] = {}  # by stage, in the order of their turns
        for index, stage in stages.items():
            named = trained(stage)
            parts = fragments(named, len(averaging), tied)
            self._named += named
            self._fragments[index] = [Fragment(part) for part in parts]
        name = f"dpipe-outer-{self._replica}"
        # For its thread alone: fragments have vectors of their own.
        self._background = BackgroundExchange({}, averaging[0].fail, lag=0, name=name)
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
        # With overlap the exchange that the last step began ends here.
        self._land(stage)
        inner_steps = self._outer.inner_steps
        for turn, fragment in enumerate(self._fragments[stage]):
            offset = self._offset(turn)
            # By the number of the step alone: all replicas, and a resumed run, launch together.
            if (self._step + 1 - offset) % inner_steps == 0:
                self._launch(stage, fragment, self._averaging[turn])
        return stepped

    def finish(self, stage: int) -> None:
        if not self._outer.overlap:
            self._land(stage)

    def traffic(self) -> list[Traffic]:
        return self._background.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        moments = self._single.state()
        state = {f"{name}{self._mark}": moment for name, moment in moments.items()}
        # The checkpoint itself has replica 0's parameters.
        if self._replica > 0:
            for name, parameter in self._named:
                state[f"{name}.local{self._mark}"] = parameter.detach()
        for fragment in self._all_fragments():
            state |= fragment.state(shared=self._replica == 0, mark=self._mark)
        return state

    def restore(self, num_updates: int, moments: Moments) -> None:
        mine = {}
        if num_updates:  # an optimizer has no state before its first
            for key in self._single.names():
                kept = moments.get(f"{key}{self._mark}", moments.get(key))
                if kept is not None:
                    mine[key] = kept
        self._single.restore(num_updates, mine)
        if self._replica > 0:
            self._restore_parameters(moments)
        for fragment in self._all_fragments():
            fragment.restore(moments, self._mark)

    @property
    def optimizer_bytes(self) -> int:
        outer = sum(fragment.num_bytes for fragment in self._all_fragments())
        return self._single.optimizer_bytes + outer

    def close(self) -> None:
        self._background.close()

    def _all_fragments(self) -> Iterator["Fragment"]:
        for of_stage in self._fragments.values():
            yield from of_stage

    @torch.no_grad()
    def _restore_parameters(self, moments: Moments) -> None:
        """This replica's own, or else the anchor."""
        for name, parameter in self._named:
            anchor = moments.get(f"{name}.anchor")
            kept = moments.get(f"{name}.local{self._mark}", anchor)
            if kept is not None:
                parameter.copy_(kept.view_as(parameter))

    def _launch(self, stage: int, fragment: "Fragment", averaging: Averaging) -> None:
        difference = fragment.take_off()

        def exchange() -> list[Traffic]:
            return averaging.average(difference, stage, lambda piece: None)

        fragment.landed = self._background.submit(exchange)

    def _land(self, stage: int) -> None:
        for turn, fragment in enumerate(self._fragments[stage]):
            if fragment.landed is not None:
                # Its messages have deadlines.
                fragment.landed.result()
                fragment.land(self._outer, self._rounds(turn))

    def _offset(self, turn: int) -> int:
        """When the fragment whose turn it is is averaged first, in steps."""
        return turn * self._outer.inner_steps // len(self._averaging)

    def _rounds(self, turn: int) -> int:
        """The outer steps of a fragment so far, by the number of the step alone."""
        steps = self._step + 1 - self._offset(turn)
        return steps // self._outer.inner_steps


class Fragment:
    """The outer optimizer of some parameters of a stage, as flat vectors [N] of fp32."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.flat = FlatParameters(named)
        vectors = torch.zeros(4, self.flat.length)
        self.anchor = vectors[0]  # the parameters on which all replicas last agreed
        self.momentum = vectors[1]  # of the outer step
        self.base = vectors[2]  # during an exchange, this replica's parameters when it began
        # during an exchange, anchor - base; then the mean of that over replicas
        self.difference = vectors[3]
        self.landed: Future[None] | None = None  # done with the exchange; None between two
        self._read_parameters(self.anchor)

    @property
    def num_bytes(self) -> int:
        return 4 * self.anchor.nbytes

    def take_off(self) -> torch.Tensor:
        """What is to be averaged, in place."""
        self._read_parameters(self.base)
        return torch.sub(self.anchor, self.base, out=self.difference)

    @torch.no_grad()
    def land(self, outer: OuterSettings, rounds: int) -> None:
        """One outer step (Sutskever et al. 2013, as torch.optim.SGD has it)."""
        self.landed = None
        momentum = outer.momentum_in(rounds)
        self.momentum.mul_(momentum).add_(self.difference)
        # In place: the difference has done its work, and is made anew at the next take-off.
        nesterov = self.difference.add_(self.momentum, alpha=momentum)
        self.anchor.sub_(nesterov, alpha=outer.learning_rate)
        for index, parameter in enumerate(self.flat.parameters):
            anchor = self.flat.view(self.anchor, index)
            agreed = anchor.to(parameter.device)
            if outer.overlap:
                # What this replica has learned meanwhile stays.
                base = self.flat.view(self.base, index)
                base = base.to(parameter.device)
                parameter.add_(agreed - base)
            else:
                parameter.copy_(agreed)

    def state(self, *, shared: bool, mark: str) -> dict[str, torch.Tensor]:
        """With `shared` also what all replicas hold alike. `base` is each replica's own."""
        vectors = {}
        if shared:
            vectors["anchor"] = self.anchor
            vectors["outer_momentum"] = self.momentum
        if self.landed is not None:
            # Until then the exchange writes to the difference.
            self.landed.result()
            if shared:
                vectors["difference"] = self.difference
            vectors[f"base{mark}"] = self.base
        state = {}
        for index, name in enumerate(self.flat.names):
            for key, vector in vectors.items():
                state[f"{name}.{key}"] = self.flat.view(vector, index)
        return state

    def restore(self, moments: Moments, mark: str) -> None:
        """From another kind's checkpoint the parameters are the anchor."""
        self._read_parameters(self.anchor)
        self._restore(self.anchor, moments, "anchor")
        self._restore(self.momentum, moments, "outer_momentum")
        if self._restore(self.difference, moments, "difference"):
            self.landed = Future()
            self.landed.set_result(None)
            if not self._restore(self.base, moments, f"base{mark}"):
                self._read_parameters(self.base)

    def _read_parameters(self, vector: torch.Tensor) -> None:
        whole = slice(0, self.flat.length)
        self.flat.fill(vector, whole, self.flat.parameters, 1.0)

    def _restore(self, vector: torch.Tensor, moments: Moments, key: str) -> bool:
        """Fill `vector` where the checkpoint has `key` of every parameter; whether it has."""
        parts = [moments.get(f"{name}.{key}") for name in self.flat.names]
        if not parts or any(part is None for part in parts):
            return False
        whole = slice(0, self.flat.length)
        self.flat.fill(vector, whole, parts, 1.0)
        return True


def fragments(
    named: Sequence[NamedParameter], count: int, tied: Collection[str] = ()
) -> list[list[NamedParameter]]:
    """`named` in `count` runs of about the same number of values; there may be empty ones.

    What is `tied` is in the first, in every stage: copies of a weight stay equal where they are
    averaged at the same steps.
    """
    total = sum(parameter.numel() for _, parameter in named)
    before = 0
    runs: list[list[NamedParameter]] = [[] for _ in range(count)]
    # The tied ones first, others in the order they have: `sorted` is stable.
    in_turn = sorted(named, key=lambda pair: pair[0] not in tied)
    for name, parameter in in_turn:
        if name in tied:
            turn = 0
        else:
            # By its middle, so that a parameter across a border goes where most of it lies.
            middle = before + parameter.numel() / 2
            turn = min(count - 1, int(middle * count / total))
        runs[turn].append((name, parameter))
        before += parameter.numel()
    return runs
