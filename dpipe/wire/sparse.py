"""`Sparse`: of each block of 4,096 values the 64 that are largest, with a sign and the size of
their group alone; the others as 0. For what `local-sgd` exchanges, with error feedback (SparseLoCo,
Sarfi et al. 2025, sends 1 to 3 % of the values in 2 bits).

    [ sizes of a block's groups | ... | signs | ... | places | ... ]
      4 of bf16                         1 bit each    12 bits each: two in three bytes

The values of a block are sent by size, so that which of the four groups of 16 one belongs to takes
no bits: a group has the mean of their sizes. In all 112 bytes for 16 KiB of fp32, 146 times fewer.
"""

import torch
from torch import Tensor

from dpipe.wire.format import SPARSE_BLOCK, SPARSE_GROUPS, SPARSE_KEPT, sparse_bytes
from dpipe.wire.packed import PackedCodec, blocks_of

_SIZE_BYTES = 2 * SPARSE_GROUPS  # a block
_SIGN_BYTES = SPARSE_KEPT // 8
_PLACE_BYTES = SPARSE_KEPT * 3 // 2
_GROUP = SPARSE_KEPT // SPARSE_GROUPS
_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class Sparse(PackedCodec):
    """An inf or a nan makes its group not finite, because both count as the largest."""

    def num_bytes(self, num_values: int) -> int:
        return sparse_bytes(num_values)

    def pack(self, flat: Tensor) -> Tensor:
        blocks = blocks_of(flat.float(), SPARSE_BLOCK)
        all_sizes = blocks.abs()
        sizes, places = all_sizes.topk(SPARSE_KEPT, dim=1)
        groups = sizes.view(-1, _GROUP)
        means = groups.mean(dim=1).bfloat16()
        kept = blocks.gather(1, places)
        signs = _pack_signs(kept.signbit())
        packed_places = _pack_places(places)
        return torch.cat([means.view(torch.uint8), signs, packed_places])

    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        num_blocks = -(-num_values // SPARSE_BLOCK)
        num_each = (_SIZE_BYTES, _SIGN_BYTES, _PLACE_BYTES)
        sizes, signs, places = wire.split([num_blocks * num for num in num_each])
        means = sizes.view(torch.bfloat16).float()
        values = means.repeat_interleave(_GROUP)
        negative = _unpack_signs(signs)
        signed = torch.where(negative, -values, values)
        by_block = signed.view(-1, SPARSE_KEPT)
        places_by_block = _unpack_places(places).view(-1, SPARSE_KEPT)
        blocks = torch.zeros(num_blocks, SPARSE_BLOCK, device=wire.device)
        return blocks.scatter_(1, places_by_block, by_block)


def _pack_signs(negative: Tensor) -> Tensor:
    bits = negative.view(-1, 8) * _BITS.to(negative.device)
    return bits.sum(dim=1, dtype=torch.uint8)


def _unpack_signs(packed: Tensor) -> Tensor:
    bits = packed[:, None] & _BITS.to(packed.device)
    return (bits > 0).view(-1)


def _pack_places(places: Tensor) -> Tensor:
    """Pairs of 12 bits as three bytes."""
    even, odd = places.view(-1, 2).unbind(1)
    low = even & 255
    middle = even >> 8 | (odd & 15) << 4
    high = odd >> 4
    triples = torch.stack([low, middle, high], dim=1)
    return triples.to(torch.uint8).view(-1)


def _unpack_places(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, 3).long().unbind(1)
    even = low | (middle & 15) << 8
    odd = middle >> 4 | high << 4
    return torch.stack([even, odd], dim=1)
