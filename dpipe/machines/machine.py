"""What is known of a cluster's machines and of the links between them, by name."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import permutations
from typing import Any

from dpipe.errors import ProfileError
from dpipe.network.link import LOOPBACK, Link

KINDS = ("embedding", "block", "head")
MOST_MACHINES = 4096
_LONGEST_NAME = 100
_NAMED = 6  # missing links that an error names

Pair = tuple[str, str]  # from, to


@dataclass(frozen=True, slots=True)
class LayerTime:
    """What one kind of layer takes on a machine, for one micro-batch of one replica."""

    kind: str | int  # one of KINDS, or the index of a layer of the user's own
    micro_batch_size: int
    forward_ms: float
    backward_ms: float  # of a whole backward
    backward_input_ms: float | None = None  # of a split one, its half for the input
    backward_weight_ms: float | None = None  # and its half for the weights

    def __post_init__(self) -> None:
        known = self.kind >= 0 if isinstance(self.kind, int) else self.kind in KINDS
        if not known:
            quoted = ", ".join(f'"{kind}"' for kind in KINDS)
            raise ProfileError(
                f"kind must be one of {quoted}, or the index of a layer of your own, got "
                f"{self.kind!r:.100}"
            )
        _at_least(1, self, "micro_batch_size")
        _not_negative(self, "forward_ms", "backward_ms", "backward_input_ms", "backward_weight_ms")
        if (self.backward_input_ms is None) != (self.backward_weight_ms is None):
            raise ProfileError(
                "backward_input_ms and backward_weight_ms are the two halves of a split backward: "
                "give both, or neither"
            )


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, on which one rank sits, or several. None: not known."""

    name: str
    host: str | None = None  # where it is reached
    device: str = "cpu"  # what torch calls it, with its name on a GPU
    devices: int = 1  # how many ranks it can hold
    cores: int | None = None  # shared by the ranks that sit on it; None: enough for all
    memory_gb: float | None = None  # free, of each device
    gflops: float | None = None  # of each device, where its layers have not been measured
    price_per_hour: float | None = None  # of the whole machine
    egress_gbps: float | None = None  # sent to all at once; None: as much as its fastest link
    ingress_gbps: float | None = None  # received from all at once; None: its links alone bound it
    layers: tuple[LayerTime, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        _check_name(self.device, "device")
        if self.host is not None:
            _check_name(self.host, "host")
        _at_least(1, self, "devices", "cores")
        _positive(self, "memory_gb", "gflops", "egress_gbps", "ingress_gbps")
        _not_negative(self, "price_per_hour")
        twice = _first_twice((layer.kind, layer.micro_batch_size) for layer in self.layers)
        if twice is not None:
            kind, size = twice
            raise ProfileError(f"layer {kind!r} with micro_batch_size {size} is listed twice")

    def layer_time(self, kind: str | int, micro_batch_size: int) -> LayerTime:
        """Raises `ProfileError`, with the sizes that were measured, for one that was not."""
        sizes = []
        for layer in self.layers:
            if layer.kind == kind:
                if layer.micro_batch_size == micro_batch_size:
                    return layer
                sizes.append(layer.micro_batch_size)
        raise ProfileError(
            f"machine {self.name!r} says nothing of layer {kind!r} with micro_batch_size "
            f"{micro_batch_size}; measured: {sorted(sizes) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """When the machines were measured, and with which model."""

    at: str  # ISO 8601, such as 2026-11-23T12:00:00Z
    model: str  # a digest of what the times of layers depend on

    def __post_init__(self) -> None:
        _check_name(self.model, "model")
        try:
            datetime.fromisoformat(self.at)
        except ValueError:
            raise ProfileError(
                f"at must be a time such as 2026-11-23T12:00:00Z, got {self.at!r:.100}"
            ) from None


@dataclass(frozen=True)
class Cluster:
    """All machines, in the order of the file, and the links between them.

    `links` has each direction by itself; where one is given alone, the other is like it. A pair
    that it lacks has the default link; without one the two cannot talk. A link from a machine to
    itself is between two ranks that both sit on it.
    """

    machines: tuple[Machine, ...]
    links: Mapping[Pair, Link] = field(default_factory=dict)
    default_link: Link | None = None
    measured: Measurement | None = None
    name: str = "machines"
    relayed: frozenset[Pair] = frozenset()  # links that pass the coordinator's machine

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        if not 1 <= len(self.machines) <= MOST_MACHINES:
            raise ProfileError(
                f"it has {len(self.machines)} machines; list each as [[machine]], at least one and "
                f"at most {MOST_MACHINES}"
            )
        twice = _first_twice(self.names)
        if twice is not None:
            raise ProfileError(f"machine {twice!r} is listed twice; names must differ")
        # A link that is given one way stands for both, which no reader has to know from here on.
        links = dict(self.links)
        for (source, target), link in self.links.items():
            self._check_end(source, target, source)
            self._check_end(source, target, target)
            links.setdefault((target, source), link)
        back = {(target, source) for source, target in self.relayed}
        relayed = self.relayed | back
        if self.default_link is not None:
            # Of its own, as a file says of a link whether it is relayed.
            links = dict.fromkeys(sorted(relayed), self.default_link) | links
        object.__setattr__(self, "links", links)  # the way into a frozen dataclass
        object.__setattr__(self, "relayed", relayed)

    def _check_end(self, source: str, target: str, end: str) -> None:
        try:
            self.machine(end)
        except ProfileError as error:
            raise ProfileError(
                f"[[link]] from {source!r:.100} to {target!r:.100}: {error}"
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self.machines)

    @cached_property
    def _by_name(self) -> Mapping[str, Machine]:
        return {machine.name: machine for machine in self.machines}

    def machine(self, name: str) -> Machine:
        """Raises `ProfileError`, with the names that there are, for another."""
        if name not in self._by_name:
            known = ", ".join(self.names[:_NAMED])
            more = _and_more(len(self.names))
            raise ProfileError(f"there is no machine {name!r:.100}; there are {known}{more}")
        return self._by_name[name]

    @cached_property
    def relay(self) -> str | None:
        """Where links are relayed, the machine whose coordinator does it, on which rank 0 must be:
        the first that has no such link itself. None where no link is relayed. Raises
        `ProfileError` where every machine has one.
        """
        if not self.relayed:
            return None
        hidden = {name for pair in self.relayed for name in pair}
        for name in self.names:
            if name not in hidden:
                return name
        raise ProfileError(
            "every machine has a relayed link, so that none is left for the coordinator, which all "
            "must be able to dial: add a machine that they reach, or leave out relayed = true of "
            "one that they do"
        )

    def link(self, source: str, target: str) -> Link | None:
        """None where the two cannot talk."""
        if source == target:
            return self.links.get((source, target), LOOPBACK)
        return self.links.get((source, target), self.default_link)

    def missing(self, names: Iterable[str]) -> list[Pair]:
        """The pairs of these machines that have no link."""
        return [pair for pair in permutations(names, 2) if self.link(*pair) is None]

    def check_links(self, names: Iterable[str]) -> None:
        """Raises `ProfileError` naming the pairs of these machines that have no link."""
        missing = self.missing(names)
        if not missing:
            return
        named = ", ".join(f"{source} to {target}" for source, target in missing[:_NAMED])
        raise ProfileError(
            f"there is no link from machine {named}{_and_more(len(missing))}; list each pair as "
            "[[link]], leave out one of the two machines, or give [default_link]"
        )


def _and_more(count: int) -> str:
    return f" and {count - _NAMED} more" if count > _NAMED else ""


def _first_twice(values: Iterable[Any]) -> Any:
    for value, count in Counter(values).items():
        if count > 1:
            return value
    return None


def _check_name(text: str, key: str) -> None:
    # It is shown in tables and messages, and written to files again.
    if not text.isprintable() or not 0 < len(text) <= _LONGEST_NAME or text != text.strip():
        raise ProfileError(
            f"{key} must be 1 to {_LONGEST_NAME} printable characters with no space at an end, got "
            f"{text!r:.100}"
        )


def _at_least(least: int, of: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(of, key)
        if value is not None and not least <= value <= _MOST:
            raise ProfileError(f"{key} must be between {least} and {_MOST}, got {value}")


def _positive(of: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(of, key)
        if value is not None and not 0 < value < math.inf:
            raise ProfileError(f"{key} must be a positive number, got {value}")


def _not_negative(of: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(of, key)
        if value is not None and not 0 <= value < math.inf:
            raise ProfileError(f"{key} must be a number that is not negative, got {value}")


_MOST = 1_000_000  # of what is counted: devices, cores, sequences of a micro-batch
