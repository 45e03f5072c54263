"""Streams: what is queued on which, what waits for what; on a GPU, that they overlap."""

import time

import pytest
import torch
from fakes.fake_cuda import FakeCuda, FakeEvent, ThreadedStreams

from dpipe.streams import HOST, CudaStreams, streams_of


def test_streams_are_on_the_host_without_a_gpu() -> None:
    assert streams_of("cpu") is HOST


def test_mark_on_the_host_is_the_time() -> None:
    before = time.perf_counter_ns()
    assert before <= HOST.ns(HOST.mark()) <= time.perf_counter_ns()


def test_sending_waits_for_what_it_sends_and_for_nothing_later() -> None:
    streams, ran = ThreadedStreams(FakeCuda()), []
    made, later = streams._cuda.Event(enable_timing=True), streams._cuda.Event(enable_timing=True)
    with streams.sending(made, [torch.zeros(1)]):
        streams._cuda.current_stream().queue(lambda: ran.append("send"))
        sent = streams.mark()
    assert not streams.done(sent) and ran == []
    made._fire()
    streams.block(sent, 5)
    assert ran == ["send"] and not streams.done(later)


def test_tensors_that_are_sent_are_kept_for_the_send_stream() -> None:
    streams, tensor = ThreadedStreams(FakeCuda()), torch.zeros(1)
    with streams.sending(streams.mark(), [tensor]):
        pass
    assert streams.kept == [tensor]


def test_receive_stream_does_not_wait_for_the_send_stream() -> None:
    streams = ThreadedStreams(FakeCuda())
    never = streams._cuda.Event(enable_timing=True)
    with streams.sending(never, []):
        pass
    with streams.receiving():
        streams.block(streams.mark(), 5)
    never._fire()


def test_waiting_on_the_host_ends_at_its_deadline() -> None:
    streams = ThreadedStreams(FakeCuda())
    with pytest.raises(TimeoutError, match=r"not reached an event within 0\.05 s"):
        streams.block(streams._cuda.Event(enable_timing=True), 0.05)


def test_utilisation_of_a_device_is_from_its_driver() -> None:
    assert (ThreadedStreams(FakeCuda()).use_percent(), HOST.use_percent()) == (83, None)


def test_driver_without_utilisation_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(FakeCuda):
        def utilization(self, device: torch.device) -> int:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    streams = ThreadedStreams(Silent())
    assert [streams.use_percent(), streams.use_percent()] == [None, None]
    assert [record.message for record in caplog.records] == [
        "the use of cpu is not reported: nvidia-ml-py does not seem to be installed"
    ]


def test_marks_of_a_device_are_on_the_clock_of_the_host() -> None:
    streams = ThreadedStreams(FakeCuda())
    before = time.perf_counter_ns()
    mark = streams.mark()
    streams.catch_up()
    assert before - 1e6 <= streams.ns(mark) <= time.perf_counter_ns()


def test_marks_before_the_last_look_at_the_clock_are_told_apart() -> None:
    """CUDA gives the time between an event and a later one, but no negative times."""
    streams = ThreadedStreams(FakeCuda())
    first = streams.mark()
    time.sleep(0.02)
    second = streams.mark()
    streams.catch_up()
    assert streams.ns(second) - streams.ns(first) >= 0.02e9


def test_time_of_a_mark_uses_one_anchor() -> None:
    """NCCL's watcher asks while the computing thread takes another: it was off by the time
    between the two.
    """
    streams = ThreadedStreams(FakeCuda())
    mark, at_ns, event = streams.mark(), time.perf_counter_ns(), streams._anchor.event
    tell = event.elapsed_time

    def overtaken(end: FakeEvent) -> float:
        time.sleep(0.1)
        streams.catch_up()
        return tell(end)

    event.elapsed_time = overtaken
    assert abs(streams.ns(mark) - at_ns) < 0.05e9


@pytest.mark.gpu(real="a stand-in has no kernels that a profiler could see")
def test_sends_and_compute_are_on_the_device_at_once() -> None:
    """Two busy kernels of 20 ms, calibrated in cycles: in the profiler's eyes they intersect."""
    streams = CudaStreams(torch.device("cuda"))
    start = streams.mark()
    torch.cuda._sleep(10_000_000)
    end = streams.mark()
    streams.catch_up()
    cycles = int(10_000_000 * 20 / start.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made = streams.mark()
        with streams.sending(made, []):
            torch.cuda._sleep(cycles)
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in profile.events() if "spin_kernel" in e.name
    )
    (_, first_end), (second_start, second_end) = spans
    assert second_start < first_end, "the second kernel began when the first was over"
    assert second_end - second_start > 5e3  # microseconds: they were busy
