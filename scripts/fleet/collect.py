"""Copies the files of a run from its machines into one folder, which `dpipe trace` and `dpipe
generate` read.

INTO/RUN/
    metrics.jsonl  config.json  trace/  logs/  tensorboard/    the run's folder on rank 0's machine
    output/rank-N.log                                          the output of each rank
    checkpoints/step-N/index.json                              tensors only with --checkpoints
    checkpoints.json                                           which machine has which files
"""

import json
import shutil
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.ssh import HostFailed, HostRefused, Machine, as_line, each

PACK_S = 3600.0


def collect(machines: Sequence[Machine], run: str | None, into: Path, *, checkpoints: bool) -> Path:
    """Returns the folder. Raises `HostRefused` if no machine has the run."""
    states: list[dict[str, Any]] = each(
        machines, lambda machine: machine.agent("status", run=run, lines=1)
    )
    name = run or _newest(states)
    having = [
        machine
        for machine, state in zip(machines, states, strict=True)
        if state["run"] == name and state["ranks"]
    ]
    if name is None or not having:
        raise HostRefused(
            f"no host has {f'a run {name}' if name else 'any run'}; scripts/cluster status "
            "shows the newest"
        )
    folder = into / name
    folder.mkdir(parents=True, exist_ok=True)

    def bring(machine: Machine) -> dict[str, Any]:
        _unpack(machine, {"run": name, "checkpoints": checkpoints}, folder)
        return dict(machine.agent("checkpoints", run=name)["files"])

    files_of_host = {
        machine.host.name: files for machine, files in zip(having, each(having, bring), strict=True)
    }
    (folder / "checkpoints.json").write_text(json.dumps(files_of_host, indent=1), encoding="utf-8")
    return folder


def _unpack(machine: Machine, spec: dict[str, Any], folder: Path) -> None:
    """Unpacks while receiving: checkpoints may be larger than memory."""
    command = machine.agent_command("pack")
    with machine.process(command) as process:
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        limit = threading.Timer(PACK_S, process.kill)
        limit.start()
        try:
            process.stdin.write(as_line(spec))
            process.stdin.close()
            with tarfile.open(fileobj=process.stdout, mode="r|gz") as tar:
                for member in tar:
                    write(tar, member, folder)
        except (OSError, tarfile.TarError) as error:
            process.kill()
            errors = process.stderr.read().decode(errors="replace").strip()
            raise HostFailed(
                f"host {machine.host.name} has not sent all its files: {error}\n{errors}"
            ) from None
        finally:
            limit.cancel()


def write(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file below `folder`; links and devices are skipped. Debian 12's Python lacks
    tarfile's own filter.

    Raises `TarError` for a path outside `folder`.
    """
    path = (folder / member.name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise tarfile.TarError(f"{member.name} is outside the run's folder")
    if (source := tar.extractfile(member) if member.isfile() else None) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def _newest(states: Sequence[dict[str, Any]]) -> str | None:
    """The newest run of the first machine that has one."""
    return next((state["run"] for state in states if state["run"]), None)
