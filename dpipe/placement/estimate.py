"""How long a step of many placements takes, quickly: about the simulator's answer from below.

Machines and stages are a pipeline of things that each do one micro-batch after another, M in all.
With f and b what a stage computes forward and backward of one micro-batch, and hops that take
bytes / rate + delay:

    stage 0  [f]-.                                  .-[b]
                  `-hop->                    <-hop-'
    stage 1            [f]-.          .-[b]
                            `-> ... -'
             |-- head --|                    |-- tail --|      of stage 1
             |------------------ round trip ------------|      of stage 0

A replica takes at least the longest of these, by stage:

    head + M (f + b) + tail                   it computes all micro-batches, and cannot begin
                                              before the first comes, nor is the step over when
                                              the last backward leaves it; ranks on one machine
                                              share its cores
    head + M bytes / egress + tail            the same of what its machine sends, and receives;
                                              ranks on one machine share both, and
                                              relayed links pass that of rank 0
    round trip + (M - 1) x the slowest        forward, backward or direction of a link, which
                                              all pass once
    head + M / k x round trip + tail          where memory lets k micro-batches be under way

Then the replicas of each stage exchange gradients, when the slowest has its own: as much as its
slowest link, egress or ingress takes, and two delays. And the ballots of a step cross the network.

Replicas of one stage are as simulated: each sends from when it has its gradients, so that a fast
one has crossed its slow link before the slowest is done, and begins when the verdict has come. Of
longer pipelines the same was tried. It let a search put stages far apart, whose exchange hides it,
and the orders that are tried first do not: 20.5 s a step in place of 15.9 for 64 machines.

    replica 0  computes ....|-- to 1 --|                 |-- to 0, 2 --|
    replica 1  computes .|-- to 0 --|       sums its share up
    replica 2  computes ..........|-- to 1 -------------|

Left out, which the simulator has: how forward and backward get in each other's way, the order of
messages in an egress, what is computed during an exchange. In steps that a machine or a link fills,
they are small.

All arrays are [candidate, replica, stage] unless said otherwise.
"""

from dataclasses import dataclass

import numpy as np

from dpipe.placement.fleet import Bools, Floats, Ints
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

GBIT = 8e-9  # in a byte


@dataclass(frozen=True)
class Estimate:
    """What the placements take. A seat is where one replica's stage is held."""

    step_s: Floats  # [candidate]; infinite where it does not fit into memory, or lacks a link
    computes_s: Floats  # by seat, the bounds of the docstring: [candidate, replica, stage]
    sends_s: Floats
    receives_s: Floats
    passes_s: Floats
    waits_s: Floats  # for what memory does not let be under way
    computing_s: Floats  # by seat, in a step: what its machine is busy with
    sending_s: Floats
    receiving_s: Floats
    exchange_s: Floats  # [candidate, stage]
    replica_s: Floats  # [candidate, replica]

    @property
    def seats_s(self) -> Floats:
        """The longest bound of each seat."""
        bounds = (self.computes_s, self.sends_s, self.receives_s, self.waits_s, self.passes_s)
        longest: Floats = np.maximum.reduce(bounds)
        return longest


def estimate(problem: PlanProblem, shape: PlanShape, seats: Ints, ends: Ints) -> Estimate:
    """`seats` are units by candidate, replica and stage; `ends` [candidate, stage + 1] where each
    stage's layers begin, and the number of layers; [candidate, replica, stage + 1] where replicas
    are cut differently.
    """
    # No link has a rate of 0: what crosses it takes for ever.
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Batch(problem, shape, seats, ends).estimate()


class _Batch:
    """Placements of one shape that are estimated together."""

    def __init__(self, problem: PlanProblem, shape: PlanShape, seats: Ints, ends: Ints) -> None:
        self._problem = problem
        self._shape = shape
        self._seats = seats
        self._units = problem.units(shape.tensor_parallel)
        self._cut_apart = ends.ndim == 3
        if not self._cut_apart:
            ends = ends[:, None]
        self._begin = ends[..., :-1]
        self._end = ends[..., 1:]
        # The two ends of each hop.
        self._here = seats[..., :-1]
        self._there = seats[..., 1:]
        self._kinds = self._units.kind[seats]
        times = problem.times(shape)
        self._forward_s = self._of_stages(times.forward)
        self._backward_s = self._of_stages(times.backward)
        # Where a backward pass may be split, the neighbour waits for the input's half alone.
        self._returns_s = self._backward_s
        if shape.splits:
            self._returns_s = self._of_stages(times.input)
        self._set_hops()

    def _of_stages(self, summed: Floats) -> Floats:
        """The layers of each seat, of `summed` [kind of machine, layer + 1]."""
        after: Floats = summed[self._kinds, self._end]
        before: Floats = summed[self._kinds, self._begin]
        return after - before

    def _of_layers(self, summed: Floats) -> Floats:
        """The same of `summed` [layer + 1], which all machines have in common."""
        after: Floats = summed[self._end]
        before: Floats = summed[self._begin]
        return after - before

    def _set_hops(self) -> None:
        units = self._units
        shape = self._shape
        forward, backward = self._problem.sent_bytes(shape)
        hops = np.arange(shape.stages - 1)
        last_layers = self._begin[..., 1:] - 1
        forward_bytes = forward[hops, last_layers]
        backward_bytes = backward[hops, last_layers]
        self._forward_gbit = forward_bytes * GBIT
        self._backward_gbit = backward_bytes * GBIT
        # A link may be slower one way than the other.
        out = (self._here, self._there)
        back = (self._there, self._here)
        self._out_s = self._forward_gbit / units.gbps[out]
        self._back_s = self._backward_gbit / units.gbps[back]
        # With the delay, and what is computed in front of it.
        forward_s = self._forward_s[..., :-1]
        returns_s = self._returns_s[..., :-1]
        up_s = forward_s + self._out_s
        up_s += units.delay_s[out]
        down_s = returns_s + self._back_s
        down_s += units.delay_s[back]
        heads_s = _summed(up_s)
        # From the first stage on: what a gradient has yet to pass when a stage is done with it.
        self._tails_s = _summed(down_s)
        self._ends_s = heads_s + self._tails_s

    def estimate(self) -> Estimate:
        num = self._shape.num_microbatches
        candidates, replicas, _ = self._seats.shape
        ends_s = self._ends_s
        sent_s, received_s = self._interfaces()
        both_s = self._forward_s + self._backward_s
        shared_s = self._on_shared_cores(both_s)
        computing_s = num * np.maximum(both_s, shared_s)
        sending_s = num * sent_s
        receiving_s = num * received_s
        # The first micro-batch passes alone, and each of the others makes the slowest wait once.
        others_s = (num - 1) * self._slowest_s()
        first_s = self._turn_s[..., None]
        found = Estimate(
            step_s=np.zeros(candidates),
            computes_s=ends_s + computing_s,
            sends_s=ends_s + sending_s,
            receives_s=ends_s + receiving_s,
            computing_s=computing_s,
            sending_s=sending_s,
            receiving_s=receiving_s,
            passes_s=first_s + others_s,
            waits_s=self._waits_s(),
            exchange_s=self._exchange_s(),
            replica_s=np.zeros((candidates, replicas)),
        )
        seats_s = found.seats_s
        seats_s.max(axis=2, out=found.replica_s)
        self._set_steps(found)
        if self._problem.first is not None:
            found.step_s[~self._led] = np.inf
        return found

    @property
    def _led(self) -> Bools:
        """By candidate, whether rank 0 is where it must be."""
        size = self._shape.tensor_parallel
        leading = self._problem.leading(size)
        first_seats = self._seats[:, 0, 0]
        return np.isin(first_seats, leading)

    def _set_steps(self, found: Estimate) -> None:
        shape = self._shape
        if shape.stages == 1 and shape.replicas > 1 and not self._cut_apart:
            self._set_steps_of_one_stage(found)
            return
        step_s = found.step_s
        # A stage's gradient is final when its last backward pass is over.
        replica_s = found.replica_s[..., None]
        of_stages_s = replica_s - self._tails_s
        final_s = of_stages_s.max(axis=1)
        exchanged_s = final_s + found.exchange_s
        agreed_s = exchanged_s.max(axis=1)
        computed_s = found.replica_s.max(axis=1)
        np.maximum(agreed_s, computed_s, out=step_s)
        share = self._problem.agreeing_share(self._shape)
        if share < 1:  # the other steps end when they are computed
            step_s *= share
            step_s += (1 - share) * computed_s
        if self._problem.votes:
            step_s += self._vote_s()
        # Of what never ends nothing can be subtracted.
        endless = np.isnan(step_s)
        step_s[endless] = np.inf

    def _set_steps_of_one_stage(self, found: Estimate) -> None:
        """In a row of steps: each begins as late as its ranks hear of the one before."""
        seats = self._seats[..., 0]
        ballots_s = np.zeros(seats.shape)
        ready_s = found.replica_s
        if self._problem.votes:
            delay_s = self._units.delay_s
            coordinator = seats[:, :1]
            ballots_s = delay_s[seats, coordinator]
            verdicts_s = delay_s[coordinator, seats]
            ready_s = ready_s + verdicts_s
        agreed_s = self._agreed_of_one_stage_s(ready_s)
        last_s = ready_s.max(axis=1, keepdims=True)
        takes_s = agreed_s - last_s
        takes_s.max(axis=1, out=found.exchange_s[:, 0])
        agreed_s += ballots_s
        ready_s = ready_s + ballots_s
        over_s = agreed_s.max(axis=1)
        computed_s = ready_s.max(axis=1)
        share = self._problem.agreeing_share(self._shape)
        step_s = share * over_s + (1 - share) * computed_s
        endless = np.isnan(step_s)
        step_s[endless] = np.inf
        found.step_s[:] = step_s

    def _agreed_of_one_stage_s(self, ready_s: Floats) -> Floats:
        """When each replica has the mean of all gradients, which are ready then: [candidate,
        replica].
        """
        units = self._units
        replicas = self._shape.replicas
        seats = self._seats[..., 0]
        by_layer = self._problem.exchanged_bytes(self._shape)
        share_gbit = by_layer[-1] * GBIT / replicas
        one_way_gbit = share_gbit / 2
        source = seats[:, :, None]
        target = seats[:, None, :]
        pairs = source * len(units) + target
        sends_s = units.gbit_s(replicas).take(pairs)
        sends_s *= one_way_gbit
        ways_s = units.delay_s_apart.take(pairs)
        ways_s += sends_s
        # What a replica sums up it has when the last of the others' has come.
        arrives_s = ready_s[..., None] + ways_s
        summed_s = arrives_s.max(axis=1)
        # The sum sets off then, or behind what the same link was still sending.
        arrives_s += sends_s
        ways_s += summed_s[..., None]
        np.maximum(arrives_s, ways_s, out=ways_s)
        agreed_s: Floats = ways_s.max(axis=1)
        return agreed_s

    @property
    def _turn_s(self) -> Floats:
        """A micro-batch alone, up and down: [candidate, replica]."""
        forward_s: Floats = self._forward_s[..., -1]
        returns_s: Floats = self._returns_s[..., -1]
        top_s = forward_s + returns_s
        return top_s + self._ends_s[..., -1]

    def _slowest_s(self) -> Floats:
        slowest_s = np.maximum(self._forward_s, self._backward_s)
        links_s = np.maximum(self._out_s, self._back_s)
        # The last stage has no hop behind it.
        before_hop_s = slowest_s[..., :-1]
        np.maximum(before_hop_s, links_s, out=before_hop_s)
        return slowest_s

    def _interfaces(self) -> tuple[Floats, Floats]:
        """What each seat's machine sends and receives for a micro-batch, in seconds."""
        units = self._units
        seats = self._seats
        forward = self._forward_gbit
        backward = self._backward_gbit
        if not units.one_each:
            # What stays on a machine does not pass its interface.
            source = units.machine[self._here]
            target = units.machine[self._there]
            leaves = source != target
            forward = forward * leaves
            backward = backward * leaves
        sent = np.zeros(seats.shape)
        sent[..., :-1] = forward
        sent[..., 1:] += backward
        received = np.zeros(seats.shape)
        received[..., 1:] = forward
        received[..., :-1] += backward
        if units.relayed.any():
            # Through the interface of the first seat, both in and out.
            relayed = units.relayed[self._here, self._there]
            both_ways = self._forward_gbit + self._backward_gbit
            passed = both_ways * relayed
            of_hops = (1, 2)  # axes
            of_all_hops = passed.sum(axis=of_hops)
            sent[:, 0, 0] += of_all_hops
            received[:, 0, 0] += of_all_hops
        egress_gbps = units.egress_gbps[seats]
        ingress_gbps = units.ingress_gbps[seats]
        sent_s = self._of_machines(sent) / egress_gbps
        received_s = self._of_machines(received) / ingress_gbps
        return sent_s, received_s

    def _on_shared_cores(self, both_s: Floats) -> Floats:
        """By seat, how long the cores of its machine compute for a micro-batch of all its seats."""
        if self._units.one_each:
            return both_s
        cores = self._units.cores[self._seats]
        total_s: Floats = self._of_machines(both_s)
        return total_s / cores

    def _of_machines(self, sizes: Floats) -> Floats:
        """By seat, what all seats of its machine move."""
        units = self._units
        if units.one_each:
            return sizes
        # Each candidate has a number for each machine, so that one count sums up all of them.
        count = len(sizes)
        candidate = np.arange(count)[:, None, None]
        first = candidate * units.num_machines
        place = first + units.machine[self._seats]
        length = count * units.num_machines
        numbers = place.ravel()
        total = np.bincount(numbers, sizes.ravel(), length)
        of_seats: Floats = total[place]
        return of_seats

    def _waits_s(self) -> Floats:
        """Where memory, or the schedule itself, lets few micro-batches be under way."""
        shape = self._shape
        layers = self._problem.held(shape)
        held = self._of_layers(layers.held)
        held = np.maximum(held, 1.0)  # a job of which nobody knows what it holds
        memory_bytes = self._units.memory_bytes[self._seats]
        static = self._of_layers(layers.static)
        free = memory_bytes - layers.working - static
        fitting = np.floor(free / held)
        fitting = np.minimum(fitting, shape.num_microbatches)
        if shape.depths is not None:
            depths = np.array(shape.depths)
            fitting = np.minimum(fitting, depths)
        turns = shape.num_microbatches / fitting
        turn_s = self._turn_s[..., None]
        above_s = turn_s - self._ends_s
        waits_s = self._ends_s + above_s * turns
        fits = fitting >= 1
        return np.where(fits, waits_s, np.inf)

    def _exchange_s(self) -> Floats:
        """What the replicas of each stage take to agree: [candidate, stage].

        Each averages a share of 1 / R, which it gets from all others and gives back to all.
        """
        count, replicas, stages = self._seats.shape
        if replicas == 1:
            return np.zeros((count, stages))
        if self._cut_apart:
            return self._exchange_by_segment_s()
        by_layer = self._problem.exchanged_bytes(self._shape)
        # Replicas are cut alike: the first stands for all.
        size = self._of_layers(by_layer)[:, 0]
        groups = self._seats.transpose(0, 2, 1)
        return self._agreed_s(size, groups)

    def _exchange_by_segment_s(self) -> Floats:
        """Each rank exchanges its segments one behind the other: [candidate, stage]. A segment is
        as `schedule.segments` has it, here of all candidates at once.
        """
        count, replicas, _ = self._seats.shape
        by_layer = self._problem.exchanged_bytes(self._shape)
        num_layers = len(by_layer) - 1
        ends = np.broadcast_to(self._end, self._seats.shape)
        layers = np.arange(num_layers)
        # The stage of each layer: [candidate, replica, layer].
        held = (ends[..., None] <= layers).sum(axis=2)
        changes = np.diff(held, axis=2).any(axis=1)
        first = np.ones((count, 1), dtype=bool)
        begins = np.concatenate([first, changes], axis=1)
        candidate, start = np.nonzero(begins)
        # A segment ends where the next begins; the last one of a candidate with the model.
        stop = np.append(start[1:], 0)
        stop[stop == 0] = num_layers
        size = by_layer[stop] - by_layer[start]
        stages = held[candidate, :, start]  # [segment, replica]
        places = (candidate[:, None], np.arange(replicas), stages)
        groups = self._seats[places]
        takes_s = self._agreed_s(size[None], groups[None])[0]
        of_seats = np.zeros(self._seats.shape)
        np.add.at(of_seats, places, takes_s[:, None])
        longest: Floats = of_seats.max(axis=1)
        return longest

    def _agreed_s(self, size: Floats, groups: Ints) -> Floats:
        """What `groups` [candidate, group, replica] take to agree on `size` bytes, both ways:
        [candidate, group].
        """
        units = self._units
        replicas = groups.shape[2]
        share_gbit = size * GBIT / replicas
        source = groups[..., :, None]
        target = groups[..., None, :]
        # Flat, because a search looks up more of these than of anything else.
        pairs = source * len(units) + target
        gbps = units.gbps_apart.take(pairs)
        delay_s = units.delay_s_apart.take(pairs)
        of_pairs = (2, 3)  # axes
        slowest = gbps.min(axis=of_pairs)
        farthest_s = delay_s.max(axis=of_pairs)
        both_ways = np.minimum(units.egress_gbps, units.ingress_gbps)
        interfaces = both_ways[groups]
        interface = interfaces.min(axis=2)
        over_link_s = share_gbit / slowest
        others_gbit = share_gbit * (replicas - 1)
        over_interface_s = others_gbit / interface
        over_s = np.maximum(over_link_s, over_interface_s)
        if units.relayed.any():
            relayed = units.relayed.take(pairs)
            count = relayed.sum(axis=of_pairs)
            relay = self._seats[0, 0, 0]
            over_relay_s = share_gbit * count
            over_relay_s /= both_ways[relay]
            over_s = np.maximum(over_s, over_relay_s)
        total: Floats = over_s + 2 * farthest_s
        return total

    def _vote_s(self) -> Floats:
        """The farthest ballot to the coordinator, at the first seat, and the verdict back."""
        units = self._units
        count = len(self._seats)
        every = self._seats.reshape(count, -1)
        first = every[:, :1]
        there_s = units.delay_s[every, first]
        back_s = units.delay_s[first, every]
        farthest_there_s: Floats = there_s.max(axis=1)
        farthest_back_s: Floats = back_s.max(axis=1)
        return farthest_there_s + farthest_back_s


def _summed(steps: Floats) -> Floats:
    """What is before each stage, of `steps` from stage to stage."""
    *others, num_steps = steps.shape
    before = np.zeros((*others, num_steps + 1))
    np.cumsum(steps, axis=-1, out=before[..., 1:])
    return before
