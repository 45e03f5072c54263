"""One rank of somebody else's engine on a configuration of ours, placed as `dpipe train` is, with
the rows of a run.

    main ── check ── placement ── process group ── step, step, ... ──> FOLDER/metrics.jsonl

Whatever reads our `metrics.jsonl` reads theirs too: scripts/sweep.py and scripts/table.py do.
"""

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it

from dpipe.config.load import Config, load
from dpipe.errors import ConfigError, DpipeError
from dpipe.plan.run_plan import check_device, local_device
from dpipe.processes.environment import ProcessInfo, environment, process_info
from dpipe.report.metrics import Metrics
from dpipe.run.results import utilisation
from dpipe.store.run_folder import open_folder
from dpipe.streams import Streams, streams_of

Step = Callable[[int], float]  # trains step n; returns its loss, which rank 0 must know
Make = Callable[[Config, int], Step]  # for one rank, when all of them can talk to each other
Check = Callable[[Config], None]


def refuse(engine: str, reasons: dict[str, bool]) -> None:
    """Raises `ConfigError` with every reason that holds."""
    held = [reason for reason, holds in reasons.items() if holds]
    if held:
        raise ConfigError(f"{engine} is run as it is: {'; '.join(held)}")


def train_rank(
    config: Config,
    process: ProcessInfo,
    check: Check,
    make: Make,
) -> None:
    """One rank, `train.steps` long; rank 0 writes a row a step. Nothing is written before `check`
    has passed.
    """
    check(config)
    check_world_size(config, process)
    torch.set_num_threads(config.node.threads)
    config = config.with_(node__device=local_device(config.node.device, process.local_rank))
    check_device(config.node.device)
    metrics = None
    if process.rank == 0:
        metrics = Metrics(
            open_folder(config, resume=False),
            first_step=0,
            tensorboard=False,
            show=lambda row: None,
        )
    device = torch.device(config.node.device)
    _open(config, process, device)
    step = make(config, process.rank)
    streams = streams_of(device)
    for number in range(config.train.steps):
        began = time.perf_counter()
        loss = step(number)
        # Before the gather of what GPUs hold, which is no part of a step.
        step_s = time.perf_counter() - began
        row = {"step": number, "loss": loss, "step_s": step_s}
        row |= _of_gpus(config, streams, step_s)
        if metrics is not None:
            metrics.write(row)
    dist.barrier()
    dist.destroy_process_group()
    if metrics is not None:
        metrics.close()


def check_world_size(config: Config, process: ProcessInfo) -> None:
    """Raises `ConfigError` where other than the configured number of processes were started."""
    if process.world_size != config.world_size:
        raise ConfigError(
            f"{process.world_size} processes were started, but pipeline.stages "
            f"{config.pipeline.stages}, "
            f"tensor_parallel.size {config.tensor_parallel.size} and data_parallel.replicas "
            f"{config.data_parallel.replicas} need {config.world_size}; start that many"
        )


def _open(config: Config, process: ProcessInfo, device: torch.device) -> None:
    longest_s = max(config.timeouts.join, config.timeouts.transfer)
    timeout = timedelta(seconds=longest_s)
    first = process.rank == 0
    world_size = process.world_size
    store = TCPStore(
        process.coordinator_host,
        process.port,
        world_size,
        is_master=first,
        timeout=timeout,
    )
    if device.type == "cuda":
        # NCCL takes the current device for its communicator's, whatever tensors come later.
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=process.rank,
        world_size=world_size,
        timeout=timeout,
    )


def _of_gpus(
    config: Config,
    streams: Streams,
    seconds: float,
) -> dict[str, Any]:
    """As our own rows have it: peak memory and use by rank, and MFU where the device's peak is
    known. All ranks meet here.
    """
    peak = streams.peak_bytes()
    if peak is None:
        return {}
    # NaN where a driver does not say: every rank must bring two numbers to the gather.
    percent = streams.use_percent()
    use = math.nan if percent is None else percent
    device = streams.device
    own = torch.tensor([peak / 1e6, use], device=device)
    num_ranks = dist.get_world_size()
    every = torch.empty(num_ranks, 2, device=device)
    dist.all_gather_into_tensor(every, own)
    memory_mb: dict[str, float] = {}
    uses: dict[str, int] = {}
    for rank, numbers in enumerate(every.tolist()):
        mb, percent = numbers
        memory_mb[str(rank)] = mb
        if not math.isnan(percent):
            uses[str(rank)] = int(percent)
    row: dict[str, Any] = {"gpu_memory_mb": memory_mb}
    if uses:
        row["gpu_use_percent"] = uses
    mfu = utilisation(config, device, seconds)
    if mfu is not None:
        row["mfu"] = mfu
    return row


def command(about: str, check: Check, make: Make) -> click.Command:
    """`python -m MODULE CONFIG -o KEY=VALUE ...`: one rank."""

    @click.command(help=about)
    @click.argument("config", type=click.Path(dir_okay=False))
    @click.option("-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE")
    @click.option("--trust-code", is_flag=True, help="As of `dpipe train`.")
    def main(config: str, overrides: tuple[str, ...], *, trust_code: bool) -> None:
        try:
            process = process_info(environment())
            loaded = load(config, overrides, trust_code=trust_code)
            train_rank(loaded, process, check, make)
        except DpipeError as error:
            click.echo(f"dpipe: {error}", err=True)
            sys.exit(error.exit_code)

    return main
