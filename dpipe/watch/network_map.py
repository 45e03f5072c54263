"""Who holds which layers, the links between them, and what binds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from dpipe.config.load import Config
from dpipe.errors import DpipeError
from dpipe.machines.file import lists_machines, load_machines
from dpipe.machines.machine import Cluster
from dpipe.machines.seats import seats_in_order
from dpipe.network.link import Network
from dpipe.watch.picture import LinkView, SeatView
from dpipe.watch.points import RunPoints, by_name

_NEARLY_FULL = 0.5  # of a step: what is less full than that binds nothing


@dataclass(frozen=True)
class KnownMachines:
    """What a file of machines says of a run's ranks; nothing where there is none."""

    cluster: Cluster | None = None
    names: tuple[str, ...] = ()  # by node: a rank, or a tensor-parallel group

    @property
    def price_per_hour(self) -> float | None:
        """Of all machines that the run uses; None where one of them has no price."""
        if self.cluster is None or not self.names:
            return None
        total = 0.0
        for name in dict.fromkeys(self.names):
            price = self.cluster.machine(name).price_per_hour
            if price is None:
                return None
            total += price
        return total

    def name_of(self, node: int) -> str | None:
        return self.names[node] if node < len(self.names) else None

    def relays(self, source: int, target: int) -> bool:
        """Whether the file says that the coordinator's machine passes on what two nodes send each
        other.
        """
        if self.cluster is None:
            return False
        return (self.name_of(source), self.name_of(target)) in self.cluster.relayed

    def memory_mb(self, node: int) -> float | None:
        """What a rank of the node may hold."""
        name = self.name_of(node)
        if self.cluster is None or name is None:
            return None
        memory_gb = self.cluster.machine(name).memory_gb
        return None if memory_gb is None else memory_gb * 1e3


@dataclass(frozen=True)
class RunLayout:
    """What a configuration says of a run's ranks before anything is measured."""

    config: Config
    machines: KnownMachines = KnownMachines()
    network: Network | None = None  # None: not stated, or it cannot be read here
    split: tuple[int, ...] = ()  # layers a stage
    rank_of_stage: tuple[int, ...] = ()
    busy: Mapping[int, float] = field(default_factory=dict)  # by rank, shares of a step

    def node_of(self, rank: int) -> int:
        return rank // self.config.ranks_per_machine

    def layers_of(self, pp_rank: int) -> str | None:
        """Such as "layers 0-3", or "layers 0-1, 4-5" of two stages."""
        ends = list(accumulate(self.split))
        ranges = []
        for stage, rank in enumerate(self.rank_of_stage):
            if rank == pp_rank and stage < len(ends):
                first = ends[stage] - self.split[stage]
                last = ends[stage] - 1
                ranges.append(str(first) if first == last else f"{first}–{last}")
        if not ranges:
            return None
        word = "layer" if len(ranges) == 1 and "–" not in ranges[0] else "layers"
        return f"{word} {', '.join(ranges)}"


def known_machines(config: Config) -> KnownMachines:
    """Of the file that the configuration names. Raises `DpipeError` if it cannot be read."""
    path = config.network_profile
    if path is None or not lists_machines(path):
        return KnownMachines()
    cluster = load_machines(path)
    names = config.predict.seats or seats_in_order(cluster, config.ranks_per_machine)
    return KnownMachines(cluster, tuple(names)[: config.num_machines])


def seat_views(layout: RunLayout, row: Mapping[str, Any]) -> tuple[SeatView, ...]:
    """By rank, with what the newest row of metrics says of its memory."""
    config = layout.config
    # On a GPU that is what runs out.
    memory = by_name(row.get("gpu_memory_mb")) or by_name(row.get("memory_mb"))
    seats = []
    for rank in range(config.world_size):
        here = config.ranks_of(rank)
        node = layout.node_of(rank)
        seat = SeatView(
            rank=rank,
            stage=here.pp_rank,
            replica=here.dp_rank,
            machine=layout.machines.name_of(node),
            layers=layout.layers_of(here.pp_rank),
            memory_mb=memory.get(str(rank)),
            limit_mb=layout.machines.memory_mb(node),
            busy=layout.busy.get(rank),
        )
        seats.append(seat)
    return tuple(seats)


def link_views(layout: RunLayout | None, points: RunPoints) -> tuple[LinkView, ...]:
    """By the links that were used, "0->1" as in a row of metrics."""
    views = []
    for name in sorted(points.rates, key=_by_ends):
        source, _, target = name.partition("->")
        mb_per_s = points.rates[name]
        rate_gbps, delay_ms = _stated(layout, source, target)
        full = None if rate_gbps is None else mb_per_s * 8 / 1e3 / rate_gbps
        # What a run has found counts as much as what was known before it.
        relayed = name in points.relayed or _relays(layout, source, target)
        view = LinkView(source, target, mb_per_s, rate_gbps, delay_ms, full, relayed)
        views.append(view)
    return tuple(views)


def _relays(layout: RunLayout | None, source: str, target: str) -> bool:
    if layout is None or not (source.isdecimal() and target.isdecimal()):
        return False
    nodes = [layout.node_of(int(rank)) for rank in (source, target)]
    return layout.machines.relays(*nodes)


def _by_ends(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Ranks by their number, and servers, which have names, behind them."""
    ends = name.split("->")
    return tuple((not end.isdecimal(), int(end) if end.isdecimal() else 0, end) for end in ends)


def _stated(
    layout: RunLayout | None, source: str, target: str
) -> tuple[float | None, float | None]:
    """Rate (Gbit/s) and delay (ms) of the link by the run's network profile."""
    if layout is None or layout.network is None:
        return None, None
    if not (source.isdecimal() and target.isdecimal()):
        return None, None
    from_node = layout.node_of(int(source))
    to_node = layout.node_of(int(target))
    # Ranks of one machine, which no profile describes.
    if from_node == to_node:
        return None, None
    try:
        link = layout.network.link(from_node, to_node)
        return layout.network.rate_gbps(from_node, to_node), link.delay_ms
    except DpipeError:  # a pair that the profile does not have
        return None, None


def with_binding(
    seats: Sequence[SeatView], links: Sequence[LinkView]
) -> tuple[tuple[SeatView, ...], tuple[LinkView, ...], str]:
    """The same with the fullest marked, and a sentence that says which it is."""
    busiest = max(seats, key=lambda seat: seat.busy or 0.0, default=None)
    fullest = max(links, key=lambda link: link.full or 0.0, default=None)
    busy = (busiest.busy or 0.0) if busiest else 0.0
    full = (fullest.full or 0.0) if fullest else 0.0
    if not (busy or full):
        return tuple(seats), tuple(links), ""
    if max(busy, full) < _NEARLY_FULL:
        sentence = (
            f"Nothing is full: the busiest rank computes {busy:.0%} of a step, the fullest link "
            f"is at {full:.0%} of its rate. A step waits for delays and for its own order."
        )
        return tuple(seats), tuple(links), sentence
    if busiest and busy >= full:
        marked = [replace(seat, binds=seat.rank == busiest.rank) for seat in seats]
        sentence = f"Rank {busiest.rank} binds: it computes {busy:.0%} of a step."
        return tuple(marked), tuple(links), sentence
    assert fullest is not None, "a link is fuller than the busiest rank"
    drawn = [replace(link, binds=link == fullest) for link in links]
    sentence = (
        f"The link {fullest.source} → {fullest.target} binds: {full:.0%} of its rate is used."
    )
    return tuple(seats), tuple(drawn), sentence
