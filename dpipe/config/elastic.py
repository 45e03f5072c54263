"""What a run whose machines come and go cannot do yet."""

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.wire.format import FORMATS


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
            "an elastic run ends at train.steps: leave train.patience out, which ends it early"
        )
    replicas = config.data_parallel
    remembers = replicas.replicas > 1 and FORMATS[replicas.wire].error_feedback
    if config.pipeline.may_remember or remembers:
        raise ConfigError(
            "an elastic run repeats steps, and a wire format of ranks, with +delta or with error "
            "feedback does not send the same twice: set pipeline.wire or data_parallel.wire to "
            "another one"
        )
    if config.pipeline.num_versions > 1:
        raise ConfigError(
            "an elastic run drops the step that is under way, and where steps overlap there are "
            f'two: set pipeline.schedule to another one than "{config.pipeline.schedule}"'
        )
    if replicas.active_kind.has_server and replicas.staleness:
        raise ConfigError(
            "an elastic run repeats steps exactly, and with data_parallel.staleness a replica goes "
            "on from whichever gradients have arrived: leave it out"
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
