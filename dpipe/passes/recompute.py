"""Selective recomputation: keep everything but the inside of attention cores, which backward runs
again (Korthikanti et al. 2022).

    q, k, v ──softmax(q k^T) v──> y        kept: q, k, v and y; made again: what lies between

Between lie [T, T] matrices, unless a fused kernel avoids them. On a CPU with dropout none does.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from dpipe.passes.seeding import same_draws


def attention_cores(layer: nn.Module) -> list[nn.Module]:
    """The modules inside `layer` with `attention_core = True`; a user's own may set it."""
    return [module for module in layer.modules() if getattr(module, "attention_core", False)]


def recompute_attention(layer: nn.Module, *, compiled: bool = False) -> None:
    """Let the attention cores inside `layer` run again in backward, in place, with the random
    numbers that they drew.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if not compiled:
        # torch.compile traces only torch's own way of restoring random numbers, which sets the
        # generators of the whole process: one thread alone may draw then.
        options |= {"preserve_rng_state": False, "context_fn": same_draws}
    for core in attention_cores(layer):
        # Looked up on the class, so that a second call does not wrap what the first has wrapped.
        run = partial(type(core).forward, core)
        core.forward = partial(checkpoint, run, **options)
