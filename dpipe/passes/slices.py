"""A sequence in slices that follow each other through a stage (Sun et al. 2024, Seq1F1B), exactly.

    forward    slice 0   slice 1   slice 2       slice s reads the keys and values of 0 to s
    backward   slice 2   slice 1   slice 0       and adds to the gradients of 0 to s

The losses and gradients are those of the whole sequence, but for the order in which floats are
added. Only modules that say `takes_slices` may look at other tokens, or at a token's position; what
works on each token by itself needs to know nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.wire.format import sliced_dimension, sliced_shape
from dpipe.wire.spec import TensorSpec


class KeysValues:
    """The keys and values [B, N, T, H] of one micro-batch in one attention, and their gradients."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, num_slices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep those of the slice whose first position is `start`; returns all up to its end."""
        length = keys.shape[2]
        if self._kept is None:
            shape = list(keys.shape)
            shape[2] = length * num_slices
            self._kept = (
                keys.new_empty(shape),
                values.new_empty(shape),
            )
        end = start + length
        found = []
        pairs = zip(self._kept, (keys, values), strict=True)
        for kept, new in pairs:
            kept[:, :, start:end] = new
            # Of its own version: a later slice is written behind what this one's backward reads.
            found.append(kept[:, :, :end].data)
        return found[0], found[1]

    def add_up(
        self, grads: tuple[torch.Tensor, torch.Tensor], start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of keys and values up to the end of a slice, the last one first;
        returns the sums of those of the slice itself, to which no earlier one adds.
        """
        if self._grads is None:
            self._grads = grads
        else:
            for total, more in zip(self._grads, grads, strict=True):
                end = more.shape[2]
                total[:, :, :end] += more
        end = grads[0].shape[2]
        # No earlier slice reads them.
        keys, values = self._grads
        own_keys = keys[:, :, start:end]
        own_values = values[:, :, start:end]
        return own_keys, own_values


class Slices:
    """Which slice a stage is working on, and what its attentions keep from one to the next."""

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self._piece: int | None = None  # None: whole sequences, as in an evaluation
        self._kept: dict[tuple[int, int], KeysValues] = {}  # by micro-batch and attention
        self._masks: dict[int, torch.Tensor] = {}  # by number of keys

    @contextmanager
    def at(self, piece: int) -> Iterator[None]:
        """What runs inside is of `piece`: slice s of micro-batch m is m * num_slices + s."""
        self._piece = piece
        try:
            yield
        finally:
            self._piece = None

    @property
    def cut(self) -> bool:
        """Whether what runs now is a slice of a sequence."""
        is_whole = self._piece is None
        return self.num_slices > 1 and not is_whole

    def first_position(self, length: int) -> int:
        """The position in its sequence of the first of these `length` tokens."""
        if self._piece is None:
            return 0
        number = self._piece % self.num_slices
        return number * length

    def of(self, attention: nn.Module) -> KeysValues:
        """What `attention` keeps of this micro-batch."""
        assert self._piece is not None
        microbatch = self._piece // self.num_slices
        # By identity: a module has no name of its own.
        place = (microbatch, id(attention))
        return self._kept.setdefault(place, KeysValues())

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores of this slice's queries: -inf for later keys. None for the
        first slice, which torch's own causal mask fits; that is aligned with the first key.

        One for all layers and micro-batches of the stage: attention keeps what it is given.
        """
        num_queries = queries.shape[2]
        num_keys = keys.shape[2]
        if num_keys == num_queries:
            return None
        if num_keys not in self._masks:
            shape = (num_queries, num_keys)
            mask = queries.new_full(shape, -torch.inf)
            # Each query reads one key more than the one before it.
            first_hidden = num_keys - num_queries + 1
            self._masks[num_keys] = mask.triu(first_hidden)
        return self._masks[num_keys]

    def forget(self, piece: int) -> None:
        """The backward pass of `piece` is done; that of slice 0 is a micro-batch's last."""
        number = piece % self.num_slices
        if number > 0:
            return
        microbatch = piece // self.num_slices
        places = list(self._kept)
        for place in places:
            if place[0] == microbatch:
                del self._kept[place]

    def clear(self) -> None:
        self._kept.clear()


def tell_slices(layers: Iterable[nn.Module], slices: Slices) -> None:
    """Give `slices` to the modules inside `layers` with `takes_slices = True`."""
    for layer in layers:
        for module in layer.modules():
            if getattr(module, "takes_slices", False):
                module.slices = slices  # type: ignore[assignment]


class CausalSlice(torch.autograd.Function):
    """softmax(q k^T / sqrt(H)) v of one slice's queries, over all keys up to its end.

        apply(q, k, v, kept, slices)     q, k, v [B, N, T / num_slices, H], of the slice

    Backward returns, for k and v, the sums of what this slice and all later ones have for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: KeysValues,
        slices: Slices,
    ) -> torch.Tensor:
        start = slices.first_position(queries.shape[2])
        keys, values = kept.put(keys, values, start, slices.num_slices)
        # A copy: the queries are a view of a matrix that also has this slice's keys and values.
        leaves = (queries.detach().clone(), keys, values)
        for leaf in leaves:
            leaf.requires_grad_()
        mask = slices.mask(queries, keys)
        # A graph within the node of the outer one: backward goes through it by itself.
        with torch.enable_grad():
            attended = _attend(*leaves, mask)
        ctx.graph = leaves, attended
        ctx.place = kept, start
        return attended.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves, attended = ctx.graph
        kept, start = ctx.place
        grads = torch.autograd.grad(attended, leaves, grad)
        of_queries, of_keys, of_values = grads
        both = (of_keys, of_values)
        own_keys, own_values = kept.add_up(both, start)
        return of_queries, own_keys, own_values, None, None


def causal_slice(
    slices: Slices,
    attention: nn.Module,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """`CausalSlice` of what `attention` is given, [B, N, T / num_slices, H] each."""
    apply: Any = CausalSlice.apply
    attended: torch.Tensor = apply(queries, keys, values, slices.of(attention), slices)
    return attended


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def slice_of(tensor: torch.Tensor, number: int, num_slices: int) -> torch.Tensor:
    """Slice `number` of tokens or activations [B, T, ...]."""
    dimension = sliced_dimension(tensor.dim())
    slices = tensor.chunk(num_slices, dimension)
    return slices[number]


def slice_spec(spec: TensorSpec, num_slices: int) -> TensorSpec:
    """What `slice_of` gives of a tensor of `spec`."""
    shape = sliced_shape(spec.shape, num_slices)
    return spec._replace(shape=shape)
