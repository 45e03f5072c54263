"""The folder of a run: opened once, never written over.

FOLDER/metrics.jsonl  tensorboard/  logs/rank-N.log  trace/  checkpoints/step-N/
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpipe.config import Config
from dpipe.errors import ConfigError


def open_folder(config: Config, resume: bool) -> Path:
    """The run's folder; raises `ConfigError` where it holds another run, so that nothing is overwritten."""
    folder = Path(config.run.folder)
    if (folder / "metrics.jsonl").exists() and not resume:
        raise ConfigError(f"{folder} already holds a run; choose another run.folder, or continue it: --resume {folder}")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "trace").mkdir(exist_ok=True)
    return folder


def keep_upload(folder: Path, rank: int, kind: str, payload: bytes) -> None:
    """What a rank gives to the run, kept on rank 0's machine."""
    (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / kind / f"rank-{rank}.json").write_bytes(payload)


@contextmanager
def logging_to(folder: Path, rank: int) -> Iterator[None]:
    """Rank 0 logs into the folder, because its terminal shows the run live; the others to their standard error."""
    log = logging.getLogger("dpipe")
    errors = logging.StreamHandler()
    errors.setLevel(logging.WARNING if rank == 0 else logging.INFO)
    handlers: list[logging.Handler] = [errors]
    if rank == 0:
        handlers.append(logging.FileHandler(folder / "logs" / "rank-0.log"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
