"""When a window is filled, and by which congestion control: over sockets, and on what the kernel
would say of a long path.
"""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpipe.errors import ConfigError
from dpipe.session import window
from dpipe.session.window import (
    Losses,
    TcpInfo,
    Window,
    bbr_has_found_rate,
    set_congestion_control,
    tcp_info,
)

IDLE = TcpInfo(
    timeout_us=220_000,
    segment=1448,
    unacknowledged=0,
    last_sent_ms=180,
    round_trip_us=21_000,
    least_round_trip_us=20_000,
    window=100,
    sent=1_000,
    lost=0,
    bytes_per_s=12_500_000,
)


@pytest.fixture
def after_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Whether windows close, as the host has it; most do."""
    setting = tmp_path / "after_idle"
    setting.write_text("1\n")
    monkeypatch.setattr(window, "_AFTER_IDLE", setting)
    return setting


@pytest.fixture
def sock(after_idle: Path) -> Iterator[socket.socket]:
    with socket.socket() as made:
        set_congestion_control(made, "reno")  # each Linux has it, and allows it to everybody
        yield made


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sockets are told to take, on a host that has BBR."""
    names = ["bbr"]
    monkeypatch.setattr(window, "_taken", lambda _: names[-1])
    monkeypatch.setattr(window, "_take", lambda _, name: names.append(name))
    return names


def say(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    monkeypatch.setattr(window, "tcp_info", lambda _: IDLE._replace(**changes))


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({}, 144_800),
        ({"last_sent_ms": 170}, 0),
        ({"unacknowledged": 1}, 0),
        ({"round_trip_us": 100}, 0),
        ({"window": 200}, 250_000),
    ],
    ids=["idle", "idle for a moment", "busy", "short path", "more than the path holds"],
)
def test_window_is_filled_before_a_pause_closes_it(
    monkeypatch: pytest.MonkeyPatch,
    sock: socket.socket,
    changes: dict[str, int],
    num_bytes: int,
) -> None:
    say(monkeypatch, **changes)
    assert Window(sock).look(1_000_000) == num_bytes


def test_window_is_no_larger_than_bursts_need(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    say(monkeypatch)
    assert Window(sock).look(20_000) == 20_000


def test_path_holds_what_the_best_burst_found(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    """The rate of a burst that shared the link says nothing of the link."""
    filled = Window(sock)
    say(monkeypatch, window=1_000)
    filled.look(1_000_000)
    say(monkeypatch, window=1_000, bytes_per_s=1_000)
    assert filled.look(1_000_000) == 250_000


@pytest.mark.parametrize(("setting", "num_bytes"), [("1", 20_000), ("0", 0)])
def test_window_that_outlasts_pauses_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    sock: socket.socket,
    after_idle: Path,
    setting: str,
    num_bytes: int,
) -> None:
    after_idle.write_text(setting)
    say(monkeypatch)
    assert Window(sock).look(20_000) == num_bytes


def test_bbr_s_window_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket, taken: list[str]
) -> None:
    say(monkeypatch)
    assert Window(sock).look(20_000) == 0


@pytest.mark.parametrize(
    ("has_found_rate", "unacknowledged", "is_begun_anew"),
    [(True, 0, True), (True, 1, False), (False, 0, False)],
    ids=["pause", "busy", "looks for the rate"],
)
def test_bbr_is_begun_anew_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
    sock: socket.socket,
    taken: list[str],
    has_found_rate: bool,
    unacknowledged: int,
    is_begun_anew: bool,
) -> None:
    say(monkeypatch, unacknowledged=unacknowledged)
    monkeypatch.setattr(window, "bbr_has_found_rate", lambda _: has_found_rate)
    Window(sock, Losses()).look(20_000)
    assert taken == (["bbr", "reno", "bbr"] if is_begun_anew else ["bbr"])


def test_bbr_that_was_asked_for_is_not_begun_anew(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket, taken: list[str]
) -> None:
    say(monkeypatch)
    monkeypatch.setattr(window, "bbr_has_found_rate", lambda _: True)
    Window(sock).look(20_000)
    assert taken == ["bbr"]


def test_host_that_does_not_allow_reno_keeps_bbr(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket, taken: list[str]
) -> None:
    def refuse(_: socket.socket, name: str) -> None:
        raise OSError(f"{name} is not allowed")

    say(monkeypatch)
    monkeypatch.setattr(window, "bbr_has_found_rate", lambda _: True)
    monkeypatch.setattr(window, "_take", refuse)
    kept = Window(sock, Losses())
    assert kept.look(20_000) == 0
    assert kept.outruns_loss


def test_host_that_allows_bbr_no_longer_is_believed(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket, taken: list[str]
) -> None:
    def refuse_bbr(_: socket.socket, name: str) -> None:
        if name == "bbr":
            raise OSError(f"{name} is not allowed")
        taken.append(name)

    say(monkeypatch)
    monkeypatch.setattr(window, "bbr_has_found_rate", lambda _: True)
    kept = Window(sock, Losses())
    monkeypatch.setattr(window, "_take", refuse_bbr)
    kept.look(20_000)
    assert (taken, kept.outruns_loss) == (["bbr", "reno"], False)


BLOATED = {"round_trip_us": 600_000, "unacknowledged": 1, "bytes_per_s": 4_000_000}


def buffer_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def is_left_to_the_kernel(sock: socket.socket) -> bool:
    return not sock.getsockopt(socket.SOL_SOCKET, window._BUFFER_LOCK)


def test_queue_that_takes_long_is_bounded(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    """The path holds 80 kB, of which the kernel may send eight times as many."""
    filled = Window(sock)
    say(monkeypatch, **BLOATED | {"round_trip_us": 400_000})
    filled.look(0)
    assert is_left_to_the_kernel(sock)
    say(monkeypatch, **BLOATED)
    filled.look(0)
    assert buffer_of(sock) == 8 * 80_000
    assert not is_left_to_the_kernel(sock)


def test_kernel_is_given_no_more_than_its_bound_in_a_call(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    """It may take all of it, whatever its bound."""
    filled = Window(sock)
    before = filled.write_bytes
    say(monkeypatch, **BLOATED)
    filled.look(0)
    assert filled.write_bytes == 320_000 < before


def test_bound_grows_with_what_the_path_holds(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    filled = Window(sock)
    for rate, buffer_bytes in ((4, 640_000), (2, 640_000), (5, 800_000)):
        say(monkeypatch, **BLOATED | {"bytes_per_s": rate * 1_000_000, "round_trip_us": 21_000})
        if rate == 4:
            say(monkeypatch, **BLOATED)
        filled.look(0)
        assert buffer_of(sock) == buffer_bytes


def test_path_is_as_short_as_it_ever_was(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    """In five minutes of a queue that is never empty the kernel forgets how short it is without."""
    filled = Window(sock)
    say(monkeypatch, **BLOATED)
    filled.look(0)
    say(monkeypatch, **BLOATED | {"least_round_trip_us": 300_000})
    filled.look(0)
    assert buffer_of(sock) == 8 * 80_000


def test_bound_that_the_host_does_not_give_is_left_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    filled = Window(sock)
    say(monkeypatch, **BLOATED | {"bytes_per_s": 100_000_000_000})
    before = filled.write_bytes
    filled.look(0)
    assert is_left_to_the_kernel(sock)
    assert filled.write_bytes == before


def test_host_that_gives_half_of_the_bound_gives_enough(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    with socket.socket() as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        most = buffer_of(greedy) // 2
    filled = Window(sock)
    # In 20 ms a third of it, of which four times as much is asked for.
    say(monkeypatch, **BLOATED | {"bytes_per_s": 50 * most // 3})
    filled.look(0)
    assert buffer_of(sock) == 2 * most
    assert not is_left_to_the_kernel(sock)


def test_kernel_that_cannot_take_a_bound_back_is_given_none(
    monkeypatch: pytest.MonkeyPatch, sock: socket.socket
) -> None:
    monkeypatch.setattr(window, "_BUFFER_LOCK", 9_999)
    before = buffer_of(sock)
    say(monkeypatch, **BLOATED)
    Window(sock).look(0)
    assert buffer_of(sock) == before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its last number."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[-1])
    return now


def lose(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], watched: Window, every: int, times: int
) -> None:
    """One segment in so many, one a second, and long enough after to be certain of the last."""
    for number in range(1, times + 1):
        clock.append(clock[-1] + 1)
        say(monkeypatch, sent=number * every, lost=number)
        watched.look(0)
    for _ in range(6):
        clock.append(clock[-1] + 1)
        watched.look(0)


@pytest.mark.parametrize(
    ("every", "times", "takes_bbr"),
    [(1_000, 5, True), (4_000, 5, True), (1_000, 4, False), (10_000, 20, False)],
    ids=["0.1 %", "0.025 %", "too few to say", "congestion"],
)
def test_losses_at_random_ask_for_bbr(
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    sock: socket.socket,
    taken: list[str],
    every: int,
    times: int,
    takes_bbr: bool,
) -> None:
    taken.append("cubic")
    lose(monkeypatch, clock, Window(sock, Losses()), every, times)
    assert taken[-1] == ("bbr" if takes_bbr else "cubic")


@pytest.mark.parametrize(("late", "name"), [(True, "cubic"), (False, "bbr")])
def test_segment_that_was_late_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    sock: socket.socket,
    taken: list[str],
    late: bool,
    name: str,
) -> None:
    """Each second one is sent again, and 0.6 s later the other end may say that it has it twice."""
    taken.append("cubic")
    watched = Window(sock, Losses())
    for second in range(15):
        for part in range(20):
            clock.append(second + part / 20)
            again = 1 if part < 12 else 0
            say(monkeypatch, sent=1_000 * second, lost=again if late else second)
            watched.look(0)
    assert taken[-1] == name


def test_losses_of_a_link_are_those_of_all_its_connections(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], sock: socket.socket, taken: list[str]
) -> None:
    taken.append("cubic")
    losses = Losses()
    for times in (3, 2):
        assert taken[-1] == "cubic"
        lose(monkeypatch, clock, Window(sock, losses), 1_000, times)
    assert taken[-1] == "bbr"


def test_what_is_lost_together_counts_once(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], sock: socket.socket, taken: list[str]
) -> None:
    """A window that opens too far loses half of itself."""
    taken.append("cubic")
    watched = Window(sock, Losses())
    for number in range(1, 500):
        clock.append(clock[-1] + 0.015)
        say(monkeypatch, sent=1_000, lost=10 * min(number, 10))
        watched.look(0)
    assert taken[-1] == "cubic"


def test_congestion_control_that_was_asked_for_is_kept(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], sock: socket.socket, taken: list[str]
) -> None:
    taken.append("cubic")
    lose(monkeypatch, clock, Window(sock), 100, 10)
    assert taken[-1] == "cubic"


@pytest.mark.parametrize(
    ("hosts", "times", "name"),
    [("cubic", 1, "cubic"), ("cubic", 0, "reno"), ("cubic", 5, "bbr"), ("bbr", 1, "reno")],
)
def test_cubic_returns_once_something_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
    sock: socket.socket,
    taken: list[str],
    tmp_path: Path,
    hosts: str,
    times: int,
    name: str,
) -> None:
    (tmp_path / "own").write_text(f"{hosts}\n")
    monkeypatch.setattr(window, "_HOSTS_OWN", tmp_path / "own")
    taken.append("reno")
    lose(monkeypatch, clock, Window(sock, Losses()), 1_000, times)
    assert taken[-1] == name


def test_host_that_does_not_allow_bbr_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], sock: socket.socket
) -> None:
    def refuse(_: socket.socket, name: str) -> None:
        raise OSError(f"{name} is not allowed")

    monkeypatch.setattr(window, "_take", refuse)
    watched = Window(sock, Losses())
    lose(monkeypatch, clock, watched, 100, 10)
    say(monkeypatch, lost=10)
    assert watched.look(20_000) == 20_000


@pytest.mark.parametrize(("hosts", "name"), [("bbr", "reno"), ("cubic", "reno"), ("htcp", "htcp")])
def test_connection_begins_with_reno_in_place_of_bbr_and_cubic(
    sock: socket.socket, taken: list[str], hosts: str, name: str
) -> None:
    taken.append(hosts)
    set_congestion_control(sock, "auto")
    assert taken[-1] == name


@pytest.mark.parametrize("hosts", ["reno", "cubic", "bbr"])
def test_connection_begins_with_bbr_where_losses_are_known(
    sock: socket.socket, taken: list[str], hosts: str
) -> None:
    taken.append(hosts)
    set_congestion_control(sock, "auto", loses=True)
    assert taken[-1] == "bbr"
    assert Window(sock, Losses()).outruns_loss


def test_host_that_does_not_allow_bbr_begins_with_its_own(
    sock: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: socket.socket, name: str) -> None:
        raise OSError(f"{name} is not allowed")

    monkeypatch.setattr(window, "_take", refuse)
    set_congestion_control(sock, "auto", loses=True)
    assert not Window(sock, Losses()).outruns_loss


def test_socket_takes_the_congestion_control_that_it_is_told(sock: socket.socket) -> None:
    set_congestion_control(sock, "host")
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert name.rstrip(b"\0") == b"reno"


def test_congestion_control_that_the_host_lacks_is_refused(sock: socket.socket) -> None:
    with pytest.raises(ConfigError, match="tcp_allowed_congestion_control"):
        set_congestion_control(sock, "nobody_wrote_it")


def test_kernel_says_how_long_a_connection_is_idle() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as here,
    ):
        there, _ = listener.accept()
        with there:
            here.sendall(b"x")
            there.recv(1)
            time.sleep(0.1)
            seen = tcp_info(here)
    assert seen.unacknowledged == 0
    assert seen.last_sent_ms >= 90
    assert seen.timeout_us >= 200_000
    assert 0 < seen.least_round_trip_us <= seen.round_trip_us < 2_000_000
    assert seen.window >= 10
    assert seen.segment > 500
    assert (seen.sent, seen.lost) == (1, 0)


def test_kernel_says_that_bbr_looks_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection on which one byte came back: BBR begins with a gain of 2 / ln 2."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as here:
        set_congestion_control(here, "reno")
        here.connect(listener.getsockname())
        assert not bbr_has_found_rate(here)
        try:
            set_congestion_control(here, "bbr")
        except ConfigError:
            pytest.skip("this host does not allow BBR")
        there, _ = listener.accept()
        with there:
            here.sendall(b"x")
            there.sendall(there.recv(1))  # and acknowledges it
            here.recv(1)
        assert not bbr_has_found_rate(here)
        monkeypatch.setattr(window, "_FOUND", 739)
        assert bbr_has_found_rate(here)


@pytest.mark.parametrize("ask", [tcp_info, bbr_has_found_rate])
def test_socket_that_is_closed_is_an_error(ask: Callable[[socket.socket], object]) -> None:
    made = socket.socket()
    made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ask(made)
