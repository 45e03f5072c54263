"""A run: checked, then started on all of its machines or on none, and stopped.

A rank reads its number and the coordinator's address from environment variables, as under `dpipe
launch`. So it does the run's token, because every user of a machine can read a command line.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from dpipe.config.load import Config, load
from dpipe.errors import DpipeError
from fleet.hosts import HostRank, Hosts, HostsError
from fleet.ssh import COMMAND_S, Machine, each

STOP_S = 60.0  # to finish a step and write a checkpoint
KILL_S = 5.0


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
    ) -> "Job":
        """Raises `ConfigError` if the configuration is not valid, `HostsError` if it needs more
        hosts.
        """
        name = resume or name or f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise HostsError(
                f"{name!r} names a run and its folder: letters, digits, hyphens, dots and "
                "underscores only"
            )
        if not any(text.startswith("run.folder=") for text in overrides):
            overrides = (*overrides, f'run.folder="runs/{name}"')
        config = load(path, overrides, trust_code=trust_code)
        ranks = tuple(hosts.ranks(config.world_size))
        text = path.read_text(encoding="utf-8")
        return cls(
            name,
            text,
            config,
            overrides,
            ranks,
            hosts.coordinator,
            resume=resume is not None,
            fallback=fallback,
            trust_code=trust_code,
        )

    def spec(self, ranks: Sequence[HostRank], token: str) -> dict[str, Any]:
        """What the agent of one host needs to start its ranks."""
        specs = [
            {"rank": r.rank, "argv": self.argv(r), "environ": self.environ(r, token)} for r in ranks
        ]
        return {
            "run": self.name,
            "config": self.text,
            "folder": self.config.run.folder,
            "resume": self.resume,
            "ranks": specs,
        }

    def argv(self, rank: HostRank) -> list[str]:
        """The command line of one rank, after the interpreter. The hosts file overrides the
        configuration's [node].
        """
        node = ('node.bind="0.0.0.0"', f'node.advertise="{rank.host.reached_at}"')
        argv = ["-m", "dpipe", "train", f"../cluster/{self.name}/job.toml"]
        for override in (*node, *self.overrides):
            argv += ["-o", override]
        if self.resume:
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


def start(job: Job, machines: Sequence[Machine]) -> dict[Machine, dict[int, int]]:
    """Start every rank; returns by machine and rank the offset in the rank's log at which this run
    begins. If one rank cannot be started, all are stopped.
    """
    token = secrets.token_urlsafe(16)
    of_host = {
        host.name: list(ranks) for host, ranks in groupby(job.ranks, key=lambda rank: rank.host)
    }
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
