"""Which pieces of a job's state (`keeper.pieces`) a rank keeps, and which it goes on from."""

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


def kept_at(run_plan: RunPlan, rank: int) -> list[int]:
    """The pieces that a rank takes copies of."""
    config = run_plan.config
    here = config.ranks_of(rank)
    return pieces_of(config).kept_by(here, layers_at(run_plan, rank))


def needed_at(run_plan: RunPlan, rank: int) -> list[int]:
    """The pieces that a rank goes on from."""
    config = run_plan.config
    here = config.ranks_of(rank)
    return pieces_of(config).needed_by(here, layers_at(run_plan, rank))
