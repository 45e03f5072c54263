"""What a placement comes to in the simulator: a schedule is chosen, a step is simulated, and what
every rank holds is counted.

The estimate that a search goes by leaves out how forward and backward, and messages, get in each
other's way; here they are. All replicas run one schedule: it is chosen for the replica that takes
longest, simulated by itself, which costs a fraction of all of them.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from dpipe.config.load import Config
from dpipe.config.wires import wire_of
from dpipe.machines.seats import message_network_of
from dpipe.memory.fit import held_by_rank, in_run
from dpipe.memory.layers import Stages
from dpipe.memory.walk import peak_memory
from dpipe.network.link import Host, Network
from dpipe.placement.climb import Placed
from dpipe.placement.estimate import Estimate, estimate
from dpipe.placement.fleet import Floats, Ints
from dpipe.placement.problem import PlanProblem
from dpipe.plan.assumed_network import losses_are_outrun
from dpipe.plan.forecast import (
    Forecast,
    agreeing_share,
    ballots_over,
    evaluation_schedule,
    fullest,
    mean_step_us,
    parts_of,
    replicas_of,
    server_ranks,
    with_exchange,
)
from dpipe.plan.on_machines import Placement
from dpipe.plan.tensor_parallel import at_boundaries
from dpipe.schedule.generate import AUTO, ONE_F_ONE_B, ZERO_BUBBLE, generate
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.size import num_messages
from dpipe.search.auto import pipeline_on, search
from dpipe.search.clock import Replay, programs_of
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Part, Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period, simulate
from dpipe.wire.format import HopFormats

# What a rank may hold, in whole parts: machines have unequal memory, and a search of schedules
# knows one limit.
_PARTS_OF_MEMORY = 1 << 20
# Of a step's exchange, in a plan's simulation; finer parts make it longer, and the step hardly
# shorter.
_MOST_MESSAGES = 8_000
# A large step's order is not searched any further where it is as close as this to the bound. In
# small ones, whose whole search takes less than a second, it might be better for other replicas.
_CLOSE = 0.0015
_LARGE = 1_500  # computations
_PLENTY = 1.25  # times what is needed: then nothing is counted


@dataclass(frozen=True)
class Evaluated:
    """A placement with a schedule, and its simulated step."""

    trial: "Trial"
    schedule: Schedule  # of computations alone
    step_us: float  # infinite where it does not fit into memory
    forecast: Forecast | None = None  # of all replicas, where they were simulated

    @property
    def placement(self) -> Placed:
        return self.trial.placement

    @property
    def config(self) -> Config:
        return self.trial.config

    @property
    def network(self) -> Network:
        return self.trial.network


class Trial:
    """One placement, ready to be simulated."""

    def __init__(self, problem: PlanProblem, placement: Placed) -> None:
        self.problem = problem
        self.placement = placement
        self.config = planned_config(problem, placement)
        units = problem.units(placement.shape.tensor_parallel)
        self.machines = units.machine[placement.seats]  # [replica, stage]
        # By stage, what its smallest machine has.
        self.memory_bytes = units.memory_bytes[placement.seats].min(axis=0)

    @property
    def formats(self) -> HopFormats:
        shape = self.placement.shape
        return HopFormats(shape.forward_wires, shape.backward_wires)

    @cached_property
    def network(self) -> Network:
        """Between all stages of all replicas."""
        return self._network(self.machines.ravel())

    def _network(self, machines: Ints) -> Network:
        names = self.problem.cluster.names
        seats = [names[machine] for machine in machines]
        network = message_network_of(self.problem.cluster, seats)
        network = replace(network, outruns_loss=losses_are_outrun(self.config))
        connections = self.config.transport.connections
        if connections == "auto":
            return network.over_enough()
        return network.over(connections)

    @cached_property
    def estimate(self) -> Estimate:
        placement = self.placement
        return estimate(
            self.problem,
            placement.shape,
            placement.seats[None],
            placement.ends[None],
        )

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """By replica."""
        return tuple(self._cost(replica) for replica in range(self.placement.shape.replicas))

    def _cost(self, replica: int) -> Cost:
        problem = self.problem
        shape = self.placement.shape
        ends = self.placement.ends_of(replica)
        times = problem.times(shape)
        units = problem.units(shape.tensor_parallel)
        kinds = units.kind[self.placement.seats[replica]]

        def stages_us(summed: Floats) -> tuple[float, ...]:
            seconds = summed[kinds, ends[1:]] - summed[kinds, ends[:-1]]
            return tuple((seconds * 1e6).tolist())

        forward, backward = problem.sent_bytes(shape)
        hops = np.arange(shape.stages - 1)
        last_layers = ends[1:-1] - 1
        cost = Cost(
            forward_us=stages_us(times.forward),
            backward_us=stages_us(times.backward),
            input_us=stages_us(times.input),
            weight_us=stages_us(times.weight),
            activation_bytes=_whole(forward[hops, last_layers]),
            gradient_bytes=_whole(backward[hops, last_layers]),
            reduce_bytes=self._parameter_bytes(replica),
            tied_bytes=problem.whole_model(self.config).tied_bytes,
            frozen=int((ends[1:] <= problem.whole_model(self.config).frozen).sum()),
        )
        return with_exchange(self.config, self._gathered(cost))

    def _gathered(self, cost: Cost) -> Cost:
        """With the time that tensor-parallel ranks take to put activations together; `cost` has the
        bytes of their boundaries already.
        """
        gathered = at_boundaries(self.config, cost)
        return replace(
            gathered,
            activation_bytes=cost.activation_bytes,
            gradient_bytes=cost.gradient_bytes,
        )

    def _parameter_bytes(self, replica: int) -> tuple[int, ...]:
        """By stage."""
        whole = self.problem.whole_model(self.config)
        of_stages = []
        for start, end in pairwise(self.placement.ends_of(replica)):
            of_layers = whole.parameter_bytes[start:end]
            of_stages.append(sum(of_layers))
        return tuple(of_stages)

    @cached_property
    def replicas(self) -> Replicas | None:
        if self.placement.shape.replicas == 1:
            return None
        parameter_bytes = self._parameter_bytes(0)
        cost = replace(self.costs[0], reduce_bytes=parameter_bytes)
        parts: tuple[Part, ...] = ()
        if self.config.pipeline.splits:
            parts = parts_of(self.config, self.problem.whole_model(self.config))
        has_server = self.config.data_parallel.active_kind.has_server
        shape = self.placement.shape
        # A simulation takes as long as it has messages, and a plan simulates a dozen placements.
        num_parts = len(parts) or shape.stages
        of_a_part = num_parts * num_messages(shape.replicas, 1, has_server=has_server)
        most_parts = max(1, _MOST_MESSAGES // of_a_part)
        chunk_bytes = max(self.config.data_parallel.chunk_bytes, max(parameter_bytes) // most_parts)
        coarse = self.config.with_(data_parallel__chunk_bytes=chunk_bytes)
        rounds = replicas_of(coarse, cost)
        return None if rounds is None else replace(rounds, parts=parts)

    @cached_property
    def stages(self) -> Stages:
        """What the layers of each stage hold; empty where nobody asked."""
        whole = self.problem.whole_model(self.config)
        if whole.memory_of is None:
            return ()
        servers = server_ranks(self.config)
        by_replica = []
        parameter_bytes = []
        for replica, cut in enumerate(self.placement.cuts):
            by_replica.append(in_run(self.config, whole.memory_of(cut), servers))
            parameter_bytes.append(self._parameter_bytes(replica))
        return fullest(by_replica, parameter_bytes)

    def held(self, schedule: Schedule) -> list[int]:
        """By rank of the pipeline, in parts of what its machine has: `_PARTS_OF_MEMORY` are all."""
        parts = []
        held = held_by_rank(schedule, self.stages)
        for num_bytes, limit in zip(held, self.memory_bytes, strict=True):
            parts.append(math.ceil(num_bytes / limit * _PARTS_OF_MEMORY))
        return parts

    def fits(self, schedule: Schedule) -> bool:
        if not self.stages or self._has_plenty:
            return True
        return max(self.held(schedule)) <= _PARTS_OF_MEMORY

    @cached_property
    def _has_plenty(self) -> bool:
        """Whether any schedule fits, with a margin for what the estimate leaves out."""
        shape = self.placement.shape
        held = self.problem.held(shape)
        ends = self.placement.ends
        static = np.diff(held.static[ends], axis=-1)
        # At worst all micro-batches are under way, or wait for their weight gradients.
        of_each = np.diff(held.held[ends], axis=-1) + np.diff(held.deferred[ends], axis=-1)
        under_way = shape.num_microbatches * of_each
        needed = static + under_way + held.working
        return bool((_PLENTY * needed < self.memory_bytes).all())

    def scenario(self, schedule: Schedule) -> Scenario:
        """Of all replicas."""
        return Scenario(
            self._lowered(schedule, reduce=self.replicas is not None),
            self.costs[0],
            self.network,
            replicas=self.replicas,
            ballots=ballots_over(self.config, self.network),
            costs=self.costs,
            hosts=self._hosts(self.machines.ravel()),
        )

    def _hosts(self, machines: Ints) -> tuple[Host, ...]:
        names = self.problem.cluster.names
        seats = [names[machine] for machine in machines]
        return Placement(self.problem.cluster, seats).hosts

    def _lowered(self, schedule: Schedule, *, reduce: bool) -> Schedule:
        cost = self.costs[0]
        return lower(schedule, tied=cost.tied_bytes > 0, reduce=reduce, frozen=cost.frozen)

    # One order for all replicas: what is good for the slowest cannot make another the slowest by
    # much, as they are cut alike.
    @cached_property
    def _slowest(self) -> tuple[Cost, Network, tuple[Host, ...]]:
        """The replica that takes longest, by the estimate, its own network, and its hosts."""
        replica_s = self.estimate.replica_s[0]
        replica = int(np.argmax(replica_s))
        machines = self.machines[replica]
        network = self._network(machines)
        hosts = self._hosts(machines)
        return self.costs[replica], network, hosts

    def _alone(self, schedule: Schedule) -> Scenario:
        """Of the slowest replica, without the others."""
        cost, network, hosts = self._slowest
        ballots = ballots_over(self.config, network)
        lowered = self._lowered(schedule, reduce=False)
        return Scenario(lowered, cost, network, hosts, ballots=ballots)

    @property
    def _agreeing_us(self) -> float:
        """What replicas add to the slowest one."""
        if self.placement.shape.replicas == 1:
            return 0.0
        found = self.estimate
        return float(found.step_s[0] - found.replica_s[0].max()) * 1e6

    @cached_property
    def by_clock(self) -> tuple[Evaluated, ...]:
        """With a few schedules that fit, or the one that the job states, the best first: timed by
        the clock of a search of schedules, which takes a tenth of what the simulator does. What
        replicas add to the slowest one is estimated.
        """
        cost, network, _ = self._slowest
        shape = self.placement.shape
        pipeline = pipeline_on(
            network,
            cost,
            shape.num_microbatches,
            shape.stages,
            ballots=ballots_over(self.config, network),
        )
        timed = []
        for schedule in self._few():
            if self.fits(schedule):
                score_us = Replay(pipeline, programs_of(schedule)).run().score_us
                timed.append(Evaluated(self, schedule, score_us + self._agreeing_us))
        return tuple(sorted(timed, key=attrgetter("step_us")))

    def quickly(self) -> Evaluated:
        """The best of these schedules as the simulator sees it, for the slowest replica alone."""
        best = Evaluated(self, self._generated(ONE_F_ONE_B.name), math.inf)
        for schedule in [found.schedule for found in self.by_clock]:
            most_us = best.step_us - self._agreeing_us
            step_us = period(self._alone(schedule), most_us) + self._agreeing_us
            if step_us < best.step_us:
                best = Evaluated(self, schedule, step_us)
        return best

    def fully(self, schedule: Schedule) -> Evaluated:
        """All replicas and their exchange, with a schedule that fits."""
        with _no_cycles_sought():
            predicted = self.forecast(schedule)
        return Evaluated(self, schedule, predicted.step_us, predicted)

    def improved(self, known: Evaluated) -> Evaluated:
        """With what schedule "auto" finds for the slowest replica, if that is faster."""
        cost, network, _ = self._slowest
        shape = self.placement.shape
        schedule = search(
            shape.stages,
            shape.num_microbatches,
            cost,
            network,
            memory_limit=self.config.pipeline.memory_limit,
            ballots=ballots_over(self.config, network),
            held_bytes=None if self._has_plenty else self.held,
            most_bytes=_PARTS_OF_MEMORY,
            close=_CLOSE if self._num_computations >= _LARGE else 0.0,
        )
        if not self.fits(schedule):
            return known
        step_us = period(self._alone(schedule), known.step_us) + self._agreeing_us
        if step_us < known.step_us:
            return Evaluated(self, schedule, step_us)
        return known

    @property
    def _num_computations(self) -> int:
        """Of a replica's step, with backward passes in halves."""
        shape = self.placement.shape
        return 3 * shape.stages * shape.num_microbatches

    def forecast(self, schedule: Schedule) -> Forecast:
        """As `plan.forecast` has it, on these machines."""
        scenario = self.scenario(schedule)
        a_step = partial(
            simulate,
            scenario.schedule,
            scenario.cost,
            scenario.network,
            scenario.hosts,
            ballots=scenario.ballots,
            costs=scenario.costs,
        )
        timeline = a_step(replicas=scenario.replicas)
        return Forecast(
            split=self.placement.cuts[0],
            schedule=scenario.schedule,
            eval_schedule=evaluation_schedule(scenario.schedule),
            cost=scenario.cost,
            network=self.network,
            timeline=timeline,
            replicas=self.replicas,
            agreeing_share=agreeing_share(self.config),
            inner_steps=self.config.data_parallel.known_inner_steps,
            step_us=mean_step_us(self.config, timeline, a_step, self.replicas),
            memory=peak_memory(schedule, self.stages) if self.stages else (),
            formats=self.formats,
            splits=self.config.pipeline.splits,
        )

    def _few(self) -> Iterator[Schedule]:
        """Deeper ones hide delays, shallower ones hold less."""
        pipeline = self.config.pipeline
        if pipeline.schedule != AUTO:
            yield self._generated(pipeline.schedule, in_flight=pipeline.in_flight)
            return
        stages = self.placement.shape.stages
        number = self.placement.shape.num_microbatches
        deep = min(2 * stages, number)
        yield self._generated(ONE_F_ONE_B.name, in_flight=min(stages, number))
        yield self._generated(ZERO_BUBBLE.name, in_flight=deep, memory_limit=deep)

    def _generated(self, name: str, **parameters: int | None) -> Schedule:
        shape = self.placement.shape
        limit = self.config.pipeline.memory_limit
        if name == ZERO_BUBBLE.name:
            parameters = {"memory_limit": limit} | parameters
        return generate(
            name,
            shape.stages,
            shape.num_microbatches,
            stages_per_rank=1,
            num_slices=1,
            **parameters,
        )


@contextmanager
def _no_cycles_sought() -> Iterator[None]:
    """A simulation keeps a million small objects: to look for cycles among them, of which it makes
    none, takes a fifth of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _whole(sizes: Floats) -> tuple[int, ...]:
    return tuple(round(size) for size in sizes.tolist())


def planned_config(problem: PlanProblem, placement: Placed) -> Config:
    """The job with all that was decided. Raises `ConfigError` where that does not fit together."""
    shape = placement.shape
    cuts = placement.cuts
    wire: Any = problem.choices.stated_wire
    if wire is None:
        wire = wire_of(HopFormats(shape.forward_wires, shape.backward_wires))
    return problem.config.with_(
        train__num_microbatches=shape.num_microbatches,
        pipeline__stages=shape.stages,
        pipeline__split=cuts[0] if len(cuts) == 1 else "estimated",
        pipeline__splits=cuts if len(cuts) > 1 else (),
        pipeline__schedule=shape.schedule,
        pipeline__recompute=shape.recompute,
        pipeline__wire=wire,
        tensor_parallel__size=shape.tensor_parallel,
        data_parallel__kind=shape.kind,
        data_parallel__replicas=shape.replicas,
        data_parallel__wire=shape.exchange_wire,
    )
