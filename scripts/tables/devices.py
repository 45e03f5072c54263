"""The GPUs of the published tables: nominal figures, and the assumptions of a table."""

from dataclasses import dataclass

from tables.form import Parameter
from tables.megatron import Device
from tables.waves import Tiles

V100_FP32_TERAFLOPS = Parameter("V100 in fp32", 15.7, "TFLOP/s", "nominal")
V100_FP16_TERAFLOPS = Parameter("V100 in fp16", 125, "TFLOP/s", "nominal")
V100_MEMORY_RATE = Parameter("rate of V100's memory", 900, "GB/s", "nominal")
V100_LINK_RATE = Parameter("V100's NVLink, each way", 150, "GB/s", "nominal")
V100_MEMORY_GIB = Parameter("V100's memory", 15.78, "GiB", "nominal: 16,160 MiB")
A100_FP16_TERAFLOPS = Parameter("A100 in fp16", 312, "TFLOP/s", "nominal")
A100_MEMORY_RATE = Parameter("rate of A100's memory", 2039, "GB/s", "nominal")


@dataclass(frozen=True)
class DeviceParameters:
    """The parameters of a `Device`, in the order in which a table prints them."""

    teraflops: Parameter
    memory_rate: Parameter
    link_rate: Parameter  # of an all-reduce inside the machine
    efficiency: Parameter  # share of both `teraflops` and `memory_rate` that kernels reach
    host_us: Parameter
    collective_us: Parameter
    checkpoint_us: Parameter
    tiles: Tiles | None = None  # of a product

    @property
    def all(self) -> tuple[Parameter, ...]:
        *own, tiles = vars(self).values()
        return (*own, *(tiles.parameters if tiles else ()))

    def device(self) -> Device:
        return Device(
            teraflops=self.teraflops.value,
            gigabytes_per_s=self.memory_rate.value,
            link_gigabytes_per_s=self.link_rate.value,
            efficiency=self.efficiency.value,
            memory_efficiency=self.efficiency.value,
            host_us=self.host_us.value,
            host_collective_us=self.collective_us.value,
            host_checkpoint_us=self.checkpoint_us.value,
            tiles=self.tiles,
        )
