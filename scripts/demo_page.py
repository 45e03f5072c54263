#!/usr/bin/env python3
"""Writes what the demo printed into the documentation.

    ./scripts/demo > demo.txt
    scripts/demo_page.py demo.txt

keeps OUTPUT, with most of its steps left out, as scripts/results/demo.txt, and writes that into
docs/first-run.md and docs/results.md. Without OUTPUT the pages are written again from the file.
"""

import re
from datetime import datetime
from pathlib import Path

import click
from table import ROOT

KEPT = ROOT / "scripts/results/demo.txt"
PAGES = {name: ROOT / "docs" / name for name in ("first-run.md", "results.md")}
_SHOWN = 3  # steps at the beginning, and as many at the end


def shown(output: str) -> str:
    """From the first loss on, without most of the steps."""
    start = output.find("step 0 ")
    if start < 0:
        raise click.ClickException("this is no output of the demo: it has no line of step 0")
    lines = [line.rstrip() for line in output[start:].splitlines()]
    steps = [line for line in lines if re.match(r"step [1-9]\d*/", line)]
    if len(steps) < 2 * _SHOWN:
        raise click.ClickException(f"the demo's output has {len(steps)} steps; let it end")
    first = lines.index(steps[_SHOWN - 1]) + 1
    last = lines.index(steps[-_SHOWN])
    return "\n".join([*lines[:first], "...", *lines[last:]]).rstrip() + "\n"


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise click.ClickException(f"the demo's output has no {pattern!r}")
    return match[1]


def day(text: str) -> str:
    """When the run began, by the name of its folder."""
    began = _found(r"runs/demo-(\d{8})-", text)
    return datetime.strptime(began, "%Y%m%d").date().isoformat()


def first_run(page: str, text: str) -> str:
    """The page with this output."""
    page = re.sub(r"(?<=This is the output of )[\d-]+", day(text), page)
    before, fence, rest = page.partition("```text\nstep 0 ")
    assert fence, "the page has no place for the output"
    _, _, behind = rest.partition("\n```\n")
    return f"{before}```text\n{text}```\n{behind}"


def paragraph(text: str) -> str:
    """For the results; broken into lines as they are there."""
    steps = _found(r"(\d+) steps in", text)
    took_s = _found(r"steps in (\d+) s", text)
    held_out = _found(r"held-out loss ([\d.]+) beats", text)
    entropy = _found(r"beats the bigram entropy ([\d.]+)", text)
    predicted = _found(r"predicted ([\d.]+) ms", text)
    measured = _found(r"measured ([\d.]+) ms", text)
    ratio = _found(r"measured / predicted ([\d.]+)", text)
    return (
        f"{steps} steps of a small GPT in four processes take {took_s} s. The held-out loss is "
        f"{held_out} bits per byte; the text's\nbigram entropy is {entropy}. A step was predicted "
        f"to take {predicted} ms and took {measured} ms: measured / predicted {ratio}.\n"
        "[First run](first-run.md#what-it-prints) shows the whole output.\n"
    )


def results(page: str, text: str) -> str:
    """The page with this output."""
    before, title, rest = page.partition("\n## The demo\n\n")
    assert title, "the page has no section of the demo"
    _, _, behind = rest.partition("\n:Command:")
    fields, _, others = behind.partition("\n\n## ")
    fields = re.sub(r"(?<=:Date: ).*", day(text), fields)
    return f"{before}{title}{paragraph(text)}\n:Command:{fields}\n\n## {others}"


@click.command(help=__doc__)
@click.argument(
    "output", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False
)
def main(output: Path | None) -> None:
    source = output or KEPT
    text = shown(source.read_text(encoding="utf-8"))
    written = {KEPT: text}
    for name, show in (("first-run.md", first_run), ("results.md", results)):
        page = PAGES[name]
        written[page] = show(page.read_text(encoding="utf-8"), text)
    # Not before all are made: an output that lacks something changes nothing.
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
