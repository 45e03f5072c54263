"""Feeds every decoder of tests/security/decoders.py with broken inputs, in turns.

    scripts/fuzz --minutes 60                       all of them
    scripts/fuzz --minutes 5 --decoder "run.json"   one
    scripts/fuzz --decoder "run.json" --input FILE  an input that one of them took badly, again

An input that a decoder takes badly is shrunk and kept as a file; the decoder is left out from then
on. Exits with 1 if there was any.
"""

import hashlib
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
from hypothesis import HealthCheck, Verbosity, given, seed, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from security.decoders import DECODERS, Decoder, broken, complaint_of  # noqa: E402

EXAMPLES = 100  # of a turn


class TakenBadly(Exception):  # noqa: N818 - it is what is looked for
    pass


def turn(decoder: Decoder, number: int) -> tuple[int, bytes | None]:
    """How many inputs were tried, and the smallest found that `decoder` takes badly."""
    tried = 0
    worst: bytes | None = None

    @seed(number)
    @settings(
        max_examples=max(1, EXAMPLES // decoder.share),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @given(data=broken(decoder))
    def attack(data: bytes) -> None:
        nonlocal tried, worst
        tried += 1
        if complaint_of(decoder, data) is not None:
            worst = data  # the last that Hypothesis tries is the smallest
            raise TakenBadly

    with suppress(TakenBadly):
        attack()
    return tried, worst


def keep(folder: Path, decoder: Decoder, data: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", decoder.name)
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:8]}"
    path.write_bytes(data)
    return path


def fuzz(decoders: Sequence[Decoder], minutes: float, first_seed: int, folder: Path) -> int:
    """How many decoders took an input badly."""
    logging.disable(logging.WARNING)  # of damage that is mended
    began = time.monotonic()
    end = began + 60 * minutes
    left = list(decoders)
    tried: Counter[str] = Counter()
    number = first_seed
    while left and time.monotonic() < end:
        for decoder in tuple(left):
            if time.monotonic() >= end:
                break
            count, worst = turn(decoder, number)
            tried[decoder.name] += count
            if worst is not None:
                left.remove(decoder)
                path = keep(folder, decoder, worst)
                click.echo(f"{decoder.name}: {complaint_of(decoder, worst)}")
                again = f'scripts/fuzz --decoder "{decoder.name}" --input {path}'
                click.echo(f"  again: {again}")
        spent_s = time.monotonic() - began
        click.echo(f"seed {number}: {tried.total()} inputs in {spent_s:.0f} s")
        number += 1
    for decoder in decoders:
        mark = "" if decoder in left else "  TAKEN BADLY"
        click.echo(f"{tried[decoder.name]:>9} {decoder.name}{mark}")
    return len(decoders) - len(left)


@click.command()
@click.option("--minutes", default=1.0, show_default=True, help="How long.")
@click.option(
    "--decoder",
    "names",
    multiple=True,
    type=click.Choice([decoder.name for decoder in DECODERS]),
    help="Only this one; may be given several times.",
)
@click.option("--seed", "first_seed", default=0, show_default=True, help="Of the first turn.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("fuzz"),
    show_default=True,
    help="Where inputs are kept.",
)
@click.option(
    "--input",
    "given_input",
    type=click.Path(path_type=Path, exists=True),
    help="Try this input alone, with a traceback.",
)
def main(
    minutes: float,
    names: tuple[str, ...],
    first_seed: int,
    folder: Path,
    given_input: Path | None,
) -> None:
    """Feed every decoder with broken inputs."""
    chosen = [decoder for decoder in DECODERS if not names or decoder.name in names]
    if given_input is not None:
        if len(chosen) != 1:
            raise click.UsageError("--input goes with one --decoder")
        click.echo(chosen[0].decode(given_input.read_bytes()))
        return
    sys.exit(1 if fuzz(chosen, minutes, first_seed, folder) else 0)


if __name__ == "__main__":
    main()
