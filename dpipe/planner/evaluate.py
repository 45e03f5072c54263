"""What a placement comes to in the simulator: a schedule is chosen, a step is simulated, and what
every rank holds is counted.

The estimate that a search goes by leaves out how forward and backward, and messages, get in each
other's way; here they are. All replicas run one schedule: it is chosen for the replica that takes
longest, simulated by itself, which costs a fraction of all of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from dpipe.config.load import Config
from dpipe.machines.seats import message_network_of
from dpipe.memory.fit import held_by_rank, in_run
from dpipe.memory.layers import Stages
from dpipe.memory.walk import peak_memory
from dpipe.network.link import Host, Network
from dpipe.placement.climb import Placed
from dpipe.placement.estimate import Estimate, estimate
from dpipe.placement.fleet import Floats, Ints
from dpipe.placement.problem import PlanProblem
from dpipe.plan.forecast import (
    Forecast,
    agreeing_share,
    ballots_over,
    evaluation_schedule,
    mean_step_us,
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
from dpipe.search.auto import search
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period, simulate

# What a rank may hold, in whole parts: machines have unequal memory, and a search of schedules
# knows one limit.
_PARTS_OF_MEMORY = 1 << 20
# Of a step's exchange, in a plan's simulation; finer parts make it longer, and the step hardly
# shorter.
_MOST_MESSAGES = 8_000
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

    @cached_property
    def network(self) -> Network:
        """Between all stages of all replicas."""
        return self._network(self.machines.ravel())

    def _network(self, machines: Ints) -> Network:
        names = self.problem.cluster.names
        seats = [names[machine] for machine in machines]
        network = message_network_of(self.problem.cluster, seats)
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
        ends = self.placement.ends
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
            reduce_bytes=self._parameter_bytes,
            tied_bytes=problem.whole_model(self.config).tied_bytes,
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

    @cached_property
    def _parameter_bytes(self) -> tuple[int, ...]:
        """By stage."""
        whole = self.problem.whole_model(self.config)
        of_stages = []
        for start, end in pairwise(self.placement.ends):
            of_layers = whole.parameter_bytes[start:end]
            of_stages.append(sum(of_layers))
        return tuple(of_stages)

    @cached_property
    def replicas(self) -> Replicas | None:
        cost = replace(self.costs[0], reduce_bytes=self._parameter_bytes)
        if self.placement.shape.replicas == 1:
            return None
        has_server = self.config.data_parallel.active_kind.has_server
        shape = self.placement.shape
        # A simulation takes as long as it has messages, and a plan simulates a dozen placements.
        of_a_part = shape.stages * num_messages(shape.replicas, 1, has_server=has_server)
        most_parts = max(1, _MOST_MESSAGES // of_a_part)
        chunk_bytes = max(
            self.config.data_parallel.chunk_bytes, max(self._parameter_bytes) // most_parts
        )
        coarse = self.config.with_(data_parallel__chunk_bytes=chunk_bytes)
        return replicas_of(coarse, cost)

    @cached_property
    def stages(self) -> Stages:
        """What the layers of each stage hold; empty where nobody asked."""
        whole = self.problem.whole_model(self.config)
        if whole.memory_of is None:
            return ()
        cut = tuple(np.diff(self.placement.ends).tolist())
        return in_run(self.config, whole.memory_of(cut), server_ranks(self.config))

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
        static = np.diff(held.static[ends])
        under_way = shape.num_microbatches * np.diff(held.held[ends])
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
        return lower(schedule, tied=self.costs[0].tied_bytes > 0, reduce=reduce)

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

    def quickly(self) -> Evaluated:
        """With the best of a few schedules, or the one that the job states. What replicas add to
        the slowest one is estimated.
        """
        best = Evaluated(self, self._generated(ONE_F_ONE_B.name), math.inf)
        for schedule in self._few():
            if not self.fits(schedule):
                continue
            step_us = period(self._alone(schedule), best.step_us) + self._agreeing_us
            if step_us < best.step_us:
                best = Evaluated(self, schedule, step_us)
        return best

    def fully(self, schedule: Schedule) -> Evaluated:
        """All replicas and their exchange, with a schedule that fits."""
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
        )
        if not self.fits(schedule):
            return known
        step_us = period(self._alone(schedule), known.step_us) + self._agreeing_us
        if step_us < known.step_us:
            return Evaluated(self, schedule, step_us)
        return known

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
            split=tuple(np.diff(self.placement.ends).tolist()),
            schedule=scenario.schedule,
            eval_schedule=evaluation_schedule(scenario.schedule),
            cost=scenario.cost,
            network=self.network,
            timeline=timeline,
            replicas=self.replicas,
            agreeing_share=agreeing_share(self.config),
            step_us=mean_step_us(self.config, timeline, a_step, self.replicas),
            memory=peak_memory(schedule, self.stages) if self.stages else (),
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
        return generate(name, shape.stages, shape.num_microbatches, stages_per_rank=1, **parameters)


def _whole(sizes: Floats) -> tuple[int, ...]:
    return tuple(round(size) for size in sizes.tolist())


def planned_config(problem: PlanProblem, placement: Placed) -> Config:
    """The job with all that was decided. Raises `ConfigError` where that does not fit together."""
    shape = placement.shape
    wire = shape.forward_wires[0] if shape.forward_wires else problem.config.pipeline.wire
    return problem.config.with_(
        train__num_microbatches=shape.num_microbatches,
        pipeline__stages=shape.stages,
        pipeline__split=tuple(np.diff(placement.ends).tolist()),
        pipeline__schedule=shape.schedule,
        pipeline__recompute=shape.recompute,
        pipeline__wire=wire,
        tensor_parallel__size=shape.tensor_parallel,
        data_parallel__kind=shape.kind,
        data_parallel__replicas=shape.replicas,
        data_parallel__wire=shape.exchange_wire,
    )
