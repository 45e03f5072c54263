"""What a run tells of itself: its efficiency step by step, and at its end trace and summary."""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import MACHINE
from dpipe.data.corpus import Corpus
from dpipe.data.feed import Text
from dpipe.errors import InputError
from dpipe.network.link import Host
from dpipe.plan.assumed_network import losses_are_outrun
from dpipe.plan.costs import layer_flops
from dpipe.plan.run_plan import RunPlan
from dpipe.report.efficiency import mfu, peak_of, train_flops
from dpipe.report.summary import TextScale, show_summary
from dpipe.report.trace import TraceInputs, save_inputs
from dpipe.run.generate import sample
from dpipe.store.run_folder import checkpoint_url

LOG = logging.getLogger("dpipe")
_SAMPLE_TOKENS = 300


@dataclass(frozen=True)
class Outcome:
    """How training ended on this rank."""

    stopped: bool  # before train.steps
    num_steps: int  # trained since this process started
    hosts: tuple[Host, ...]  # the cores that its ranks computed on


def utilisation(config: Config, device: torch.device, seconds: float) -> float | None:
    """MFU of a step that took `seconds`; None for a user's own model, and on a device whose peak is
    unknown.
    """
    if device.type != "cuda" or not config.model.is_transformer:
        return None
    peak = peak_of(torch.cuda.get_device_name(device))
    if peak is None:
        return None
    flops = train_flops(layer_flops(config, config.train.batch_size))
    return mfu(flops, seconds, peak, config.train.precision, config.world_size)


def shared_cores(config: Config, coordinator: Coordination) -> tuple[Host, ...]:
    """The cores that ranks compute on, by pipeline rank; none for a GPU's ranks. All ranks call it
    at the end of a run.
    """
    # The cores that this process may use: a container, a batch system or taskset limits them.
    here = [socket.gethostname(), sorted(os.sched_getaffinity(0))]
    machines = coordinator.share("trained", here, config.timeouts.transfer, MACHINE)
    # Replayed stages sleep, and leave the cores to others.
    on_cpu = config.model.family.computes and torch.device(config.node.device).type == "cpu"
    if not on_cpu:
        return ()
    size = config.tensor_parallel.size
    return hosts_of(machines, size, config.node.threads * size)


def hosts_of(
    machines: Sequence[tuple[str, Sequence[int]]], tensor_size: int, threads: int
) -> tuple[Host, ...]:
    """Of ranks with those hostnames and cores: pipeline ranks that may use the same core share a
    host.
    """
    hosts: list[tuple[set[int], set[tuple[str, int]]]] = []
    for rank, (name, cores) in enumerate(machines):
        # The ranks of a tensor-parallel group are one pipeline rank.
        ranks = {rank // tensor_size}
        places = {(name, core) for core in cores}
        apart = []
        for others, theirs in hosts:
            if ranks & others or places & theirs:
                ranks |= others
                places |= theirs
            else:
                apart.append((others, theirs))
        hosts = [*apart, (ranks, places)]
    return tuple(Host(tuple(sorted(ranks)), len(places), threads) for ranks, places in hosts)


def _save_trace_inputs(run_plan: RunPlan, hosts: tuple[Host, ...], folder: Path) -> None:
    """What `dpipe trace` needs of the run besides the spans."""
    config = run_plan.config
    forecast = run_plan.forecast
    inputs = TraceInputs(
        schedule=forecast.schedule,
        cost=forecast.cost,
        network=config.network_profile,
        connections=forecast.network.connections,
        hosts=hosts,
        replicas=forecast.usual_replicas,
        headers=config.counts_headers,
        tensor_size=config.tensor_parallel.size,
        waits_for_verdict=config.train.waits_for_verdict,
        seats=config.predict.seats,
        outruns_loss=losses_are_outrun(config),
    )
    save_inputs(folder / "trace", inputs)


def show_result(run_plan: RunPlan, outcome: Outcome, folder: Path, console: Console) -> None:
    """On rank 0: complete the trace, and print the summary, or how to continue a stopped run."""
    config = run_plan.config
    if config.run.trace_steps and outcome.num_steps > 0:
        _save_trace_inputs(run_plan, outcome.hosts, folder)
    # It has little time, and the summary is that of the run which continues it.
    if outcome.stopped:
        line = f"stopped before the end; go on with --resume {folder}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    parallel = config.data_parallel
    shards = parallel.replicas if parallel.active_kind.shards_optimizer else 1
    corpus = run_plan.corpus
    if corpus is None:
        show_summary(console, folder, scale=None, checkpoint_url=None, sample=None, shards=shards)
        return
    url = checkpoint_url(config)
    text = None
    if config.run.sample:
        text = sample_text(config, corpus, url, config.run.sample)
    show_summary(
        console,
        folder,
        scale=_text_scale(config, corpus),
        checkpoint_url=url,
        sample=text,
        shards=shards,
    )


def _text_scale(config: Config, corpus: Text) -> TextScale | None:
    # Of samples only answers are learned: nats a token do not convert to bits a byte.
    if not config.model.family.continues_text or not isinstance(corpus, Corpus):
        return None
    return TextScale(
        train_bytes_per_token=corpus.bytes_per_token("train"),
        held_out_bytes_per_token=corpus.bytes_per_token("held_out"),
        bigram_entropy=corpus.bigram_entropy(),
    )


def sample_text(config: Config, corpus: Text, url: str, prompt: str) -> str | None:
    """The finished model's continuation of `prompt`; None, and a warning, if it cannot be made.

    That is no failure of the run: each machine's part of a checkpoint may be in a folder of its
    own, and a user's own model need not continue texts.
    """
    try:
        return sample(config, corpus.tokenizer, url, prompt, _SAMPLE_TOKENS)
    except InputError as error:
        LOG.warning("run.sample is left out: %s", error)
        return None
