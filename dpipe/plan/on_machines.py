"""What a step takes on the machines of `predict.machines`, by replica and stage. No torch.

Ranks sit in the order of the file: those of the first replica first.

    machines.toml   a (devices = 2)  b  c         2 stages, 2 replicas
    replica 0       a                a            stage 0 on a, stage 1 on a
    replica 1                           b  c      stage 0 on b, stage 1 on c
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.machines.file import load_machines
from dpipe.machines.machine import Cluster, LayerTime, Machine
from dpipe.machines.seats import Seats, hosts_of, seats_in_order
from dpipe.network.link import Host
from dpipe.plan.costs import LayerCosts
from dpipe.plan.tensor_parallel import Times
from dpipe.timeline.cost import Cost
from dpipe.tokenizer.tokenizer import vocabulary_of


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run sit; a tensor-parallel group is one of them."""

    cluster: Cluster
    seats: Seats  # by rank

    def machine(self, rank: int) -> Machine:
        return self.cluster.machine(self.seats[rank])

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Machines whose ranks have to share cores."""
        hosts = hosts_of(self.cluster, self.seats)
        crowded = []
        for host in hosts:
            if host.computes and host.cores < len(host.ranks):
                crowded.append(host)
        return tuple(crowded)


def placement_of(config: Config) -> Placement | None:
    """None without `predict.machines`. Raises `ConfigError` where the machines hold fewer ranks
    than the run has, `ProfileError` for links that are missing between those that hold some.
    """
    path = config.predict.machines
    if path is None:
        return None
    cluster = load_machines(path)
    refuse_times_of_other_model(config, cluster)
    seats = config.predict.seats or seats_in_order(cluster, config.ranks_per_machine)
    num_ranks = config.num_machines
    if len(seats) < num_ranks:
        of_group = ""
        if config.ranks_per_machine > 1:
            of_group = f" of {config.ranks_per_machine} devices each, on one machine"
        raise ConfigError(
            f"the run takes {num_ranks} places{of_group}, but the machines of {path} have "
            f"{len(seats)}: list more machines or devices, or give the run fewer stages or replicas"
        )
    seats = seats[:num_ranks]
    cluster.check_links(dict.fromkeys(seats))
    return Placement(cluster, seats)


def digest_of_layers(config: Config) -> str:
    """Says whether two configurations have layers that take the same time on one machine."""
    # Of bytes there are 256, which files that were measured before do not say.
    if config.data.tokenizer == "bytes" or not config.model.family.computes:
        return config.layers_digest()
    return config.layers_digest(vocabulary_of(config))


def refuse_times_of_other_model(config: Config, cluster: Cluster) -> None:
    """Raises `ConfigError` where layers were measured with another model, or at another precision.
    What a file written by hand says is believed.
    """
    measured = cluster.measured
    has_times = any(machine.layers for machine in cluster.machines)
    if measured is None or not has_times or not config.model.family.computes:
        return
    digest = digest_of_layers(config)
    if measured.model != digest:
        raise ConfigError(
            f"the layers in {cluster.name} were measured with another model or precision: "
            f"[measured] model is {measured.model}, that of the job is {digest}; "
            "measure with this job (dpipe measure), or take [measured] out of the file if the "
            "times hold for it as well"
        )


def costs_on(
    config: Config,
    placement: Placement,
    cost_of: Callable[[Machine], Cost],
) -> tuple[Cost, ...]:
    """By replica; `cost_of` is what all stages would take on one machine."""
    by_machine: dict[str, Cost] = {}
    for name in placement.seats:
        if name not in by_machine:
            by_machine[name] = cost_of(placement.cluster.machine(name))
    num_ranks = config.pipeline.ranks
    costs = []
    for first in range(0, len(placement.seats), num_ranks):
        last = first + num_ranks
        names = placement.seats[first:last]
        of_replica = _of_stages(by_machine, names)
        costs.append(of_replica)
    return tuple(costs)


def _of_stages(by_machine: Mapping[str, Cost], names: Sequence[str]) -> Cost:
    """Of one replica, whose ranks are on the machines `names`; stages are dealt out in turn."""
    # What is sent and held does not depend on the machine.
    any_of_them = by_machine[names[0]]
    costs = []
    for stage in range(any_of_them.num_stages):
        place = stage % len(names)
        name = names[place]
        cost = by_machine[name]
        costs.append(cost)
    return replace(
        any_of_them,
        forward_us=tuple(cost.forward_us[stage] for stage, cost in enumerate(costs)),
        backward_us=tuple(cost.backward_us[stage] for stage, cost in enumerate(costs)),
        input_us=tuple(cost.input_us[stage] for stage, cost in enumerate(costs)),
        weight_us=tuple(cost.weight_us[stage] for stage, cost in enumerate(costs)),
    )


def slowest(costs: Sequence[Cost]) -> Cost:
    """Each stage as slow as in the replica where it is slowest, and each message as large: what an
    order of all replicas is looked for with.
    """
    return replace(
        costs[0],
        forward_us=_longest([cost.forward_us for cost in costs]),
        backward_us=_longest([cost.backward_us for cost in costs]),
        input_us=_longest([cost.input_us for cost in costs]),
        weight_us=_longest([cost.weight_us for cost in costs]),
        activation_bytes=_largest([cost.activation_bytes for cost in costs]),
        gradient_bytes=_largest([cost.gradient_bytes for cost in costs]),
    )


def _largest(sent_bytes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """By hop, of all replicas."""
    largest = []
    for of_hop in zip(*sent_bytes, strict=True):
        most_bytes = max(of_hop)
        largest.append(most_bytes)
    return tuple(largest)


def _longest(taken_us: Sequence[Times]) -> Times:
    """By stage, of all replicas."""
    longest = []
    for of_stage in zip(*taken_us, strict=True):
        most_us = max(of_stage)
        longest.append(most_us)
    return tuple(longest)


def layers_on(config: Config, layers: LayerCosts, machine: Machine) -> LayerCosts:
    """`layers`, which are at `predict.gflops`, as they were measured on `machine`, or else at its
    own gflops. Raises `ProfileError` for a machine where some were measured and others were not.
    """
    if not machine.layers:
        # Where nothing is known of a machine, it is as fast as the job says of all.
        gflops = machine.gflops or config.predict.gflops
        times_faster = gflops / config.predict.gflops
        return replace(
            layers,
            forward_s=tuple(seconds / times_faster for seconds in layers.forward_s),
            backward_s=tuple(seconds / times_faster for seconds in layers.backward_s),
            core_s=tuple(seconds / times_faster for seconds in layers.core_s),
        )
    size = config.microbatch_size
    kinds = layer_kinds(config, len(layers.forward_s))
    measured = [_measured(machine, kind, size) for kind in kinds]
    forward_s = tuple(layer.forward_ms / 1e3 for layer in measured)
    # Attention cores are not timed apart from their block: by their share of its operations.
    core_s = []
    counted = zip(forward_s, layers.forward_s, layers.core_s, strict=True)
    for seconds, counted_s, counted_core_s in counted:
        share_s = 0.0
        if counted_s:
            share_s = seconds * counted_core_s / counted_s
        core_s.append(share_s)
    return replace(
        layers,
        forward_s=forward_s,
        backward_s=tuple(layer.backward_ms / 1e3 for layer in measured),
        core_s=tuple(core_s),
        input_s=tuple(_half_ms(layer, layer.backward_input_ms) / 1e3 for layer in measured),
        weight_s=tuple(_half_ms(layer, layer.backward_weight_ms) / 1e3 for layer in measured),
    )


def _measured(machine: Machine, kind: str | int, size: int) -> LayerTime:
    """What lies on the line through the two nearest sizes that were measured, or as much more as
    the micro-batch is larger than the only one. Raises `ProfileError` where none was.
    """
    layers = [layer for layer in machine.layers if layer.kind == kind]
    layers.sort(key=lambda layer: abs(layer.micro_batch_size - size))
    if not layers or layers[0].micro_batch_size == size:
        return machine.layer_time(kind, size)
    first = layers[0]
    if len(layers) == 1:
        return _scaled(first, size / first.micro_batch_size, size)
    second = layers[1]
    step = second.micro_batch_size - first.micro_batch_size
    share = (size - first.micro_batch_size) / step
    backward_ms = _on_line(first.backward_ms, second.backward_ms, share)
    forward_ms = _on_line(first.forward_ms, second.forward_ms, share)
    by = 1.0
    if first.backward_ms:
        by = backward_ms / first.backward_ms
    # The halves of a split backward pass as they were at the nearest size.
    halves = _scaled(first, by, size)
    return replace(halves, forward_ms=forward_ms, backward_ms=backward_ms)


def _on_line(first: float, second: float, share: float) -> float:
    return max(0.0, first + (second - first) * share)


def _scaled(layer: LayerTime, by: float, size: int) -> LayerTime:
    input_ms = layer.backward_input_ms
    weight_ms = layer.backward_weight_ms
    return replace(
        layer,
        micro_batch_size=size,
        forward_ms=layer.forward_ms * by,
        backward_ms=layer.backward_ms * by,
        backward_input_ms=None if input_ms is None else input_ms * by,
        backward_weight_ms=None if weight_ms is None else weight_ms * by,
    )


def _half_ms(layer: LayerTime, measured_ms: float | None) -> float:
    return layer.backward_ms / 2 if measured_ms is None else measured_ms


def layer_kinds(config: Config, num_layers: int) -> Sequence[str | int]:
    """By layer, what `machines.toml` calls it."""
    if config.model.is_transformer:
        return ("embedding", *["block"] * (num_layers - 2), "head")
    return range(num_layers)
