"""Commands that show a run while it goes."""

import sys
from functools import partial

import click

from dpipe.cli.options import OVERRIDE, TRUST_CODE, show


@click.command()
@click.argument("target", metavar="RUN|HOST:PORT")
@OVERRIDE
@click.option("--text", "as_text", is_flag=True, help="Show it in this terminal instead.")
@click.option(
    "--bind",
    metavar="HOST:PORT",
    default="127.0.0.1:7007",
    show_default=True,
    help="Where the page is served; elsewhere than on loopback it needs the token of the link that "
    "is printed.",
)
@TRUST_CODE
def watch(
    target: str, overrides: tuple[str, ...], as_text: bool, bind: str, trust_code: bool
) -> None:
    """Serve a live page of a run: losses, speed, network, the last step, events.

    RUN is a run's folder, of a run that trains or has ended; HOST:PORT is where `dpipe coordinate`
    listens, whose token -o node.token_file=FILE gives. The page only reads.

    \b
    Examples:
      dpipe watch runs/quickstart
      dpipe watch 10.0.0.1:7000 --text
    """
    from dpipe.report.display import lasting
    from dpipe.watch.command import serve_page, source_of

    source = source_of(target, overrides, trust_code=trust_code)
    if as_text:
        from dpipe.watch.terminal import show_in_terminal

        show_in_terminal(source)
        return
    say = partial(click.echo, file=lasting(sys.stdout))
    serve_page(source, bind, say=say)


@click.command()
@click.argument("runs", metavar="RUN [RUN ...]", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="The file to write; default: RUN/report.html, and of several runs report.html here.",
)
@TRUST_CODE
def report(runs: tuple[str, ...], out: str | None, trust_code: bool) -> None:
    """Write what `dpipe watch` shows of RUN to one HTML file, or compare several runs in it.

    Several runs are laid over each other: loss over steps, time, bytes sent, and price.

    \b
    Examples:
      dpipe report runs/quickstart
      dpipe report runs/fp32 runs/int8 --out wires.html
    """
    from dpipe.watch.report import write_report

    show(write_report(runs, out, trust_code=trust_code))
