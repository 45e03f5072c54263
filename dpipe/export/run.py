"""A run of a published model, written as Hugging Face's libraries read it."""

from pathlib import Path

from dpipe.errors import ConfigError
from dpipe.hub.extra import hub_function
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url, load_configuration


def export_folder(
    run: Path,
    folder: Path,
    *,
    only_adapter: bool = False,
    best: bool = False,
    learned: bool = True,
) -> int:
    """The newest checkpoint of `run`, or its `best`, to the new `folder`; returns its step
    (`folder.py`). Without what was `learned`: its model as it was published.

    Raises `ConfigError` for a run of another model than a published one.
    """
    config = load_configuration(run)
    if config.model.hf is None:
        raise ConfigError(
            f"{run} is a run of model.layers {config.model.layers!r}, which transformers does not "
            "have: export is for runs with model.hf"
        )
    url = checkpoint_url(config, run)
    step = checkpoint.best(url) if best else None
    export = hub_function("folder:export_run", room="export")
    written: int = export(
        config, url if learned else None, folder, only_adapter=only_adapter, step=step
    )
    return written
