"""Selective recomputation: keep everything but the attention cores, which are run again
(Korthikanti et al. 2022).

    q, k, v ──softmax(q k^T) v──> y        held: q, k, v and y; made again in backward: whatever lies between

Between lie the [T, T] matrices wherever a fused kernel does not spare them: with dropout on a CPU,
for one.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from dpipe.stage.seeding import same_draws


def attention_cores(layer: nn.Module) -> list[nn.Module]:
    """The modules of `layer` that say `attention_core = True`; a user's own may."""
    return [module for module in layer.modules() if getattr(module, "attention_core", False)]


def recompute_attention(layer: nn.Module, *, compiled: bool = False) -> None:
    """Let the attention cores inside `layer` run again in backward, in place, with the random
    numbers they drew.

    What is compiled takes torch's own way of setting them, which is for one thread.
    """
    draws: dict[str, Any] = (
        {} if compiled else {"preserve_rng_state": False, "context_fn": same_draws}
    )
    for core in attention_cores(layer):
        # Looked up on the class, so that a second call does not wrap what the first has wrapped.
        core.forward = partial(
            checkpoint, partial(type(core).forward, core), use_reentrant=False, **draws
        )
