"""A process that does nothing but apply one tokenizer, within limits: `child.py BYTES`.

A tokenizer.json may be somebody else's, and there is no telling from a regular expression how long
it takes, nor from a replacement how much it makes. Whatever goes wrong goes wrong here.

    parent   {"file": "...", "marks": ["[SEP]"], "special_is_text": false}
    child    {"vocab_size": 300, "marks": {"[SEP]": 2}}
    parent   {"texts": ["ab"]}          child    {"ids": [[5, 7]]}
    parent   {"decode": [5, 7]}         child    {"text": "ab"}
    parent   anything                   child    {"error": "what the library says"}

One line of JSON each. It imports nothing of dpipe, to start fast.
"""

import json
import resource
import sys
from typing import Any

from tokenizers import Tokenizer


class Child:
    def __init__(self) -> None:
        self._tokenizer: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "file" in request:
            return self._open(request)
        if "texts" in request:
            return {"ids": self._ids(request["texts"])}
        return {"text": self._tokenizer.decode(request["decode"])}

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        self._tokenizer = Tokenizer.from_str(request["file"])
        self._tokenizer.encode_special_tokens = request["special_is_text"]
        # What a model needs: ids may have gaps.
        vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        marks = {mark: self._tokenizer.token_to_id(mark) for mark in request["marks"]}
        return {"vocab_size": vocab_size, "marks": marks}

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1:
            return [self._tokenizer.encode(texts[0], add_special_tokens=False).ids]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def main(most_bytes: int) -> None:
    # Not the address space: each thread of the library reserves some that it never uses.
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = Child()
    for line in sys.stdin.buffer:
        try:
            answer = child.answer(json.loads(line))
        except BaseException as error:  # a panic of Rust is no Exception
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
