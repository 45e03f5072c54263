"""Commands of runs whose machines come and go: coordinate, join, leave, status."""

import sys
from functools import partial

import click

from dpipe.cli.options import CONFIG, JSON, MAX_WAIT_S, OVERRIDE, TRUST_CODE, NumberRange, show

ADDRESS = click.argument("address", metavar="HOST:PORT")
SECONDS = NumberRange(min=0, max=MAX_WAIT_S)


@click.command()
@CONFIG
@OVERRIDE
@click.option("--bind", metavar="HOST:PORT", default="127.0.0.1:7000", show_default=True)
@click.option(
    "--patience",
    "patience_s",
    type=SECONDS,
    default=30.0,
    show_default=True,
    help="Seconds to wait for another machine in the place of one that is gone, before the job is "
    "planned anew for those that are left.",
)
@click.option(
    "--epoch-ports",
    metavar="FIRST-LAST",
    default="0",
    help="Ports that epochs take in turns, for a firewall; default: any free one.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait, and take the run over where its coordinator shows no sign of life at "
    "run.checkpoint_url any more.",
)
@TRUST_CODE
def coordinate(
    config: str,
    overrides: tuple[str, ...],
    bind: str,
    patience_s: float,
    epoch_ports: str,
    standby: bool,
    trust_code: bool,
) -> None:
    """Keep a run going whose machines come and go.

    Machines join with `dpipe join`. What must not be lost is in FOLDER/journal.sqlite: killed and
    started again, this goes on, and the machines wait for it. With run.checkpoint_url a copy is
    there, too, so that a standby on another machine can take over.

    \b
    Examples:
      dpipe coordinate job.toml --bind 0.0.0.0:7000
      dpipe coordinate job.toml --bind 0.0.0.0:7000 --standby    # on another machine
    """
    from dpipe.agent.coordinate import coordinate as coordinate_here
    from dpipe.report.display import lasting
    from dpipe.watch.report import write_at_end

    say = partial(click.echo, file=lasting(sys.stdout))
    folder = coordinate_here(
        config,
        overrides,
        bind,
        patience_s=patience_s,
        epoch_ports=epoch_ports,
        standby=standby,
        trust_code=trust_code,
        say=say,
    )
    if folder is not None:
        write_at_end(folder, trust_code=trust_code)


@click.command()
@ADDRESS
@OVERRIDE
@click.option("--name", help="What people call this machine; default: its host name.")
@click.option(
    "--notice",
    metavar="SOURCE",
    help="Where a notice comes from that this machine goes: file:PATH, command:CMD, aws, gcp or "
    "azure.",
)
@click.option(
    "--leave-within",
    "leave_s",
    type=SECONDS,
    default=120.0,
    show_default=True,
    help="Seconds for handing over after Ctrl-C or SIGTERM.",
)
@click.option(
    "--wait",
    "wait_s",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds to wait for a coordinator that is away.",
)
@click.option(
    "--memory-gb",
    type=NumberRange(min=0, min_open=True),
    help="Memory that the run may have here; default: all of this machine's.",
)
@click.option(
    "--keeper-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port at which others fetch and leave copies, for a firewall; default: any free one.",
)
@TRUST_CODE
def join(
    address: str,
    overrides: tuple[str, ...],
    name: str | None,
    notice: str | None,
    leave_s: float,
    wait_s: float,
    memory_gb: float | None,
    keeper_port: int,
    trust_code: bool,
) -> None:
    """Be one of the machines of the run that is coordinated at HOST:PORT.

    The job comes from the coordinator; -o sets this machine's own keys, of [node]. The machine gets
    a rank, or is kept as a spare. The first Ctrl-C hands over what it has and leaves.

    \b
    Example:
      dpipe join 10.0.0.1:7000 -o node.device=cuda --notice aws
    """
    from dpipe.agent.joining import join as join_here

    join_here(
        address,
        overrides,
        name=name,
        notice=notice,
        leave_s=leave_s,
        wait_s=wait_s,
        memory_gb=memory_gb,
        keeper_port=keeper_port,
        trust_code=trust_code,
    )


@click.command()
@ADDRESS
@OVERRIDE
@click.option("--name", help="Whose agents are to leave; default: this host's.")
@click.option(
    "--within", "within_s", type=SECONDS, default=120.0, show_default=True, help="Seconds to go."
)
def leave(address: str, overrides: tuple[str, ...], name: str | None, within_s: float) -> None:
    """Have a machine hand over what it has and leave the run at HOST:PORT.

    \b
    Example:
      dpipe leave 10.0.0.1:7000 --name gpu-7
    """
    from dpipe.agent.inquiry import leave as leave_there
    from dpipe.agent.joining import own_security

    num_agents = leave_there(address, own_security(overrides), name, within_s)
    show(f"{num_agents} agent{'s' if num_agents > 1 else ''} will leave within {within_s:g} s")


@click.command()
@ADDRESS
@OVERRIDE
@JSON
def status(address: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show who has which rank in the run at HOST:PORT, its spares and its last events.

    \b
    Example:
      dpipe status 10.0.0.1:7000
    """
    from dpipe.agent.inquiry import as_text
    from dpipe.agent.inquiry import status as status_there
    from dpipe.agent.joining import own_security

    run = status_there(address, own_security(overrides))
    show(run.model_dump_json(indent=1, exclude={"rows"}) if as_json else as_text(run))
