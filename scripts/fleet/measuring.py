"""`dpipe measure` on every host, one process each, and the file that rank 0 wrote."""

import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dpipe.config.load import load
from fleet.hosts import HostRank, Hosts, HostsError
from fleet.job import Job
from fleet.ssh import Machine


@dataclass(frozen=True)
class MeasureJob(Job):
    """A job whose ranks are the hosts, whatever their slots."""

    micro_batch_sizes: tuple[int, ...] = ()

    @classmethod
    def on_all(
        cls,
        path: Path,
        overrides: tuple[str, ...],
        hosts: Hosts,
        micro_batch_sizes: tuple[int, ...],
        *,
        trust_code: bool,
    ) -> "MeasureJob":
        """Raises `ConfigError` for a configuration that cannot be."""
        name = f"measure-{datetime.now():%Y%m%d-%H%M%S}"
        overrides = (*overrides, f'run.folder="runs/{name}"')
        return cls(
            name,
            path.read_text(encoding="utf-8"),
            load(path, overrides, trust_code=trust_code),
            overrides,
            tuple(HostRank(rank, 0, host) for rank, host in enumerate(hosts.hosts)),
            hosts.coordinator,
            trust_code=trust_code,
            micro_batch_sizes=micro_batch_sizes,
        )

    @property
    def out(self) -> str:
        """Beside the job's files, seen from the project's."""
        return f"../cluster/{self.name}/machines.toml"

    def argv(self, rank: HostRank) -> list[str]:
        _dash_m, _dpipe, _train, *words = super().argv(rank)
        argv = ["-m", "dpipe", "measure", *words, "--name", rank.host.planned_as, "--out", self.out]
        if rank.host.price_per_hour is not None:
            argv += ["--price", str(rank.host.price_per_hour)]
        for size in self.micro_batch_sizes:
            argv += ["--micro-batch-size", str(size)]
        return argv


def refuse_file(out: Path) -> None:
    """Before minutes of measuring. Raises `HostsError` for a file that would be lost."""
    if out.exists():
        raise HostsError(
            f"{out} exists, and may have been edited by hand: move it away, or name another file "
            "(--out)"
        )


def fetch(job: MeasureJob, machine: Machine, out: Path) -> None:
    """Bring what rank 0 on `machine` wrote."""
    path = f"{machine.host.source}/{job.out}"
    out.write_bytes(machine.run(f"cat {shlex.quote(path)}"))
