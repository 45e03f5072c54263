"""What `dpipe serve` does: a parameter server by itself, until all workers have left it or it is
asked to stop. Killed and started again, it goes on.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dpipe.config.load import Config, load
from dpipe.dataparallel.kinds import KINDS, names_where
from dpipe.errors import ConfigError, InputError, RunError
from dpipe.paramserver.journal import REMEDY
from dpipe.paramserver.server import ParameterServer
from dpipe.processes.environment import environment
from dpipe.processes.signals import stop_on_signals
from dpipe.run.join import address_toward
from dpipe.serve.announcing import announce
from dpipe.store import checkpoint
from dpipe.store.run_folder import absent, held
from dpipe.wire.rpc import Security

_POLL_S = 1.0  # between looks at whether a signal has come

Tensors = Mapping[str, torch.Tensor]


class FolderSnapshots:
    """`paramserver.journal.Snapshots`: checkpoints of one stage, by `store/checkpoint.py`."""

    def save(
        self, folder: Path, step: int, tensors: Tensors, moments: Tensors, state: Mapping[str, Any]
    ) -> None:
        checkpoint.save(
            str(folder),
            step,
            0,
            tensors,
            moments,
            state,
            lambda part: [part],  # one process: it shares with itself
            keep=1,
            remedy=REMEDY,
        )

    def load(self, folder: Path) -> tuple[int, Tensors, Tensors, Mapping[str, Any]] | None:
        if checkpoint.latest(str(folder)) is None:
            return None
        loaded = checkpoint.load(str(folder), lambda name: True)
        return loaded.step, loaded.tensors, loaded.optimizer, loaded.state


def serve_parameters(
    path: str,
    overrides: tuple[str, ...],
    bind: str | None,
    say: Callable[[str], None],
    *,
    run: str | None = None,
    instead_of: str | None = None,
) -> None:
    """A parameter server by itself, until every worker has left it or it is asked to stop. `run`: a
    coordinator that is told where it is, `instead_of` another one.

    Raises `RunError` once a stage cannot go on: started again, the server goes on at the last step
    that it kept.
    """
    # a server runs no layers
    config = load(path, overrides, trust_code=True)
    if not KINDS[config.data_parallel.kind].has_server:
        raise ConfigError(
            f'data_parallel.kind is "{config.data_parallel.kind}", so that no worker would ever '
            f"come; set it to {names_where(lambda kind: kind.has_server)}, here and for the workers"
        )
    host, port = _bind(config, bind)
    node = config.node
    folder = _state_folder(config, host, port)
    token = node.token or environment().get("DPIPE_TOKEN", "")
    security = Security.load(token, node.tls_cert, node.tls_key, node.tls_ca, node.token_file)
    torch.set_num_threads(node.threads)  # it steps all stages: this is its compute
    stopping = stop_on_signals("stopping; every acknowledged step is kept")
    with _state_held(folder), stopping as wants_stop:
        server = ParameterServer(
            bind=host, port=port, security=security, folder=folder, snapshots=FolderSnapshots()
        )
        try:
            say(f"parameter server at {host}:{server.port}, state in {folder}{_kept_by(server)}")
            if run is not None:
                # Only now, when it answers.
                listening = (host, server.port)
                address = announce(run, config, listening, instead_of, security)
                say(f"the workers of the run at {run} call it at {address}")
            # In pieces, because a signal is only noted, and wakes nobody.
            while not (wants_stop() or server.failure or server.wait_until_left(_POLL_S)):
                pass
        finally:
            server.close()
    if server.failure is not None:
        raise RunError(f"{server.failure}; start it again to continue") from server.failure
    say("stopped; start it again to continue" if wants_stop() else "all workers have left")


def _kept_by(server: ParameterServer) -> str:
    kept = [f"; stage {stage} is at step {step}" for stage, step in server.standing.items()]
    return "".join(kept)


def _state_folder(config: Config, host: str, port: int) -> Path:
    """Where a server keeps its state; one of several has a folder of its own, or it would take up
    the others' stages when it is started again, and wait for workers that never come to it.
    """
    folder = Path(config.run.folder) / "server"
    if config.data_parallel.servers == "one":
        return folder
    return folder / f"{host}-{port}"


@contextmanager
def _state_held(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: two servers would remove each other's steps. The folders made for
    one that cannot start are removed again.
    """
    created = absent(folder)
    lock = folder / "lock"  # a file of its own: those of the state are replaced by others
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; set another run.folder") from None
    taken = (
        f"another parameter server has its state in {folder}; give this one a run.folder of its own"
    )
    with held(lock, taken):
        try:
            yield
        except InputError:
            lock.unlink(missing_ok=True)
            for path in created:
                # It fails where another server has put something in it.
                with suppress(OSError):
                    path.rmdir()
            raise


def _bind(config: Config, bind: str | None) -> tuple[str, int]:
    """Host and port to listen on: those of `bind`, else of the one address that workers call."""
    addresses = config.data_parallel.address
    if bind is None and len(addresses) != 1:
        raise ConfigError(
            "no address to listen on: give --bind HOST:PORT, or set data_parallel.address to one "
            "HOST:PORT"
        )
    host, _, port = (addresses[0] if bind is None else bind).rpartition(":")
    if bind is None:
        host = config.node.bind or address_toward(host)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--bind {bind!r} must be HOST:PORT, such as 0.0.0.0:7100")
    return host, int(port)
