"""The real megatron-core as an engine on a CPU: what its layers use of CUDA is replaced by
stand-ins.

Without dropout: its generators are left out. An engine as `dpipe.baselines.megatron` is one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from dpipe.baselines import megatron
from dpipe.baselines.foreign import Step
from dpipe.config.load import Config


def check_config(config: Config) -> None:
    pass


def make_step(config: Config, rank: int) -> Step:
    _without_cuda()
    return megatron.make_step(config, rank)


def _without_cuda() -> None:
    """In this process, for good."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in ("ones", "zeros", "empty", "tensor", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: (
        kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")
    )
    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = str(kwargs.get("device"))
        return make(*args, **kwargs | ({"device": "cpu"} if asked.startswith("cuda") else {}))

    return made
