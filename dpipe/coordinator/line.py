"""Messages both ways between a rank and the coordinator, over a session that outlives streams.

    tell --> outbox --> writer --> cut --> session ======> session --> frames --> assemble
                        (a thread)                         (the reader's thread)

In the session each frame stands behind its size, four bytes, big-endian. None is the last word:
both ends say it, and hear it, before a line ends in order.
"""

import queue
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from dpipe.coordinator.frame import FRAME_BYTES, cut
from dpipe.session.frames import MessageFrames, MessageStream
from dpipe.session.session import LinkSession

M = TypeVar("M", bound=Message)

# For another stream in the place of one that was closed, where a process refuses connections or
# nothing can be dialled: a process that died closes its own, as a middle box may.
GONE_S = 0.5
_SIZE_BYTES = 4
_END = bytes(_SIZE_BYTES)


class Line(Generic[M]):
    def __init__(self, session: LinkSession, name: str) -> None:
        self.session = session
        self._outbox: queue.SimpleQueue[M | None] = queue.SimpleQueue()
        self._writer = Thread(target=self._write, name=name, daemon=True)

    @property
    def num_unsent(self) -> int:
        return self._outbox.qsize()

    def start(self, stream: MessageStream) -> None:
        self.session.attach(MessageFrames(stream), 0, 0)
        self._writer.start()

    def tell(self, message: M | None) -> None:
        """Send it behind all others, and return at once; None ends this direction."""
        self._outbox.put(message)

    def frames(self) -> Iterator[bytes]:
        """What comes, until the other end ends its direction. Raises `ConnectionError` where the
        session ends before, and `DecodeError` on what is no frame.
        """
        while True:
            prefix = bytearray(_SIZE_BYTES)
            self.session.read(memoryview(prefix))
            if prefix == _END:
                return
            size = int.from_bytes(prefix, "big")
            if size > 1 + FRAME_BYTES:
                raise DecodeError(f"{size} bytes are not a frame")
            frame = bytearray(size)
            self.session.read(memoryview(frame))
            yield bytes(frame)

    def wait_for_writer(self, timeout_s: float) -> None:
        if self._writer.ident is not None:
            self._writer.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait for the writer, and close the streams once nobody uses them."""
        self.wait_for_writer(timeout_s)
        if not self._writer.is_alive():
            self.session.release()

    def _write(self) -> None:
        with suppress(OSError):  # the reader hears of it as well
            while (message := self._outbox.get()) is not None:
                for frame in cut(message):
                    self.session.write(len(frame).to_bytes(_SIZE_BYTES, "big"), memoryview(frame))
            self.session.write(_END, memoryview(b""))
