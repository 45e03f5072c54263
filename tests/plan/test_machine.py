from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.plan import machine
from dpipe.plan.machine import cgroup_limit, refuse_more_than_machine
from dpipe.plan.run_plan import draft

GB = 10**9
HUGE = 9223372036854771712  # what version 1 says where there is no limit


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job"}, None),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": "max"}, None),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": f"{4 * GB}"}, 4 * GB),
        (
            {
                "proc/self/cgroup": "0::/user/job",
                "sys/fs/cgroup/user/job/memory.max": "max",
                "sys/fs/cgroup/user/memory.max": f"{3 * GB}",
            },
            3 * GB,
        ),
        # In a container, which sees its own group as the root.
        ({"proc/self/cgroup": "0::/../x", "sys/fs/cgroup/memory.max": f"{2 * GB}"}, 2 * GB),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n7:memory:/job",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GB}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{HUGE}",
            },
            GB,
        ),
    ],
    ids=["no cgroups", "no file", "no limit", "a limit", "of the parent", "container", "version 1"],
)
def test_limit_of_control_groups_is_the_least_on_the_way_up(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    write(tmp_path, files)
    assert cgroup_limit(tmp_path) == limit


def test_ranks_that_do_not_fit_the_limit_are_refused(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_plan = draft(tiny())
    refuse_more_than_machine(run_plan, [0])
    monkeypatch.setattr(machine, "cgroup_limit", lambda: 1000)
    with pytest.raises(ConfigError, match=r"memory is limited \(by its cgroup\) to 0\.0 GB"):
        refuse_more_than_machine(run_plan, [0])
