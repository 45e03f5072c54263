"""Training from Python: `dpipe.train` for one rank, `dpipe.launch` for all ranks of a machine.

losses = []
folder = dpipe.launch("job.toml", on_row=lambda row: losses.append(row.get("loss")))
"""

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from dpipe.config.load import Config, in_folder, load
from dpipe.errors import InputError, RunError
from dpipe.processes.environment import set_up_grpc
from dpipe.report.display import lasting
from dpipe.report.rows import OnRow

LOG = logging.getLogger("dpipe")


def train(
    config: Config | str | Path,
    *,
    overrides: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float | None = None,
    resume: str | Path | None = None,
    fallback: bool = False,
    on_row: OnRow | None = None,
    show: bool = False,
    change: Sequence[str] = (),
    trust_code: bool = False,
) -> Path:
    """Train one rank in this process, as `dpipe train` does; returns the run's folder.

    `config` is a configuration or the path of one, `overrides` are such as "train.steps=100".
    Without `rank`, `world_size` and `coordinator` ("host:port") they come from the environment of
    torchrun or Slurm, and where there is none this is the only rank. `timeout_s` is how long to
    wait for the other ranks (default: timeouts.join). `resume` is the folder of a run to continue;
    with `fallback` from the checkpoint before the newest, if that is damaged. `change` names keys,
    such as "train.seed", that may differ from the run's although they make another run of it.
    `trust_code` lets model.layers name code outside the working folder that no installed package
    declares for it: a configuration from somebody else can name any.

    On rank 0 `on_row` gets each row of metrics.jsonl as it is written; what it raises ends the
    run. With `show` rank 0 prints what `dpipe train` prints.

    In the main thread, Ctrl-C stops the run after the step with a checkpoint, and this returns.
    Raises `InputError` for what you can fix before the run, and `RunError` where the run fails.
    Sets the number of torch's threads to node.threads, and in the environment what makes gRPC
    faster (GRPC_EXPERIMENTS, GRPC_POLL_STRATEGY): grpc must not have been imported before.
    """
    checked = load(config, in_folder(overrides, resume), trust_code=trust_code)
    set_up_grpc()
    from dpipe.run.start import train_rank  # imports grpc

    train_rank(
        checked,
        rank=rank,
        world_size=world_size,
        coordinator=coordinator,
        timeout=timeout_s,
        resume=resume is not None,
        fallback=fallback,
        change=change,
        console=Console(file=lasting(sys.stdout)) if show else Console(file=StringIO(), quiet=True),
        on_row=on_row,
    )
    return Path(checked.run.folder)


def launch(
    config: Config | str | Path,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int | None = None,
    resume: str | Path | None = None,
    fallback: bool = False,
    on_row: OnRow | None = None,
    change: Sequence[str] = (),
    trust_code: bool = False,
) -> Path:
    """Train all ranks as processes of this machine, and wait; returns the run's folder.

    Each rank is a `python -m dpipe train` of its own, so that this works in a notebook and in a
    script without `if __name__ == "__main__"`. A model of your own (model.layers) must be in a
    module that these processes can import. What ranks print is in FOLDER/logs.

    `num_ranks` sets pipeline.stages so that there are that many ranks; the other arguments are
    those of `train`. `on_row` is called in this thread; what it raises kills the ranks.

    In the main thread the first Ctrl-C stops the ranks after their step with a checkpoint, and
    this returns; a second one kills them. Raises `InputError` for what you can fix before the
    run, and `RunError` where the run fails, with the last lines of the rank that failed first.
    """
    from dpipe.run.start import launch_ranks  # imports grpc, before which `train` can set it up

    checked = load(config, in_folder(overrides, resume), trust_code=trust_code)
    lines: list[str] = []
    # a folder that only this user can read: the file may hold the token
    with tempfile.TemporaryDirectory(prefix="dpipe-") as folder:
        path = Path(folder) / "config.json"
        # Only what was set: some keys mean something of their own when they are left out.
        path.write_text(json.dumps(checked.model_dump(mode="json", exclude_unset=True)))
        exit_code = launch_ranks(
            str(path),
            (),
            num_ranks=num_ranks,
            resume=None if resume is None else str(resume),
            fallback=fallback,
            change=change,
            trust_code=trust_code,
            say=lines.append,
            quiet=True,
            on_row=on_row,
        )
    if exit_code == InputError.exit_code:
        raise InputError("\n".join(lines))
    if exit_code:
        raise RunError("\n".join(lines))
    return Path(checked.run.folder)
