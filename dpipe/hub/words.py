"""A published model's own tokenizer, and the template by which it writes a chat."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from dpipe.config.load import Config
from dpipe.errors import DataError
from dpipe.hub.model import source_of
from dpipe.hub.source import ModelSource

Turn = Mapping[str, str]  # role and content


class Words:
    """The tokenizer of `model.hf`. Raises `DataError` if it has none, or one of another model."""

    def __init__(self, config: Config) -> None:
        source = source_of(config)
        self.name = str(source.folder)
        self._tokenizer = _loaded(source)
        self.vocab_size = len(self._tokenizer)
        rows = int(source.config().vocab_size)
        if self.vocab_size > rows:
            raise DataError(
                f"the tokenizer of model.hf {self.name} has {self.vocab_size} entries, and the "
                f"model {rows}: it is another model's; copy the one that belongs to it"
            )
        template = self._tokenizer.chat_template or ""
        backend = self._tokenizer.backend_tokenizer.to_str()
        self.fingerprint = (backend + str(template)).encode()

    @property
    def start(self) -> Sequence[int]:
        """The tokens before a text: what Llama and Gemma have learned to begin with."""
        around = self._tokenizer.encode("")
        first = self._tokenizer.bos_token_id
        return [first] if around[:1] == [first] else []

    @property
    def end(self) -> int | None:
        """The token behind a text."""
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def frame(self) -> tuple[int, int, int]:
        """The tokens before and behind a sequence, and the one in place of a masked word. Raises
        `DataError` for one that is not there.
        """
        names = ("cls_token", "sep_token", "mask_token")
        missing = [name for name in names if getattr(self._tokenizer, f"{name}_id") is None]
        if missing:
            raise DataError(
                f"the tokenizer of model.hf {self.name} has no {', '.join(missing)}, which an "
                "encoder needs: copy the one that belongs to the model"
            )
        first, last, masked = (getattr(self._tokenizer, f"{name}_id") for name in names)
        return int(first), int(last), int(masked)

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def chat(self, turns: Sequence[Turn], *, asks: bool = False) -> str:
        """`turns` as the model reads them; with `asks` the assistant's next turn is begun.

        Raises `DataError` where the template refuses them, and without a template.
        """
        if not self.has_template:
            raise DataError(
                f"the tokenizer of model.hf {self.name} has no chat template: take an instruct "
                'model, or data.format = "instruction"'
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(turns), tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # whatever a template raises
            raise DataError(
                f"the chat template of model.hf {self.name} refuses these turns: "
                f"{type(error).__name__}: {error}"
            ) from None
        return str(text)

    def save(self, folder: Any) -> None:
        self._tokenizer.save_pretrained(folder)


@cache
def _loaded(source: ModelSource) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source.folder, **source.file_options)
    except Exception as error:  # it depends on the tokenizer's class what a broken one raises
        raise DataError(
            f"model.hf {source.folder} has no tokenizer that transformers can read "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}); copy "
            "tokenizer.json and tokenizer_config.json there"
        ) from None
