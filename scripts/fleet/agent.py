"""Runs on each machine for `scripts/cluster`, from the project's files there. Standard library
alone.

    ssh HOST .venv/bin/python src/scripts/fleet/agent.py VERB        one line of JSON in, JSON out

FOLDER/
    commit                  what is installed; absent until it is complete
    src/                    the project
    shaped                  the profile and the device that netem has shaped
    cluster/current         the name of the newest run here
    cluster/RUN/            job.toml  machines.toml  run.json  rank-N.log  rank-N.pid  rank-N.exit

Each rank has a holder: a process in a session of its own that waits for it and writes its exit
code.

    sshd ── agent start ──► hold ──► dpipe train      agent and sshd may end; hold and rank stay
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2]
FOLDER = SOURCE.parent
RUNS = FOLDER / "cluster"
SHAPED = FOLDER / "shaped"
LOOK_S = 0.2
SIGN_OF_LIFE_S = 5.0
START_S = 20.0
COMMAND_S = 60.0
TAIL_BYTES = 1 << 20


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The request cannot be done here; the message becomes the answer."""


@dataclass(frozen=True)
class Rank:
    """One rank of one run, read from its files."""

    run: str
    number: int

    def file(self, kind: str) -> Path:
        return RUNS / self.run / f"rank-{self.number}.{kind}"

    @property
    def pid(self) -> int | None:
        """Of the rank's process if it is alive."""
        return self._alive("rank")

    @property
    def holder(self) -> int | None:
        return self._alive("holder")

    def _alive(self, role: str) -> int | None:
        """Compares the start time, too: another process may have the number by now."""
        process = (_read(self.file("pid")) or {}).get(role)
        return process["pid"] if process and started_at(process["pid"]) == process["born"] else None

    @property
    def exit_code(self) -> int | None:
        ended = _read(self.file("exit"))
        return None if ended is None else ended["code"]

    @property
    def log_bytes(self) -> int:
        return self.file("log").stat().st_size if self.file("log").exists() else 0

    def state(self) -> dict[str, Any]:
        """`running`, `ended` with an exit code, or `lost`: ended without one, for example because
        the machine was rebooted.
        """
        alive = self.pid or self.holder  # before the exit code: the holder writes it and ends
        code = self.exit_code
        state = "ended" if code is not None else "running" if alive else "lost"
        return {
            "state": state,
            "code": code,
            "since": _changed(self.file("exit" if code is not None else "pid")),
        }


def started_at(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def ranks_of(run: str) -> list[Rank]:
    numbers = (path.stem.partition("-")[2] for path in (RUNS / run).glob("rank-*.pid"))
    return [Rank(run, number) for number in sorted(map(int, numbers))]


def current() -> str | None:
    return (RUNS / "current").read_text(encoding="utf-8") if (RUNS / "current").exists() else None


def status(spec: dict[str, Any]) -> dict[str, Any]:
    """What is installed, and the state of the ranks of a run (by default the newest), with the end
    of their logs.
    """
    run = spec["run"] or current()
    return {
        "commit": (FOLDER / "commit").read_text(encoding="utf-8").strip()
        if (FOLDER / "commit").exists()
        else None,
        "run": run,
        "ranks": {rank.number: rank.state() | _tail(rank, spec["lines"]) for rank in ranks_of(run)}
        if run
        else {},
        "elastic": bool(run and _about(run).get("elastic", False)),
        "shaped": _read(SHAPED),
    }


def _tail(rank: Rank, lines: int) -> dict[str, Any]:
    """The last line of a log, and the offset of its last `lines` (within the last megabyte); 0
    lines mean all.
    """
    if not rank.log_bytes:
        return {"last": "", "offset": 0}
    with rank.file("log").open("rb") as log:
        first = log.seek(max(0, rank.log_bytes - TAIL_BYTES))
        tail = log.read().splitlines(keepends=True)
    offset = first + sum(map(len, tail[:-lines])) if lines else 0
    return {"last": tail[-1].decode(errors="replace").strip(), "offset": offset}


def start(spec: dict[str, Any]) -> dict[str, Any]:
    """Start this machine's ranks of a run and return; answers where in their logs it begins."""
    run = spec["run"]
    if (now := current()) and any(rank.pid for rank in ranks_of(now)):
        raise Refused(f"run {now} is still going here; scripts/cluster down stops it")
    folder = RUNS / run
    if folder.exists() and not spec["resume"]:
        raise Refused(
            f"there was a run {run} here before; choose another --name, or --resume {run}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("rank-*.pid"), *folder.glob("rank-*.exit")):
        old.unlink()
    _write_files(folder, spec["files"])
    _write(folder / "run.json", {"folder": spec["folder"], "elastic": spec["elastic"]})
    (RUNS / "current").write_text(run, encoding="utf-8")
    ranks = [Rank(run, each["rank"]) for each in spec["ranks"]]
    offsets = {rank.number: rank.log_bytes for rank in ranks}
    for rank, each in zip(ranks, spec["ranks"], strict=True):
        _start_holder(rank, each["argv"], each["environ"])
    _await(lambda: all(rank.file("pid").exists() for rank in ranks), START_S)
    for rank in ranks:
        if not rank.file("pid").exists():
            raise Refused(
                f"rank {rank.number} has not started within {START_S:g} s: {_tail(rank, 1)['last']}"
            )
    return {"offsets": offsets}


def _write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _start_holder(rank: Rank, argv: list[str], environ: dict[str, str]) -> None:
    with rank.file("log").open("ab") as log:
        holder = subprocess.Popen(
            [sys.executable, __file__, "hold"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert holder.stdin is not None
    holder.stdin.write(
        json.dumps({**asdict(rank), "argv": argv, "environ": environ}).encode() + b"\n"
    )
    holder.stdin.close()


def hold(spec: dict[str, Any]) -> None:
    """Run one rank and write its exit code; 128 + n if signal n ended it, as shells do."""
    rank = Rank(spec["run"], spec["number"])
    environ = {
        **os.environ,
        **spec["environ"],
        "PYTHONUNBUFFERED": "1",  # else the last lines of a killed rank are lost
    }
    process = subprocess.Popen(
        [sys.executable, *spec["argv"]],
        cwd=SOURCE,
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = {"rank": process.pid, "holder": os.getpid()}
    _write(
        rank.file("pid"),
        {role: {"pid": pid, "born": started_at(pid)} for role, pid in pids.items()},
    )
    code = process.wait()
    _write(rank.file("exit"), {"code": code if code >= 0 else 128 - code})


def follow(spec: dict[str, Any]) -> None:
    """Print each rank's log from an offset on, as one JSON object a line, and its state once it has
    ended.

    {"rank": 2, "line": "...", "offset": 812}     offset: where the next line begins
    {"rank": 2, "state": "ended", "code": 0}      nothing comes after it
    {}                                            a sign of life: the write fails if nobody reads
    """
    offsets = {Rank(spec["run"], int(number)): offset for number, offset in spec["offsets"].items()}
    last_output = time.monotonic()
    while offsets:
        for rank in list(offsets):
            state = rank.state()  # before the log: then the log of an ended rank is complete
            for line, after in _lines(rank, offsets[rank], whole=state["state"] == "running"):
                _say({"rank": rank.number, "line": line, "offset": after})
                offsets[rank], last_output = after, time.monotonic()
            if state["state"] != "running" or not spec["wait"]:
                del offsets[rank]
                _say({"rank": rank.number, **state})
        if time.monotonic() - last_output > SIGN_OF_LIFE_S:
            last_output = time.monotonic()
            _say({})
        if offsets:
            time.sleep(LOOK_S)


def _lines(rank: Rank, offset: int, *, whole: bool) -> Iterator[tuple[str, int]]:
    """The lines from `offset` on, each with the offset of the next. With `whole` the last is left
    out until it ends.
    """
    if not rank.file("log").exists():
        return
    with rank.file("log").open("rb") as log:
        log.seek(offset)
        for line in log:
            if whole and not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line.decode(errors="replace").rstrip("\r\n"), offset


def stop(spec: dict[str, Any]) -> dict[str, Any]:
    """Send a signal to the ranks that are alive, wait for them, and answer which are still alive.

    SIGKILL goes to the rank's process group, so also to what it started; others to the rank alone.
    """
    number = signal.Signals[spec["signal"]]
    alive = [rank for rank in ranks_of(spec["run"] or current() or "-") if rank.pid]
    for rank in alive:
        if pid := rank.pid:
            with suppress(ProcessLookupError):
                (os.killpg if number is signal.SIGKILL else os.kill)(pid, number)
    _await(lambda: not any(rank.pid for rank in alive), spec["wait_s"])
    return {
        "signalled": [rank.number for rank in alive],
        "alive": [rank.number for rank in alive if rank.pid],
    }


def pack(spec: dict[str, Any]) -> None:
    """A run's files as a tar on standard output: logs, the run's folder, and of its checkpoints the
    index, or all.
    """
    run = spec["run"]
    folder = _folder_of(run)
    with tarfile.open(mode="w|gz", fileobj=sys.stdout.buffer) as tar:
        for rank in ranks_of(run):
            tar.add(rank.file("log"), f"output/rank-{rank.number}.log")
        for path in sorted(folder.rglob("*")):
            tensors = path.suffix == ".safetensors"
            if path.is_file() and (spec["checkpoints"] or not tensors):
                tar.add(path, str(path.relative_to(folder)))


def checkpoints(spec: dict[str, Any]) -> dict[str, Any]:
    """The files of a run's checkpoints on this machine, and their sizes."""
    folder = _folder_of(spec["run"])
    files = sorted(path for path in (folder / "checkpoints").rglob("*") if path.is_file())
    return {"files": {str(path.relative_to(folder)): path.stat().st_size for path in files}}


def _folder_of(run: str) -> Path:
    return SOURCE / str(_about(run).get("folder", "-"))


def _about(run: str) -> dict[str, Any]:
    return _read(RUNS / run / "run.json") or {}


def shape(spec: dict[str, Any]) -> dict[str, Any]:
    """Put a profile on the device that leads to `toward`. It is removed again unless `keep` comes
    in time.
    """
    profile = FOLDER / spec["name"]
    profile.write_text(spec["profile"], encoding="utf-8")
    device = spec["device"] or _device_toward(spec["toward"])
    arguments = ["apply", str(profile), "--device", device, "--node", str(spec["node"]), "--detach"]
    _netem(*arguments, *(["--addresses", ",".join(spec["addresses"])] if spec["addresses"] else []))
    _write(SHAPED, {"profile": profile.stem, "device": device, "kept": False})
    subprocess.Popen(
        [sys.executable, __file__, "revert", json.dumps(spec["revert_s"])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return {"device": device}


def keep(spec: dict[str, Any]) -> dict[str, Any]:
    """Keep the shaping: the caller can still reach this machine."""
    shaped = _read(SHAPED)
    if shaped is None:
        raise Refused(
            "the profile was removed again, because this machine was not reached through it in time"
        )
    _write(SHAPED, {**shaped, "kept": True})
    return {}


def revert(spec: float) -> None:
    """Wait for `keep`, else remove the shaping: a profile must not lock its user out."""
    _await(lambda: (_read(SHAPED) or {"kept": True})["kept"], spec)
    if not (_read(SHAPED) or {"kept": True})["kept"]:
        unshape({})


def unshape(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove our shaping, if there is any."""
    shaped = _read(SHAPED)
    if shaped is not None:
        _netem("clear", "--device", shaped["device"])
        SHAPED.unlink(missing_ok=True)
    return {"cleared": shaped and shaped["device"]}


def verify(spec: dict[str, Any]) -> dict[str, Any]:
    """Compare the link to a peer, where `answer` runs, with the profile."""
    arguments = [
        "verify",
        str(FOLDER / spec["name"]),
        "--node",
        str(spec["node"]),
        "--peer",
        str(spec["peer"]),
    ]
    done = _run([sys.executable, "-m", "netem", *arguments, spec["address"]], 2 * COMMAND_S)
    if done.returncode not in (0, 1) or not done.stdout:
        raise Refused(done.stderr.strip())
    return {"rows": done.stdout.splitlines(), "close": done.returncode == 0}


def answer(spec: dict[str, Any]) -> None:
    """Answer a peer's `verify` for as long as standard input is open."""
    with subprocess.Popen([sys.executable, "-m", "netem", "answer"], cwd=SOURCE) as answering:
        sys.stdin.read()
        answering.kill()


def _netem(*arguments: str) -> None:
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    done = _run([*sudo, sys.executable, "-m", "netem", *arguments], COMMAND_S)
    if done.returncode != 0:
        raise Refused((done.stderr or done.stdout).strip())


def _run(argv: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _device_toward(address: str) -> str:
    done = _run(["ip", "-j", "route", "get", address], COMMAND_S)
    if done.returncode != 0:
        raise Refused(
            f"no route to {address}: {done.stderr.strip()}; set interface in the hosts file"
        )
    return str(json.loads(done.stdout)[0]["dev"])


def _await(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(LOOK_S / 4)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, value: Any) -> None:
    """Atomic: others may read the file at any time."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value), encoding="utf-8")
    os.replace(new, path)


def _changed(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


ANSWERS = {
    verb.__name__: verb for verb in (status, start, stop, checkpoints, shape, keep, unshape, verify)
}
STREAMS = {verb.__name__: verb for verb in (hold, follow, pack, answer)}


def main(verb: str, *arguments: str) -> None:
    if verb == revert.__name__:
        revert(json.loads(arguments[0]))
        return
    spec = json.loads(sys.stdin.readline())
    if verb in STREAMS:
        STREAMS[verb](spec)
        return
    try:
        _say(ANSWERS[verb](spec))
    except Refused as refusal:
        _say({"refused": str(refusal)})


if __name__ == "__main__":
    main(*sys.argv[1:])
