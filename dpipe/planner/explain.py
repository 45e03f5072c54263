"""Why a plan is as fast as it is, and what would make it faster: by the estimate, which is what is
asked again under other conditions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dpipe.machines.machine import Cluster, Machine
from dpipe.placement.climb import Climb, Placed, best_of
from dpipe.placement.estimate import GBIT, Estimate, estimate
from dpipe.placement.priced import names_of
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import Starts
from dpipe.planner.decide import Decided
from dpipe.wire.format import wire_bytes

_FASTER_GBPS = 10.0  # of a link, in what is asked
_LINKS = 3  # that are told, those that bring most
_BRINGS = 0.005  # of the step, at least
_ROUNDS = 40  # of a climb with one machine more
_WIDTH = 48
_MUCH = 1 << 20


@dataclass(frozen=True)
class SeatReport:
    """One stage of one replica: what it holds, and how busy its machine is in a step."""

    replica: int
    stage: int
    machine: str
    layers: int
    computes: float  # shares of the step
    sends: float
    receives: float
    memory: float  # share of what the machine has; 0 where that is not known
    bound: str  # "compute", "egress", "ingress", "memory", or "delay"


@dataclass(frozen=True)
class LinkReport:
    """Between two stages of one replica, towards the later one and back."""

    replica: int
    stage: int  # the earlier of the two
    gbps: float
    back_gbps: float
    delay_ms: float
    full: float  # of the step's time, in which it sends; without delays
    back_full: float


@dataclass(frozen=True)
class WhatIf:
    """What another condition would bring."""

    change: str
    gain: float  # of the step: 0.08 is 8 % less


def seat_reports(decided: Decided) -> list[SeatReport]:
    """Of every seat, replica after replica."""
    placement = decided.best.placement
    stages = placement.shape.stages
    found = decided.best.trial.estimate
    step_s = float(found.step_s[0])
    bound = _bounds(found)
    cuts = placement.cuts
    reports = []
    for seat, name in enumerate(names_of(decided.problem, placement)):
        replica, stage = divmod(seat, stages)
        place = (0, replica, stage)  # of the one candidate
        report = SeatReport(
            replica=replica,
            stage=stage,
            machine=name,
            layers=cuts[replica % len(cuts)][stage],
            computes=float(found.computing_s[place]) / step_s,
            sends=float(found.sending_s[place]) / step_s,
            receives=float(found.receiving_s[place]) / step_s,
            memory=_memory(decided, name, stage),
            bound=bound[replica][stage],
        )
        reports.append(report)
    return reports


def _bounds(found: Estimate) -> list[list[str]]:
    """By replica and stage, which of the estimate's bounds is the longest."""
    bounds = {
        "compute": found.computes_s,
        "egress": found.sends_s,
        "ingress": found.receives_s,
        "memory": found.waits_s,
        "delay": found.passes_s,
    }
    of_plan = [bound[0] for bound in bounds.values()]
    # Of bounds that are as long the first is named: compute before a link.
    longest = np.argmax(of_plan, axis=0)
    names = np.array(list(bounds))
    by_seat: list[list[str]] = names[longest].tolist()
    return by_seat


def _memory(decided: Decided, name: str, stage: int) -> float:
    forecast = decided.best.forecast
    memory_gb = decided.problem.cluster.machine(name).memory_gb
    if forecast is None or not forecast.memory or memory_gb is None:
        return 0.0
    return forecast.memory[stage].total / (memory_gb * 1e9)


def link_reports(decided: Decided) -> list[LinkReport]:
    """Of every hop, replica after replica."""
    placement = decided.best.placement
    shape = placement.shape
    problem = decided.problem
    units = problem.units(shape.tensor_parallel)
    step_s = decided.best.step_us / 1e6
    forward, backward = problem.sent_bytes(shape)
    reports = []
    for replica, seats in enumerate(placement.seats.tolist()):
        for stage, (here, there) in enumerate(pairwise(seats)):
            last_layer = placement.ends_of(replica)[stage + 1] - 1
            forward_gbit = shape.num_microbatches * forward[stage, last_layer] * GBIT
            backward_gbit = shape.num_microbatches * backward[stage, last_layer] * GBIT
            gbps = float(units.gbps[here, there])
            back_gbps = float(units.gbps[there, here])
            report = LinkReport(
                replica=replica,
                stage=stage,
                gbps=gbps,
                back_gbps=back_gbps,
                delay_ms=float(units.delay_s[here, there]) * 1e3,
                full=float(forward_gbit / gbps / step_s),
                back_full=float(backward_gbit / back_gbps / step_s),
            )
            reports.append(report)
    return reports


def what_ifs(decided: Decided) -> list[WhatIf]:
    """Those that would bring something, the most first."""
    found = [*_faster_links(decided), *_smaller_formats(decided), *_one_more(decided)]
    worth = [each for each in found if each.gain >= _BRINGS]
    return sorted(worth, key=lambda each: -each.gain)


def _faster_links(decided: Decided) -> Iterator[WhatIf]:
    """Each link between stages, in both directions; the best few."""
    placement = decided.best.placement
    units = decided.problem.units(placement.shape.tensor_parallel)
    gains = []
    for replica in placement.seats:
        for here, there in pairwise(replica.tolist()):
            if units.gbps[here, there] < _FASTER_GBPS:
                gains.append(_faster_link(decided, here, there))
    gains.sort(key=lambda each: -each.gain)
    yield from gains[:_LINKS]


def _faster_link(decided: Decided, here: int, there: int) -> WhatIf:
    problem = decided.problem
    placement = decided.best.placement
    size = placement.shape.tensor_parallel
    units = problem.units(size)
    gbps = units.gbps.copy()
    gbps[here, there] = _FASTER_GBPS
    gbps[there, here] = _FASTER_GBPS
    # An egress that is as fast as the fastest link would hide what the faster one brings.
    fastest_gbps = gbps.max(axis=1, where=gbps > 0, initial=0)
    egress_gbps = np.maximum(units.egress_gbps, fastest_gbps)
    faster = replace(units, gbps=gbps, egress_gbps=egress_gbps)
    after_s = _step_s(problem.with_units(size, faster), placement)
    names = problem.cluster.names
    first, second = sorted(names[units.machine[unit]] for unit in (here, there))
    change = f"{_FASTER_GBPS:g} Gbit/s on link {first} - {second}"
    return _gain(decided, change, after_s)


def _smaller_formats(decided: Decided) -> Iterator[WhatIf]:
    """Between stages and between replicas, of what the job leaves open but the user has not
    allowed.
    """
    placement = decided.best.placement
    shape = placement.shape
    # What the job states is the user's decision, and one stage sends nothing.
    stated = decided.problem.choices.stated_wire is not None
    if stated or shape.stages == 1:
        return
    used = {*shape.forward_wires, *shape.backward_wires}
    now_bytes = min(wire_bytes(name, _MUCH) for name in used)
    for name in ("bf16", "int8"):
        if wire_bytes(name, _MUCH) >= now_bytes:
            continue
        hops = (name,) * (shape.stages - 1)
        smaller = replace(shape, forward_wires=hops, backward_wires=hops)
        after = _step_s(decided.problem, replace(placement, shape=smaller))
        yield _gain(decided, f"--formats none,{name} ({name} between stages)", after)


def _one_more(decided: Decided) -> Iterator[WhatIf]:
    """Like the machine that is fastest, beside it."""
    problem = decided.problem
    shape = decided.best.placement.shape
    times = problem.times(shape)
    units = problem.units(shape.tensor_parallel)
    layers_s = times.forward + times.backward
    whole_s = layers_s[units.kind, -1]
    fastest = units.machine[np.argmin(whole_s)]
    model = problem.cluster.machines[fastest]
    # What is remembered of the cluster as it was has arrays that are too short.
    cluster = _with_one_more(problem.cluster, model)
    larger = replace(problem, cluster=cluster, _known={})
    best_s = float(decided.best.trial.estimate.step_s[0])
    for start in _starts(larger, decided):
        climb = Climb(larger, decided.objective, start, seed=0)
        # Short, from where the plan is: what a whole search would find is at least as good.
        climb.run(_ROUNDS, _WIDTH)
        best_s = min(best_s, climb.best.step_s)
    yield _gain(decided, f"one more machine like {model.name}", best_s)


def _starts(larger: PlanProblem, decided: Decided) -> Iterator[Placed]:
    """The plan itself, where the new machine can take somebody's place, and one more stage."""
    starts = Starts(larger, decided.objective)
    shape = decided.best.placement.shape
    yield _extended(larger, decided, starts.fitted(shape))
    if shape.stages == larger.num_layers or larger.choices.stages is not None:
        return
    hops = larger.choices.smallest_wires(shape.stages)
    longer = replace(
        shape,
        stages=shape.stages + 1,
        forward_wires=hops.forward,
        backward_wires=hops.backward,
    )
    if longer.num_seats <= len(larger.units(shape.tensor_parallel)):
        yield starts.fitted(longer)


def _extended(larger: PlanProblem, decided: Decided, otherwise: Placed) -> Placed:
    """The plan's own placement, with the new machine left out, if units are numbered as before."""
    placement = decided.best.placement
    num_units = len(larger.units(placement.shape.tensor_parallel))
    new = np.arange(len(placement.order), num_units)
    if not len(new) or len(placement.cuts) > 1:
        return otherwise
    orders = np.concatenate([placement.order, new])[None]
    ends = placement.ends[None]
    return best_of(larger, placement.shape, decided.objective, orders, ends)


def _with_one_more(cluster: Cluster, model: Machine) -> Cluster:
    """Behind all others, with the links of `model`, and between the two the best of these."""
    name = f"another {model.name}"[:100]
    links = dict(cluster.links)
    # A link to itself is loopback, which says nothing of the way to another machine.
    own = []
    for (source, target), link in cluster.links.items():
        if source == model.name and target != model.name:
            links[name, target] = link
            own.append(link)
        if target == model.name and source != model.name:
            links[source, name] = link
    if own:
        nearest = max(own, key=lambda link: (link.bandwidth_gbps, -link.delay_ms))
        links[name, model.name] = nearest
        links[model.name, name] = nearest
    machines = (*cluster.machines, replace(model, name=name))
    return replace(cluster, machines=machines, links=links)


def _step_s(problem: PlanProblem, placement: Placed) -> float:
    seats = placement.seats[None]
    ends = placement.ends[None]
    found = estimate(problem, placement.shape, seats, ends)
    return float(found.step_s[0])


def _gain(decided: Decided, change: str, after_s: float) -> WhatIf:
    before_s = float(decided.best.trial.estimate.step_s[0])
    return WhatIf(change, 1 - after_s / before_s)
