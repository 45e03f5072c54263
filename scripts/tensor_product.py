#!/usr/bin/env python3
"""Every way to spread a tiny model over ranks, compared with one process: the largest difference of
the losses of three steps.

    scripts/tensor_product.py     tensor_parallel.size 1, 2, 4 x stages 1, 2 x sequence x recompute
                                  x GPT, BERT

The ranks are threads of this process over real links and gloo; dropout is on, but where attention
cores are run again: torch's checkpoint sets the random numbers of the process, which threads share.
Exits with 1 if a run differs from one process by more than 1e-5, relative. The tests have some of
these layouts; all of them take some minutes on two cores.
"""

import itertools
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import click
from rich.console import Console
from tokenizers import BertWordPieceTokenizer

from dpipe.config.load import Config, build
from dpipe.processes.environment import ProcessInfo
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.run.build import run_rank

_TOKEN = "product"  # noqa: S105 - on loopback, for the time of a run
BOUND = 1e-5
SUBJECTS, VERBS = (
    ("the fox", "a dog", "the cat", "one bird", "an old man"),
    ("sees", "hears", "finds", "follows"),
)
SENTENCES = [
    f"{subject} {verb} {other} ." for subject in SUBJECTS for verb in VERBS for other in SUBJECTS
]
TEXT = (
    "\n".join(SENTENCES) + "\n\n" + "\n".join(reversed(SENTENCES)) + "\n"
)  # two documents, a sentence a line
_RANK_S = 120


@dataclass(frozen=True)
class Arrangement:
    layers: str
    size: int
    stages: int
    sequence: bool
    recompute: str

    @property
    def dropout(self) -> float:
        return 0.0 if self.recompute == "selective" else 0.1

    def __str__(self) -> str:
        positions = "sequence" if self.sequence else "-"
        cut = f"{self.layers:4}  T {self.size}  stages {self.stages}"
        return f"{cut}  {positions:8}  recompute {self.recompute:9}"


def arrangements() -> Iterator[Arrangement]:
    for layers, size, stages, sequence, recompute in itertools.product(
        ("gpt", "bert"), (1, 2, 4), (1, 2), (False, True), ("none", "selective", "full")
    ):
        if size > 1 or not sequence:
            yield Arrangement(layers, size, stages, sequence, recompute)


def word_pieces(text: str) -> BertWordPieceTokenizer:
    """Each word is a piece. A trained vocabulary has another order in every process, and with it
    the figures.
    """
    words = sorted(set(text.split()))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return BertWordPieceTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})


def configured(arrangement: Arrangement, folder: Path) -> Config:
    return build(
        {
            "model": {
                "layers": arrangement.layers,
                "vocab_size": 256,
                "num_layers": 2,
                "width": 16,
                "num_heads": 4,
                "context": 16,
                "dropout": arrangement.dropout,
                "tie_embeddings": True,
            },
            "data": {
                "files": [str(folder / "text.txt")],
                "tokenizer": str(folder / "pieces.json"),
                "cache": str(folder / "cache"),
                "held_out": 0.1,
            },
            "train": {"steps": 3, "batch_size": 8, "num_microbatches": 4, "learning_rate": 1e-2},
            "pipeline": {"stages": arrangement.stages, "recompute": arrangement.recompute},
            "tensor_parallel": {
                "size": arrangement.size,
                "sequence_parallel": arrangement.sequence,
            },
            "run": {
                "folder": str(folder / str(arrangement).replace(" ", "")),
                "tensorboard": False,
                "trace_steps": 0,
            },
            "timeouts": {"join": 30, "transfer": 30},
        }
    )


def losses(config: Config) -> list[float]:
    """Of each step of a run whose ranks are threads; raises what a rank raised."""
    address = f"127.0.0.1:{free_port()}" if config.world_size > 1 else None
    raised: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            process = ProcessInfo(rank, config.world_size, rank, address, token=_TOKEN)
            run_rank(config, process, console=Console(file=StringIO()))
        except BaseException as error:
            raised.append(error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,)) for rank in range(config.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_RANK_S)
    if raised:
        raise raised[0]
    return [row["loss"] for row in read_rows(Path(config.run.folder)) if "loss" in row]


@click.command(help=__doc__)
def main() -> None:
    logging.disable()
    worst, alone = 0.0, dict[tuple[str, float], list[float]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        word_pieces(TEXT).save(str(folder / "pieces.json"))
        for arrangement in arrangements():
            run_losses = losses(configured(arrangement, folder))
            kind = arrangement.layers, arrangement.dropout
            expected = alone.setdefault(kind, run_losses)  # the first of each kind is one process
            apart = max(abs(a - b) / b for a, b in zip(run_losses, expected, strict=True))
            worst = max(worst, apart)
            print(f"{arrangement}  {apart:.1e}", flush=True)
    print(f"furthest apart: {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(int(worst > BOUND))


if __name__ == "__main__":
    main()
