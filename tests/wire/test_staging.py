"""Staging through host memory: only the thread that reads the bytes waits for the GPU."""

import pytest
import torch

from dpipe.streams import HOST, CudaStreams
from dpipe.wire.spec import TensorSpec
from dpipe.wire.staging import Staging

LARGE = TensorSpec((512, 1024), torch.bfloat16)


def test_tensor_on_a_cpu_is_not_copied() -> None:
    tensor = torch.arange(4.0)
    fetched, ready = Staging(HOST).fetch(tensor)
    assert fetched.data_ptr() == tensor.data_ptr()
    assert ready is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_tensor_goes_to_the_host_and_back_without_a_wait_for_the_device() -> None:
    streams = CudaStreams(torch.device("cuda"))
    staging, tensor = (
        Staging(streams),
        torch.randn(1 << 20, device=streams.device, dtype=torch.bfloat16),
    )
    arrived = staging.empty(TensorSpec.of(tensor))
    assert arrived.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with streams.sending(streams.mark(), [tensor]):
            fetched, ready = staging.fetch(tensor)
        staging.block(ready, 30)
        arrived.copy_(fetched)
        back = staging.land(arrived)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back, tensor)


def test_memory_of_a_freed_tensor_is_reused() -> None:
    staging = Staging(HOST)
    address = staging.empty(LARGE).data_ptr()
    elsewhere = torch.empty(LARGE.shape, dtype=LARGE.dtype)  # free memory of malloc is used first
    assert staging.empty(LARGE).data_ptr() == address != elsewhere.data_ptr()


def test_memory_is_lent_for_as_long_as_a_view_of_it_lives() -> None:
    staging = Staging(HOST)
    row = staging.empty(LARGE)[3].fill_(1)
    staging.empty(LARGE).fill_(2)
    assert row.eq(1).all()


def test_kept_memory_is_little_more_than_the_peak_use() -> None:
    staging, spec = Staging(HOST), TensorSpec((48 << 20,), torch.uint8)
    in_use = [staging.empty(spec), staging.empty(spec)]
    in_use.clear()
    assert len(staging._spare[spec.num_bytes]) == 1
