"""Hosts as network namespaces around one router that shapes every link: real kernel TCP, on one
machine.

    dpipe-NAME-0         dpipe-NAME-router                     dpipe-NAME-1
    10.K.0.1 on eth0 ──► port0 ─► shape0 (netem) ─ forward ─► port1 ─► eth0, 10.K.0.2

What a host sends is shaped on its way into the router, as `tc` on its own interface would; a device
to shape there is an ifb, to which the port's incoming packets are redirected. What it takes in,
where that is bounded, is shaped as it leaves the router by the host's port. Everything lives in
the lab's own namespaces and one folder: `down` needs no state of `up`, and works after a crash.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dpipe.machines.hosts import load_hosts_network
from dpipe.network.link import Link, Network
from netem import measure, shell, tc
from netem.measure import Host
from netem.probe import Observed
from netem.router import QUEUE_PACKETS, GuestRouter, NamespaceRouter, Router
from netem.shell import NetemError

ROUTERS = (NamespaceRouter.kind, GuestRouter.kind)
STATE = Path("/run/dpipe-lab")
MAX_HOSTS = 64
_PARTED = 100  # of the router's rules
_REFERENCE = Link(delay_ms=2.0, bandwidth_gbps=10.0)
_WIDE = Link(delay_ms=0.0, bandwidth_gbps=100.0)  # netem is at work, but never the limit
_LOOKS = 2
_FULL_FRAME_BYTES = 1514
_PACKETS_A_FRAME = 1.5  # a full frame, and half of an acknowledgement: Linux sends one for two


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab that is up. What its router adds and carries was measured as it came up, between the
    idle hosts 0 and 1.

    On a busy machine measurements vary. Recorded are the shortest delay, which other work cannot
    shorten, and the lowest rate, which a later run is most likely to reach.
    """

    name: str
    num_hosts: int
    octet: int  # the K of 10.K.0.0
    router_kind: str
    own_delay_ms: float = 0.0
    # through netem, over a few connections, whose packets TCP coalesces up to 64 KiB
    carries_gbps: float = 0.0
    carries_packets: float = 0.0  # of full size a second: the limit of many slow connections
    congestion_control: str = ""  # of the hosts' TCP: the kernel's default, unless `up` set another

    @property
    def folder(self) -> Path:
        return _folder(self.name)

    @property
    def hosts(self) -> list[Host]:
        return [
            Host(f"dpipe-{self.name}-{i}", f"10.{self.octet}.0.{i + 1}")
            for i in range(self.num_hosts)
        ]

    @property
    def addresses(self) -> list[str]:
        return [host.address for host in self.hosts]

    @property
    def gateway(self) -> str:
        return f"10.{self.octet}.255.254"

    @property
    def router(self) -> Router:
        namespace = f"dpipe-{self.name}-router"
        if self.router_kind == NamespaceRouter.kind:
            return NamespaceRouter(namespace)
        return GuestRouter(namespace, self.folder)

    def network(self) -> Network | None:
        """The current profile, or None if the links are unshaped."""
        profiles = sorted((self.folder / "profile").glob("*"))
        return load_hosts_network(profiles[0]) if profiles else None


def up(
    name: str,
    num_hosts: int,
    profile: Path | None = None,
    router_kind: str | None = None,
    sysctl: Sequence[str] = (),
) -> Lab:
    """Bring a lab up, measure what its router can do, and shape it. Without a profile it stays
    unshaped.

    `router_kind`: by default the one that this kernel allows. `sysctl`: settings of every host's
    TCP, such as `net.ipv4.tcp_congestion_control=reno`. Raises `NetemError` without root, if a lab
    of this name is up already, if the router does not start, or if the kernel refuses a setting;
    nothing is left behind then.
    """
    shell.require_root("a lab")
    shell.require_programs("ip", "tc", "ping", *(["sysctl"] if sysctl else []))
    _folder(name)  # for its errors
    if not 2 <= num_hosts <= MAX_HOSTS:
        raise NetemError(f"a lab has 2 to {MAX_HOSTS} hosts, got {num_hosts}")
    if profile is not None:
        load_hosts_network(profile).check(num_hosts)  # before anything is changed
    octet = _claim(name)
    try:
        lab = Lab(name, num_hosts, octet, router_kind or _kernel_router(name))
        _build(lab)
        _set_tcp(lab, sysctl)
        lab = measured(replace(lab, congestion_control=_congestion_control(lab.hosts[0])))
        if profile is not None:
            set_profile(lab, profile)
        _save(lab)
    except BaseException:
        down(name)
        raise
    return lab


def set_profile(lab: Lab, profile: Path) -> None:
    """Shape every link by another profile; programs in the lab keep running."""
    _shape(lab, load_hosts_network(profile))
    shutil.rmtree(lab.folder / "profile", ignore_errors=True)
    (lab.folder / "profile").mkdir()
    shutil.copy(profile, lab.folder / "profile")  # under its own name, which may be the network's


def cut(lab: Lab, host: int) -> None:
    """Nothing reaches a host any more, and nothing leaves it, until `mend`. Nobody is told: packets
    vanish in the router, as on a line that is broken further away.
    """
    # Not by its port: a guest's loses its device where it is taken down. The filter drops what
    # comes from an address to which there is no way back.
    lab.router.run(
        f"echo 1 > /proc/sys/net/ipv4/conf/port{host}/rp_filter\n"
        f"ip route replace blackhole {lab.addresses[host]}"
    )


def mend(lab: Lab, host: int) -> None:
    address = lab.addresses[host]
    lab.router.run(
        f"ip route replace {address} dev port{host} src {lab.gateway}\n"
        f"echo 0 > /proc/sys/net/ipv4/conf/port{host}/rp_filter"
    )


def part(lab: Lab, side: Collection[int]) -> None:
    """The hosts of `side` reach each other alone, and so do the others, until `rejoin`. Packets
    between both vanish in the router.
    """
    others = set(range(lab.num_hosts)).difference(side)
    rules = []
    for one in side:
        for other in others:
            for source, target in ((one, other), (other, one)):
                way = f"from {lab.addresses[source]} to {lab.addresses[target]}"
                rules.append(f"ip rule add prio {_PARTED} {way} blackhole")
    lab.router.run("\n".join(rules))


def rejoin(lab: Lab) -> None:
    lab.router.run(f"while ip rule del prio {_PARTED} 2>/dev/null; do :; done")


def load(name: str) -> Lab:
    shell.require_root("a lab")
    try:
        return Lab(**json.loads((_folder(name) / "lab.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        if name in names():
            raise NetemError(
                f"lab {name!r} did not come up completely: lab down --name {name}, then up again"
            ) from None
        raise NetemError(
            f"no lab {name!r} is up; labs that are up: {', '.join(names()) or 'none'}"
        ) from None


def names() -> list[str]:
    return sorted(path.name for path in STATE.glob("*") if path.is_dir())


def down(name: str) -> bool:
    """End every process of a lab and remove its namespaces and folder; false if there was none."""
    shell.require_root("a lab")
    folder, namespaces = _folder(name), _namespaces(name)
    _end(namespaces)
    for namespace in namespaces:
        shell.run(["ip", "netns", "del", namespace])
    existed = bool(namespaces) or folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return existed


def execute(lab: Lab, host: int, command: Sequence[str]) -> None:
    """Replace this process by `command` on a host, as exec does: does not return."""
    if not 0 <= host < lab.num_hosts:
        raise NetemError(f"lab {lab.name!r} has hosts 0 to {lab.num_hosts - 1}, not {host}")
    os.execvp("ip", lab.hosts[host].enter(command))  # noqa: S606, S607


def warnings(lab: Lab, network: Network) -> list[str]:
    """Where a profile asks for more than the router can do: results then measure the router."""
    links = [
        network.link(a, b) for a in range(lab.num_hosts) for b in range(lab.num_hosts) if a != b
    ]
    warnings_ = []
    if (fastest_gbps := max(link.bandwidth_gbps for link in links)) > lab.carries_gbps:
        warnings_.append(
            f"a link asks {fastest_gbps:g} Gbit/s; the router carries {lab.carries_gbps:.2g} in all"
        )
    elif (total_gbps := _egress_gbps(lab, network)) > (
        uncoalesced_gbps := lab.carries_packets / _PACKETS_A_FRAME * _FULL_FRAME_BYTES * 8e-9
    ):
        warnings_.append(
            f"all hosts may send {total_gbps:g} Gbit/s together; the router carries "
            f"{lab.carries_gbps:.2g} in all, "
            f"and {uncoalesced_gbps:.2g} where TCP coalesces no packets, as over many slow "
            f"connections{_paced(lab)}"
        )
    if (shortest_ms := min(link.delay_ms for link in links)) < lab.own_delay_ms:
        warnings_.append(
            f"a link asks {shortest_ms:g} ms; the router alone takes {lab.own_delay_ms:.2g} ms"
        )
    return warnings_


def observe_ring(
    lab: Lab, network: Network, seconds: float = 2.0
) -> dict[tuple[int, int], Observed]:
    """The link from each host to the next one, while all of them send."""
    ring = {(i, (i + 1) % lab.num_hosts) for i in range(lab.num_hosts)}
    links = {(lab.hosts[i], lab.hosts[j]): network.link(i, j) for i, j in ring}
    observed = measure.observe_together(links, seconds)
    return {(i, j): observed[lab.hosts[i], lab.hosts[j]] for i, j in sorted(ring)}


def _paced(lab: Lab) -> str:
    if lab.congestion_control != "bbr":
        return ""
    return (
        ", above all with this kernel's BBR, which spaces them: --sysctl "
        "net.ipv4.tcp_congestion_control=reno"
    )


def _egress_gbps(lab: Lab, network: Network) -> float:
    peers = range(lab.num_hosts)
    total_gbps = 0.0
    for i in peers:
        fastest_gbps = max(network.link(i, j).bandwidth_gbps for j in peers if j != i)
        total_gbps += network.interface(i).egress_gbps or fastest_gbps
    return total_gbps


def _claim(name: str) -> int:
    """Make the lab's folder; returns the octet of its addresses, which no other lab has, nor one
    that is coming up.
    """
    STATE.mkdir(mode=0o700, exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _folder(name).mkdir(mode=0o700)
        except FileExistsError:
            raise NetemError(
                f"lab {name!r} is up already: lab down --name {name}, or choose another --name"
            ) from None
        used = set()
        for path in STATE.glob("*/octet"):
            with suppress(FileNotFoundError):  # its lab has just gone down
                used.add(int(path.read_text()))
        octet = min(set(range(100, 100 + len(used) + 1)) - used)
        (_folder(name) / "octet").write_text(str(octet))
    return octet


def _folder(name: str) -> Path:
    # No hyphen: the namespaces of lab `a` are found by the prefix dpipe-a-.
    if not re.fullmatch(r"[a-z0-9]{1,16}", name):
        raise NetemError(f"a lab's name is 1 to 16 small letters and digits, got {name!r}")
    return STATE / name


def _save(lab: Lab) -> None:
    (lab.folder / "lab.json").write_text(json.dumps(asdict(lab)), encoding="utf-8")


def _kernel_router(name: str) -> str:
    """The kind of router that this kernel allows: tries a netem qdisc in a namespace of its own."""
    namespace = f"dpipe-{name}-trial"
    shell.run(["ip", "netns", "add", namespace])
    try:
        shell.run(
            ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", *tc.netem(_REFERENCE)]
        )
    except NetemError:
        return GuestRouter.kind
    finally:
        shell.run(["ip", "netns", "del", namespace])
    return NamespaceRouter.kind


def _build(lab: Lab) -> None:
    for host in lab.hosts:
        shell.run(["ip", "netns", "add", host.namespace])
    lab.router.start([host.namespace for host in lab.hosts])
    lab.router.run(_router_script(lab))
    for host in lab.hosts:
        script = f"""
            ip link set lo up
            ip link set eth0 txqueuelen {QUEUE_PACKETS} up
            ip address add {host.address}/32 dev eth0
            ip route add {lab.gateway} dev eth0 scope link src {host.address}
            ip route add default via {lab.gateway} src {host.address}
        """
        shell.run(host.enter(["sh", "-ec", script]))


def _set_tcp(lab: Lab, sysctl: Sequence[str]) -> None:
    for host in lab.hosts if sysctl else ():
        shell.run(host.enter(["sysctl", "-qw", *sysctl]))


def _congestion_control(host: Host) -> str:
    return shell.run(host.enter(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])).strip()


def _router_script(lab: Lab) -> str:
    """Forwards between the ports; what arrives at a port passes an ifb that can be shaped."""
    links = ["link set lo up", f"address add {lab.gateway}/32 dev lo"]
    redirects = []
    for i, address in enumerate(lab.addresses):
        links += [
            f"route add {address} dev port{i} src {lab.gateway}",
            f"link add shape{i} type ifb",
            f"link set shape{i} txqueuelen {QUEUE_PACKETS} up",
        ]
        redirects += [
            f"qdisc add dev port{i} clsact",
            f"filter add dev port{i} ingress protocol ip prio 1 u32 match u32 0 0 action mirred "
            "egress redirect "
            f"dev shape{i}",
        ]
    return f"echo 1 >/proc/sys/net/ipv4/ip_forward\n{_batch('ip', links)}{_batch('tc', redirects)}"


def _batch(program: str, lines: Sequence[str], otherwise: str = "") -> str:
    """One process for many lines: in a guest, starting a process takes 50 ms."""
    return "\n".join([f"{program} -force -batch - <<'.' {otherwise}", *lines, "."]) + "\n"


def _shape(lab: Lab, network: Network | None) -> None:
    """Shape every host's egress, and its ingress where one is stated; delays are shortened by the
    router's own.
    """
    devices = [f"shape{i}" for i in range(lab.num_hosts)]
    ports = [f"port{i}" for i in range(lab.num_hosts)]
    clear = [" ".join(tc.clear_command(device)[1:]) for device in devices + ports]
    script = _batch(
        "tc", clear, otherwise="2>/dev/null || true"
    )  # `tc` fails where there is no qdisc
    if network is not None:
        less = _less(network, lab.own_delay_ms)
        commands = []
        for i in range(lab.num_hosts):
            commands.append(tc.egress_commands(less, i, devices[i], lab.addresses))
            commands.append(tc.ingress_commands(less, i, ports[i]))
        script += _batch(
            "tc", [" ".join(command[1:]) for of_device in commands for command in of_device]
        )
    lab.router.run(script)


def _less(network: Network, delay_ms: float) -> Network:
    def less(link: Link) -> Link:
        rest_ms = max(0.0, link.delay_ms - delay_ms)
        return replace(link, delay_ms=rest_ms, jitter_ms=min(rest_ms, link.jitter_ms))

    return network.with_links(less)


def measured(lab: Lab) -> Lab:
    """The lab, with its router's own delay and capacity measured. Leaves its links unshaped."""
    first, second = lab.hosts[:2]
    bare = replace(lab, own_delay_ms=0.0)
    delays_ms, rates_gbps = [], []
    for _ in range(_LOOKS):
        _shape(bare, Network("reference", _REFERENCE))
        delays_ms.append(measure.delay_ms(first, second) - _REFERENCE.delay_ms)
        _shape(bare, Network("wide", _WIDE))
        rates_gbps.append(measure.observe(first, second, _REFERENCE, seconds=0.5).bandwidth_gbps)
    _shape(bare, None)
    packets = measure.packets_per_second(first, second)
    return replace(
        lab,
        own_delay_ms=max(0.0, min(delays_ms)),
        carries_gbps=min(rates_gbps),
        carries_packets=packets,
    )


def _namespaces(name: str) -> list[str]:
    listed = shell.run(["ip", "netns", "list"]).split("\n")
    return [
        word for line in listed for word in line.split()[:1] if word.startswith(f"dpipe-{name}-")
    ]


def _end(namespaces: Sequence[str]) -> None:
    """End every process in the namespaces: SIGTERM, then SIGKILL, each sent once."""
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        signalled: set[int] = set()
        deadline = time.monotonic() + patience_s
        while (pids := _processes(namespaces)) and time.monotonic() < deadline:
            for pid in pids - signalled:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= pids
            time.sleep(0.05)


def _processes(namespaces: Sequence[str]) -> set[int]:
    return {
        int(pid)
        for namespace in namespaces
        for pid in shell.run(["ip", "netns", "pids", namespace]).split()
    }
