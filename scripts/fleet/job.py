"""A run: checked, then started on all its machines or on none; told to stop; its outcome.

What a rank needs to find its place comes in its environment, as from `dpipe launch`; so does the
run's token, which must not be on a command line, where every user of a machine can read it.
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

STOP_S = 60.0  # for a step and a checkpoint
KILL_S = 5.0


@dataclass(frozen=True)
class Job:
    """What is run, and where its ranks sit. `resume` goes on with the run of this name."""

    name: str
    text: str
    config: Config
    overrides: tuple[str, ...]
    seats: tuple[HostRank, ...]
    coordinator: str
    resume: bool = False
    fallback: bool = False

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
    ) -> "Job":
        """Raises `ConfigError` for a configuration that cannot be, `HostsError` where it needs more
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
        config = load(path, overrides)
        seats = tuple(hosts.seats(config.world_size))
        text = path.read_text(encoding="utf-8")
        return cls(
            name, text, config, overrides, seats, hosts.coordinator, resume is not None, fallback
        )

    def spec(self, seats: Sequence[HostRank], token: str) -> dict[str, Any]:
        """What the agent of one host is told of the ranks that sit there."""
        ranks = [
            {"rank": s.rank, "argv": self.argv(s), "environ": self.environ(s, token)} for s in seats
        ]
        return {
            "run": self.name,
            "config": self.text,
            "folder": self.config.run.folder,
            "resume": self.resume,
            "ranks": ranks,
        }

    def argv(self, seat: HostRank) -> list[str]:
        """Of one rank, after the interpreter. The configuration's own [node] says less than the
        hosts file.
        """
        node = ('node.bind="0.0.0.0"', f'node.advertise="{seat.host.reached_at}"')
        given = [word for text in (*node, *self.overrides) for word in ("-o", text)]
        on = ["--resume", self.config.run.folder] if self.resume else []
        on += ["--fallback"] if self.fallback else []
        return ["-m", "dpipe", "train", f"../cluster/{self.name}/job.toml", *given, *on]

    def environ(self, seat: HostRank, token: str) -> dict[str, str]:
        return {
            "DPIPE_RANK": str(seat.rank),
            "DPIPE_LOCAL_RANK": str(seat.local_rank),
            "DPIPE_WORLD_SIZE": str(len(self.seats)),
            "DPIPE_COORDINATOR": self.coordinator,
            "DPIPE_TOKEN": token,
        }


def start(job: Job, machines: Sequence[Machine]) -> dict[Machine, dict[int, int]]:
    """Start every rank; returns where in its log each one's run begins. Where one cannot start,
    none stays.
    """
    token = secrets.token_urlsafe(16)
    of_host = {
        host.name: list(seats) for host, seats in groupby(job.seats, key=lambda seat: seat.host)
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
    """Signal what is alive of a run (of the newest on each machine), and wait a while for it to
    end.

    Returns what is in doubt, a line a machine: one that was not reached, or where a rank outlives
    the wait.
    """

    def tell(machine: Machine) -> str | None:
        try:
            left = machine.agent(
                "stop", run=run, signal=how, wait_s=wait_s, timeout_s=wait_s + COMMAND_S
            )["alive"]
        except DpipeError as error:  # the others are told all the same
            return str(error)
        late = bool(left) and wait_s > 0
        return (
            f"host {machine.host.name}: ranks {left} are alive {wait_s:g} s after {how}"
            if late
            else None
        )

    return [doubt for doubt in each(machines, tell) if doubt is not None]
