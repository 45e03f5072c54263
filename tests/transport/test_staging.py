"""On the way through host memory nobody waits for the GPU but the thread that reads the bytes."""

import pytest
import torch

from dpipe.streams import HOST, CudaStreams
from dpipe.transport.staging import Staging
from dpipe.wire.spec import TensorSpec


def test_tensor_on_a_cpu_is_not_copied() -> None:
    tensor = torch.arange(4.0)
    fetched, ready = Staging(HOST).fetch(tensor)
    assert fetched.data_ptr() == tensor.data_ptr()
    assert ready is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_tensor_goes_to_the_host_and_back_without_a_wait_for_the_device() -> None:
    streams = CudaStreams(torch.device("cuda"))
    staging, tensor = Staging(streams), torch.randn(1 << 20, device=streams.device, dtype=torch.bfloat16)
    arrived = staging.empty(TensorSpec.of(tensor))
    assert arrived.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with streams.sending(streams.mark(), [tensor]):
            fetched, ready = staging.fetch(tensor)
        staging.block(ready, 30)
        arrived.copy_(fetched)
        back = staging.use(*staging.land(arrived))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back, tensor)
