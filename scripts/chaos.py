"""Kills, pauses and replaces the machines of an elastic run, each a process, and compares it with a
run that nothing happened to.

    scripts/chaos job.toml --kill-every 60 --minutes 15 --seed 1
    scripts/chaos job.toml --network netem/profiles/10ms-1gbps.toml     each machine a host of a lab
    scripts/chaos job.toml --guarding 20      what copies cost: 20 turns with them, 20 without
    scripts/chaos job.toml --undisturbed chaos/undisturbed --folder more --seed 2
    scripts/chaos --simulate 100000 --seed 1      clusters on a virtual clock instead: no job

    undisturbed   dpipe launch, or the same without faults   losses, parameters, seconds
                  (or what --undisturbed kept of another call)
    disturbed     dpipe coordinate, a dpipe join a rank      the same, to the last bit?
                  and a spare; a fault every so often

Faults, by the seed: a machine is killed (and a new one joins), a machine is stopped for a while,
the coordinator is killed and started again; in a lab also: a machine's cable is cut for a while.
Only where --fault asks for them: the coordinator is killed, its folder deleted, and a standby takes
over; a parameter server, which then runs by itself, is killed and started again, or begins on
another machine; in a lab, half of the machines are parted from the others and from the coordinator.
What each process holds is looked at once a minute while there are faults (levels.py): an hour of
`--fault kill --kill-every 60` leaves a coordinator whose memory, descriptors and threads must stay
level, one of `--fault pause` also machines. Exits with 1 where a bit differs, or a process grows.
"""

import hashlib
import math
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import click
from forked import END_S, Forked, import_dpipe, make_folder
from levels import MOST_GROWTH, Levels
from machines import Machines, lab_of, machines_of
from progress import Fault, Progress, ended, report, values_of

from dpipe.cli.options import MAX_WAIT_S, NumberRange
from dpipe.config.load import load
from dpipe.engine.update import Verdict
from dpipe.epoch.guard import Guard
from dpipe.errors import CheckpointError, ConfigError
from dpipe.store import checkpoint
from netem import lab as labs

ROOT = Path(__file__).resolve().parent.parent
PAUSES_S = (5.0, 20.0, 60.0)
CUTS_S = PAUSES_S
FAULTS = ("kill", "pause", "coordinator")
CUT = "cut"
TAKEOVER = "takeover"
SERVER = "server"
SHARED = "shared"  # where checkpoints are that outlive a coordinator's folder
PARTITION = "partition"
LOOK_S = 0.05


@dataclass(frozen=True)
class Storm:
    """Which faults, by which dice, one in how many seconds, and for how many minutes."""

    kinds: Sequence[str] = ()
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    every_s: float = 60.0
    minutes: float = 0.0


def digest_of(url: str) -> str:
    """Of parameters and the optimizer's state in the newest checkpoint."""
    loaded = checkpoint.load(url, lambda name: True)
    total = hashlib.sha256(str(loaded.step).encode())
    for named in (loaded.tensors, loaded.optimizer):
        for name in sorted(named):
            total.update(name.encode())
            total.update(named[name].numpy().tobytes())
    return total.hexdigest()


def launched(job: str, overrides: Sequence[str], environ: dict[str, str]) -> Progress:
    """Raises `SystemExit` where the job does not run at all."""
    folder = Path(load(job, [text for text in overrides if text != "-o"]).run.folder)
    progress = Progress(folder / "metrics.jsonl")
    with (folder.parent / "undisturbed.log").open("ab") as log:
        process = Forked(["launch", job, *overrides], environ, log.fileno())
    try:
        while process.poll() is None:
            progress.look()
            time.sleep(LOOK_S)
    finally:
        process.terminate()
        process.wait()
    progress.look()
    if process.returncode:
        raise SystemExit(process.returncode)
    return progress


def strike(machines: Machines, progress: Progress, storm: Storm) -> tuple[str, str]:
    """One fault; says of which kind, and what it is."""
    draw = storm.draw
    kind = draw.choice(storm.kinds)
    awake = machines.awake()
    if kind == TAKEOVER:
        machines.take_over(progress)
        return kind, "the coordinator is killed, and its folder deleted: a standby takes over"
    if kind == SERVER:
        return lose_server(machines, draw)
    if kind == PARTITION and awake:
        seconds = draw.choice(CUTS_S)
        side = sorted(draw.sample(sorted(awake), max(1, len(awake) // 2)))
        machines.part(side, seconds)
        what = f"{' '.join(side)} are parted from the others for {seconds:g} s"
        return f"{kind} of {seconds:g} s", what
    if kind == "coordinator" or not awake:
        assert machines.coordinator is not None
        machines.coordinator.kill()
        machines.coordinator.wait()
        machines.coordinate()
        return "coordinator", "the coordinator is killed and started again"
    name = draw.choice(sorted(awake))
    if kind == CUT:
        seconds = draw.choice(CUTS_S)
        machines.cut_off(name, seconds)
        return f"{kind} of {seconds:g} s", f"{name} is cut off for {seconds:g} s"
    if kind == "pause":
        seconds = draw.choice(PAUSES_S)
        machines.pause(name, seconds)
        return f"{kind} of {seconds:g} s", f"{name} is stopped for {seconds:g} s"
    machines.kill(name)
    return kind, f"{name} is killed, {machines.join()} joins"


def lose_server(machines: Machines, draw: random.Random) -> tuple[str, str]:
    if draw.random() < 0.5:
        machines.restart_server()
        return SERVER, "the parameter server is killed and started again"
    machines.move_server()
    return f"{SERVER} elsewhere", "the parameter server is killed, and one begins elsewhere"


def disturb(machines: Machines, progress: Progress, storm: Storm) -> list[Fault]:
    """Until the coordinator says that the run is over."""
    faults: list[Fault] = []
    next_at: float | None = None
    last_at = math.inf
    newest_at = 0.0
    there_at = time.monotonic()  # when there was a machine
    while machines.coordinator is not None and machines.coordinator.poll() is None:
        progress.look()
        machines.wake()
        now = time.monotonic()
        # After the last fault nothing grows by faults any more: that would hide what did.
        if now <= last_at:
            machines.look()
        if faults and progress.newest_at > newest_at:
            # Not only to the first one: a step that was under way may still be made.
            fault = faults[-1]
            still_s = progress.newest_at - max(fault.at, newest_at)
            fault.still_s = max(fault.still_s or 0.0, still_s)
        newest_at = progress.newest_at
        if next_at is None and progress.newest >= 0:
            next_at = now + storm.every_s * storm.draw.uniform(0.5, 1.5)
            last_at = now + 60 * storm.minutes
        if storm.kinds and next_at is not None and next_at <= now <= last_at:
            faults.append(Fault(*strike(machines, progress, storm), now, progress.best))
            click.echo(f"  step {progress.best}: {faults[-1].what}")
            next_at = now + storm.every_s * storm.draw.uniform(0.5, 1.5)
        if any(process.poll() is None for process in machines.running.values()):
            there_at = now
        elif now - there_at > END_S:
            click.echo(f"no machine is left: see {machines.folder}/*.log")
            break
        time.sleep(LOOK_S)
    progress.look()
    return faults


def undisturbed(
    job: str,
    options: list[str],
    folder: Path,
    num: int,
    environ: dict[str, str],
    lab: labs.Lab | None,
) -> Progress:
    """Raises `SystemExit` where the job does not run at all."""
    if lab is None:
        return launched(job, options, environ)
    progress = Progress(folder / "undisturbed" / "metrics.jsonl")
    (folder / "calm").mkdir()
    with machines_of(job, options, folder / "calm", num, environ, lab) as machines:
        disturb(machines, progress, Storm())
        assert machines.coordinator is not None
        code = machines.coordinator.wait()
    if code:
        raise SystemExit(code)
    return progress


def options_of(folder: Path, overrides: Sequence[str]) -> dict[str, list[str]]:
    """What each of the two runs adds to its command line."""
    options = {}
    for name in ("undisturbed", "disturbed"):
        texts = (*overrides, f'run.folder="{folder / name}"', "run.log_every=1")
        options[name] = [part for text in texts for part in ("-o", text)]
    return options


def simulate(num_seeds: int, first: int) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from simulated.faults import simulate as simulate_one
    from simulated.heads import simulate_heads

    began_at = time.monotonic()
    for number in range(first, first + num_seeds):
        try:
            simulate_one(number)
            simulate_heads(number)
        except BaseException:
            click.echo(f"seed {number}: scripts/chaos --simulate 1 --seed {number}")
            raise
    click.echo(f"{num_seeds} seeds from {first} in {time.monotonic() - began_at:.0f} s: all well")


def compare(folder: Path, calm: Progress, rough: Progress) -> bool:
    """Says whether losses and parameters of the two runs are the same; whether both are."""
    same_losses = values_of(calm.path, "loss") == values_of(rough.path, "loss")
    same_end = False
    shared = folder / SHARED
    rough_end = shared if shared.exists() else rough.path.parent / "checkpoints"
    with suppress(CheckpointError):
        same_end = digest_of(str(calm.path.parent / "checkpoints")) == digest_of(str(rough_end))
    click.echo(f"losses {'equal in every bit' if same_losses else 'DIFFER'}")
    click.echo(f"parameters {'equal in every bit' if same_end else 'DIFFER'}")
    return same_losses and same_end


def end_as_by_ctrl_c() -> None:
    """Where this process is told to end: it leaves no other behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def guard_in_turns(block: int) -> None:
    """From here on, processes that are forked take copies in every other block of steps alone."""
    after_step = Guard.after_step

    def in_turns(guard: Guard, next_step: int, verdict: Verdict | None) -> None:
        if next_step // block % 2 == 0:
            after_step(guard, next_step, verdict)

    Guard.after_step = in_turns  # type: ignore[method-assign]


def measure_guarding(job: str, overrides: list[str], folder: Path, num: int, turns: int) -> None:
    """One run without faults: the time of steps in blocks with copies and in those without."""
    config = load(job, [text for text in overrides if text != "-o"])
    block = config.train.steps // (2 * turns)
    if block < 2:
        raise click.UsageError(f"train.steps must be {4 * turns} or more for {turns} turns")
    guard_in_turns(block)
    progress = Progress(Path(config.run.folder) / "metrics.jsonl")
    with machines_of(job, overrides, folder, num, with_token()) as machines:
        disturb(machines, progress, Storm())
    ratios = []
    seconds = values_of(progress.path, "step_s")
    # The first pair has what only a first step does.
    for turn in range(1, turns):
        middle = (2 * turn + 1) * block
        # Sums: what a copy costs, it costs in few of the steps.
        guarded_s = sum(seconds[step] for step in range(middle - block, middle))
        bare_s = sum(seconds[step] for step in range(middle, middle + block))
        ratios.append(guarded_s / bare_s - 1)
    ratios.sort()
    low = 100 * ratios[len(ratios) // 4]
    high = 100 * ratios[-1 - len(ratios) // 4]
    click.echo(
        f"{block} steps with copies take {100 * median(ratios):+.2f} % of the time of {block} "
        f"without: the median of {len(ratios)} turns, half of which lie between {low:+.2f} and "
        f"{high:+.2f} %"
    )


def run_both(
    job: str,
    folders: dict[str, list[str]],
    folder: Path,
    num: int,
    network: Path | None,
    storm: Storm,
    levels: Levels,
    calm: Progress | None,
) -> tuple[Progress, Progress, list[Fault]]:
    """The run without faults, where `calm` is not of one; the one with faults, and these; `levels`
    are of its processes.
    """
    environ = with_token()
    rough = Progress(folder / "disturbed" / "metrics.jsonl")
    has_standby = TAKEOVER in storm.kinds
    has_server = SERVER in storm.kinds
    options = folders["disturbed"]
    if has_standby:
        options = [*options, "-o", f'run.checkpoint_url="{(folder / SHARED).absolute()}"']
    with lab_of(network, 1 + num + (has_standby or has_server)) as lab:
        if calm is None:
            calm = undisturbed(job, folders["undisturbed"], folder, num, environ, lab)
        click.echo(f"undisturbed: {calm.best + 1} steps in {calm.seconds:.0f} s; now with faults")
        args = (job, options, folder, num, environ, lab, has_standby, has_server, levels)
        with machines_of(*args) as machines:
            faults = disturb(machines, rough, storm)
    return calm, rough, faults


def with_token() -> dict[str, str]:
    """The environment, with a token for the machines."""
    token = os.environ.get("DPIPE_TOKEN") or secrets.token_hex(16)
    return {**os.environ, "DPIPE_TOKEN": token}


_POSITIVE = NumberRange(min=0, min_open=True, max=MAX_WAIT_S)


def kinds_of(kinds: tuple[str, ...], network: Path | None) -> tuple[str, ...]:
    if network is None and {CUT, PARTITION} & set(kinds):
        raise click.UsageError("links are cut in a lab alone: give --network")
    if {TAKEOVER, "coordinator"} <= set(kinds):
        raise click.UsageError(
            "where a standby takes over nobody starts the coordinator again: leave out --fault "
            f"{TAKEOVER} or --fault coordinator"
        )
    return kinds or (FAULTS if network is None else (*FAULTS, CUT))


def num_ranks(job: str, overrides: Sequence[str], kinds: Sequence[str]) -> int:
    """Raises `click.UsageError` where the job cannot be run, or has no server to lose."""
    try:
        if SERVER in kinds:
            load(job, [*overrides, 'data_parallel.address="127.0.0.1:1"'])
        return load(job, overrides).world_size
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


@click.command()
@click.argument("job", required=False, type=click.Path(exists=True))
@click.option("-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option(
    "--kill-every", "every_s", type=_POSITIVE, default=60.0, show_default=True, help="Seconds."
)
@click.option(
    "--minutes", type=_POSITIVE, default=15.0, show_default=True, help="Of faults, after step 0."
)
@click.option(
    "--network",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A profile: each machine is a host of a lab with such links (needs root).",
)
@click.option(
    "--spares",
    type=click.IntRange(0, 1000),
    default=1,
    show_default=True,
    help="Machines beyond the ranks.",
)
@click.option(
    "--fault",
    "kinds",
    multiple=True,
    type=click.Choice([*FAULTS, CUT, TAKEOVER, SERVER, PARTITION]),
    help="Only such; may be given several times.",
)
@click.option("--seed", default=1, show_default=True, help="Of the faults.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("chaos"),
    show_default=True,
    help="A new one, for the runs and the logs of all processes.",
)
@click.option(
    "--undisturbed",
    "calm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The run.folder of such a run on the same network, to compare with instead of making one.",
)
@click.option(
    "--most-mb-an-hour",
    "most_mb",
    type=_POSITIVE,
    default=MOST_GROWTH.memory_mb,
    show_default=True,
    help="By which the memory of a process that is there for 18 minutes may grow.",
)
@click.option(
    "--guarding",
    "turns",
    type=click.IntRange(min=2),
    help="Turns with copies and without: no faults.",
)
@click.option(
    "--simulate",
    "num_seeds",
    type=click.IntRange(min=1),
    help="Clusters on a virtual clock to run.",
)
def main(
    job: str | None,
    overrides: tuple[str, ...],
    every_s: float,
    minutes: float,
    network: Path | None,
    spares: int,
    seed: int,
    kinds: tuple[str, ...],
    folder: Path,
    calm: Path | None,
    most_mb: float,
    turns: int | None,
    num_seeds: int | None,
) -> None:
    """Kill and pause the machines of an elastic run, and compare it with an undisturbed one."""
    if num_seeds is not None:
        return simulate(num_seeds, seed)
    if job is None:
        raise click.UsageError("give a job, or --simulate")
    storm = Storm(kinds_of(kinds, network), random.Random(seed), every_s, minutes)
    known = None if calm is None else ended(calm)
    end_as_by_ctrl_c()
    import_dpipe()
    num = num_ranks(job, overrides, storm.kinds) + spares
    make_folder(folder)
    folders = options_of(folder, overrides)
    if turns is not None:
        return measure_guarding(job, folders["undisturbed"], folder, num, turns)
    levels = Levels(replace(MOST_GROWTH, memory_mb=most_mb))
    one, other, faults = run_both(job, folders, folder, num, network, storm, levels, known)
    report(faults, one, other)
    is_same = compare(folder, one, other)
    growing = levels.growing()
    if growing:
        click.echo(f"{', '.join(growing)} grew by more than {levels.most} an hour")
    sys.exit(not is_same or bool(growing))


if __name__ == "__main__":
    main()
