#!/usr/bin/env python3
"""Runs every cell of a sweep file that has not been measured yet, and appends a line of JSON for
each.

    scripts/sweep.py scripts/sweeps/gpt3xl_gpipe_network.toml   networks x engines x schedules x ...
    scripts/table.py gpt3xl_gpipe_network --mode replay         the results
    scripts/sweep.py scripts/sweeps/gpt3xl_megatron.toml        layouts x engines, on GPUs here

A cell is a run of all ranks on this machine: as it is, in a `netem lab`, or behind the shaped
transport. You can stop it at any time and start it again: results stay, and a line that was cut
short is measured again. Delete a line to repeat its measurement. Cells that need more GPUs than
this machine has are skipped.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, Self

import click
import torch
from engines import (
    Engine,
    Layout,
    check_engine,
    device_name,
    difference_in_training,
    gpus_needed,
    spread,
    trained,
)
from pydantic import BaseModel, ConfigDict, Field, model_validator
from table import NUM_STAGES, ROOT, WIRES, Row, order_of
from trials import append, commit_of_tree, key_of, read_table, whole_lines
from venue import Kind, Venue, overrides, venue

from dpipe.bench.torch_pipelining import SMALL, compare_pipelining
from dpipe.config.load import Config, load
from dpipe.config.section import Count
from dpipe.errors import ConfigError, DpipeError, RunError
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network
from dpipe.plan.forecast import Forecast, ballots_over, forecast
from dpipe.search.auto import pipeline_on
from dpipe.search.bound import lower_bound_us


class Runs(BaseModel):
    """One engine with each schedule and wire format, on the networks of the sweep or on its own.

    `overrides` change the configuration; `label` then follows the engine's name in the table. Each
    of `layouts` spreads the configured batch over its ranks in micro-batches of each of
    `micro_batches` sequences.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Engine = "dpipe"
    label: str = ""
    schedules: tuple[str, ...]
    wires: tuple[Literal["fp32", "bf16", "int8", "int4"], ...] = ("fp32",)
    networks: tuple[str, ...] = ()  # default: the sweep's
    overrides: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    micro_batches: tuple[Count, ...] = ()


class Sweep(BaseModel):
    """A sweep file: each of `run` on each network, or without a network if `venue` is "local".

    Its paths are relative to the repository. `scale` divides messages and bandwidths, not delays:
    one machine can then run twelve replay stages, and a step takes as long as at full size.
    `sysctl` are TCP settings of the hosts of a lab.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: str
    venue: Kind = "shaped"
    sysctl: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    run: tuple[Runs, ...]
    scale: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=1800.0, gt=0)  # a cell

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.venue == "local") == bool(self.networks):
            raise ValueError('venue "local" takes no networks; any other venue needs some')
        return self


@dataclass(frozen=True)
class Cell:
    """One run: the network at full size, and the configuration for `dpipe launch`."""

    engine: str
    schedule: str
    wire: str
    network: Network
    profile: Path  # of the scaled network that the ranks use
    config_path: Path
    overrides: tuple[str, ...]
    sweep: "Sweep"
    label: str = ""

    @property
    def system(self) -> str:
        return f"{self.engine} {self.label}".strip()

    @property
    def config(self) -> Config:
        return load(self.config_path, self.overrides)

    @property
    def key(self) -> str:
        """Equal for cells with the same measurement."""
        sweep, config = self.sweep, self.config
        device = (device_name(config),) if sweep.venue == "local" else ()
        return key_of(
            config,
            self.engine,
            sweep.venue,
            sweep.sysctl,
            sweep.scale,
            stated(self.network),
            *device,
        )

    def __str__(self) -> str:
        where = shape_of(self.config) if self.sweep.venue == "local" else self.network.name
        return f"{where} {self.system} {self.schedule} {self.wire}"


def shape_of(config: Config) -> str:
    """Tensor x pipeline x data parallel ranks, and the micro-batch."""
    ranks = (config.tensor_parallel.size, config.pipeline.ranks, config.data_parallel.replicas)
    return f"{' x '.join(map(str, ranks))}, micro-batch {config.microbatch_size}"


def cells(sweep: Sweep, work: Path) -> Iterator[Cell]:
    """All cells. Writes the profiles of their scaled networks into `work`. Raises the first error
    of a cell's configuration.
    """
    path = ROOT / sweep.config
    base = load(path)
    if sweep.scale > 1 and base.model.family.computes:
        raise ConfigError(
            f"scale {sweep.scale} divides replay.message_bytes, but {path} trains a real model; "
            "drop it"
        )
    work.mkdir(parents=True, exist_ok=True)
    for runs, network, scaled_profile in _on_networks(sweep, work):
        for schedule, wire in product(runs.schedules, runs.wires):
            base_overrides = (
                *overrides(sweep.venue, scaled_profile),
                f"run.folder={json.dumps(str(work / 'run'))}",
                *(f"replay.{key}={size}" for key, size in scaled_bytes(base, sweep.scale).items()),
                f"pipeline.schedule={json.dumps(schedule)}",
                f"pipeline.wire={json.dumps(WIRES[wire])}",
                *(
                    [f"data_parallel.wire={json.dumps(WIRES[wire])}"]
                    if base.data_parallel.replicas > 1
                    else []
                ),
                *runs.overrides,
            )
            for layout_overrides in spread(
                runs.layouts, runs.micro_batches, load(path, base_overrides)
            ):
                cell = Cell(
                    runs.engine,
                    schedule,
                    wire,
                    network,
                    scaled_profile,
                    path,
                    (*base_overrides, *layout_overrides),
                    sweep,
                    runs.label,
                )
                network.check(cell.config.world_size)
                check_engine(runs.engine, cell.config)
                check_rounds(cell.config)
                yield cell


def _on_networks(sweep: Sweep, work: Path) -> Iterator[tuple[Runs, Network, Path]]:
    """Each block with each of its networks, and the path of the scaled profile."""
    for runs in sweep.run:
        if sweep.venue == "local":
            yield runs, Network(), work
        for profile in runs.networks or sweep.networks:
            network = load_network(ROOT / profile)
            check_scale(network, sweep.scale)
            scaled_profile = work / Path(profile).name
            scaled_profile.write_text(
                as_profile(scaled(network, sweep.scale, windows=sweep.venue == "shaped")),
                encoding="utf-8",
            )
            yield runs, network, scaled_profile


def scaled_bytes(config: Config, scale: int) -> dict[str, int | list[int]]:
    """The byte counts of `replay` divided by `scale`; those left at their default are left out."""
    replay = config.replay
    sizes: dict[str, int | list[int]] = {"message_bytes": replay.message_bytes // scale}
    if config.tensor_parallel.size > 1:
        sizes["exchange_bytes"] = replay.exchange_bytes // scale
    if isinstance(replay.parameter_bytes, list):
        sizes["parameter_bytes"] = [size // scale for size in replay.parameter_bytes]
    elif replay.parameter_bytes:
        sizes["parameter_bytes"] = replay.parameter_bytes // scale
    return sizes


def check_scale(network: Network, scale: int) -> None:
    """Raises `ConfigError` for losses: packets keep their size, and a message that is divided has
    fewer of them to lose.
    """
    links = [*network.links.values()]
    if network.default is not None:
        links.append(network.default)
    if scale > 1 and any(link.loss_percent for link in links):
        raise ConfigError(
            f"{network.name} loses packets: with scale {scale} a message would lose a {scale}th of "
            "what it loses at full size; drop scale, or the network"
        )


def scaled(network: Network, scale: int, *, windows: bool) -> Network:
    """A slower network. TCP `windows` are divided only with shaping in software: the kernel's
    cannot be changed.
    """

    def slower(link: Link) -> Link:
        window = link.window_bytes / scale if link.window_bytes and windows else link.window_bytes
        return replace(link, bandwidth_gbps=link.bandwidth_gbps / scale, window_bytes=window)

    return network.with_links(slower)


def stated(network: Network) -> dict[str, Any]:
    """A network as the table of a profile."""
    top = {} if network.default is None else _keys(network.default)
    links = [
        {"from": source, "to": target, **_keys(link)}
        for (source, target), link in network.links.items()
    ]
    return {"name": network.name, **top} | ({"link": links} if links else {})


def _keys(link: Link) -> dict[str, float]:
    keys = {key: value for key, value in asdict(link).items() if value is not None}
    if not link.reorder_percent:
        del keys["reorder_percent"]  # lines of before it was known keep their key
    return keys


def as_profile(network: Network) -> str:
    table = stated(network)
    links = table.pop("link", [])
    rows = [
        f"    {{ {', '.join(f'{key} = {value}' for key, value in link.items())} }},"
        for link in links
    ]
    top = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join([*top, *(["link = [", *rows, "]"] if rows else []), ""])


def measure(cell: Cell, at: Venue, timeout_s: float) -> dict[str, Any]:
    """Seconds per step without the first one, and the measured network."""
    observed = at.become(cell.profile)
    try:
        rows = trained(cell.engine, cell.config_path, cell.overrides, at, timeout_s)
    except RunError as error:
        raise RunError(f"{cell}: {error}") from None
    steps = [row for row in rows if "step_s" in row]
    seconds = [row["step_s"] for row in steps]
    line = {
        "measured_s": round(usual(seconds[1:], cell.config), 3),
        "steps_s": seconds,
        "observed": observed,
    }
    return line | (of_gpus(steps[-1]) if gpus_needed(cell.config) else {})


def of_gpus(row: dict[str, Any]) -> dict[str, Any]:
    """GPU metrics of the last step's row: largest memory peak, mean utilisation, and MFU if
    known.
    """
    uses = [*row.get("gpu_use_percent", {}).values()]
    return {
        "memory_gb": round(max(row["gpu_memory_mb"].values()) / 1e3, 2),
        "gpu_use_percent": round(mean(uses)) if uses else None,
        "mfu": row.get("mfu"),
    }


def usual(seconds: list[float], config: Config) -> float:
    """The median step. With local SGD the mean over the last whole rounds, because only the last
    step of a round exchanges.
    """
    data_parallel, steps = config.data_parallel, len(seconds)
    if data_parallel.kind != "local-sgd" or data_parallel.replicas == 1:
        return median(seconds)
    return mean(seconds[steps % data_parallel.known_inner_steps :])


def check_rounds(config: Config) -> None:
    """Raises `ConfigError` if the counted steps, all but the first, contain no whole round of local
    SGD.
    """
    data_parallel, counted = config.data_parallel, config.train.steps - 1
    if (
        data_parallel.kind == "local-sgd"
        and data_parallel.replicas > 1
        and counted < data_parallel.known_inner_steps
    ):
        raise ConfigError(
            f"train.steps {config.train.steps} hold no round of data_parallel.inner_steps "
            f"{data_parallel.known_inner_steps} "
            "after the first step; raise train.steps or lower data_parallel.inner_steps"
        )


def difference_of_losses(cell: Cell, at: Venue) -> float | None:
    """The largest difference from our losses when the cell's engine trains a small GPT; None for
    dpipe. Raises if it is too large.
    """
    if cell.engine == "dpipe":
        return None
    if cell.config.model.family.computes:
        timeout_s = cell.sweep.timeout_s
        return difference_in_training(
            cell.engine, cell.config_path, cell.overrides, at, timeout_s=timeout_s
        )
    # Torch has no "auto"; the schedule that it finds splits the backward pass, as zero-bubble does.
    schedule = "zero-bubble" if cell.schedule == "auto" else cell.schedule
    return float(compare_pipelining(schedule, SMALL)["loss difference"])


def as_line(cell: Cell, measured: dict[str, Any], commit: str) -> dict[str, Any]:
    """The columns of the table with today's prediction, and the origin of the measurement. Without
    a single delay and bandwidth for a network whose links differ.
    """
    config = cell.config
    prediction, stages = forecast(config), config.pipeline.stages
    local = cell.sweep.venue == "local"  # there is no network to predict for
    link = None if cell.network.links or local else cell.network.default
    row = Row(
        delay_ms=link.delay_ms if link else None,
        bandwidth_gbps=link.bandwidth_gbps if link else None,
        data_parallel=config.data_parallel.replicas,
        engine=cell.system,
        schedule=cell.schedule + ("" if local or stages == NUM_STAGES else f", {stages} stages"),
        wire=cell.wire,
        predicted_s=None if local else round(prediction.step_us / 1e6, 3),
    )
    return {
        **asdict(row),
        **measured,
        "mode": "real" if config.model.family.computes else "replay",
        "network": stated(cell.network),
        "venue": cell.sweep.venue,
        "clip_norm": config.train.clip_norm,
        "order": order_of(prediction.schedule) if cell.schedule == "auto" else None,
        "sysctl": cell.sweep.sysctl,
        "scale": cell.sweep.scale,
        "transport": config.transport.kind,
        "connections": prediction.network.connections,
        "digest": config.digest(),
        **made_by(commit),
        "key": cell.key,
        "bound_s": bound_s(config, prediction),
        **laid_out(config),
    }


def made_by(commit: str) -> dict[str, str]:
    return {
        "machine": f"{os.cpu_count()}-core {platform.machine()}",
        "date": date.today().isoformat(),
        "commit": commit,
    }


def bound_s(config: Config, prediction: Forecast) -> float | None:
    """What no order of a replay's computations and messages is below; None with replicas."""
    if config.model.family.computes or prediction.replicas is not None:
        return None
    network = prediction.network
    pipeline = pipeline_on(
        network,
        prediction.cost,
        # Slices are pieces by themselves, here in any order.
        config.train.num_microbatches * config.pipeline.sequence_slices,
        config.pipeline.ranks,
        ballots=ballots_over(config, network, config.transport.shape),
    )
    return round(lower_bound_us(pipeline) / 1e6, 3)


def laid_out(config: Config) -> dict[str, Any]:
    """The keys by which the tables of layouts look up a line."""
    return {
        "device": device_name(config),
        "gpus": gpus_needed(config),
        "tensor_parallel": config.tensor_parallel.size,
        "pipeline_parallel": config.pipeline.ranks,
        "micro_batch": config.microbatch_size,
        "batch_size": config.train.batch_size,
        "precision": config.train.precision,
        "recompute": config.pipeline.recompute,
    }


def sweep_missing(sweep: Sweep, results: Path, work: Path, most: int | None) -> int:
    """Measure at most `most` cells that `results` lacks; returns the number of failures, which do
    not stop the others.
    """
    all_cells, keys = list(cells(sweep, work)), {line["key"] for line in whole_lines(results)}
    missing = [(index, cell) for index, cell in enumerate(all_cells, 1) if cell.key not in keys]
    todo = fitting(missing)[:most]
    if not todo:
        return 0
    failed, commit = 0, commit_of_tree()
    with venue(sweep.venue, max(cell.config.world_size for _, cell in todo), sweep.sysctl) as at:
        for index, cell in todo:
            click.echo(f"[{index}/{len(all_cells)}] {cell} ... ", nl=False)
            try:
                difference = difference_of_losses(cell, at)
                measured = {**measure(cell, at, sweep.timeout_s), "loss_difference": difference}
            except (RunError, AssertionError) as error:
                failed += 1
                click.echo(f"\n{error}", err=True)
                continue
            line = as_line(cell, measured, commit)
            append(results, line)
            predicted = (
                "" if line["predicted_s"] is None else f", predicted {line['predicted_s']:.2f}"
            )
            click.echo(f"{line['measured_s']:.2f} s a step{predicted}")
    return failed


def fitting(missing: list[tuple[int, Cell]]) -> list[tuple[int, Cell]]:
    """The cells for which this machine has enough GPUs. Raises `ConfigError` if there are none."""
    num_gpus = torch.cuda.device_count()
    fitting_cells = [
        (number, cell) for number, cell in missing if gpus_needed(cell.config) <= num_gpus
    ]
    if missing and not fitting_cells:
        least = min(gpus_needed(cell.config) for _, cell in missing)
        raise ConfigError(
            f"every cell that is left needs {least} GPUs at least, and torch sees {num_gpus} here; "
            "run "
            "the sweep on a "
            "machine that has them, or give the sweep file smaller layouts"
        )
    if len(fitting_cells) < len(missing):
        click.echo(
            f"left out, for want of GPUs (there are {num_gpus}): "
            f"{len(missing) - len(fitting_cells)} of "
            f"{len(missing)} cells"
        )
    return fitting_cells


@click.command(help=__doc__)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--results", type=Path, help="The file to append to; default scripts/results/NAME.jsonl."
)
@click.option(
    "--most", type=click.IntRange(min=1), help="Measure at most this many cells, then stop."
)
def main(file: Path, results: Path | None, most: int | None) -> None:
    try:
        sweep = read_table(Sweep, file)
        where = results or ROOT / f"scripts/results/{sweep.name}.jsonl"
        failed = sweep_missing(sweep, where, ROOT / "runs/sweeps" / sweep.name, most)
    except DpipeError as error:
        click.echo(f"sweep: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
