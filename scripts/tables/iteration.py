"""A simulated iteration of Megatron or PyTorch's Pipe: the pipeline, then the all-reduce, then the
update.

stage time     layers x (forward, backward) of a layer on tensor-parallel ranks, then the logits
pipeline       dpipe's simulator over a link inside the machine
hops           part of the stages' time; over the network if the next stage is on another machine
all-reduce     a ring over each rank's gradients; rings that leave a machine share its interface
update         limited by the memory's rate
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import generate
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from tables.measured import Layout
from tables.megatron import Device, Shape, Strategy, layer_parameters, layer_us


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind behind one network interface, with the same rate in and out."""

    device: Device
    network_gigabytes_per_s: float
    message_us: float = 0.0  # per message to another machine, whatever its size
    gpus: int = 8


@dataclass(frozen=True)
class Job:
    """`stages_per_rank` above 1 requires the schedule "interleaved"."""

    shape: Shape
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    batch_size: int  # of all replicas
    strategy: Strategy
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    gathers_parameters: bool = False  # FSDP: all-gather in forward and backward, reduce-scatter
    # Each pipeline is inside one machine, as in PyTorch's Pipe. Otherwise Megatron's rank order.
    pipeline_inside: bool = False

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel * self.stages_per_rank

    @property
    def num_microbatches(self) -> int:
        return max(1, self.batch_size // self.data_parallel // self.shape.micro_batch)

    def layout(self, precision: str, recompute: str) -> Layout:
        """The layout of a measured line (`measured.py`)."""
        ranks = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        return Layout(*ranks, self.shape.micro_batch, self.batch_size, precision, recompute)


@dataclass(frozen=True)
class Crossings:
    """Transfers that leave the busiest machine at the same time."""

    hops: int  # activations to the next stage
    rings: int  # all-reduce rings; each has one link to another machine


def crossings(job: Job, gpus: int) -> Crossings:
    """Ranks are numbered tensor first, then data, then pipeline parallel (Megatron's order), and
    fill one machine after the other:

        stages, T = 2, D = 6:    | 0 0 0 0 0 0 0 0 | 0 0 0 0 1 1 1 1 | 1 1 1 1 1 1 1 1 | ...
    """
    t, d, p = job.tensor_parallel, job.data_parallel, job.pipeline_parallel
    if job.pipeline_inside:
        return Crossings(0, t * p if d > 1 else 0)

    def machine(stage: int, replica: int, part: int) -> int:
        return ((stage * d + replica) * t + part) // gpus

    hops: Counter[int] = Counter()
    rings: Counter[int] = Counter()
    for stage, replica, part in product(range(p), range(d), range(t)):
        here = machine(stage, replica, part)
        hops[here] += stage + 1 < p and machine(stage + 1, replica, part) != here
        rings[here] += machine(stage, (replica + 1) % d, part) != here
    return Crossings(max(hops.values()), max(rings.values()))


def iteration_s(job: Job, machine: Machine) -> float:
    """Seconds. PyTorch's Pipe copies activations while its stages compute; in Megatron a hop blocks
    both of its ends.
    """
    device = machine.device
    if job.pipeline_inside:
        message_bytes = job.shape.activation_bytes
        cost = stage_cost(job, device, message_bytes=message_bytes)
    else:
        cost = stage_cost(job, device, hop_us=hop_us(job, machine))
    link = Link(delay_ms=0.02, bandwidth_gbps=8 * device.link_gigabytes_per_s)
    return pipeline_s(job, cost, link) + all_reduce_s(job, machine) + update_s(job, device)


def hop_us(job: Job, machine: Machine) -> float:
    """Of an exchange with a neighbour: each of the t ranks sends the whole activation, as Megatron
    did before its scatter/gather optimisation. Hops that leave a machine share its interface.
    """
    moved_bytes = job.shape.activation_bytes
    crossing = crossings(job, machine.gpus).hops
    if not crossing:
        return machine.device.collective_us(moved_bytes)
    through_us = moved_bytes / (machine.network_gigabytes_per_s * 1e3)
    return crossing * (machine.message_us + through_us)


def stage_cost(job: Job, device: Device, *, message_bytes: int = 0, hop_us: float = 0.0) -> Cost:
    """The cost of each stage. `hop_us` is the time for which an exchange with one neighbour, both
    ways at once, blocks the stage: half of it after forward, half after backward.
    """
    shape, t, stages = job.shape, job.tensor_parallel, job.num_stages
    forward, backward = (
        shape.num_layers / stages * us for us in layer_us(shape, t, job.strategy, device)
    )
    tokens = shape.sequence * shape.micro_batch
    logits = device.kernel_us(2 * tokens * shape.width * shape.vocabulary(t))
    if shape.classifies:
        logits = 0.0
    last = [stage == stages - 1 for stage in range(stages)]
    neighbours = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
    held = [hop_us * count / 2 for count in neighbours]
    return Cost(
        forward_us=tuple(forward + end * logits + hop for end, hop in zip(last, held, strict=True)),
        backward_us=tuple(
            backward + end * 2 * logits + hop for end, hop in zip(last, held, strict=True)
        ),
        input_us=(0.0,) * stages,
        weight_us=(0.0,) * stages,
        activation_bytes=(message_bytes,) * (stages - 1),
    )


def pipeline_s(job: Job, cost: Cost, link: Link) -> float:
    plan = generate(
        job.schedule, job.num_stages, job.num_microbatches, stages_per_rank=job.stages_per_rank
    )
    return simulate_alone(Scenario(plan, cost, Network("machine", link))).duration_us / 1e6


def parameters(shape: Shape) -> int:
    return (
        shape.num_layers * layer_parameters(shape, 1)
        + (shape.vocabulary(1) + shape.sequence) * shape.width
    )


def all_reduce_s(job: Job, machine: Machine) -> float:
    """In a ring each rank sends its gradients twice, less a share of 1/d (Patarasuk & Yuan 2009);
    gathering parameters is a third time. Rings that leave a machine share its interface.
    """
    d = job.data_parallel
    rounds = 3 if job.gathers_parameters else 2
    own = parameters(job.shape) / (job.tensor_parallel * job.pipeline_parallel)
    moved_bytes = rounds * (d - 1) / d * own * job.shape.value_bytes
    crossing = crossings(job, machine.gpus).rings
    if not crossing:
        return machine.device.collective_us(moved_bytes) / 1e6
    return moved_bytes * crossing / (machine.network_gigabytes_per_s * 1e9)


def update_s(job: Job, device: Device) -> float:
    """Master weights and Adam's two moments are read and written, gradients are read."""
    own = parameters(job.shape) / (job.tensor_parallel * job.pipeline_parallel)
    moved_bytes = 28 if job.shape.adam else 12
    return own * moved_bytes / (device.gigabytes_per_s * device.memory_efficiency * 1e9)
