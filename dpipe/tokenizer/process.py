"""The parent's end of a tokenizer's own process (`child.py`)."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from dpipe.tokenizer import child
from dpipe.wire.text import visible

MAX_FILE_BYTES = 64 << 20  # three times the largest that is published
MAX_VOCABULARY = 1 << 24
MEMORY_BYTES = 4 << 30
# For one request, of a million characters at most: on a slow machine some seconds.
ANSWER_S = 120.0
ANSWER_BYTES = 256 << 20
_CHUNK = 1 << 20


class TokenizerFailed(Exception):  # noqa: N818 - becomes the caller's own error
    """The tokenizer cannot be used; the message says why."""


class TokenizerProcess:
    """Applies one tokenizer. Its methods raise `TokenizerFailed`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            # Every wait is in `_wait_for`, which has a deadline.
            os.set_blocking(pipe.fileno(), False)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        ids: list[list[int]] = self.ask({"texts": list(texts)})["ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.ask({"decode": list(ids)})["text"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        self._send(json.dumps(request).encode() + b"\n", deadline)
        answer: dict[str, Any] = json.loads(self._line(deadline))
        if "error" in answer:
            raise TokenizerFailed(visible(answer["error"]))
        return answer

    def _send(self, line: bytes, deadline: float) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        rest = memoryview(line)
        while rest:
            self._wait_for(pipe.fileno(), select.POLLOUT, deadline)
            try:
                rest = rest[os.write(pipe.fileno(), rest[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise TokenizerFailed(self._end()) from None

    def _line(self, deadline: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            self._wait_for(pipe.fileno(), select.POLLIN, deadline)
            part = os.read(pipe.fileno(), _CHUNK)
            size += len(part)
            if not part:
                raise TokenizerFailed(self._end())
            if size > ANSWER_BYTES:
                raise TokenizerFailed(f"it makes more than {ANSWER_BYTES} bytes of a text")
            parts.append(part)
        return b"".join(parts)

    def _wait_for(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TokenizerFailed(
                f"it took longer than {ANSWER_S:g} s: a pattern in it may take time without end"
            )

    def _end(self) -> str:
        code = self._process.wait()
        return (
            f"its process ended (exit code {code}), as it does where more than "
            f"{MEMORY_BYTES >> 30} GiB are asked for"
        )


@contextmanager
def tokenizer_process(
    content: bytes, *, special_is_text: bool = False
) -> Iterator[TokenizerProcess]:
    """A process that applies the tokenizer.json `content`; it ends with the block."""
    # -P: a file of the working folder must not stand in for a module.
    argv = [sys.executable, "-P", child.__file__, str(MEMORY_BYTES)]
    process = subprocess.Popen(  # noqa: S603 - this interpreter and a file beside this one
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        opened = TokenizerProcess(process)
        opened.ask(_opening(content, (), special_is_text=special_is_text))
        yield opened
    finally:
        # It may be in a loop that reads no more.
        process.kill()
        process.communicate()


@lru_cache(maxsize=4)
def described(content: bytes, marks: tuple[str, ...] = ()) -> tuple[int, dict[str, int | None]]:
    """The rows that a model needs for the tokenizer.json `content`, and the ids of some tokens,
    None of one that it lacks. Raises `TokenizerFailed`.
    """
    with tokenizer_process(content) as process:
        answer = process.ask(_opening(content, marks, special_is_text=False))
    vocab_size = answer["vocab_size"]
    if vocab_size > MAX_VOCABULARY:
        raise TokenizerFailed(
            f"its largest id is {vocab_size - 1}, and a model has {MAX_VOCABULARY} rows at most"
        )
    return vocab_size, answer["marks"]


def _opening(content: bytes, marks: Sequence[str], *, special_is_text: bool) -> dict[str, Any]:
    if len(content) > MAX_FILE_BYTES:
        raise TokenizerFailed(f"it has more than {MAX_FILE_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise TokenizerFailed(str(error)) from None
    return {"file": text, "marks": list(marks), "special_is_text": special_is_text}
