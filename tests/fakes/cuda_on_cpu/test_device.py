"""That the stand-in finds what a GPU would do wrong."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from fakes import cuda_on_cpu

pytestmark = pytest.mark.stand_in


def races() -> list[str]:
    assert cuda_on_cpu.DEVICE is not None
    return cuda_on_cpu.DEVICE.take_races()[1].splitlines()


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def behind(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(other)
    stream.wait_event(event)


def test_read_that_does_not_wait_for_a_write_is_a_race(side: torch.cuda.Stream) -> None:
    made = torch.ones(8, device="cuda")
    with torch.cuda.stream(side):
        made.record_stream(side)
        made + 1
    (race,) = races()
    assert race.startswith("aten::add.out on stream ")
    assert " reads what aten::fill_.Scalar on stream 0 of cuda:0 may still write" in race


def test_write_that_does_not_wait_for_a_read_is_a_race(side: torch.cuda.Stream) -> None:
    made = torch.ones(8, device="cuda")
    behind(side, torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.record_stream(side)
        made + 1
    made.zero_()
    (race,) = races()
    assert race.startswith("aten::zero_ on stream 0 of cuda:0 writes what ")


@pytest.mark.parametrize("how", ["event", "host", "another thread's word"])
def test_stream_that_waits_does_not_race(how: str, side: torch.cuda.Stream) -> None:
    made = torch.ones(8, device="cuda")
    if how == "event":
        behind(side, torch.cuda.current_stream())
    else:
        event = torch.cuda.Event()
        event.record()
        in_thread(event.synchronize) if how != "host" else event.synchronize()
    with torch.cuda.stream(side):
        made.record_stream(side)
        made + 1
    assert races() == []


def in_thread(work) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_memory_that_is_freed_under_another_stream_is_a_race(side: torch.cuda.Stream) -> None:
    made = torch.ones(8, device="cuda")
    behind(side, torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    del made
    (race,) = races()
    assert race.startswith(
        "memory of stream 0 of cuda:0 is free for it again while aten::add.out on stream "
    )


def test_copy_to_pinned_memory_is_a_write_of_its_stream(side: torch.cuda.Stream) -> None:
    host = torch.empty(8, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(torch.ones(8, device="cuda"), non_blocking=True)
    host.to("cuda", non_blocking=True)
    (race,) = races()
    assert race.startswith("copy_ on stream 0 of cuda:0 reads what copy_ on stream ")


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.embedding(torch.ones(4, 4, device="cuda"), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        torch.ones(4, device="cuda:0") + torch.ones(4, device="cuda:1")


@pytest.mark.parametrize("waits", [True, False])
def test_host_that_waits_is_refused_on_demand(waits: bool) -> None:
    number, host = torch.ones((), device="cuda"), torch.empty((), pin_memory=not waits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing") if waits else nullcontext():
            host.copy_(number, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_counted_as_cuda_s_allocator_does() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = torch.ones(129, device="cuda")
    assert torch.cuda.memory_allocated() == before + 1024
    del made
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 1024


def test_gradients_are_those_of_a_cpu() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    layer(x).square().sum().backward()
    expected = layer.weight.grad
    layer.zero_grad()
    layer.to("cuda")(x.to("cuda")).square().sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), expected)
