"""A step before the first one that exchanges no messages and leaves no trace, for NCCL.

    rank 0   post recv B0 ======== runs on the device until rank 1 sends ========>
             F0: its first kernel is loaded, for which CUDA may wait for all that runs
    rank 1   never gets F0

A receive that NCCL posts early is a kernel that runs until the peer sends. What CUDA does for the
first time meanwhile (load a kernel, allocate memory) may wait for that kernel, and the peer may
wait for what comes next here: a deadlock (CUDA programming guide, lazy loading; NCCL user guide,
using multiple communicators concurrently). So each rank first runs the program of a step by itself,
and receives zeros.
"""

import logging

import torch

from dpipe.engine.trainer import Job

LOG = logging.getLogger(__name__)


def rehearse(job: Job, step: int) -> None:
    """For `Transport.rehearse`: run what `step` runs, and an evaluation where there is one. Random
    numbers, buffers and gradients are afterwards as if it had not run.
    """
    stages = job.stages.values()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for stage in stages:
        kept += [(buffer, buffer.clone()) for buffer in stage.buffers()]
    # The replicas' exchange sends messages too, and nobody is at the other end.
    alone = job.executor.alone()
    for stage in stages:
        stage.begin_step(step)
    alone.run(job.schedule, job.feed.training(step))
    if job.train.eval_every is not None:
        alone.run(job.eval_schedule, job.feed.held_out(0))
    job.executor.clear()
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    job.recorder.take_parts()
    LOG.info("a step was rehearsed without its messages")
