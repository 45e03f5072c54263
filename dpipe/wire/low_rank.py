"""`LowRank`: a tensor as the product of two thin matrices, by power iteration with a warm start
(PowerSGD, Vogels et al. 2019). For gradients of activations, which have few directions.

    M [n, m]  ~  P [n, r] Q [m, r]^T            on the wire: P, then Q, in bf16

    P = orthonormal(M Q_before)    Q = M^T P    so that P Q^T is M's projection on P's columns

m is the tensor's last dimension, n all others. Q_before is what the last tensor on the same link
ended with: the next micro-batch has nearly the same directions, and one iteration follows them.
"""

import torch
from torch import Tensor

from dpipe.wire.format import matrix_shape, rank_of
from dpipe.wire.spec import TensorSpec

_FIRST_ITERATIONS = 4  # without a warm start
# Of the first directions in every start: a direction that has died out is found again.
_KEPT_OPEN = 0.01


class LowRank:
    """The error is what lies outside of P's columns: its norm is at most that of the tensor, and
    0.01 of it for the bf16. A tensor with an inf or a nan in it decodes to nan throughout.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._directions: Tensor | None = None  # Q of the tensor before

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        matrix = _matrix(tensor.detach().float())
        rank = rank_of(self._rank, *matrix.shape)
        first = _first_directions(matrix.shape[1], rank, matrix.device)
        directions = self._directions
        iterations = 1
        if directions is None or directions.shape != first.shape:
            directions = first
            iterations = _FIRST_ITERATIONS
        for _ in range(iterations):
            columns, _ = torch.linalg.qr(matrix @ directions.nan_to_num())
            rows = matrix.t() @ columns
            directions = _start_from(rows, first)
        self._directions = directions
        factors = torch.cat([columns.reshape(-1), rows.reshape(-1)])
        return factors.bfloat16()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        num_rows, num_columns = matrix_shape(like.shape)
        rank = rank_of(self._rank, num_rows, num_columns)
        factors = wire.float()
        columns, rows = factors.split([num_rows * rank, num_columns * rank])
        product: Tensor = columns.view(num_rows, rank) @ rows.view(num_columns, rank).t()
        return product.reshape(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        num_rows, num_columns = matrix_shape(like.shape)
        rank = rank_of(self._rank, num_rows, num_columns)
        size = (num_rows + num_columns) * rank
        return TensorSpec((size,), torch.bfloat16)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(matrix_shape(tuple(tensor.shape)))


def _first_directions(num_columns: int, rank: int, device: torch.device) -> Tensor:
    """The same at both ends and in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_columns, rank, generator=generator).to(device)


def _start_from(rows: Tensor, first: Tensor) -> Tensor:
    """Columns of length 1, so that none is lost beside others that are far longer."""
    lengths = rows.norm(dim=0, keepdim=True)
    found: Tensor = rows / lengths.clamp(min=1e-30)
    return found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) + _KEPT_OPEN * first


def rank8() -> LowRank:
    return LowRank(8)


def rank32() -> LowRank:
    return LowRank(32)
