"""An iteration of Megatron or of PyTorch's Pipe on given machines, simulated: stages, then gradients, then the update.

stage time     layers x (forward, backward) of a layer on tensor parallel ranks, the logits on the last
pipeline       dpipe's simulator over a link inside the machine
all-reduce     every replica is one machine, whose network card carries the whole model's gradients, twice
update         as fast as memory can be read and written
"""

from dataclasses import dataclass

from dpipe.schedule.generate import generate
from dpipe.timeline.simulate import Cost, simulate
from dpipe.topology import Link, Network
from tables.megatron import Device, Shape, Strategy, layer_parameters, layer_us

_UPDATE_BYTES = 28  # a parameter: master copy, two moments read and written, gradient read


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind; `network_gigabytes_per_s` is what leaves a machine at best."""

    device: Device
    value_bytes: int
    network_gigabytes_per_s: float


@dataclass(frozen=True)
class Job:
    shape: Shape
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    batch_size: int  # of all replicas
    strategy: Strategy
    schedule: str = "1f1b"
    gathers_parameters: bool = False  # FSDP: all-gathered forward and backward, reduced by halves

    @property
    def num_microbatches(self) -> int:
        return max(1, self.batch_size // self.data_parallel // self.shape.micro_batch)


def iteration_s(job: Job, machine: Machine) -> float:
    shape, t, p, device = job.shape, job.tensor_parallel, job.pipeline_parallel, machine.device
    forward, backward = (shape.num_layers / p * us for us in layer_us(shape, t, job.strategy, device))
    tokens = shape.sequence * shape.micro_batch
    logits = device.kernel_us(2 * tokens * shape.width * shape.vocabulary(t))
    last = (0.0,) * (p - 1) + (1.0,)
    cost = Cost(
        forward_us=tuple(forward + end * logits for end in last),
        backward_us=tuple(backward + end * 2 * logits for end in last),
        input_us=(0.0,) * p,
        weight_us=(0.0,) * p,
        activation_bytes=(shape.values * machine.value_bytes // t,) * (p - 1),
    )
    link = Network("machine", Link(delay_ms=0.02, bandwidth_gbps=8 * device.link_gigabytes_per_s))
    pipeline = simulate(generate(job.schedule, p, job.num_microbatches), cost, link).duration_us
    return pipeline / 1e6 + _agreement_s(job, machine) + _update_s(job, machine)


def parameters(shape: Shape) -> int:
    return shape.num_layers * layer_parameters(shape, 1) + (shape.vocabulary(1) + shape.sequence) * shape.width


def _agreement_s(job: Job, machine: Machine) -> float:
    """A ring carries gradients twice, less a share (Patarasuk & Yuan 2009); gathering parameters is one time more."""
    d = job.data_parallel
    rounds = 3 if job.gathers_parameters else 2
    model_bytes = parameters(job.shape) * machine.value_bytes
    return rounds * (d - 1) / d * model_bytes / (machine.network_gigabytes_per_s * 1e9)


def _update_s(job: Job, machine: Machine) -> float:
    own = parameters(job.shape) / (job.tensor_parallel * job.pipeline_parallel)
    return own * _UPDATE_BYTES / (machine.device.gigabytes_per_s * machine.device.efficiency * 1e9)
