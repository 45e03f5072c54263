"""How long a transformer layer takes on a GPU that computes products in waves of tiles.

A product is cut into tiles, of which every multiprocessor holds as many at a time as its registers
have room for. A last wave that is not full takes as long as a full one. On a V100, 160 tiles of
128 x 128 at a time, with a width and a sequence of 2048:

    one sequence      256 tiles   [160][ 96]                        80 % of two waves
    two               512         [160][160][160][32]               80 % of four
    three             768         [160][160][160][160][128]         96 % of five

So three sequences at once take less than three times as long as one.
"""

import math
from typing import NamedTuple

from tables.form import Parameter

TILE = Parameter("side of a product's tile", 128, "values", "nominal: cuBLAS in fp32 on V100")
TILES_AT_ONCE = Parameter(
    "tiles at a time", 160, "", "nominal: two on each of V100's 80 multiprocessors"
)
PARAMETERS = (TILE, TILES_AT_ONCE)

# Inputs and outputs, in widths: queries, keys and values; projection; the perceptron's two.
_PRODUCTS = ((1, 3), (1, 1), (1, 4), (4, 1))


class Passes(NamedTuple):
    forward: float
    backward: float


def layer(sequence: int, width: int, micro_batch: int) -> Passes:
    """A layer in the time of one product of `sequence` x `width` x `width` without a gap."""
    tokens = sequence * micro_batch
    # Scores and mixing are so many products, one a head, that they fill their waves.
    core = 2 * tokens / width
    forward = core
    backward = 2 * core
    for inputs, outputs in _PRODUCTS:
        work = inputs * outputs * micro_batch
        fan_in = inputs * width
        fan_out = outputs * width
        forward += work * stretch(tokens, fan_out)
        # The gradients of the input and of the weights.
        backward += work * (stretch(tokens, fan_in) + stretch(fan_in, fan_out))
    return Passes(forward, backward)


def stretch(rows: int, columns: int) -> float:
    """How many times as long a product of this shape takes as with full waves alone."""
    side = int(TILE.value)
    tiles = math.ceil(rows / side) * math.ceil(columns / side)
    at_once = int(TILES_AT_ONCE.value)
    return math.ceil(tiles / at_once) * at_once / tiles
