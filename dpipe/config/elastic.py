"""What a run whose machines come and go cannot do yet."""

from dpipe.config.load import Config
from dpipe.errors import ConfigError


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
            "an elastic run repeats steps, and a wire format of ranks, with +feedback or with "
            "+delta does not send the same twice: set pipeline.wire to another one"
        )
    if config.pipeline.num_versions > 1:
        raise ConfigError(
            "an elastic run drops the step that is under way, and where steps overlap there are "
            f'two: set pipeline.schedule to another one than "{config.pipeline.schedule}"'
        )
    # What copies of layers hold is whole layers, and the optimizer's state of each.
    kind = config.data_parallel.active_kind
    if config.tensor_parallel.size > 1 or kind.shards_optimizer or kind.has_server:
        raise ConfigError(
            "an elastic run keeps each layer whole on a rank: set tensor_parallel.size = 1 and "
            'data_parallel.kind = "all-reduce" or "local-sgd"'
        )


def check_spares(config: Config) -> None:
    """Raises `ConfigError` for a job that processes with spares among them cannot train."""
    check_elastic(config)
    if config.run.checkpoint_url is None:
        raise ConfigError(
            "with --spares no machine keeps its rank, and so none its part of a checkpoint: set "
            "run.checkpoint_url to a place that all machines reach, such as s3://bucket/run or "
            "file:///shared/run"
        )
