"""What all ranks have reported, as machines with names and links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import permutations

from dpipe.machines.machine import Cluster, LayerTime, Machine, Measurement
from dpipe.measure.pings import Delay
from dpipe.measure.reports import LayerReport, MachineReport, StreamReport, TogetherReport
from dpipe.measure.rounds import Pair, pair_of
from dpipe.network.link import Link

_LONGEST_ADDRESS = 100  # that a file of machines takes


@dataclass(frozen=True)
class MeasuredCluster:
    """Of all machines, the same on every rank."""

    cluster: Cluster
    problems: tuple[str, ...]  # who cannot talk with whom, and what to doubt; a line each


@dataclass
class FoundLinks:
    """What is known so far, by rank."""

    delays: dict[Pair, Delay] = field(default_factory=dict)  # of both directions
    streams: dict[tuple[int, int], StreamReport] = field(default_factory=dict)  # from, to
    reasons: dict[Pair, str] = field(default_factory=dict)  # why a pair cannot talk
    relayed: frozenset[Pair] = frozenset()
    in_turns: bool = True  # whether no direction was measured while the other was

    def refuse(self, pair: Pair, reason: str) -> None:
        """The first reason stays."""
        self.reasons.setdefault(pair, reason)

    def round_trips_s(self) -> dict[Pair, float]:
        """Of the pairs that can talk."""
        talking = {}
        for pair, delay in self.delays.items():
            if pair not in self.reasons:
                talking[pair] = 2 * delay.one_way_ms * 1e-3
        return talking

    def measured(self) -> dict[tuple[int, int], Link]:
        """Of the pairs that can talk in both directions: one that is left out would be taken to be
        like the other.
        """
        links = {}
        for (source, target), stream in self.streams.items():
            pair = pair_of(source, target)
            if pair in self.reasons or (target, source) not in self.streams:
                continue
            delay = self.delays[pair]
            delay_ms = _short(delay.one_way_ms)
            links[source, target] = Link(
                delay_ms=delay_ms,
                bandwidth_gbps=_short(stream.gbps),
                jitter_ms=min(_short(delay.jitter_ms), delay_ms),
                loss_percent=_short(stream.loss_percent),
            )
        return links


def measured_alone(here: MachineReport, model: str) -> MeasuredCluster:
    """One machine, of which nothing but itself is known."""
    nothing = TogetherReport(egress_gbps=0, ingress_gbps=0)
    return measured([here], [nothing], {0: None}, FoundLinks(), Measurement(date_now(), model))


def date_now() -> str:
    """In UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def measured(
    reports: Sequence[MachineReport],
    together: Sequence[TogetherReport],
    addresses: Mapping[int, str | None],
    found: FoundLinks,
    measurement: Measurement,
) -> MeasuredCluster:
    """All by rank."""
    names = _unique([report.name for report in reports])
    links = found.measured()
    machines = []
    for rank, report in enumerate(reports):
        bounds = _bounds(rank, together[rank], links)
        machines.append(_machine(names[rank], addresses[rank], report, bounds))
    named = {(names[source], names[target]): link for (source, target), link in links.items()}
    relayed = frozenset(
        (names[source], names[target])
        for source, target in links
        if pair_of(source, target) in found.relayed
    )
    cluster = Cluster(tuple(machines), named, measured=measurement, relayed=relayed)
    return MeasuredCluster(cluster, _problems(names, found, links))


def _unique(names: Sequence[str]) -> list[str]:
    """Machines of one name, as containers may be, get their rank behind it."""
    unique: list[str] = []
    for rank, given in enumerate(names):
        name = given
        if names.count(given) > 1:
            name = f"{given}-{rank}"
        # Somebody may have called another machine just that.
        while name in unique or (name != given and name in names):
            name += "-"
        unique.append(name)
    return unique


def _bounds(
    rank: int, together: TogetherReport, links: Mapping[tuple[int, int], Link]
) -> TogetherReport:
    """What a machine sends and receives at most. If it carried more for one peer alone than with
    all at once, it was the others who could take or give no more.
    """
    egress = [together.egress_gbps]
    ingress = [together.ingress_gbps]
    for (source, target), link in links.items():
        if source == rank:
            egress.append(link.bandwidth_gbps)
        if target == rank:
            ingress.append(link.bandwidth_gbps)
    return TogetherReport(
        egress_gbps=max(egress),
        ingress_gbps=max(ingress),
    )


def _machine(
    name: str,
    address: str | None,
    report: MachineReport,
    bounds: TogetherReport,
) -> Machine:
    """What is 0 was not measured."""
    host = None
    if address is not None and len(address) <= _LONGEST_ADDRESS:
        host = address.rpartition(":")[0]
    # The last, should a rank say something twice.
    layers = {(layer.kind, layer.micro_batch_size): layer for layer in report.layers}
    return Machine(
        name=name,
        host=host,
        device=report.device,
        devices=report.devices,
        cores=report.cores,
        memory_gb=_short(report.memory_gb) or None,
        price_per_hour=report.price_per_hour,
        egress_gbps=_short(bounds.egress_gbps) or None,
        ingress_gbps=_short(bounds.ingress_gbps) or None,
        layers=tuple(_layer_time(layer) for layer in layers.values()),
    )


def _layer_time(layer: LayerReport) -> LayerTime:
    return LayerTime(
        layer.kind,
        layer.micro_batch_size,
        forward_ms=_short(layer.forward_ms),
        backward_ms=_short(layer.backward_ms),
        backward_input_ms=_short(layer.backward_input_ms),
        backward_weight_ms=_short(layer.backward_weight_ms),
    )


def _short(value: float) -> float:
    """Four digits: nothing here is known better."""
    return float(f"{value:.4g}")


def _problems(
    names: Sequence[str], found: FoundLinks, links: Mapping[tuple[int, int], Link]
) -> tuple[str, ...]:
    lines = []
    if not found.in_turns:
        lines.append(
            "so many machines are so far apart that links with a round trip of 40 ms or more were "
            "measured both ways at once: they may carry up to half as much again"
        )
    for source, target in permutations(range(len(names)), 2):
        ends = f"{names[source]} and {names[target]}"
        reason = found.reasons.get((source, target), "one of them has reported nothing")
        if (source, target) not in links:
            if source < target:
                lines.append(f"{ends} cannot talk: {reason}")
            continue
        if source < target and (source, target) in found.relayed:
            lines.append(
                f"{ends} cannot dial each other: what is said here of their link is that of the "
                "relay on the coordinator's machine"
            )
        if found.streams[source, target].rising:
            lines.append(
                f"{names[source]} to {names[target]}: its time was over while its rate was still "
                "rising, so that it carries more than is said here"
            )
    return tuple(lines)
