"""What a wire format with "+delta" goes with: samples that come again, and are known again."""

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.wire.format import FORMATS


def check_deltas(config: Config) -> None:
    """Raises `ConfigError` where links with "+delta" would not know a sample again."""
    if not _uses_deltas(config):
        return
    needed = None
    if not config.data.has_samples:
        needed = 'samples that come again: rows, data.format = "chat" or so, not windows of a text'
    elif config.data.streaming:
        needed = "data.streaming = false: where a row of a stream comes again is not known"
    elif config.data.packing and config.data.shuffle != "none":
        needed = (
            "sequences that are the same in each epoch: set data.packing = false, or "
            'data.shuffle = "none"'
        )
    elif config.pipeline.num_versions > 1:
        needed = f'another pipeline.schedule than "{config.pipeline.schedule}", whose steps overlap'
    elif config.pipeline.wire_formats is None:
        needed = 'pipeline.wire to name it: "auto" does not know in which epoch the run is'
    elif any(map(is_by_sample, config.pipeline.wire_formats.backward)):
        needed = 'to be of activations alone, such as {forward = "int4+delta", backward = "int8"}'
    if needed is not None:
        raise ConfigError(f'a pipeline.wire with "+delta" needs {needed}; or leave "+delta" out')


def _uses_deltas(config: Config) -> bool:
    formats = config.pipeline.wire_formats
    if formats is None:
        return any(map(is_by_sample, config.pipeline.wire_allowed))
    # Each once: of hundreds of links most have the same.
    return any(map(is_by_sample, {*formats.forward, *formats.backward}))


def is_by_sample(name: str) -> bool:
    return FORMATS.named(name).by_sample
