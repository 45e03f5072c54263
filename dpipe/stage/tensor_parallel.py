"""A layer on T ranks, each with a part of every matrix (Shoeybi et al. 2019, Megatron-LM).

                        x ──enter──> [columns of A] ──gelu, or its heads──> [rows of B] ──leave──> y
    tensor parallel     whole        each rank its own part                 one term of a sum      whole
        forward          as it is                                                     all-reduce
        backward         all-reduce                                                   as it is
    sequence parallel   its positions                                                              its positions
        forward          all-gather                                                   reduce-scatter
        backward         reduce-scatter                                               all-gather

Between the matrices, where tensor parallelism computes the same norms and dropout on every rank,
sequence parallelism gives each rank a part of the positions (Korthikanti et al. 2022). The bytes
exchanged are the same.

torch's `parallelize_module` does not serve here: its DTensors live in the default group of a
process, and ranks may be threads of one; they draw other dropout masks for each T; and weight
gradients that wait (`linear.py`) need the factors of a product, which a DTensor hides. What is left
is small: layers stay as they are, and a layer's `tensor_plan` says which of its modules become
which of the classes below, with names and order of the parameters kept.

B batch · S sequence · D width
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.stage.linear import Linear
from dpipe.stage.tensor_group import TensorGroup

_SEQUENCE = 1  # the dimension of [B, S, D] that is split between the matrices

Exchange = Callable[[torch.Tensor], torch.Tensor]


class _Through(torch.autograd.Function):
    """`there` on the way forward, `back` on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def _through(x: torch.Tensor, there: Exchange, back: Exchange) -> torch.Tensor:
    y: torch.Tensor = _Through.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y


def enter(x_BSD: torch.Tensor, group: TensorGroup) -> torch.Tensor:  # noqa: N803 - shape suffix
    """In front of a matrix of which each rank has some columns: the whole of x, and the sum of all
    its gradients.
    """
    if group.sequence:
        return _through(
            x_BSD,
            lambda x: group.all_gather(x, _SEQUENCE),
            lambda grad: group.reduce_scatter(grad, _SEQUENCE),
        )
    return _through(x_BSD, lambda x: x.view_as(x), group.all_reduce)


def leave(x_BSD: torch.Tensor, group: TensorGroup) -> torch.Tensor:  # noqa: N803 - shape suffix
    """Behind a matrix of which each rank has some rows: the sum of what they made."""
    if group.sequence:
        return _through(
            x_BSD,
            lambda x: group.reduce_scatter(x, _SEQUENCE),
            lambda grad: group.all_gather(grad, _SEQUENCE),
        )
    return _through(x_BSD, group.all_reduce, lambda grad: grad)


def split_dropout(
    x: torch.Tensor, probability: float, group: TensorGroup, dim: int
) -> torch.Tensor:
    """Dropout on a part, along `dim`, of what one process would have: it draws for all of it and
    takes its part.
    """
    whole = list(x.shape)
    whole[dim] *= group.size
    noise = group.part(F.dropout(x.new_ones(whole), probability, inplace=True), dim)
    return x * noise.clone()  # a view would keep all of it


def _kept_in_part(
    whole: torch.Tensor, part: torch.Tensor, group: TensorGroup
) -> AbstractContextManager[object]:
    """What is kept of `whole` for backward, in whatever shape, is its `part`."""
    place = whole.untyped_storage()._cdata

    def pack(kept: torch.Tensor) -> torch.Tensor | torch.Size:
        return kept.shape if kept.untyped_storage()._cdata == place else kept

    def unpack(packed: torch.Tensor | torch.Size) -> torch.Tensor:
        return (
            group.all_gather(part, _SEQUENCE).view(packed)
            if isinstance(packed, torch.Size)
            else packed
        )

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Piece:
    """A module whose parameters `cut` are split along a dimension, `parts` of them each for itself
    (q, k and v).
    """

    cut: ClassVar[Mapping[str, int]] = {}
    parts: ClassVar[int] = 1
    group: TensorGroup


def leave_uncompiled(layer: nn.Module) -> None:
    """Keep the pieces of `layer` out of what `torch.compile` traces, in place.

    It does not trace the calls of a process group, nor hooks on what is kept for backward; and its
    random numbers are not those that one process draws.
    """
    for module in layer.modules():
        if isinstance(module, Piece):
            module.forward = torch.compiler.disable(module.forward)


class ColumnLinear(Piece, Linear):
    """Some of the outputs: weight [out / T, in].

    Where the sequence is split backward needs the whole input again: it keeps this rank's positions
    alone, and gathers them once more (Korthikanti et al. 2022, section 4.2.2).
    """

    cut: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(
                torch.get_autocast_dtype(input.device.type)
            )  # here, so that half as much is exchanged
        whole = enter(input, self.group)
        with (
            _kept_in_part(whole, input.detach(), self.group)
            if self.group.sequence
            else nullcontext()
        ):
            return self.product(whole, self.bias)


class QkvLinear(ColumnLinear):
    """Queries, keys and values of some of the heads: weight [3 D / T, D]."""

    parts: ClassVar = 3


class RowLinear(Piece, Linear):
    """Some of the inputs: weight [out, in / T]. The bias is whole, and is added once, to the
    sum.
    """

    cut: ClassVar = {"weight": 1}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = leave(self.product(input, None), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class FirstPositionLinear(Piece, Linear):
    """Whole, and reads [B, D] of position 0, which rank 0 alone has where the sequence is split:
    then its output is everybody's, and so are the gradients that it alone makes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if not self.group.sequence:
            return output
        return _through(
            output,
            lambda y: self.group.all_gather(y, 0).chunk(self.group.size)[0],
            lambda grad: grad if self.group.rank == 0 else torch.zeros_like(grad),
        )


class VocabularyEmbedding(Piece, nn.Embedding):
    """Some of the words: weight [V / T, D]. The others are zeros here, and come from the rank that
    has them.
    """

    cut: ClassVar = {"weight": 0}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        here = input - self.group.rank * len(self.weight)
        elsewhere = (here < 0) | (here >= len(self.weight))
        rows = super().forward(here.masked_fill(elsewhere, 0))
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class SequenceEmbedding(Piece, nn.Embedding):
    """Whole; looks up its positions [..., S] alone where the sequence is split."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(self.group.part(input, -1) if self.group.sequence else input)


class SequenceDropout(Piece, nn.Dropout):
    """Drops on its positions what one process would drop there."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.group.sequence and self.training and self.p:
            return split_dropout(input, self.p, self.group, _SEQUENCE)
        return super().forward(input)


@dataclass(frozen=True)
class Shard:
    """Where one rank's part of a parameter lies in the whole of `shape`, cut along `dim` in each of
    its `parts`.

    rows of q k v, T = 2      whole   [ q0 q1 | k0 k1 | v0 v1 ]      rank 0   [ q0 k0 v0 ]      rank 1   [ q1 k1 v1 ]
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
        """The part of `rank` out of a whole of any shape with the right size."""
        parts = whole.view(self.shape).chunk(self.parts, self.dim)
        return torch.cat([part.chunk(self.size, self.dim)[rank] for part in parts], self.dim)

    def join(self, ranks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from the parts of all ranks in order, of any shape with the right size."""
        own = list(self.shape)
        own[self.dim] //= self.size
        cut = [part.reshape(own).chunk(self.parts, self.dim) for part in ranks]
        return torch.cat([of_rank[part] for part in range(self.parts) for of_rank in cut], self.dim)


class Split:
    """How the parameters of a stage lie on the ranks of `group`.

    Those in `shards`, by their name in the whole model, are cut; each rank has the others whole.
    Where the sequence is split the gradient of those is a sum over positions, of which each rank
    has some terms.
    """

    def __init__(self, group: TensorGroup, layers: Mapping[int, nn.Module]) -> None:
        """Cuts `layers`, by their index in the model, in place."""
        self.group = group
        self.shards = {
            f"layers.{index}.{name}": shard
            for index, layer in layers.items()
            for name, shard in _cut(layer, group)
        }

    def add_up(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Once all gradients of a step are made: the sums of those that have terms on every
        rank.
        """
        if not self.group.sequence:
            return
        gradients = [p.grad for name, p in named if name not in self.shards and p.grad is not None]
        if gradients:
            row = self.group.all_reduce(torch.cat([grad.flatten() for grad in gradients]))
            for grad, total in zip(
                gradients, row.split([g.numel() for g in gradients]), strict=True
            ):
                grad.copy_(total.view_as(grad))

    def whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """The parameter of that name, put together from all ranks, of which each has to ask."""
        shard = self.shards.get(name)
        return (
            mine
            if shard is None
            else shard.join(self.group.all_gather(mine.flatten(), 0).chunk(self.group.size))
        )


def _cut(layer: nn.Module, group: TensorGroup) -> Iterable[tuple[str, Shard]]:
    """Do what the layer's `tensor_plan` says; yields how each parameter was cut, by its name in the
    layer.
    """
    plan: Mapping[str, type[Piece]] = layer.tensor_plan  # type: ignore[assignment]
    for place, kind in plan.items():
        piece: Any = layer.get_submodule(place)
        piece.__class__ = kind
        piece.group = group
        for key, dim in kind.cut.items():
            whole = getattr(piece, key)
            if whole is None:
                continue
            shard = Shard(tuple(whole.shape), dim, kind.parts, group.size)
            mine = shard.take(whole.detach(), group.rank).contiguous()
            setattr(piece, key, nn.Parameter(mine, requires_grad=whole.requires_grad))
            yield f"{place}.{key}", shard
