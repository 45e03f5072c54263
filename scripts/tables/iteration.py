"""An iteration of Megatron or of PyTorch's Pipe on given machines, simulated: stages, then
gradients, then the update.

stage time     layers x (forward, backward) of a layer on tensor-parallel ranks, then the logits
pipeline       dpipe's simulator over a link inside the machine
all-reduce     every replica is one machine, whose card carries the model's gradients, twice
update         as fast as memory can be read and written
"""

from dataclasses import dataclass

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import generate
from dpipe.timeline.cost import Cost
from dpipe.timeline.simulate import simulate_alone
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
    """`stages_per_rank` above 1 goes with the schedule "interleaved"."""

    shape: Shape
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    batch_size: int  # of all replicas
    strategy: Strategy
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    gathers_parameters: bool = False  # FSDP: all-gathered forward and backward, reduced by halves

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def num_microbatches(self) -> int:
        return max(1, self.batch_size // self.data_parallel // self.shape.micro_batch)


def iteration_s(job: Job, machine: Machine) -> float:
    """Seconds. A hop carries 1/t of the activation, inside the machine, while its ends compute."""
    device = machine.device
    cost = stage_cost(
        job, device, message_bytes=job.shape.values * machine.value_bytes // job.tensor_parallel
    )
    link = Link(delay_ms=0.02, bandwidth_gbps=8 * device.link_gigabytes_per_s)
    return pipeline_s(job, cost, link) + _agreement_s(job, machine) + update_s(job, device)


def stage_cost(job: Job, device: Device, *, message_bytes: int = 0, hop_us: float = 0.0) -> Cost:
    """A step of each stage; `hop_us` are those for which a hop to or from a neighbour holds up the
    stage itself.
    """
    shape, t, stages = job.shape, job.tensor_parallel, job.num_stages
    forward, backward = (
        shape.num_layers / stages * us for us in layer_us(shape, t, job.strategy, device)
    )
    tokens = shape.sequence * shape.micro_batch
    logits = device.kernel_us(2 * tokens * shape.width * shape.vocabulary(t))
    last = [stage == stages - 1 for stage in range(stages)]
    hops = [hop_us * (stages > 1)] * stages
    return Cost(
        forward_us=tuple(forward + end * logits + hop for end, hop in zip(last, hops, strict=True)),
        backward_us=tuple(
            backward + end * 2 * logits + hop for end, hop in zip(last, hops, strict=True)
        ),
        input_us=(0.0,) * stages,
        weight_us=(0.0,) * stages,
        activation_bytes=(message_bytes,) * (stages - 1),
    )


def pipeline_s(job: Job, cost: Cost, link: Link) -> float:
    plan = generate(
        job.schedule, job.num_stages, job.num_microbatches, stages_per_rank=job.stages_per_rank
    )
    return simulate_alone(plan, cost, Network("machine", link)).duration_us / 1e6


def parameters(shape: Shape) -> int:
    return (
        shape.num_layers * layer_parameters(shape, 1)
        + (shape.vocabulary(1) + shape.sequence) * shape.width
    )


def _agreement_s(job: Job, machine: Machine) -> float:
    """A ring carries gradients twice, less a share (Patarasuk & Yuan 2009); gathering parameters is
    one time more.
    """
    d = job.data_parallel
    rounds = 3 if job.gathers_parameters else 2
    model_bytes = parameters(job.shape) * machine.value_bytes
    return rounds * (d - 1) / d * model_bytes / (machine.network_gigabytes_per_s * 1e9)


def update_s(job: Job, device: Device) -> float:
    own = parameters(job.shape) / (job.tensor_parallel * job.pipeline_parallel)
    return own * _UPDATE_BYTES / (device.gigabytes_per_s * device.efficiency * 1e9)
