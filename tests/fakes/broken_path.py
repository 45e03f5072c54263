"""`BrokenPath`: a proxy on loopback that breaks connections as networks do."""

import math
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class BrokenPath:
    """Dial `address` to reach `port`. With `reset_after`, each connection is reset after a random
    number of bytes of that mean.
    """

    def __init__(self, port: int, *, reset_after: float = math.inf, seed: int = 0) -> None:
        self.num_connections = 0
        self.num_resets = 0
        self.delay_s = 0.0
        self.mtu: int | None = None  # larger packets are dropped silently
        self._port = port
        self._reset_after = reset_after
        self._random = random.Random(seed)
        self._open = threading.Event()  # clear while the path is cut
        self._open.set()
        self._pairs: list[_Pair] = []
        self._stopped = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """From now on nothing passes, and new connections do not open."""
        self._open.clear()

    def restore(self) -> None:
        self._open.set()

    def reset(self) -> None:
        """Break every connection at once, as a firewall does that forgets them."""
        for pair in tuple(self._pairs):
            pair.reset()

    def swallow(self) -> None:
        """Acknowledge all bytes of the open connections, and deliver none."""
        for pair in tuple(self._pairs):
            pair.swallowed = True

    def heal(self) -> None:
        """Reset no more."""
        self._reset_after = math.inf
        for pair in tuple(self._pairs):
            pair.left = math.inf

    def _accept(self) -> None:
        while not self._stopped:
            try:
                here, _ = self._listener.accept()
            except OSError:
                continue
            try:
                self._open.wait()
                there = socket.create_connection(("127.0.0.1", self._port), 5)
            except OSError:
                here.close()
                continue
            left = math.inf
            if self._reset_after < math.inf:
                left = self._random.expovariate(1 / self._reset_after)
            pair = _Pair(here, there, left)
            self._pairs.append(pair)
            self.num_connections += 1
            for ends in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=self._pump, args=(pair, *ends)))
                self._threads[-1].start()

    def _pump(self, pair: "_Pair", source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.mtu is not None and min(len(data), pair.segment) > self.mtu:
                    pair.swallowed = True
                if pair.swallowed:
                    continue
                sink.sendall(data[: int(min(len(data), pair.left))])
                pair.left -= len(data)
                if pair.left <= 0:
                    self.num_resets += 1
                    pair.reset()
            sink.shutdown(socket.SHUT_WR)
        pair.leave()
        if pair.num_pumps == 0:
            with suppress(ValueError):
                self._pairs.remove(pair)


class _Pair:
    """The two connections that stand for one."""

    def __init__(self, here: socket.socket, there: socket.socket, left: float) -> None:
        self.ends = (here, there)
        self.segment = here.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        self.left = left  # bytes until it is reset
        self.swallowed = False
        self.num_pumps = 2
        self._lock = threading.Lock()

    def reset(self) -> None:
        with self._lock:
            for end in self.ends:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        with self._lock:
            self.num_pumps -= 1
            if self.num_pumps == 0:
                for end in self.ends:
                    end.close()
