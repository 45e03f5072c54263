"""Which pieces of a job's state (`keeper.pieces`) a rank keeps, and which it goes on from.

parts of a layer          where
1                         a rank has all of it, and its replicas have the same
tensor_parallel.size      the ranks of a group have a part each, and go on from that
replicas times as many    replicas differ: each keeps its part of a checkpoint, and goes on from
                          those of all of them
"""

from dpipe.config.load import Config
from dpipe.keeper.pieces import Pieces
from dpipe.plan.run_plan import RunPlan
from dpipe.run.resume import layers_at


def num_keeping(config: Config) -> int:
    """The replicas whose parts make up the state of a layer; 1: each has all of it."""
    settings = config.data_parallel
    has_all = settings.active_kind.same_state and not settings.delay
    return 1 if has_all else settings.replicas


def pieces_of(config: Config) -> Pieces:
    return Pieces(config.tensor_parallel.size * num_keeping(config))


def part_at(config: Config, rank: int) -> int:
    """Which part of its layers a rank keeps."""
    here = config.ranks_of(rank)
    replica = here.dp_rank % num_keeping(config)
    return replica * here.tp_size + here.tp_rank


def kept_at(run_plan: RunPlan, rank: int) -> list[int]:
    """The pieces that a rank takes copies of."""
    config = run_plan.config
    return pieces_of(config).of(layers_at(run_plan, rank), part_at(config, rank))


def needed_at(run_plan: RunPlan, rank: int) -> list[int]:
    """The pieces that a rank goes on from."""
    config = run_plan.config
    here = config.ranks_of(rank)
    pieces = pieces_of(config)
    needed = []
    for part in range(here.tp_rank, pieces.num_parts, here.tp_size):
        needed += pieces.of(layers_at(run_plan, rank), part)
    return needed
