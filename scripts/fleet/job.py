"""A run: checked, then started on all of its machines or on none, and stopped.

A rank reads its number and the coordinator's address from environment variables, as under `dpipe
launch`. So it does the run's token, because every user of a machine can read a command line.
"""

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dpipe.config.elastic import check_spares
from dpipe.config.load import Config, load
from dpipe.errors import DpipeError
from dpipe.machines.file import lists_machines
from dpipe.plan.on_machines import placement_of
from dpipe.planner.fits import planned
from dpipe.planner.plan_file import load_plan
from dpipe.toml import to_toml
from fleet.hosts import HostRank, Hosts, HostsError
from fleet.ssh import COMMAND_S, Machine, each

STOP_S = 60.0  # to finish a step and write a checkpoint
KILL_S = 5.0
_JOB = "job.toml"
_MACHINES = "machines.toml"


@dataclass(frozen=True)
class Job:
    """A configuration, and the host that each rank runs on."""

    name: str  # of the run; with `resume`, of the run that is continued
    text: str  # of the configuration file
    config: Config
    overrides: tuple[str, ...]
    ranks: tuple[HostRank, ...]
    coordinator: str  # HOST:PORT
    resume: bool = False
    fallback: bool = False  # to the checkpoint before, if the newest is damaged
    trust_code: bool = False  # of model.layers, wherever it is from
    # Processes beyond the ranks, of a run that outlives its machines; None: it does not.
    spares: int | None = None
    # Beside the configuration on each host, by name.
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: Path,
        overrides: tuple[str, ...],
        hosts: Hosts,
        *,
        name: str | None = None,
        resume: str | None = None,
        fallback: bool = False,
        trust_code: bool = False,
        plan: Path | None = None,
        machines: Path | None = None,
        spares: int | None = None,
    ) -> "Job":
        """With a `plan`, the job as it decides and on the hosts that it names. `machines`, by
        default those of `predict.machines` or of the hosts file, go along: a run's summary predicts
        from them. Raises `ConfigError` if the configuration is not valid, or plans a run anew that
        is to be resumed, `HostsError` if it needs other or more hosts.
        """
        name = _named(path, resume or name)
        if not any(text.startswith("run.folder=") for text in overrides):
            overrides = (*overrides, f'run.folder="runs/{name}"')
        if machines is not None:
            overrides = (*overrides, _predicting_with(machines))
        ranks: Sequence[HostRank] = ()
        if plan is not None:
            ranks = hosts.ranks_at(_seats_of(plan, spares))
            hosts.refuse_hidden(ranks[0].host)
            overrides = _on_machines_of(hosts, path, overrides, trust_code=trust_code)
            overrides = planned(path, overrides, plan, trust_code=trust_code)
        config = load(path, overrides, trust_code=trust_code)
        ranks = ranks or _ranks_of(config, hosts, spares)
        files = _machines_of(config)
        if files:
            overrides = (*overrides, _predicting_with(_beside_job(name, _MACHINES)))
        text = path.read_text(encoding="utf-8")
        return cls(
            name,
            text,
            config,
            overrides,
            tuple(ranks),
            f"{ranks[0].host.reached_at}:{hosts.coordinator_port}",
            resume=resume is not None,
            fallback=fallback,
            trust_code=trust_code,
            spares=spares,
            files=files,
        )

    @property
    def is_elastic(self) -> bool:
        return self.spares is not None

    def spec(self, ranks: Sequence[HostRank], token: str) -> dict[str, Any]:
        """What the agent of one host needs to start its ranks."""
        specs = [
            {"rank": r.rank, "argv": self.argv(r), "environ": self.environ(r, token)} for r in ranks
        ]
        return {
            "run": self.name,
            "files": {_JOB: self.text, **self.files},
            "folder": self.config.run.folder,
            "resume": self.resume,
            "elastic": self.is_elastic,
            "ranks": specs,
        }

    def argv(self, rank: HostRank) -> list[str]:
        """The command line of one rank, after the interpreter. The hosts file overrides the
        configuration's [node].
        """
        node = ('node.bind="0.0.0.0"', f'node.advertise="{rank.host.reached_at}"')
        argv = ["-m", "dpipe", "train", _beside_job(self.name, _JOB)]
        for override in (*node, *self.overrides):
            argv += ["-o", override]
        if self.spares is not None:
            argv += ["--spares", str(self.spares)]
        # An elastic run goes on where there is one.
        elif self.resume:
            argv += ["--resume", self.config.run.folder]
        if self.fallback:
            argv += ["--fallback"]
        if self.trust_code:
            argv += ["--trust-code"]
        return argv

    def environ(self, rank: HostRank, token: str) -> dict[str, str]:
        return {
            "DPIPE_RANK": str(rank.rank),
            "DPIPE_LOCAL_RANK": str(rank.local_rank),
            "DPIPE_WORLD_SIZE": str(len(self.ranks)),
            "DPIPE_COORDINATOR": self.coordinator,
            "DPIPE_TOKEN": token,
        }


def _seats_of(plan: Path, spares: int | None) -> tuple[str, ...]:
    if spares is not None:
        raise HostsError("--plan places each rank on a host, and --spares moves them")
    return load_plan(plan).seats


def _ranks_of(config: Config, hosts: Hosts, spares: int | None) -> list[HostRank]:
    """As many as the job has, and its spares; where these are to be planned as they join, one on
    each slot. Raises what each process would of a job that does not outlive its machines.
    """
    if spares is not None:
        check_spares(config)
    elif config.pipeline.plan == "auto":
        return hosts.ranks(hosts.num_slots)
    return hosts.ranks(config.world_size + (spares or 0))


def _named(path: Path, given: str | None) -> str:
    """The name of a run. Raises `HostsError` for one that is no folder's."""
    name = given or f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise HostsError(
            f"{name!r} names a run and its folder: letters, digits, hyphens, dots and underscores "
            "only"
        )
    return name


def _beside_job(run: str, file: str) -> str:
    """On a host, seen from the project's folder."""
    return f"../cluster/{run}/{file}"


def _predicting_with(machines: Path | str) -> str:
    return f"predict.machines={to_toml(str(machines))}"


def _machines_of(config: Config) -> dict[str, str]:
    """What goes along. Raises what each rank would of machines that do not fit the job."""
    path = config.predict.machines
    if path is None:
        return {}
    placement_of(config)
    return {_MACHINES: Path(path).read_text(encoding="utf-8")}


def _on_machines_of(
    hosts: Hosts, path: Path, overrides: tuple[str, ...], *, trust_code: bool
) -> tuple[str, ...]:
    """With a hosts file that is one of machines, unless the job names another."""
    stated = load(path, overrides, trust_code=trust_code).predict.machines
    if stated is not None or not lists_machines(hosts.path):
        return overrides
    return (*overrides, _predicting_with(hosts.path))


def start(job: Job, machines: Sequence[Machine]) -> dict[Machine, dict[int, int]]:
    """Start every rank; returns by machine and rank the offset in the rank's log at which this run
    begins. If one rank cannot be started, all are stopped.
    """
    token = secrets.token_urlsafe(16)
    # Not by runs of ranks: a plan may come back to a host.
    of_host: defaultdict[str, list[HostRank]] = defaultdict(list)
    for rank in job.ranks:
        of_host[rank.host.name].append(rank)
    used = [machine for machine in machines if machine.host.name in of_host]
    try:
        answers = each(used, lambda m: m.agent("start", **job.spec(of_host[m.host.name], token)))
    except BaseException:
        stop(used, job.name, "SIGKILL", KILL_S)
        raise
    offsets = [
        {int(rank): offset for rank, offset in answer["offsets"].items()} for answer in answers
    ]
    return dict(zip(used, offsets, strict=True))


def stop(machines: Sequence[Machine], run: str | None, how: str, wait_s: float = 0.0) -> list[str]:
    """Send the signal `how` to the live ranks of a run (None: the newest on each machine), and wait
    up to `wait_s` for them to exit.

    Returns an error for each machine that was not reached or has a rank that did not exit in time.
    """

    def stop_on(machine: Machine) -> str | None:
        try:
            left = machine.agent(
                "stop", run=run, signal=how, wait_s=wait_s, timeout_s=wait_s + COMMAND_S
            )["alive"]
        except DpipeError as error:  # the other machines are stopped all the same
            return str(error)
        if left and wait_s > 0:
            return f"host {machine.host.name}: ranks {left} are alive {wait_s:g} s after {how}"
        return None

    return [error for error in each(machines, stop_on) if error is not None]
