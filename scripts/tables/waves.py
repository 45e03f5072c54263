"""Products on a GPU, which computes them in waves of tiles.

A product is cut into tiles, of which every multiprocessor holds as many at a time as its registers
have room for. A last wave that is not full takes as long as a full one. On a V100, 160 tiles of
128 x 128 at a time, with a width and a sequence of 2048:

    one sequence      256 tiles   [160][ 96]                        80 % of two waves
    two               512         [160][160][160][32]               80 % of four
    three             768         [160][160][160][160][128]         96 % of five

So three sequences at once take less than three times as long as one.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tables.form import Parameter


@dataclass(frozen=True)
class Tiles:
    """What a GPU's multiprocessors work on at a time."""

    rows: Parameter
    columns: Parameter
    at_once: Parameter

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(vars(self).values())

    def stretch(self, rows: int, columns: int) -> float:
        """How many times as long a product of this shape takes as with full waves alone; the
        tiles lie as is better.
        """
        return min(self._stretch(rows, columns), self._stretch(columns, rows))

    def _stretch(self, rows: int, columns: int) -> float:
        down = math.ceil(rows / self.rows.value)
        across = math.ceil(columns / self.columns.value)
        waves = math.ceil(down * across / self.at_once.value)
        full = (rows / self.rows.value) * (columns / self.columns.value)
        return waves * self.at_once.value / full


def _tiles(rows: int, columns: int, at_once: int, library: str, gpu: str) -> Tiles:
    return Tiles(
        Parameter("rows of a product's tile", rows, "", f"nominal: {library}"),
        Parameter("columns of it", columns, "", f"nominal: {library}"),
        Parameter("tiles at a time", at_once, "", f"nominal: {gpu}"),
    )


V100_FP32 = _tiles(128, 128, 160, "cuBLAS in fp32", "two on each of V100's 80 multiprocessors")
A100_FP16 = _tiles(256, 128, 108, "cuBLAS in fp16", "one on each of A100's 108 multiprocessors")


class Passes(NamedTuple):
    forward: float
    backward: float


# Inputs and outputs, in widths: queries, keys and values; projection; the perceptron's two.
_PRODUCTS = ((1, 3), (1, 1), (1, 4), (4, 1))


def products(tokens: int, width: int, tensor_parallel: int, tiles: Tiles | None) -> Passes:
    """The products of a transformer layer on a rank, in the time of one without a gap whose inputs
    and outputs are both `width`. Without `tiles` none has a gap.
    """
    forward = 0.0
    backward = 0.0
    for inputs, outputs in _PRODUCTS:
        work = inputs * outputs
        fan_in = inputs * width
        fan_out = outputs * width
        # By columns, where there are more outputs than inputs; else by rows.
        if outputs > inputs:
            fan_out //= tensor_parallel
        else:
            fan_in //= tensor_parallel
        # Output; gradients of the input and of the weights.
        shapes = ((tokens, fan_out), (tokens, fan_in), (fan_in, fan_out))
        ahead, *back = (tiles.stretch(*shape) if tiles else 1.0 for shape in shapes)
        forward += work * ahead
        backward += work * sum(back)
    return Passes(forward, backward)
