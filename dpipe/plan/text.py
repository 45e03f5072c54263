"""What `dpipe simulate` prints."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dpipe.config.load import Config, load
from dpipe.errors import ConfigError
from dpipe.plan.assumed_network import of_config
from dpipe.plan.forecast import Forecast, forecast
from dpipe.timeline.summary import summarise


def forecast_text(path: str, overrides: tuple[str, ...], network: str | None, as_json: bool) -> str:
    """What `dpipe simulate` prints."""
    config = load(path, overrides)
    known = of_config(config, network) if network else None
    if config.model.is_transformer or not config.model.family.computes:
        found = forecast(config, None, known)
    else:
        from dpipe.plan.run_plan import draft  # a user's own layers are counted by torch

        found = draft(config, network=known).forecast
    row = as_row(found)
    return json.dumps(row, indent=2) if as_json else as_text(row, config)


def as_row(found: Forecast) -> dict[str, Any]:
    if found.timeline.duration_us <= 0:
        raise ConfigError(
            "no time passes in such a step: set replay.forward_ms, or a predict.gflops that there "
            "is"
        )
    summary = summarise(found.timeline, found.schedule).as_dict()
    return {
        "network": found.network.name,
        "schedule": found.schedule.name,
        "layers_per_stage": list(found.split),
        "step_s": found.step_us / 1e6,
        "agreeing_step_s": summary.pop("step_us") / 1e6,
        **summary,
        "memory": [asdict(rank) | {"total": rank.total} for rank in found.memory],
    }


def as_text(row: dict[str, Any], config: Config) -> str:
    assumed = (
        f", assuming {config.predict.gflops:g} GFLOP/s a rank"
        if config.model.family.computes
        else ""
    )
    agrees = ""
    if row["agreeing_step_s"] != row["step_s"]:
        agrees = f" on average, {row['agreeing_step_s']:.4f} s where replicas agree"
    links = "  ".join(f"{link} {n / 1e6:.2f} MB" for link, n in sorted(row["link_bytes"].items()))
    return "\n".join(
        (
            f"network         {row['network']}",
            f"schedule        {row['schedule']}, layers a stage {row['layers_per_stage']}",
            f"step            {row['step_s']:.4f} s{agrees}{assumed}",
            f"bubble          {row['mean_bubble']:.1%}  (by rank "
            f"{' '.join(f'{b:.0%}' for b in row['bubble'])})",
            f"overlap         {row['mean_overlap']:.1%} of sending happens while computing",
            f"peak in flight  {' '.join(map(str, row['peak_in_flight']))} micro-batches, by rank",
            f"a step sends    {links or 'nothing'}",
            *_tensor_lines(config),
            *(
                _memory_line(number * config.tensor_parallel.size, rank)
                for number, rank in enumerate(row["memory"])
            ),
        )
    )


def _tensor_lines(config: Config) -> Iterator[str]:
    """Where several ranks hold a stage together: what is said of a machine, and what of each of its
    ranks.
    """
    size = config.tensor_parallel.size
    predict = config.predict
    if size > 1 and not config.model.family.computes:
        yield f"tensor parallel {size} ranks a stage, each on a host of its own; above, the first of them"
    elif size > 1:
        link = f"{predict.machine_gbps:g} Gbit/s and {predict.machine_delay_ms:g} ms"
        yield f"tensor parallel {size} ranks a stage on one machine, assuming {link} between them;"
        yield f"{'':<15} above, a rank is such a machine; below, the first of its ranks"


def _memory_line(rank: int, memory: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {memory[kind] / 1e9:.3f}" for kind in memory if kind != "total")
    return f"{'memory' if rank == 0 else '':<15} rank {rank} at most {memory['total'] / 1e9:.3f} GB: {kinds}"
