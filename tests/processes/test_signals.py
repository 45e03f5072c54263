import os
import signal
import threading

import pytest

from dpipe.processes.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_to_stop(number: signal.Signals) -> None:
    with stop_on_signals() as wants_stop:
        assert not wants_stop()
        os.kill(os.getpid(), number)
        assert wants_stop()


def test_log_says_what_a_signal_leads_to(caplog: pytest.LogCaptureFixture) -> None:
    with stop_on_signals("stopping; all is kept"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert caplog.messages == ["SIGTERM: stopping; all is kept"]


def test_second_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop_on_signals():  # noqa: PT012 - the second of two is the subject
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_thread_without_signals_is_never_asked_to_stop() -> None:
    seen: list[bool] = []

    def watch() -> None:
        with stop_on_signals() as wants_stop:
            seen.append(wants_stop())

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join(5)
    assert seen == [False]
