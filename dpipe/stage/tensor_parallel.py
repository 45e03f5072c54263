"""A layer on T ranks, each with a part of every matrix (Shoeybi et al. 2019, Megatron-LM).

                        x ──enter──> [columns of A] ──gelu, or its heads──> [rows of B] ──leave──> y
    tensor parallel     whole        each rank its own part                 one term of a sum      whole
        forward          as it is                                                     all-reduce
        backward         all-reduce                                                   as it is
    sequence parallel   its positions                                                              its positions
        forward          all-gather                                                   reduce-scatter
        backward         reduce-scatter                                               all-gather

Between the matrices, where tensor parallelism computes the same norms and dropout on every rank,
sequence parallelism gives each rank a part of the positions (Korthikanti et al. 2022). It exchanges
as many bytes.

torch's `parallelize_module` does not serve here. Its DTensors live in a process's default group,
and ranks may be threads of one process. It draws other dropout masks for each T. And weight
gradients that wait (`linear.py`) need the factors of a product, which a DTensor hides. What is left
is small: a layer's `tensor_plan` says which of its modules become which class below; names and
order of the parameters stay.

B batch · S sequence · D width · N tokens · V vocabulary
"""  # noqa: E501 - the drawing

# ruff: noqa: N803, N806 - shape suffixes

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dpipe.passes.linear import Linear
from dpipe.stage.tensor_group import TensorGroup

_SEQUENCE = 1  # the dimension of [B, S, D] that is split between the matrices
_IGNORED = -100  # as torch's cross_entropy has it: a target that does not count

Collective = Callable[[torch.Tensor], torch.Tensor]


class _Exchanged(torch.autograd.Function):
    """`there` on the way forward, `back` on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Collective, back: Collective) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def _exchanged(x: torch.Tensor, there: Collective, back: Collective) -> torch.Tensor:
    y: torch.Tensor = _Exchanged.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y


def enter(x_BSD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """In front of a matrix split by columns: the whole of x, and the sum of its gradients."""
    if group.sequence:
        return _exchanged(
            x_BSD,
            lambda x: group.all_gather(x, _SEQUENCE),
            lambda grad: group.reduce_scatter(grad, _SEQUENCE),
        )
    return _exchanged(x_BSD, lambda x: x.view_as(x), group.all_reduce)


def leave(x_BSD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Behind a matrix split by rows: the sum of all ranks' terms."""
    if group.sequence:
        return _exchanged(
            x_BSD,
            lambda x: group.reduce_scatter(x, _SEQUENCE),
            lambda grad: group.all_gather(grad, _SEQUENCE),
        )
    return _exchanged(x_BSD, group.all_reduce, lambda grad: grad)


def split_dropout(
    x: torch.Tensor, probability: float, group: TensorGroup, dim: int
) -> torch.Tensor:
    """Dropout on this rank's part, along `dim`, with the mask that one process would draw: draws
    the whole mask and takes its part.
    """
    whole = list(x.shape)
    whole[dim] *= group.size
    noise = group.part(F.dropout(x.new_ones(whole), probability, inplace=True), dim)
    return x * noise.clone()  # a view would keep the whole mask in memory


def split_cross_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, group: TensorGroup
) -> torch.Tensor:
    """Cross entropy where each rank has the logits of V / T words (Shoeybi et al. 2019, section 3).

        loss = log(sum of exp(logits - peak)) - (logit of the target - peak)

    The mean over targets that are not ignored, in nats, the same on all ranks. Three numbers a
    token are exchanged, and never the logits.
    """
    loss: torch.Tensor = _SplitCrossEntropy.apply(logits_NV, targets_N, group)  # type: ignore[no-untyped-call]
    return loss


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        group: TensorGroup,
    ) -> torch.Tensor:
        # Of all ranks' words, so that no rank's exponentials overflow and their sums fit together.
        peak_N = group.all_reduce(logits_NV.amax(-1), dist.ReduceOp.MAX)
        shifted_NV = logits_NV - peak_N.unsqueeze(-1)
        # The target's index among this rank's words, where it is one of them.
        num_words = logits_NV.shape[-1]
        here_N = targets_N - group.rank * num_words
        is_here_N = (here_N >= 0) & (here_N < num_words)
        # An index in range for all: what `gather` finds for another rank's word is multiplied away.
        here_N1 = here_N.masked_fill(~is_here_N, 0).unsqueeze(-1)
        target_logit_N = shifted_NV.gather(-1, here_N1).squeeze(-1) * is_here_N
        exp_NV = shifted_NV.exp_()
        sums = group.all_reduce(torch.stack([exp_NV.sum(-1), target_logit_N]))
        total_N, target_logit_N = sums.unbind()
        counts_N = targets_N != _IGNORED
        weight_N = counts_N / counts_N.sum()
        # In place, as above: [N, V / T] is the largest tensor there is.
        softmax_NV = exp_NV.div_(total_N.unsqueeze(-1))
        ctx.save_for_backward(softmax_NV, here_N1, is_here_N, weight_N)
        return ((total_N.log() - target_logit_N) * weight_N).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax_NV, here_N1, is_here_N, weight_N = ctx.saved_tensors
        grad_NV = softmax_NV * (weight_N * grad).unsqueeze(-1)
        target_grad_N = -(is_here_N * weight_N * grad)
        grad_NV.scatter_add_(-1, here_N1, target_grad_N.unsqueeze(-1))
        return grad_NV, None, None


class SplitModule:
    """A module whose parameters in `cut` are split along a dimension, in `parts` that are each cut
    by themselves (3 for q, k and v).
    """

    cut: ClassVar[Mapping[str, int]] = {}
    parts: ClassVar[int] = 1
    group: TensorGroup


def leave_uncompiled(layer: nn.Module) -> None:
    """Keep the split modules of `layer` out of what `torch.compile` traces, in place.

    It traces neither the calls of a process group nor hooks on what is kept for backward, and its
    random numbers are not those that one process draws.
    """
    for module in layer.modules():
        if isinstance(module, SplitModule):
            module.forward = torch.compiler.disable(module.forward)


class ColumnLinear(SplitModule, Linear):
    """Some of the outputs: weight [out / T, in].

    With sequence parallelism, backward needs the whole input again: this rank's positions alone are
    kept, and gathered once more (Korthikanti et al. 2022, section 4.2.2).
    """

    cut: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):
            # Cast before the exchange, which then moves half the bytes.
            input = input.to(torch.get_autocast_dtype(input.device.type))
        whole = enter(input, self.group)
        keeping: AbstractContextManager[object] = nullcontext()
        if self.group.sequence:
            keeping = _kept_in_part(whole, input.detach(), self.group)
        with keeping:
            return self.product(whole, self.bias)


def _kept_in_part(
    whole: torch.Tensor, part: torch.Tensor, group: TensorGroup
) -> AbstractContextManager[object]:
    """Where autograd would keep `whole` for backward, in whatever shape, it keeps `part` and
    gathers it.
    """
    # By storage, because autograd keeps a view or a transpose of it.
    storage = whole.untyped_storage()._cdata

    def pack(kept: torch.Tensor) -> torch.Tensor | torch.Size:
        return kept.shape if kept.untyped_storage()._cdata == storage else kept

    def unpack(packed: torch.Tensor | torch.Size) -> torch.Tensor:
        if isinstance(packed, torch.Size):
            return group.all_gather(part, _SEQUENCE).view(packed)
        return packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class QkvLinear(ColumnLinear):
    """Queries, keys and values of some of the heads: weight [3 D / T, D]."""

    parts: ClassVar = 3


class RowLinear(SplitModule, Linear):
    """Some of the inputs: weight [out, in / T]. The bias is whole, and added once, to the sum."""

    cut: ClassVar = {"weight": 1}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = leave(self.product(input, None), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class FirstPositionLinear(SplitModule, Linear):
    """Whole, and reads [B, D] of position 0, which with sequence parallelism rank 0 alone has.

    Then all ranks take rank 0's output, and the gradients that it alone makes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if not self.group.sequence:
            return output

        def of_first(y: torch.Tensor) -> torch.Tensor:
            ranks = self.group.all_gather(y, 0)
            return ranks.chunk(self.group.size)[0]

        def to_first(grad: torch.Tensor) -> torch.Tensor:
            return grad if self.group.rank == 0 else torch.zeros_like(grad)

        return _exchanged(output, of_first, to_first)


class VocabularyEmbedding(SplitModule, nn.Embedding):
    """Some of the words: weight [V / T, D]. Another rank's words are zeros here, and come with the
    sum.
    """

    cut: ClassVar = {"weight": 0}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = input - self.group.rank * len(self.weight)
        elsewhere = (here < 0) | (here >= len(self.weight))
        rows = super().forward(here.masked_fill(elsewhere, 0))  # row 0 stands in, and is blanked
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class SequenceEmbedding(SplitModule, nn.Embedding):
    """Whole; with sequence parallelism it looks up this rank's positions [..., S] alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.group.sequence:
            input = self.group.part(input, -1)
        return super().forward(input)


class SequenceDropout(SplitModule, nn.Dropout):
    """On this rank's positions, with the mask that one process would draw."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.group.sequence and self.training and self.p:
            return split_dropout(input, self.p, self.group, _SEQUENCE)
        return super().forward(input)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter of `shape`, cut along `dim` in each of its `parts` for `size`
    ranks.

    rows of q k v, size 2    whole  [ q0 q1 | k0 k1 | v0 v1 ]
                             rank 0 [ q0 k0 v0 ]    rank 1 [ q1 k1 v1 ]
    """

    shape: tuple[int, ...]
    dim: int
    parts: int
    size: int

    @property
    def num_values(self) -> int:
        """Of one rank's part."""
        return math.prod(self.shape) // self.size

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of `rank`, from a whole of any shape with the right number of values."""
        parts = whole.view(self.shape).chunk(self.parts, self.dim)
        own = [part.chunk(self.size, self.dim)[rank] for part in parts]
        return torch.cat(own, self.dim)

    def join(self, ranks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from the parts of all ranks in order, of any shape with as many values."""
        own = list(self.shape)
        own[self.dim] //= self.size
        cut = [shard.reshape(own).chunk(self.parts, self.dim) for shard in ranks]
        ordered = [of_rank[part] for part in range(self.parts) for of_rank in cut]
        return torch.cat(ordered, self.dim)


class Split:
    """How the parameters of a stage are sharded over the ranks of `group`.

    Those in `shards`, by their name in the whole model, are cut; each rank has the others whole.
    With sequence parallelism the gradient of a whole one is a sum over positions, of which each
    rank has some terms.
    """

    def __init__(self, group: TensorGroup, layers: Mapping[int, nn.Module]) -> None:
        """Cuts `layers`, by their index in the model, in place."""
        self.group = group
        self.shards: dict[str, Shard] = {}
        for index, layer in layers.items():
            for name, shard in _cut(layer, group):
                self.shards[f"layers.{index}.{name}"] = shard

    def add_up(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """After the last backward of a step: sum the gradients of which each rank has some
        terms.
        """
        if not self.group.sequence:
            return
        gradients: list[torch.Tensor] = []
        for name, parameter in named:
            if name not in self.shards and parameter.grad is not None:
                gradients.append(parameter.grad)
        if not gradients:
            return
        # One collective for all: most are biases and norms, too small to pay a round trip each.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        total = self.group.all_reduce(flat)
        totals = total.split([gradient.numel() for gradient in gradients])
        for gradient, summed in zip(gradients, totals, strict=True):
            gradient.copy_(summed.view_as(gradient))

    def whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """The parameter of that name, joined from all ranks; a collective that each of them must
        call.
        """
        shard = self.shards.get(name)
        if shard is None:
            return mine
        ranks = self.group.all_gather(mine.flatten(), 0)
        return shard.join(ranks.chunk(self.group.size))


def _cut(layer: nn.Module, group: TensorGroup) -> Iterable[tuple[str, Shard]]:
    """Do what the layer's `tensor_plan` says; yields each cut parameter's name in the layer, and
    its shard.
    """
    plan: Mapping[str, type[SplitModule]] = layer.tensor_plan  # type: ignore[assignment]
    for path, kind in plan.items():
        module: Any = layer.get_submodule(path)
        module.__class__ = kind  # in place: the layer's own code goes on calling it by its name
        module.group = group
        for key, dim in kind.cut.items():
            whole = getattr(module, key)
            if whole is None:
                continue
            shard = Shard(tuple(whole.shape), dim, kind.parts, group.size)
            mine = shard.take(whole.detach(), group.rank).contiguous()
            setattr(module, key, nn.Parameter(mine, requires_grad=whole.requires_grad))
            yield f"{path}.{key}", shard
