"""Whether the ranks that are to start on this machine can be there: asked before any is made."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import torch

from dpipe.errors import ConfigError
from dpipe.optimizers.kinds import OPTIMIZERS
from dpipe.plan.run_plan import RunPlan

# A parameter and its gradient: with what the optimizer keeps, what is known of any model that
# trains.
_COPIES = 2


def refuse_more_than_machine(run_plan: RunPlan, ranks: Iterable[int]) -> None:
    """Raises `ConfigError` if `ranks` are predicted to hold more than this machine has.

    Who sets pipeline.memory_gb says what a rank may hold, and is believed.
    """
    config = run_plan.config
    if run_plan.model is None or config.pipeline.memory_gb is not None:
        return
    ranks = list(ranks)
    # What the processes need anyway is not counted, so that nothing is refused that would fit.
    held = sum(held_bytes(run_plan, rank) for rank in ranks)
    has, what = _machine_bytes(config.node.device)
    if held > has:
        holders = f"the {len(ranks)} ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
        raise ConfigError(
            f"{holders} on this machine would hold {held / 1e9:,.1f} GB, and its {what} "
            f"{has / 1e9:,.1f} GB; take a smaller model, or more machines (dpipe simulate predicts "
            "what each rank holds). If you know better: set pipeline.memory_gb to what a rank may "
            "hold"
        )


def held_bytes(run_plan: RunPlan, rank: int) -> int:
    config = run_plan.config
    memory = run_plan.forecast.memory
    if memory:
        return memory[config.ranks_of(rank).pp_rank].total
    optimizer = OPTIMIZERS[config.train.optimizer]
    parameter_bytes = run_plan.parameter_bytes
    state_bytes = optimizer.state_of(parameter_bytes)
    held = _COPIES * parameter_bytes + state_bytes
    return held // config.pipeline.ranks


def _machine_bytes(device: str) -> tuple[int, str]:
    """What `device` stands for here, and what it is."""
    if device.startswith("cpu"):
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = cgroup_limit()
        if limit is not None and limit < physical:
            return limit, "memory is limited (by its cgroup) to"
        return physical, "memory is"
    # "cuda" is shared out among all GPUs here; a numbered one is meant alone.
    gpus = range(torch.cuda.device_count()) if device == "cuda" else [torch.device(device)]
    total = sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    return total, "GPUs have"


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The bytes that the control groups of this process let it have, as a container or a batch
    system sets them; None where they set none. `root` is where /proc and /sys are.
    """
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        # "0::/path" in version 2; in version 1 one line for each hierarchy, "7:memory:/path".
        number, controllers, path = line.split(":", 2)
        if number == "0":
            limits += _limits_above(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_above(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_above(mount: Path, path: str, name: str) -> list[int]:
    """Of a group and all that it is in. A container may see only the last of them, as the root."""
    groups = PurePosixPath("/", path.lstrip("/"))
    limits = []
    for group in (groups, *groups.parents):
        # "max" where there is none; version 1 has a huge number.
        limits += [
            int(line) for line in _lines(mount / str(group).lstrip("/") / name) if line != "max"
        ]
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
