"""What `dpipe simulate` prints."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dpipe.config.load import Config, load
from dpipe.config.wires import wire_of
from dpipe.errors import ConfigError
from dpipe.plan.assumed_network import configured_network
from dpipe.plan.forecast import Forecast, forecast
from dpipe.timeline.summary import summarise
from dpipe.toml import to_toml


def forecast_text(
    path: str,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
    *,
    trust_code: bool = False,
) -> str:
    """For the configuration in `path`, on the network profile `network` instead of its own."""
    config = load(path, overrides, trust_code=trust_code)
    assumed = configured_network(config, network) if network else None
    if config.model.is_transformer or not config.model.family.computes:
        predicted = forecast(config, None, assumed)
    else:
        from dpipe.plan.run_plan import draft  # a user's own layers are counted by torch

        predicted = draft(config, network=assumed, reads_text=False).forecast
    row = as_row(predicted)
    return json.dumps(row, indent=2) if as_json else as_text(row, config)


def as_row(predicted: Forecast) -> dict[str, Any]:
    """One value a key, as `--json` prints them. Raises `ConfigError` for a step of no length."""
    if predicted.timeline.step_us <= 0:
        raise ConfigError(
            "no time passes in such a step: set replay.forward_ms, or a lower predict.gflops"
        )
    summary = summarise(predicted.timeline, predicted.schedule).as_dict()
    return {
        "network": predicted.network.name,
        "schedule": predicted.schedule.name,
        "layers_per_stage": _layers_per_stage(predicted),
        "wire": wire_of(predicted.formats),
        **({"inner_steps": predicted.inner_steps} if predicted.agreeing_share < 1 else {}),
        "step_s": predicted.step_us / 1e6,
        "agreeing_step_s": summary.pop("step_us") / 1e6,
        **summary,
        "memory": [asdict(rank) | {"total": rank.total} for rank in predicted.memory],
    }


def _layers_per_stage(predicted: Forecast) -> list[Any]:
    """By replica where these are cut differently."""
    if predicted.splits:
        return [list(cut) for cut in predicted.splits]
    return list(predicted.split)


def as_text(row: dict[str, Any], config: Config) -> str:
    """The row of `as_row` for a person."""
    assumed = ""
    if config.model.family.computes:
        assumed = f", assuming {config.predict.gflops:g} GFLOP/s a rank"
        if config.predict.machines is not None:
            assumed = f", on the machines of {config.predict.machines}"
    agrees = ""
    if row["agreeing_step_s"] != row["step_s"]:
        agrees = f" on average, {row['agreeing_step_s']:.4f} s where replicas agree"
    bubbles = " ".join(f"{bubble:.0%}" for bubble in row["bubble"])
    in_flight = " ".join(map(str, row["peak_in_flight"]))
    by_link = sorted(row["link_bytes"].items())
    links = "  ".join(f"{link} {num_bytes / 1e6:.2f} MB" for link, num_bytes in by_link)
    lines = [
        f"network         {row['network']}",
        f"schedule        {row['schedule']}, layers a stage {row['layers_per_stage']}",
        f"step            {row['step_s']:.4f} s{agrees}{assumed}",
        f"bubble          {row['mean_bubble']:.1%}  (by rank {bubbles})",
        f"overlap         {row['mean_overlap']:.1%} of sending happens while computing",
        f"peak in flight  {in_flight} micro-batches, by rank",
        f"a step sends    {links or 'nothing'}",
        *_wire_lines(row, config),
        *_inner_step_lines(row, config),
        *_tensor_parallel_lines(config),
    ]
    # A rank of the schedule is a whole tensor-parallel group: its first rank is shown.
    for number, rank in enumerate(row["memory"]):
        lines.append(_memory_line(number * config.tensor_parallel.size, rank))
    return "\n".join(lines)


def _wire_lines(row: dict[str, Any], config: Config) -> Iterator[str]:
    """Where the file does not say it in a word."""
    if row["wire"] != config.pipeline.wire:
        yield f"wire            {to_toml(row['wire'])}"


def _inner_step_lines(row: dict[str, Any], config: Config) -> Iterator[str]:
    if config.data_parallel.averages_when_cheap:
        yield f"inner steps     {row['inner_steps']}, then replicas average"


def _tensor_parallel_lines(config: Config) -> Iterator[str]:
    """With tensor parallelism: which lines are of a machine, and which of one of its ranks."""
    size = config.tensor_parallel.size
    if size == 1:
        return
    if not config.model.family.computes:
        yield (
            f"tensor parallel {size} ranks a stage, each on a host of its own; above, the first of "
            "them"
        )
        return
    predict = config.predict
    link = f"{predict.machine_gbps:g} Gbit/s and {predict.machine_delay_ms:g} ms"
    yield f"tensor parallel {size} ranks a stage on one machine, assuming {link} between them;"
    yield f"{'':<15} above, a rank is such a machine; below, the first of its ranks"


def _memory_line(rank: int, memory: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {memory[kind] / 1e9:.3f}" for kind in memory if kind != "total")
    label = "memory" if rank == 0 else ""
    return f"{label:<15} rank {rank} at most {memory['total'] / 1e9:.3f} GB: {kinds}"
