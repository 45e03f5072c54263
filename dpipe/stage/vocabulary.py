"""Cross entropy where each of T ranks has the logits of some of the words (Shoeybi et al. 2019,
section 3).

    loss = log(sum of exp(logits - peak)) - (logit of the target - peak)        three numbers a token are exchanged,
                                                                                and never the logits

N tokens · V vocabulary
"""

# ruff: noqa: N803, N806 - shape suffixes

from typing import Any

import torch
import torch.distributed as dist

from dpipe.stage.tensor_group import TensorGroup

_IGNORED = -100  # as torch's cross_entropy has it: a target that asks for nothing


def split_cross_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, group: TensorGroup
) -> torch.Tensor:
    """The mean over targets that are not ignored, in nats, the same on all ranks; `logits_NV` are
    this rank's V / T.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits_NV, targets_N, group)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, group: TensorGroup
    ) -> torch.Tensor:
        peak_N = group.all_reduce(logits_NV.amax(-1), dist.ReduceOp.MAX)
        shifted_NV = logits_NV - peak_N.unsqueeze(-1)
        here_N = targets_N - group.rank * logits_NV.shape[-1]
        is_here_N = (here_N >= 0) & (here_N < logits_NV.shape[-1])
        here_N1 = here_N.masked_fill(~is_here_N, 0).unsqueeze(-1)
        asked_N = shifted_NV.gather(-1, here_N1).squeeze(-1) * is_here_N
        chances_NV = shifted_NV.exp_()
        total_N, asked_N = group.all_reduce(torch.stack([chances_NV.sum(-1), asked_N])).unbind()
        counts_N = targets_N != _IGNORED
        share_N = counts_N / counts_N.sum()
        chances_NV.div_(total_N.unsqueeze(-1))
        ctx.save_for_backward(chances_NV, here_N1, is_here_N, share_N)
        return ((total_N.log() - asked_N) * share_N).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        chances_NV, here_N1, is_here_N, share_N = ctx.saved_tensors
        grad_NV = chances_NV * (share_N * grad).unsqueeze(-1)
        grad_NV.scatter_add_(-1, here_N1, -(is_here_N * share_N * grad).unsqueeze(-1))
        return grad_NV, None, None
