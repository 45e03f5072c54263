"""One end of a session over TCP that pauses between its messages.

    paused_link.py listen PORT
    paused_link.py call HOST PORT warm|cold     writes the seconds of messages behind a pause

Run on two hosts of a lab.
"""

import socket
import sys
import threading
import time

from dpipe.session.frames import ByteFrames
from dpipe.session.session import LOOK_S, LinkSession
from dpipe.session.stream import SocketStream, tune
from dpipe.session.window import set_congestion_control

MESSAGE = bytes(400_000)
PAUSE_S = 1.0
OPENING = 4  # messages without a pause, by which a window opens
MEASURED = 3


def session_over(sock: socket.socket) -> LinkSession:
    tune(sock, 30.0, 60.0)
    set_congestion_control(sock, "reno")
    session = LinkSession(80.0)
    session.attach(ByteFrames(SocketStream(sock)), 0, 0)
    return session


def listen(port: int) -> None:
    with socket.create_server(("", port)) as listener:
        sock, _ = listener.accept()
    session = session_over(sock)
    message = bytearray(len(MESSAGE))
    for _ in range(OPENING + MEASURED):
        session.read(memoryview(message))
        session.write(b"", memoryview(b"."))
    session.end()
    session.skip()


def call(host: str, port: int, *, warm: bool) -> list[float]:
    session = session_over(connected(host, port))
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            session.keep_warm(time.monotonic())

    watcher = threading.Thread(target=watch)
    if warm:
        watcher.start()
    took = []
    for number in range(OPENING + MEASURED):
        if number >= OPENING:
            time.sleep(PAUSE_S)
        began = time.monotonic()
        session.write(b"", memoryview(MESSAGE))
        session.read(memoryview(bytearray(1)))
        took.append(time.monotonic() - began)
    over.set()
    if warm:
        watcher.join()
    session.close()
    return took[OPENING:]


def connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(int(sys.argv[2]))
    else:
        _, _, host, port, how = sys.argv
        seconds = call(host, int(port), warm=how == "warm")
        sys.stdout.write(" ".join(map(str, seconds)))
