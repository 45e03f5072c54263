"""The commands of `scripts/cluster`: each parses its arguments, then calls one or two functions of
the files beside this one.
"""

import io
import shlex
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dpipe.errors import DpipeError
from fleet import collect as collecting
from fleet import install, job, measuring, shaping
from fleet.hosts import Hosts, HostsError, load_hosts
from fleet.ssh import COMMAND_S, Machine, connected, each
from fleet.watch import Line, Watch, attend, signals

F = TypeVar("F", bound=Callable[..., Any])

REPOSITORY = Path(__file__).resolve().parents[2]
_WIDE = 250  # characters, where the output is not a terminal
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class _Commands(click.Group):
    """Turns dpipe's errors into a message and an exit code: 2 for what the user can correct, 1 for
    what has failed.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DpipeError as error:
            _say(str(error))
            sys.exit(error.exit_code)


@click.group(cls=_Commands)
def main() -> None:
    """Train on many machines over SSH: one `dpipe train` for each slot of the hosts file."""


def _on_machines(command: F) -> F:
    """Adds --hosts, and connects to these hosts for the duration of the command."""
    text = "The hosts file."

    @click.option(
        "--hosts",
        "path",
        type=click.Path(path_type=Path),
        default="hosts.toml",
        show_default=True,
        help=text,
    )
    @wraps(command)
    def connecting(path: Path, **options: Any) -> None:
        hosts = load_hosts(path)
        with connected(hosts.hosts) as machines:
            command(hosts, machines, **options)

    return connecting  # type: ignore[return-value]  # click reads the parameters from its own decorators


@main.command()
@click.option(
    "--commit",
    default="HEAD",
    show_default=True,
    help="What to install: a commit, a branch or a tag.",
)
@click.option(
    "--timeout", default=install.SETUP_S, show_default=True, help="Seconds that one host may take."
)
@_on_machines
def up(hosts: Hosts, machines: list[Machine], commit: str, timeout: float) -> None:
    """Install the project at a commit on every host that does not have it."""
    release = install.Release.of(REPOSITORY, commit)
    if changed := install.uncommitted(REPOSITORY):
        _say(
            f"note: {len(changed)} files differ from their last commit; what is installed is "
            f"{release.commit:.12}"
        )
    with _progress() as progress:
        tasks = {machine: progress.add_task(machine.host.name, state="") for machine in machines}
        install.install(
            machines,
            release,
            say=lambda m, state: progress.update(tasks[m], state=state),
            limit_s=timeout,
        )


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@_on_machines
def put(hosts: Hosts, machines: list[Machine], paths: tuple[Path, ...]) -> None:
    """Copy files or folders to the project's folder on every host, where a configuration's relative
    paths start.
    """
    install.require_installed(machines)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in paths:
            tar.add(path, path.name)
    install.copy(machines, archive.getvalue())


@main.command("exec")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--timeout", default=COMMAND_S, show_default=True, help="Seconds that one host may take."
)
@_on_machines
def execute(hosts: Hosts, machines: list[Machine], words: tuple[str, ...], timeout: float) -> None:
    """Run a command on every host: `exec -- nvidia-smi`."""
    for machine, output in zip(
        machines, each(machines, lambda m: m.run(shlex.join(words), timeout_s=timeout)), strict=True
    ):
        for line in output.decode(errors="replace").splitlines():
            click.echo(f"{machine.host.name} | {line}")


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE", help="As for dpipe train."
)
@click.option(
    "--name",
    help="The name of the run and of its folder, runs/NAME; default: CONFIG's name and the time.",
)
@click.option(
    "--plan",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What `dpipe plan` decided; each rank starts on the host of its machine.",
)
@click.option(
    "--machines",
    "machines_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The machines of the plan, for the run's own prediction; default: the hosts file, if it "
    "is one of machines.",
)
@click.option("--resume", metavar="NAME", help="Continue a run from its newest checkpoint.")
@click.option(
    "--fallback",
    is_flag=True,
    help="With --resume: if the newest checkpoint is damaged, use the one before.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Slots beyond the ranks: a run that goes on where a host is lost, except that of rank 0. "
    "It needs run.checkpoint_url.",
)
@click.option(
    "--trust-code",
    is_flag=True,
    help="Let model.layers name code outside the working folder, here and on every host.",
)
@click.option(
    "--detach", is_flag=True, help="Return once all ranks are started; see status, logs and down."
)
@_on_machines
def run(
    hosts: Hosts,
    machines: list[Machine],
    config: Path,
    machines_file: Path | None,
    detach: bool,
    **options: Any,
) -> None:
    """Train: one process a slot, in the order of the hosts file or where the plan places it, and
    follow all logs.

    The exit code is the run's. Ctrl-C ends all ranks with a checkpoint, a second one kills them.
    The run goes on if this command dies or its connections are lost: `logs -f` follows it again.
    """
    the_job = job.Job.of(config, hosts=hosts, machines=machines_file, **options)
    hosts_of_ranks = {rank.host for rank in the_job.ranks}
    used = [machine for machine in machines if machine.host in hosts_of_ranks]
    install.require_installed(used)
    with signals() as received:
        offsets = job.start(the_job, used)
        _say(f"run {the_job.name}: {len(the_job.ranks)} ranks on {len(used)} hosts")
        if not detach or received:
            watch = Watch(the_job.name, offsets)
            following = partial(attend, show=_show, say=_say, is_elastic=the_job.is_elastic)
            sys.exit(following(watch, used, the_job.name, received))


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE", help="As for dpipe train."
)
@click.option(
    "--micro-batch-size",
    "micro_batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="As for dpipe measure.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("machines.toml"),
    show_default=True,
    help="A file here.",
)
@click.option(
    "--trust-code",
    is_flag=True,
    help="Let model.layers name code outside the working folder, here and on every host.",
)
@_on_machines
def measure(
    hosts: Hosts,
    machines: list[Machine],
    config: Path,
    overrides: tuple[str, ...],
    micro_batch_sizes: tuple[int, ...],
    out: Path,
    trust_code: bool,
) -> None:
    """Measure every host and every link between two of them, and write OUT, for `dpipe plan`.

    One `dpipe measure` on each host of the hosts file, whose `price_per_hour` it takes along.
    """
    measuring.refuse_file(out)
    the_job = measuring.MeasureJob.on_all(
        config, overrides, hosts, micro_batch_sizes, trust_code=trust_code
    )
    install.require_installed(machines)
    with signals() as received:
        offsets = job.start(the_job, machines)
        watch = Watch(the_job.name, offsets)
        code = attend(watch, machines, the_job.name, received, show=_show, say=_say)
    if code == 0:
        measuring.fetch(the_job, machines[0], out)
        _say(f"wrote {out}")
    sys.exit(code)


@main.command()
@_on_machines
def status(hosts: Hosts, machines: list[Machine]) -> None:
    """Show what is installed on each host, and the state of its ranks. The exit code is 1 if a host
    does not answer.
    """
    table = Table(
        *("host", "commit", "shaped", "run", "rank", "state", "since", "last line"), box=None
    )
    for column in table.columns[:-1]:
        column.no_wrap = True

    def ask(machine: Machine) -> dict[str, Any] | str:
        try:
            if install.installed(machine) is None:
                return "nothing is installed"
            return dict(machine.agent("status", run=None, lines=1))
        except DpipeError as error:
            return str(error)

    answers = each(machines, ask)
    for machine, answer in zip(machines, answers, strict=True):
        for row in _rows(answer):
            table.add_row(machine.host.name, *row)
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)
    sys.exit(1 if any(isinstance(answer, str) for answer in answers) else 0)


def _rows(answer: dict[str, Any] | str) -> list[list[str]]:
    if isinstance(answer, str):
        return [["", "", "", "", answer]]
    shaped = answer["shaped"]
    first = [
        answer["commit"][:12],
        f"{shaped['profile']} on {shaped['device']}" if shaped else "",
        answer["run"] or "",
    ]
    rows = []
    for number, rank in answer["ranks"].items():
        state = rank["state"] if rank["code"] is None else f"exit code {rank['code']}"
        since = time.strftime("%H:%M:%S", time.localtime(rank["since"])) if rank["since"] else ""
        rows.append([*first, number, state, since, rank["last"][:100]])
    return rows or [first]


@main.command()
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Follow the run until it ends; Ctrl-C ends the run, as in `run`.",
)
@click.option(
    "-n",
    "--lines",
    default=20,
    show_default=True,
    help="How many of the last lines of each log to show first; 0: all.",
)
@click.option("--run", "name", help="Default: the newest.")
@_on_machines
def logs(hosts: Hosts, machines: list[Machine], follow: bool, lines: int, name: str | None) -> None:
    """Show the logs of all ranks in one view."""
    install.require_installed(machines)
    answers = each(machines, lambda m: m.agent("status", run=name, lines=lines))
    states = dict(zip(machines, answers, strict=True))
    with_run = {m: s for m, s in states.items() if s["ranks"]}
    if not with_run:
        raise HostsError(
            f"no host has {f'a run {name}' if name else 'any run'}; scripts/cluster status shows "
            "the newest"
        )
    name = name or next(iter(with_run.values()))["run"]
    offsets = {
        m: {int(r): rank["offset"] for r, rank in s["ranks"].items()}
        for m, s in with_run.items()
        if s["run"] == name
    }
    watch = Watch(name, offsets, wait=follow)
    if follow:
        with signals() as received:
            is_elastic = any(state["elastic"] for state in with_run.values())
            following = partial(attend, show=_show, say=_say, is_elastic=is_elastic)
            sys.exit(following(watch, list(offsets), name, received))
    with watch:
        for event in watch:
            if isinstance(event, Line):
                _show(event)


@main.command()
@click.argument("profile")
@click.option(
    "--verify",
    is_flag=True,
    help="Then measure each host's link to the next one, and compare with the profile.",
)
@_on_machines
def netem(hosts: Hosts, machines: list[Machine], profile: str, verify: bool) -> None:
    """Shape every host's egress by PROFILE (a file; host i of the hosts file is node i), or `clear`
    them all.

    This works during a run, too. The shaping stays until `netem clear` or `down`. A host that can
    no longer be reached removes its shaping within a minute.
    """
    install.require_installed(machines)
    if profile == "clear":
        for machine, device in zip(machines, shaping.clear(machines), strict=True):
            click.echo(
                f"{machine.host.name}: {f'cleared {device}' if device else 'was not shaped'}"
            )
        return
    shape = shaping.Shape.of(Path(profile), machines)
    for machine, device in zip(machines, shaping.apply(machines, shape), strict=True):
        click.echo(f"{machine.host.name}: {device} is shaped as {profile}")
    if verify:
        measurements = shaping.verify(machines, shape)
        for node, measurement in enumerate(measurements):
            click.echo(f"host {node} to {(node + 1) % len(machines)}:")
            click.echo("\n".join(f"  {row}" for row in measurement["rows"]))
        sys.exit(0 if all(measurement["close"] for measurement in measurements) else 1)


@main.command()
@click.option("--run", "name", help="Default: the newest.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default="collected",
    show_default=True,
    help="A folder here.",
)
@click.option(
    "--checkpoints",
    is_flag=True,
    help="The tensors, too: those of all machines together are a complete checkpoint.",
)
@_on_machines
def collect(
    hosts: Hosts, machines: list[Machine], name: str | None, into: Path, checkpoints: bool
) -> None:
    """Copy a run's metrics, traces, logs and the index of its checkpoints to INTO/RUN."""
    click.echo(collecting.collect(machines, name, into, checkpoints=checkpoints))


@main.command()
@click.option("--kill", is_flag=True, help="At once, without a checkpoint.")
@click.option(
    "--grace",
    default=job.STOP_S,
    show_default=True,
    help="Seconds to wait for a step and a checkpoint.",
)
@click.option(
    "--remove", is_flag=True, help="Also remove the project, its environment, runs and checkpoints."
)
@_on_machines
def down(hosts: Hosts, machines: list[Machine], kill: bool, grace: float, remove: bool) -> None:
    """Stop the run on every host and remove its shaping."""
    installed = [
        m
        for m, commit in zip(machines, each(machines, install.installed), strict=True)
        if commit is not None
    ]
    problems = [] if kill or not installed else job.stop(installed, None, "SIGTERM", grace)
    if installed and (kill or problems):
        problems = job.stop(installed, None, "SIGKILL", job.KILL_S)
    problems += shaping.clear_reachable(installed) if installed else []
    for problem in problems:
        _say(problem)
    if remove and not problems:
        each(installed, install.remove)
    sys.exit(1 if problems else 0)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[state]}"))
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))


def _show(line: Line) -> None:
    click.echo(
        click.style(f"rank {line.rank} | ", fg=_COLORS[line.rank % len(_COLORS)]) + line.text
    )


_say = partial(click.echo, err=True)


if __name__ == "__main__":
    main(prog_name="scripts/cluster")
