"""Text to token ids, and back. Sizes of vocabularies need no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dpipe.config.load import Config
from dpipe.errors import ConfigError, DataError


def vocabulary_of(config: Config) -> int:
    """Entries of the configured model's vocabulary."""
    return config.model.vocab_size or vocabulary(config.data.tokenizer)


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary. Raises `ConfigError` if its file cannot be read."""
    if tokenizer == "bytes":
        return 256
    from tokenizers import Tokenizer

    try:
        return size_of(Tokenizer.from_file(tokenizer))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {error}") from None


def size_of(tokenizer: Any) -> int:
    """The entries that a model needs for a Hugging Face tokenizer. Its ids may have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


class Tokenizer(Protocol):
    name: str  # as in data.tokenizer
    vocab_size: int
    fingerprint: bytes  # all that decides its ids

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token."""

    name = "bytes"
    vocab_size = 256
    fingerprint = b"bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`. Raises `DataError` if it is missing or something else."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Pieces  # slow to import, and not needed for bytes

        self.name = path
        try:
            self.fingerprint = Path(path).read_bytes()
            self._pieces = Pieces.from_str(self.fingerprint.decode())
        except FileNotFoundError:
            raise DataError(
                f'data.tokenizer {path} does not exist; give a tokenizer.json, or "bytes"'
            ) from None
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"data.tokenizer {path} is not a Hugging Face tokenizer.json: {error}"
            ) from None
        self.vocab_size = size_of(self._pieces)

    def encode(self, text: str) -> list[int]:
        return list(self._pieces.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._pieces.decode(list(ids)))


def open_tokenizer(name: str) -> Tokenizer:
    """ "bytes", or the path of a Hugging Face tokenizer.json."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)
