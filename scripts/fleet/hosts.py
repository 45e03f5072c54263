"""The hosts file: the machines of a run, and the ranks that each of them runs.

user = "ubuntu"             # applies to every host
key = "~/.ssh/cloud.pem"
[[host]]
address = "18.185.3.4"      # rank 0, which runs the coordinator
advertise = "10.0.0.4"
[[host]]
address = "18.185.3.5"      # ranks 1 and 2
advertise = "10.0.0.5"
slots = 2

A file of machines may stand for it.
"""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dpipe.errors import InputError, ProfileError
from dpipe.machines.file import load_machines
from dpipe.toml import parse_toml, read_text

_ERRORS_SHOWN = 20
_NAMED = 6
_RENAMED = {"meeting_port": "coordinator_port"}  # keys of older hosts files

Port = Annotated[int, Field(ge=1, le=65535)]


class HostsError(InputError):
    """The hosts file cannot be used; the message says what to change in it."""


def _no_option(text: str) -> str:
    if not text or text.startswith("-") or any(letter.isspace() for letter in text):
        raise ValueError(
            "must be a name or an address, without blanks and not starting with a hyphen"
        )
    return text


def _from_home(text: str) -> str:
    """A path on the host. A relative path starts in the home folder, as in SSH."""
    folder = text.removeprefix("~/").rstrip("/")
    if folder in ("", "~", "."):
        raise ValueError("must be a folder of its own")
    return folder


Name = Annotated[str, AfterValidator(_no_option)]
RemotePath = Annotated[str, AfterValidator(_from_home)]


class Host(BaseModel):
    """One machine. Every key but `address` and `advertise` may also stand at the top of the file,
    where it applies to all hosts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Name  # what ssh connects to; a Host of ~/.ssh/config works if `advertise` is set
    # Where the other hosts reach it; default: `address`. "none": they cannot, it connects to them.
    advertise: Name | None = None
    user: Name | None = None  # user, port and key default to the configuration of ssh
    port: Port | None = None
    key: Path | None = None
    ssh_options: tuple[str, ...] = ()  # such as "ProxyJump=bastion"
    slots: Annotated[int, Field(ge=1, le=4096)] = 1  # ranks on this host
    machine: str | None = None  # what a plan calls it; default: as `name`
    price_per_hour: Annotated[float, Field(ge=0, le=1e9)] | None = None  # for measure and plan
    interface: Name | None = None  # that netem shapes; default: the one that leads to the next host
    folder: RemotePath = "dpipe"  # all files of dpipe and its runs are in it
    python: str = "python3"  # that scripts/setup makes the environment with
    extras: str = ""  # of setup.py, such as "plot"
    # An existing environment to use; scripts/setup is then not run.
    venv: RemotePath | None = None

    @property
    def name(self) -> str:
        return self.address if self.port is None else f"{self.address}:{self.port}"

    @property
    def planned_as(self) -> str:
        return self.machine or self.name

    @property
    def reached_at(self) -> str:
        return self.advertise or self.address

    @property
    def source(self) -> str:
        """The project's files on the host, where its commands run."""
        return f"{self.folder}/src"

    @property
    def interpreter(self) -> str:
        return f"{self.venv or f'{self.source}/.venv'}/bin/python"


@dataclass(frozen=True)
class HostRank:
    """Where one rank runs; `local_rank` counts the ranks of its host."""

    rank: int
    local_rank: int
    host: Host


@dataclass(frozen=True)
class Hosts:
    """All machines, in the order of their ranks."""

    path: Path
    hosts: tuple[Host, ...]
    coordinator_port: int

    @property
    def coordinator(self) -> str:
        return f"{self.hosts[0].reached_at}:{self.coordinator_port}"

    @property
    def num_slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def refuse_hidden(self, first: Host) -> None:
        """Raises `HostsError` where the host of rank 0 cannot be reached by the others."""
        if first.reached_at == "none":
            raise HostsError(
                f"hosts file {self.path}: the plan starts rank 0 on {first.name}, which runs the "
                'coordinator; it cannot have advertise = "none"'
            )

    def ranks(self, num_ranks: int) -> list[HostRank]:
        """Raises `HostsError` if there are fewer slots than ranks."""
        every = [(host, slot) for host in self.hosts for slot in range(host.slots)]
        if len(every) < num_ranks:
            raise HostsError(
                f"{num_ranks} ranks need as many slots; {self.path} has {len(every)} on "
                f"{len(self.hosts)} hosts: "
                "add hosts or slots, or give the run fewer ranks (pipeline.stages, "
                "data_parallel.replicas)"
            )
        return [HostRank(rank, slot, host) for rank, (host, slot) in enumerate(every[:num_ranks])]

    def ranks_at(self, seats: Sequence[str]) -> list[HostRank]:
        """The ranks on the machines of a plan. Raises `HostsError` with the difference: machines
        that are not here, or have fewer slots than ranks.
        """
        hosts = {host.planned_as: host for host in self.hosts}
        missing = [name for name in dict.fromkeys(seats) if name not in hosts]
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            here = ", ".join([*hosts][:_NAMED])
            raise HostsError(
                f"the plan places stages on machines that {self.path} has not: "
                f"{', '.join(missing[:_NAMED])}{more} (it has {here}); plan for these hosts, or "
                "give a host its name in the plan as machine"
            )
        used: Counter[str] = Counter()
        ranks = []
        for rank, name in enumerate(seats):
            ranks.append(HostRank(rank, used[name], hosts[name]))
            used[name] += 1
        for name, count in used.items():
            if count > hosts[name].slots:
                raise HostsError(
                    f"the plan places {count} ranks on {name}, which has slots = "
                    f"{hosts[name].slots} in {self.path}; raise it, or plan for these hosts"
                )
        return ranks


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    coordinator_port: Port = 7000  # on rank 0's host
    host: Annotated[tuple[Host, ...], Field(min_length=1)]


def load_hosts(path: Path) -> Hosts:
    """Also from a file of machines, each of which says where it is reached; ssh's own configuration
    then knows users and keys. Raises `HostsError` naming the file, the host and the key.
    """
    try:
        table = parse_toml(read_text(path))
    except FileNotFoundError:
        raise HostsError(
            f"hosts file {path} does not exist; scripts/aws up writes one, docs/machines.md shows "
            "one"
        ) from None
    except (ValueError, IsADirectoryError) as error:
        raise HostsError(f"hosts file {path} is not TOML: {error}") from None
    if "machine" in table:
        table = {"host": _of_machines(path)}
    try:
        file = _File.model_validate(_spread(table))
    except ValidationError as error:
        raise HostsError(
            "\n".join(f"hosts file {path}: {_explain(e)}" for e in error.errors()[:_ERRORS_SHOWN])
        ) from None
    _check(path, file.host)
    return Hosts(path, file.host, file.coordinator_port)


def _of_machines(path: Path) -> list[dict[str, Any]]:
    try:
        cluster = load_machines(path)
    except ProfileError as error:
        raise HostsError(str(error)) from None
    hosts = []
    for machine in cluster.machines:
        if machine.host is None:
            raise HostsError(
                f"machines file {path}: machine {machine.name!r} has no host, the address at which "
                "it is reached"
            )
        hosts.append({"address": machine.host, "slots": machine.devices, "machine": machine.name})
    return hosts


def _spread(table: dict[str, Any]) -> dict[str, Any]:
    """Copy the keys at the top of the file into every host that does not set them itself."""
    own = {"address", "advertise", "machine"}
    shared = {key: table.pop(key) for key in list(table) if key in Host.model_fields.keys() - own}
    hosts = table.get("host")
    if isinstance(hosts, list):
        table["host"] = [{**shared, **host} if isinstance(host, dict) else host for host in hosts]
    return table


def _check(path: Path, hosts: Sequence[Host]) -> None:
    for what, values in {
        "address and port": [host.name for host in hosts],
        "machine": [host.planned_as for host in hosts],
        "advertise": [
            host.reached_at for host in hosts if host.reached_at != "none" and host.port is None
        ],
    }.items():
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise HostsError(
                f"hosts file {path}: two hosts have the same {what}, {twice[0]}; slots = 2 gives "
                "one two ranks"
            )
    if hosts[0].reached_at == "none":
        raise HostsError(
            f'hosts file {path}: host 0 runs the coordinator; it cannot have advertise = "none"'
        )
    for number, host in enumerate(hosts):
        if host.key is not None and not host.key.expanduser().is_file():
            raise HostsError(
                f"hosts file {path}: host {number} ({host.name}): key {host.key} does not exist"
            )


def _explain(error: Any) -> str:
    where = list(error["loc"])
    at = f"host {where[1]}: " if where[:1] == ["host"] and len(where) > 1 else ""
    key = str(where[-1])[:100] if where else "file"
    if error["type"] == "extra_forbidden":
        if key in _RENAMED:
            return f"{at}{key!r} is now called {_RENAMED[key]!r}; rename it"
        known = list(Host.model_fields) + ([] if at else ["coordinator_port", "host"])
        close = difflib.get_close_matches(key, known, n=1)
        return f"{at}unknown key {key!r}; " + (
            f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        )
    if error["type"] == "missing":
        return f"{at}{key!r} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{at}{key}: {message}, got {error['input']!r:.200}"
