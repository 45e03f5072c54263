"""A job and its machines, with all that a search looks up: made once, and remembered."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dpipe.config.load import Config
from dpipe.machines.machine import Cluster, Machine
from dpipe.placement.choices import OpenChoices
from dpipe.placement.fleet import Floats, Ints, Units, kinds_of, units_of
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
from dpipe.plan.forecast import agreeing_share

# Of the whole model on one rank, for the micro-batches of a configuration.
WholeModel = Callable[[Config], LayerCosts]
Key = tuple[object, ...]  # what a table that is known depends on
Made = TypeVar("Made")


@dataclass(frozen=True)
class PlanProblem:
    config: Config
    cluster: Cluster
    choices: OpenChoices
    whole_model: WholeModel = transformer_costs
    first: str | None = None  # the machine of rank 0, where that is known already
    _known: dict[Key, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def num_layers(self) -> int:
        whole = self.whole_model(self.config)
        return len(whole.forward_s)

    @property
    def votes(self) -> bool:
        return self.config.train.waits_for_verdict

    @property
    def tokens(self) -> int:
        """Of a step."""
        sequences = self.config.train.batch_size
        return sequences * self.config.model.context

    @cached_property
    def _one_of_each_kind(self) -> list[Machine]:
        machines = self.cluster.machines
        kinds = kinds_of(machines)
        first: dict[int, Machine] = {}
        # Kinds are numbered as they come, so that they come in order here.
        for kind, machine in zip(kinds, machines, strict=True):
            first.setdefault(kind, machine)
        return list(first.values())

    def units(self, group_size: int) -> Units:
        def make() -> Units:
            return units_of(self.cluster, self.config, group_size)

        key = ("units", group_size)
        return self._once(key, make)

    def leading(self, group_size: int) -> Ints:
        """The units that may have the first seat, where only those of `first` may."""
        if self.first is None:
            return np.arange(0)
        machine = self.cluster.names.index(self.first)
        units = self.units(group_size)
        return np.flatnonzero(units.machine == machine)

    def led(self, orders: Ints, group_size: int) -> Ints:
        """`orders` [candidate, unit] with a unit of `first` in the first seat, in exchange for
        whichever sat there. As they are where it has none, which the estimate refuses.
        """
        own = self.leading(group_size)
        if own.size == 0:
            return orders
        unit = own[0]
        led = orders.copy()
        candidates, places = np.nonzero(orders == unit)
        led[candidates, places] = orders[candidates, 0]
        led[candidates, 0] = unit
        return led

    def with_units(self, group_size: int, units: Units) -> "PlanProblem":
        """The same job on machines that differ from these only as `units` say."""
        known = dict(self._known)
        known["units", group_size] = units
        return replace(self, _known=known)

    def times(self, shape: PlanShape) -> SummedTimes:
        def make() -> SummedTimes:
            config = self.trial(shape)
            whole = self.whole_model(config)
            machines = self._one_of_each_kind
            return times_of(config, whole, machines)

        key = ("times", *_computes(shape))
        return self._once(key, make)

    def held(self, shape: PlanShape) -> Held:
        def make() -> Held:
            config = self.trial(shape)
            whole = self.whole_model(config)
            return held_of(config, whole)

        # What is sharded between replicas is held by each in part.
        key = ("held", shape.kind, shape.replicas, *_computes(shape))
        return self._once(key, make)

    def sent_bytes(self, shape: PlanShape) -> tuple[Floats, Floats]:
        """By hop and the layer in front of it, forward and backward."""

        def make() -> tuple[Floats, Floats]:
            hops = len(shape.forward_wires)
            inner_layers = self.num_layers - 1
            forward = np.zeros((hops, inner_layers))
            backward = np.zeros_like(forward)
            for hop, wire in enumerate(shape.forward_wires):
                forward[hop], _ = self._hops(shape, wire)
            for hop, wire in enumerate(shape.backward_wires):
                _, backward[hop] = self._hops(shape, wire)
            return forward, backward

        key = ("sent", shape.forward_wires, shape.backward_wires, *_computes(shape))
        return self._once(key, make)

    def _hops(self, shape: PlanShape, wire: str) -> tuple[Floats, Floats]:
        def make() -> tuple[Floats, Floats]:
            config = self.trial(shape)
            whole = self.whole_model(config)
            return bytes_of_hops(config, whole, wire)

        key = ("hops", wire, *_computes(shape))
        return self._once(key, make)

    def exchanged_bytes(self, shape: PlanShape) -> Floats:
        """Both ways, summed up by layer."""

        def make() -> Floats:
            whole = self.whole_model(self.config)
            return exchanged_bytes(whole, shape.kind, shape.exchange_wire)

        key = ("exchanged", shape.kind, shape.exchange_wire)
        return self._once(key, make)

    def trial(self, shape: PlanShape) -> Config:
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
            pipeline__wire="none",
            tensor_parallel__size=shape.tensor_parallel,
            data_parallel__kind=shape.kind,
            data_parallel__replicas=shape.replicas,
            data_parallel__wire=shape.exchange_wire,
            train__num_microbatches=shape.num_microbatches,
        )

    def agreeing_share(self, shape: PlanShape) -> float:
        """The share of the steps at which replicas exchange something."""

        def make() -> float:
            return agreeing_share(self.trial(shape))

        key = ("agreeing", shape.kind, shape.replicas, shape.num_microbatches)
        return self._once(key, make)

    def _once(self, key: Key, make: Callable[[], Made]) -> Made:
        if key not in self._known:
            self._known[key] = make()
        made: Made = self._known[key]
        return made


def _computes(shape: PlanShape) -> Key:
    """What the passes of a micro-batch depend on: its size, and how it is computed."""
    sequences = shape.replicas * shape.num_microbatches  # that the batch is divided by
    return sequences, shape.tensor_parallel, shape.recompute
