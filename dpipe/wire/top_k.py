"""`TopK`: of each block of 256 values the 16 that are largest, the others as 0. For gradients of
activations, with error feedback ("top16+feedback").

    [ value | value | ... | place | place | ... ]      bf16, then the place in its block as a byte
"""

import torch
from torch import Tensor

from dpipe.wire.format import KEPT_VALUES, TOP_BLOCK, top_k_bytes
from dpipe.wire.packed import PackedCodec, blocks_of


class TopK(PackedCodec):
    """A value that is sent keeps the bound of bf16; one that is not is 0. A block with a nan in it
    has one behind the link, too, because nan counts as the largest.
    """

    def num_bytes(self, num_values: int) -> int:
        return top_k_bytes(num_values)

    def pack(self, flat: Tensor) -> Tensor:
        blocks = blocks_of(flat.float(), TOP_BLOCK)
        sizes = blocks.abs()
        _, places = sizes.topk(KEPT_VALUES, dim=1, sorted=False)
        values = blocks.gather(1, places).bfloat16()
        packed = places.to(torch.uint8)
        return torch.cat([values.view(-1).view(torch.uint8), packed.view(-1)])

    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        num_kept = wire.numel() // 3
        values, places = wire.split([2 * num_kept, num_kept])
        by_block = places.long().view(-1, KEPT_VALUES)
        kept = values.view(torch.bfloat16).float().view(-1, KEPT_VALUES)
        blocks = torch.zeros(len(kept), TOP_BLOCK, device=wire.device)
        return blocks.scatter_(1, by_block, kept)
