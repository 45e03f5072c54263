"""Waiting for the notice that a machine will be taken away.

    file:PATH    the file is there; a number in it is the seconds that are left
    command:CMD  the command ends with 0; a number that it prints is the seconds that are left
    aws          a spot instance's interruption, two minutes before
    gcp          a spot or preemptible VM's, half a minute before
    azure        a spot VM's, half a minute before

What cannot be asked, such as a metadata service that is away for a moment, is no notice.
"""

import logging
import shlex
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from dpipe.errors import ConfigError
from dpipe.wire.schema import Schema

LOG = logging.getLogger("dpipe")
POLL_S = 2.0
_ANSWER_S = 2.0
_MOST_BYTES = 64 << 10
_LINK_LOCAL = "http://169.254.169.254"
_AWS_S = 120.0
_OTHERS_S = 30.0
_DEFAULT_S = 30.0

_TABLE = Schema[dict[str, Any]](dict[str, Any])

Ask = Callable[[], float | None]  # the seconds that are left; None: nothing is to come


def watcher(notice: str, metadata: str = _LINK_LOCAL) -> Ask:
    """What `--notice` names. Raises `ConfigError` for anything else."""
    kind, _, argument = notice.partition(":")
    if kind == "file" and argument:
        return lambda: _in_file(Path(argument))
    if kind == "command" and argument:
        return lambda: _of_command(shlex.split(argument))
    if notice in _CLOUDS:
        ask = _CLOUDS[notice]
        return lambda: ask(metadata)
    names = ", ".join(["file:PATH", "command:CMD", *_CLOUDS])
    raise ConfigError(f"--notice {notice!r} is none of {names}")


def watch(ask: Ask, heed: Callable[[float], None], stopped: threading.Event) -> None:
    """Ask until a notice comes, and `heed` it once. Runs in a thread until `stopped`."""
    while not stopped.is_set():
        try:
            left_s = ask()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            LOG.debug("no notice could be asked for: %s", error)
            left_s = None
        if left_s is not None:
            LOG.warning("notice: this machine goes in %g s", left_s)
            heed(left_s)
            return
        stopped.wait(POLL_S)


def _in_file(path: Path) -> float | None:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    return _seconds(text)


def _of_command(argv: list[str]) -> float | None:
    done = subprocess.run(  # noqa: S603 - the user's own command line
        argv, capture_output=True, text=True, timeout=_ANSWER_S * 5, check=False
    )
    return _seconds(done.stdout) if done.returncode == 0 else None


def _seconds(text: str) -> float:
    """The number in a text; half a minute where it holds none."""
    try:
        return max(0.0, min(float(text), 86_400.0))
    except ValueError:
        return _DEFAULT_S


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = Request(url, headers=headers, method=method)  # noqa: S310 - a metadata service
    try:
        with urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
            return bytes(answer.read(_MOST_BYTES)).decode()
    except HTTPError as error:
        error.close()  # it has the connection
        raise


def _aws(metadata: str) -> float | None:
    token = _get(
        f"{metadata}/latest/api/token",
        {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
        method="PUT",
    )
    url = f"{metadata}/latest/meta-data/spot/instance-action"
    # 404, an OSError, as long as nothing is to come.
    return aws_notice(_get(url, {"X-aws-ec2-metadata-token": token}))


def aws_notice(answer: str) -> float | None:
    """Raises `ValueError` on an answer that is none."""
    action = _TABLE.read(answer.encode())
    if action.get("action") not in ("stop", "terminate"):
        return None
    return _left_s(str(action.get("time")), _AWS_S)


def _gcp(metadata: str) -> float | None:
    url = f"{metadata}/computeMetadata/v1/instance/preempted"
    answer = _get(url, {"Metadata-Flavor": "Google"})
    return _OTHERS_S if answer.strip() == "TRUE" else None


def _azure(metadata: str) -> float | None:
    url = f"{metadata}/metadata/scheduledevents?api-version=2020-07-01"
    return azure_notice(_get(url, {"Metadata": "true"}))


def azure_notice(answer: str) -> float | None:
    """Raises `ValueError` on an answer that is none."""
    events = _TABLE.read(answer.encode()).get("Events")
    for event in events if isinstance(events, list) else []:
        if isinstance(event, dict) and event.get("EventType") == "Preempt":
            return _OTHERS_S
    return None


def _left_s(when: str, otherwise_s: float) -> float:
    """The seconds until a time such as 2026-11-23T16:00:00Z."""
    try:
        at = datetime.fromisoformat(when)
        return max(0.0, (at - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return otherwise_s


_CLOUDS: dict[str, Callable[[str], float | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
