"""A step that moves nothing and leaves nothing, before the first that does: for links on which
receives wait on a GPU.

    rank 0   post recv B0 ======== waits on the device for rank 1 ========>
             F0: its first kernel is loaded, for which CUDA may wait for all that runs     -> rank 1 never gets F0

What NCCL receives early is a kernel that runs until its peer sends. What CUDA does for the first
time while it runs (load a kernel, take memory) may wait for it, and the peer may wait for what
comes behind that (CUDA programming guide, lazy loading; NCCL user guide, using multiple
communicators concurrently). So each rank goes through the program of a step once by itself, where
all that it receives is zeros.
"""

import logging

import torch

from dpipe.engine.trainer import Job

LOG = logging.getLogger(__name__)


def rehearse(job: Job, step: int) -> None:
    """For `Transport.rehearse`: run what `step` runs, and an evaluation where there is one. Random
    numbers are drawn as for any other step.
    """
    stages = job.stages.values()
    kept = [(buffer, buffer.clone()) for stage in stages for buffer in stage.buffers()]
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
