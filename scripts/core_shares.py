"""Processes that have a share of a core each, by a quota of the kernel (CFS bandwidth control).

    /sys/fs/cgroup/cpu/dpipe-shares-PID/0    cgroup v1    cpu.cfs_quota_us, cpu.cfs_period_us
    /sys/fs/cgroup/dpipe-shares-PID/0        cgroup v2    cpu.max

Other work of the machine gets what the quotas leave. Otherwise a process would get less than its
share of a busy machine: there all processes of a group have one weight, whatever their nice values.

Without the right to make control groups (root has it), start each process by hand with less of a
core: `systemd-run --user --scope -p CPUQuota=25% ...`, or in a container with `--cpus 0.25`.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from venue import ThisMachine

from dpipe.errors import RunError

_PERIOD_US = 10_000  # a micro-batch takes longer, so that none is computed at full speed
# The most that the kernel takes, where a group has 1024 or 100 by default.
_SHARES = 262_144  # cgroup v1
_WEIGHT = 10_000  # cgroup v2
_CGROUP = Path("/sys/fs/cgroup")
_END_S = 10.0


@dataclass(frozen=True)
class CoreShares(ThisMachine):
    """Rank r runs in the group of `places[r]`."""

    groups: tuple[Path, ...]
    places: tuple[int, ...]

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        # The shell goes into the group and becomes the process, which has all of its threads there.
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        return ["sh", "-c", script, str(self.groups[self.places[rank]]), *argv]


@contextmanager
def core_shares(shares: Sequence[float]) -> Iterator[tuple[Path, ...]]:
    """A control group for each share of a core; they are removed with the block. Raises `RunError`
    where the kernel, or a lack of rights, allows none.
    """
    root, is_v1 = _controller()
    folder = root / f"dpipe-shares-{os.getpid()}"
    groups = [folder / str(number) for number in range(len(shares))]
    try:
        try:
            _make(folder, groups, shares, is_v1=is_v1)
        except OSError as error:
            raise RunError(
                f"no control groups can be made in {root} ({error.strerror}): run this as root, "
                "or start the processes by hand as scripts/core_shares.py says"
            ) from None
        yield tuple(groups)
    finally:
        for group in (*groups, folder):
            _remove(group)


def _controller() -> tuple[Path, bool]:
    """Where groups with quotas are made, and whether by the first version's files."""
    v1 = _CGROUP / "cpu"
    if (v1 / "cpu.cfs_quota_us").exists():
        return v1, True
    return _CGROUP, False


def _make(folder: Path, groups: Sequence[Path], shares: Sequence[float], *, is_v1: bool) -> None:
    folder.mkdir()
    if is_v1:
        (folder / "cpu.shares").write_text(str(_SHARES))
    else:
        # What a group's children may bound, the group must have been given.
        for parent in (folder.parent, folder):
            (parent / "cgroup.subtree_control").write_text("+cpu")
        (folder / "cpu.weight").write_text(str(_WEIGHT))
    for group, share in zip(groups, shares, strict=True):
        group.mkdir()
        quota_us = round(share * _PERIOD_US)
        if is_v1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def _remove(group: Path) -> None:
    """Once its processes have ended, which the kernel sees a little later."""
    deadline = time.monotonic() + _END_S
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
