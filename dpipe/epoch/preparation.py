"""What a machine does with a job before it offers itself: whatever is wrong is found while nobody
waits for it, and what the first epoch would read, write and import is there.

    ask for the job ──▶ build, draft ──▶ enlist ──▶ spare, or a rank
                             └──▶ refused, with words; the run has not heard of it
"""

from typing import Any

from dpipe.config.load import Config, build
from dpipe.config.run import NodeConfig
from dpipe.config.trust import refuse_untrusted
from dpipe.errors import ConfigError
from dpipe.plan.forecast import without_search
from dpipe.plan.run_plan import draft
from dpipe.probe.launcher_costs import from_text


def prepare(
    job: dict[str, dict[str, Any]], layer_costs: str, node: NodeConfig, *, trust_code: bool
) -> None:
    """`job` and its costs as an `Assignment` has them. Raises `InputError` where this machine could
    not take a rank of it.
    """
    config = build({**job, "node": node.model_dump()})
    refuse_untrusted(config.model.layers, trust_code=trust_code)
    check_elastic(config)
    costs = from_text(config.digest(), layer_costs)
    # Reads the text, which makes its cache here, and imports what a rank needs.
    draft(config, probed=costs, choose=without_search, predicts_memory=False)


def check_elastic(config: Config) -> None:
    """Raises `ConfigError` for what an epoch cannot do yet."""
    if config.pipeline.split == "measured":
        raise ConfigError(
            "an elastic run is cut before anything is measured: set pipeline.split to "
            '"estimated", or to that of a plan'
        )
    if config.pipeline.plan == "auto":
        raise ConfigError(
            "an elastic run has the cut that its job says, whichever machines join: leave "
            'pipeline.plan = "auto" out, or take what `dpipe plan` says'
        )
    if config.train.patience is not None:
        raise ConfigError(
            "train.patience ends a run early, and a run whose machines come and go ends at "
            "train.steps: leave train.patience out"
        )
    if config.pipeline.may_remember:
        raise ConfigError(
            "an elastic run repeats steps, and a wire format of ranks or with +feedback does "
            "not send the same twice: set pipeline.wire to another one"
        )
    if config.pipeline.num_versions > 1:
        raise ConfigError(
            "an elastic run drops the step that is under way, and where steps overlap there are "
            f'two: set pipeline.schedule to another one than "{config.pipeline.schedule}"'
        )
    kind = config.data_parallel.active_kind
    if config.tensor_parallel.size > 1 or kind.shards_optimizer or kind.has_server:
        raise ConfigError(
            "an elastic run keeps each layer whole on a rank: set tensor_parallel.size = 1 and "
            'data_parallel.kind = "all-reduce" or "local-sgd"'
        )
