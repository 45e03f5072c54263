"""A job and its machines, with all that a search looks up: made once, and remembered."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpipe.config.load import Config
from dpipe.machines.machine import Cluster, Machine
from dpipe.placement.choices import OpenChoices
from dpipe.placement.fleet import Floats, Units, kinds_of, units_of
from dpipe.placement.shape import PlanShape
from dpipe.placement.tables import (
    Held,
    SummedTimes,
    bytes_of_hops,
    exchanged_bytes,
    held_of,
    times_of,
)
from dpipe.plan.costs import LayerCosts, transformer_costs

# Of the whole model on one rank, for the micro-batches of a configuration.
WholeModel = Callable[[Config], LayerCosts]


@dataclass(frozen=True)
class PlanProblem:
    config: Config
    cluster: Cluster
    choices: OpenChoices
    whole_model: WholeModel = transformer_costs
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    @cached_property
    def num_layers(self) -> int:
        return len(self.whole_model(self.config).forward_s)

    @property
    def votes(self) -> bool:
        return self.config.train.waits_for_verdict

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.train.batch_size * self.config.model.context

    @cached_property
    def _one_of_each_kind(self) -> list[Machine]:
        machines = self.cluster.machines
        first = dict(zip(reversed(kinds_of(machines)), reversed(machines), strict=True))
        return [first[kind] for kind in sorted(first)]

    def units(self, group_size: int) -> Units:
        def make() -> Units:
            return units_of(self.cluster, self.config, group_size)

        units: Units = self._once(("units", group_size), make)
        return units

    def with_units(self, group_size: int, units: Units) -> "PlanProblem":
        """The same job on machines that differ from these only as `units` say."""
        return replace(self, _known={**self._known, ("units", group_size): units})

    def times(self, shape: PlanShape) -> SummedTimes:
        def make() -> SummedTimes:
            config = self.trial(shape)
            return times_of(config, self.whole_model(config), self._one_of_each_kind)

        times: SummedTimes = self._once(("times", *_computes(shape)), make)
        return times

    def held(self, shape: PlanShape) -> Held:
        def make() -> Held:
            config = self.trial(shape)
            return held_of(config, self.whole_model(config))

        held: Held = self._once(("held", shape.kind, shape.replicas, *_computes(shape)), make)
        return held

    def sent_bytes(self, shape: PlanShape) -> tuple[Floats, Floats]:
        """By hop and the layer in front of it, forward and backward."""

        def make() -> tuple[Floats, Floats]:
            forward = [self._hops(shape, wire)[0] for wire in shape.forward_wires]
            backward = [self._hops(shape, wire)[1] for wire in shape.backward_wires]
            nothing = np.zeros((0, self.num_layers - 1))
            return np.array(forward or nothing), np.array(backward or nothing)

        key = ("sent", shape.forward_wires, shape.backward_wires, *_computes(shape))
        sent: tuple[Floats, Floats] = self._once(key, make)
        return sent

    def _hops(self, shape: PlanShape, wire: str) -> tuple[Floats, Floats]:
        def make() -> tuple[Floats, Floats]:
            config = self.trial(shape, wire)
            return bytes_of_hops(config, self.whole_model(config))

        hops: tuple[Floats, Floats] = self._once(("hops", wire, *_computes(shape)), make)
        return hops

    def exchanged_bytes(self, shape: PlanShape) -> Floats:
        """Both ways, summed up by layer."""

        def make() -> Floats:
            whole = self.whole_model(self.config)
            return exchanged_bytes(whole, shape.kind, shape.exchange_wire)

        size: Floats = self._once(("exchanged", shape.kind, shape.exchange_wire), make)
        return size

    def trial(self, shape: PlanShape, wire: str = "none") -> Config:
        """The job with the micro-batches of `shape`, before it is cut. Raises `ConfigError` where
        they do not go with the rest of the job.
        """
        return self.config.with_(
            pipeline__stages=1,
            pipeline__split="estimated",
            pipeline__schedule="1f1b",
            pipeline__in_flight=None,
            pipeline__programs=(),
            pipeline__recompute=shape.recompute,
            pipeline__wire=wire,
            tensor_parallel__size=shape.tensor_parallel,
            data_parallel__kind=shape.kind,
            data_parallel__replicas=shape.replicas,
            data_parallel__wire=shape.exchange_wire,
            train__num_microbatches=shape.num_microbatches,
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _computes(shape: PlanShape) -> tuple[object, ...]:
    """What the passes of a micro-batch depend on: its size, and how it is computed."""
    sequences = shape.replicas * shape.num_microbatches  # that the batch is divided by
    return sequences, shape.tensor_parallel, shape.recompute
