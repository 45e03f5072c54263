"""Text to token ids, and back. Sizes of vocabularies need no torch."""

import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dpipe.config.load import Config
from dpipe.errors import ConfigError, DataError
from dpipe.hub.extra import hub_function
from dpipe.tokenizer.process import (
    MAX_FILE_BYTES,
    TokenizerFailed,
    TokenizerProcess,
    described,
    tokenizer_process,
)

# Long runs too: patterns that backtrack without end do so over them.
_SAMPLE = string.printable + "The fox is quick. " * 8 + "a" * 60 + "b" + " " * 60 + "0" * 60
_MOST_IDS = 16  # of a character: its bytes, and what a normalizer makes of it


def vocabulary_of(config: Config) -> int:
    """Entries of the configured model's vocabulary."""
    if config.model.hf is not None:
        return int(hub_function("model:vocabulary")(config))
    return config.model.vocab_size or vocabulary(config.data.tokenizer)


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary. Raises `ConfigError` if its file cannot be read."""
    if tokenizer == "bytes":
        return 256
    try:
        vocab_size, _ = described(_content(tokenizer))
    except (OSError, ValueError, TokenizerFailed) as error:
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {error}") from None
    return vocab_size


def _content(path: str) -> bytes:
    """Raises `OSError` or `ValueError`; of a file that is too large only what shows it is read."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


class Tokenizer(Protocol):
    name: str  # as in data.tokenizer
    vocab_size: int

    @property
    def start(self) -> Sequence[int]:
        """The tokens that it puts before a text."""

    fingerprint: bytes  # all that decides its ids

    def encode(self, text: str) -> list[int]: ...
    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token."""

    name = "bytes"
    vocab_size = 256
    start = ()
    fingerprint = b"bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, applied in a process of its own: it may be anybody's, and
    no more than its process shall run out of memory or time. All methods raise `DataError`, the
    constructor also for a file that is missing or something else.
    """

    start = ()
    marks: ClassVar[tuple[str, ...]] = ()  # tokens whose ids `mark_ids` has
    special_is_text: ClassVar[bool] = False  # whether a special token's name in a text is text

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self._file = _content(path)
            self.vocab_size, self.mark_ids = described(self._file, self.marks)
        except FileNotFoundError:
            raise DataError(
                f'data.tokenizer {path} does not exist; give a tokenizer.json, or "bytes"'
            ) from None
        except (OSError, ValueError, TokenizerFailed) as error:
            raise DataError(
                f"data.tokenizer {path} is not a Hugging Face tokenizer.json that can be used: "
                f"{error}"
            ) from None
        self.fingerprint = self._file

    def encode(self, text: str) -> list[int]:
        (ids,) = self.encode_each([text])
        return ids

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """One process for all of them."""
        with self._process() as process:
            for text in texts:
                ids = self.ids(process, text)
                largest = max(ids, default=-1)
                if largest >= self.vocab_size:
                    raise TokenizerFailed(f"it makes id {largest}, of {self.vocab_size} entries")
                yield ids

    def ids(self, process: TokenizerProcess, text: str) -> list[int]:
        return process.encode([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        with self._process() as process:
            return process.decode(ids)

    @contextmanager
    def _process(self) -> Iterator[TokenizerProcess]:
        try:
            with tokenizer_process(self._file, special_is_text=self.special_is_text) as process:
                yield process
        except TokenizerFailed as error:
            raise DataError(
                f"data.tokenizer {self.name} cannot be applied to this text: {error}; take another "
                "tokenizer"
            ) from None


def tokenizer_of(config: Config) -> Tokenizer:
    """The configured one, or that of a published model."""
    if config.model.hf is not None:
        words: Tokenizer = words_of(config)
        return words
    return open_tokenizer(config.data.tokenizer)


def words_of(config: Config) -> Any:
    """`hub.words.Words` of the published model."""
    _try_out(hub_function("model:source_of")(config).folder / "tokenizer.json")
    return hub_function("words:Words")(config)


def _try_out(path: Path) -> None:
    """Load the tokenizer.json of a published model where no more than a process can run out of
    memory or time, and apply it. Raises `DataError`.
    """
    if not path.exists():
        return
    tokenizer = FileTokenizer(str(path))
    num_ids = len(tokenizer.encode(_SAMPLE))
    if num_ids > _MOST_IDS * len(_SAMPLE):
        raise DataError(f"{path} makes {num_ids} tokens of {len(_SAMPLE)} characters")


def open_tokenizer(name: str) -> Tokenizer:
    """ "bytes", or the path of a Hugging Face tokenizer.json."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)
