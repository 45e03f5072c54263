"""Whether a plan is one for this job and these machines, and the job as it then runs."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpipe.config.load import Config, load
from dpipe.config.wires import WireTable
from dpipe.errors import ConfigError
from dpipe.machines.file import load_machines
from dpipe.machines.machine import Cluster
from dpipe.plan.on_machines import digest_of_layers
from dpipe.planner.plan_file import Plan, load_plan
from dpipe.toml import to_toml

_NAMED = 6
# What a job may state of `split` and `connections`, and a plan decides all the same.
_LEFT_OPEN = ("auto", "estimated", "measured")


def planned(
    path: Config | str | Path,
    overrides: Sequence[str],
    plan_path: str | Path,
    *,
    trust_code: bool = False,
) -> tuple[str, ...]:
    """`overrides` with what the plan decides. Raises `ConfigError` for a plan that does not fit the
    job.
    """
    plan = load_plan(plan_path)
    config = load(path, overrides, trust_code=trust_code)
    refuse_other_job(plan, config, f"plan {plan_path}")
    # A job that asks for a plan of its own gets this one.
    planned_overrides = (*overrides, *plan.overrides, "pipeline.plan=none")
    if config.predict.machines is None:
        return planned_overrides
    refuse_other_machines(plan, load_machines(config.predict.machines))
    return (*planned_overrides, f"predict.seats={to_toml(list(plan.groups))}")


def refuse_other_seat(plan_path: str | Path, rank: int, name: str) -> None:
    """Raises `ConfigError` where the plan has `rank` on another machine than `name`."""
    seats = load_plan(plan_path).seats
    if rank >= len(seats):
        return  # of too many processes the run itself says more
    seat = seats[rank]
    # As `dpipe measure` calls machines of one host name: with their number behind it.
    if re.fullmatch(rf"{re.escape(name)}(-\d+-*)?", seat):
        return
    own = [number for number, other in enumerate(seats) if other == name]
    hint = "the plan leaves this machine out"
    if own:
        hint = f"start --rank {' or '.join(map(str, own))} here"
    raise ConfigError(
        f"plan {plan_path} has rank {rank} on {seat}, but this is {name}: {hint}, or say which "
        "machine of the plan this is (--name)"
    )


def refuse_other_job(plan: Plan, config: Config, where: str = "the plan") -> None:
    """Raises `ConfigError` with the difference."""
    digest = digest_of_layers(config)
    if plan.model != digest:
        raise ConfigError(
            f"{where} is of another model: its digest is {plan.model}, that of the job "
            f"{digest}; plan this job, or take the job that was planned"
        )
    differences = []
    for section, keys in plan.settings.items():
        stated = getattr(config, section)
        for key, value in keys.items():
            own = getattr(stated, key, None)
            # A file has lists where a configuration has tuples.
            own = list(own) if isinstance(own, tuple) else own
            own = own.model_dump() if isinstance(own, WireTable) else own
            if own in _LEFT_OPEN:
                continue
            if key in stated.model_fields_set and own != value:
                text = "left out" if own is None else to_toml(own)
                differences.append(f"{section}.{key} is {text}, planned {to_toml(value)}")
    if differences:
        raise ConfigError(
            f"{where} does not fit the job: {'; '.join(differences)}; leave these out of the job, "
            "or plan it as it is"
        )


def refuse_other_machines(plan: Plan, cluster: Cluster) -> None:
    """Raises `ConfigError` naming machines that are not there, or are too small."""
    missing = [name for name in dict.fromkeys(plan.seats) if name not in cluster.names]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ConfigError(
            f"the plan places stages on machines that {cluster.name} has not: "
            f"{', '.join(missing[:_NAMED])}{more}; plan anew for these machines"
        )
    for name, ranks in Counter(plan.seats).items():
        devices = cluster.machine(name).devices
        if ranks > devices:
            raise ConfigError(
                f"the plan places {ranks} ranks on {name}, which has devices = {devices}; plan "
                "anew for these machines"
            )
