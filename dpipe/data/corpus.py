"""Text to tokens to windows. A window is a function of (seed, step, replica), so ranks agree on it
without talking.

    files ──sorted, joined──> text ──tokenizer──> CACHE/<digest>/
                                                      tokens.bin     [ training ... | held out ]
                                                      corpus.json    counts, bytes, entropy

The folder's name is a digest of the text and of everything that decides its tokens, so a folder is
never stale. corpus.json has the digest of each block of tokens and of itself: a folder in which a
byte has changed is made anew.
"""

import glob
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dpipe.errors import DataError
from dpipe.tokenizer.tokenizer import Tokenizer

LOG = logging.getLogger("dpipe")
Part = Literal["train", "held_out"]
TokenBatch = tuple[torch.Tensor, torch.Tensor]

_FORMAT = "dpipe-corpus-2"  # in the digest: what wrote other files is not found
_BLOCK_BYTES = 1 << 22
_THREADS = 4  # that check blocks; hashlib lets them run at once
_PIECE = 1 << 20  # characters that a tokenizer gets at once
# 2^64 over the golden ratio: any number of its multiples are spread evenly.
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Facts:
    """What the cache knows of a text besides its tokens."""

    num_tokens: int
    num_train_tokens: int
    train_bytes: int
    held_out_bytes: int
    bigram_bits: float  # entropy of a byte given the one before


@dataclass(frozen=True)
class Corpus:
    """A text as tokens: the training part, then the held-out part."""

    tokens: NDArray[Any]  # [num_tokens], uint16 or uint32
    facts: Facts
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def num_train_tokens(self) -> int:
        return self.facts.num_train_tokens

    @property
    def num_held_out_tokens(self) -> int:
        return self.facts.num_tokens - self.facts.num_train_tokens

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def check_length(self, context: int, *, need_held_out: bool) -> None:
        """Raises `DataError` if a part cannot fill a window of `context` tokens and the token after
        it.
        """
        if self.num_train_tokens <= context:
            raise DataError(
                f"the training text has {self.num_train_tokens} tokens, model.context {context} "
                f"needs {context + 1}; give more text or lower model.context"
            )
        if need_held_out and self.num_held_out_tokens <= context:
            raise DataError(
                f"the held-out text has {self.num_held_out_tokens} tokens, model.context {context} "
                f"needs {context + 1}; raise data.held_out, give more text, or unset "
                "train.eval_every"
            )

    def batch(
        self, seed: int, step: int, replica: int, batch_size: int, context: int
    ) -> TokenBatch:
        """Inputs and targets [B, T], int64: windows from anywhere in the training text, and the
        same windows one token on.

        They are drawn by Philox (Salmon et al. 2011), which is counter-based: `seed` is its key,
        (step, replica) are the high words of its counter.
        """
        philox = np.random.Philox(key=seed % 2**64, counter=[0, 0, step, replica])
        # The raw words: what numpy makes of them may change from one version to the next.
        drawn = philox.random_raw(batch_size)
        starts = drawn % np.uint64(self.num_train_tokens - context)
        return self._windows(starts.astype(np.int64), context)

    def held_out_batch(self, index: int, batch_size: int, context: int) -> TokenBatch:
        """As `batch`, from the held-out text. The windows of any number of batches are spread over
        all of it.
        """
        numbers = range(index * batch_size, (index + 1) * batch_size)
        span = self.num_held_out_tokens - context
        starts = []
        for number in numbers:
            fraction = number * _GOLDEN % 2**64  # of 2^64, so that whole numbers are enough
            starts.append(self.num_train_tokens + (fraction * span >> 64))
        return self._windows(np.array(starts), context)

    def bytes_per_token(self, split: Part) -> float:
        """0 for an empty held-out part."""
        if split == "train":
            return self.facts.train_bytes / self.num_train_tokens
        return self.facts.held_out_bytes / max(1, self.num_held_out_tokens)

    def bigram_entropy(self) -> float:
        """Bits a byte: the entropy of a byte of the text given the one before."""
        return self.facts.bigram_bits

    def _windows(self, starts: NDArray[np.int64], context: int) -> TokenBatch:
        # One token more than the inputs: the targets are the same windows, a token on.
        places = starts[:, None] + np.arange(context + 1)
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        inputs = windows[:, :-1].contiguous()
        targets = windows[:, 1:].contiguous()
        return inputs, targets


def prepare(
    files: Sequence[str],
    tokenizer: Tokenizer,
    cache: Path,
    held_out: float | Sequence[str],
    accept: Callable[[Corpus], None] = lambda corpus: None,
    between: bytes = b"\n",
) -> Corpus:
    """The text of `files` as tokens, from the cache or into it; its last `held_out` share is held
    out, or the text of these files.

    A pattern is a glob relative to the working folder, or "package:NAME/GLOB" inside an installed
    package. `accept` sees the corpus before anything is written, and may raise. Files are joined
    with `between`. Several processes may prepare the same text at once.

    Raises `DataError` for a pattern that matches nothing, rows, text that is empty or not UTF-8, a
    cache that cannot be written, and text that gives no token.
    """
    paths = find_files(files)
    _check_are_texts(paths)
    text = between.join(path.read_bytes() for path in paths)
    rest = None  # held out, in files of its own
    if not isinstance(held_out, float):
        rest_paths = find_files(held_out, "data.held_out")
        _check_are_texts(rest_paths)
        check_apart(paths, rest_paths)
        rest = between.join(path.read_bytes() for path in rest_paths)
        paths += rest_paths
    folder = cache / _digest(text, rest, tokenizer, held_out)
    is_damaged = False
    if folder.exists():
        try:
            corpus = _open(folder, tokenizer)
        except _DamagedCache as error:
            LOG.warning("the token cache %s is damaged (%s): it is made again", folder, error)
            is_damaged = True
        else:
            accept(corpus)
            return corpus
    if not text:
        raise DataError(f"data.files: {len(paths)} files hold no text")
    for path in paths:
        check_utf8(path)
    corpus = _tokenise(*_parts(text, rest, held_out), tokenizer)
    accept(corpus)
    _store(corpus, folder, replaces=is_damaged)
    try:
        # Mapped from the file: ranks of one machine then share its pages.
        return _open(folder, tokenizer)
    except _DamagedCache as error:
        LOG.warning("the token cache %s cannot be read back (%s): not used", folder, error)
        return corpus


def find_files(patterns: Sequence[str], key: str = "data.files") -> list[Path]:
    """The files that the patterns of `key` name, sorted, each once."""
    if not patterns:
        raise DataError(f'{key} is empty; name text files, such as files = ["books/*.txt"]')
    return sorted({path for pattern in patterns for path in _matches(pattern, key)})


def check_apart(files: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Raises `DataError` for a file that would be trained on and held out."""
    trained = {path.resolve() for path in files}
    for path in held_out:
        if path.resolve() in trained:
            raise DataError(
                f"{path} is in data.files and in data.held_out: its loss would say nothing; take "
                "it out of one of them"
            )


def _check_are_texts(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix in (".jsonl", ".parquet", ".arrow"):
            raise DataError(
                f'{path} holds rows, and data.format = "text" would learn how they are written: '
                'set data.format = "completion" for their texts (or "chat" and so on), which '
                "needs model.hf, or give files of plain text"
            )


def _matches(pattern: str, key: str) -> list[Path]:
    root = Path()
    inside = pattern
    if pattern.startswith("package:"):
        package, _, inside = pattern.removeprefix("package:").partition("/")
        root = _package_folder(package, pattern, key)
    names = glob.glob(inside, root_dir=root, recursive=True)
    paths = [root / name for name in names]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(f"{key} {pattern!r} matches no file in {root.absolute()}")
    return files


def _package_folder(package: str, pattern: str, key: str) -> Path:
    """Where a package lies, without importing it: its text needs none of its dependencies."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"{key} {pattern!r}: no package {package!r} is installed; try pip install {package}"
        )
    return Path(spec.submodule_search_locations[0])


def check_utf8(path: Path) -> None:
    """Raises `DataError` naming the first byte that is not UTF-8."""
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}; convert it, for example with iconv"
        ) from None


def _digest(
    text: bytes, rest: bytes | None, tokenizer: Tokenizer, held_out: float | Sequence[str]
) -> str:
    parts = [_FORMAT.encode(), tokenizer.fingerprint]
    if rest is None:
        parts += [repr(held_out).encode(), text]
    else:
        parts += [b"files", text, rest]
    # Digests of one length each: of parts that are just joined, a byte could change sides.
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:32]


def _parts(text: bytes, rest: bytes | None, held_out: float | Sequence[str]) -> tuple[str, str]:
    """To train on, and held out."""
    whole = text.decode()
    if rest is not None:
        return whole, rest.decode()
    assert isinstance(held_out, float)
    cut = round(len(whole) * (1 - held_out))
    return whole[:cut], whole[cut:]


def _tokenise(text: str, held_out: str, tokenizer: Tokenizer) -> Corpus:
    # Apart, so that no token holds characters of both.
    train = _ids(text, tokenizer)
    rest = _ids(held_out, tokenizer)
    if not len(train):
        raise DataError(
            f"data.tokenizer {tokenizer.name} makes no token of a text of {len(text)} characters"
        )
    facts = Facts(
        num_tokens=len(train) + len(rest),
        num_train_tokens=len(train),
        train_bytes=len(text.encode()),
        held_out_bytes=len(held_out.encode()),
        bigram_bits=_bigram_bits(text + held_out),
    )
    return Corpus(np.concatenate([train, rest]), facts, tokenizer)


def _ids(text: str, tokenizer: Tokenizer) -> NDArray[Any]:
    dtype = _dtype(tokenizer)
    ids = [np.zeros(0, dtype)]  # an empty text has no pieces
    for piece in tokenizer.encode_each(_pieces(text)):
        ids.append(np.array(piece, dtype))
    return np.concatenate(ids)


def _pieces(text: str) -> Iterator[str]:
    """Cut after a line if possible, so that a cut seldom falls into a word."""
    start = 0
    while start < len(text):
        behind_line = text.rfind("\n", start, start + _PIECE) + 1  # 0 where there is none
        end = behind_line or start + _PIECE
        yield text[start:end]
        start = end


def _dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def _bigram_bits(text: str) -> float:
    values = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    numbers = values[:-1] * 256 + values[1:]
    pairs = np.bincount(numbers, minlength=1 << 16).reshape(256, 256)
    firsts = pairs.sum(1, keepdims=True)
    # A pair that does not occur counts nothing: 0 log 1.
    ones = np.ones(pairs.shape)
    probabilities = np.divide(pairs, firsts, where=pairs > 0, out=ones)
    bits = -(pairs * np.log2(probabilities)).sum()
    return float(bits / max(1, pairs.sum()))


class _DamagedCache(Exception):  # noqa: N818 - never leaves this file
    """What is in the folder is not what was written."""


def _store(corpus: Corpus, folder: Path, *, replaces: bool) -> None:
    """Write under a temporary name, sync, rename: a folder that exists is complete, whoever wrote
    it. It `replaces` a damaged one, which is removed; a process that has that open keeps it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written: {error}; set data.cache"
        ) from None
    ready = unfinished / "ready"
    try:
        ready.mkdir()
        _write(ready / "tokens.bin", corpus.tokens.tobytes())
        _write(ready / "corpus.json", _described(corpus))
        if replaces:
            # A folder cannot be renamed onto one that has files. Another process may have moved it
            # out of the way before.
            with suppress(FileNotFoundError):
                os.rename(folder, unfinished / "damaged")
        os.rename(ready, folder)
    except OSError as error:
        if not folder.exists():  # otherwise another process was first, with the same bytes
            raise DataError(
                f"the token cache {folder} cannot be written: {error}; set data.cache"
            ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _described(corpus: Corpus) -> bytes:
    """Its corpus.json."""
    table = {"facts": asdict(corpus.facts), "blocks": _digests(corpus.tokens)}
    return json.dumps({**table, "sha256": _table_digest(table)}).encode()


def _digests(tokens: NDArray[Any]) -> list[str]:
    """The SHA-256 of each block."""
    content = tokens.view(np.uint8)
    starts = range(0, len(content), _BLOCK_BYTES)
    blocks = [content[start : start + _BLOCK_BYTES] for start in starts]
    with ThreadPoolExecutor(_THREADS) as threads:
        hashes = threads.map(hashlib.sha256, blocks)
        return [each.hexdigest() for each in hashes]


def _table_digest(table: Mapping[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _open(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """Raises `_DamagedCache` if one byte differs from what was written."""
    path = folder / "tokens.bin"
    try:
        table = json.loads((folder / "corpus.json").read_bytes())
        digest = table.pop("sha256")
        if digest != _table_digest(table):
            raise _DamagedCache("corpus.json does not have its digest")
        facts = Facts(**table["facts"])
        shape = (facts.num_tokens,)
        tokens = np.memmap(path, _dtype(tokenizer), "r", shape=shape)
        num_bytes = path.stat().st_size
    # What a damaged file makes of the lines above.
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise _DamagedCache(error) from None
    if num_bytes != tokens.nbytes:
        raise _DamagedCache(f"tokens.bin has {num_bytes} bytes instead of {tokens.nbytes}")
    for number, digest in enumerate(_digests(tokens)):
        if digest != table["blocks"][number]:
            raise _DamagedCache(f"tokens.bin differs after byte {number * _BLOCK_BYTES}")
    return Corpus(tokens, facts, tokenizer)
