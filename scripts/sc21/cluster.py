"""The simulator's model of machines with eight A100s. Ranks are in Megatron's order: tensor, data,
pipeline.

tensor     all-reduces of the layers (tables/megatron.py) over NVLink; in groups of more than 8
           ranks over the network cards
pipeline   dpipe's simulator. A hop blocks both of its ends, as in Megatron. To another machine it
           goes over the cards of the GPUs; with scatter/gather each of the t ranks sends 1/t, and
           an all-gather over NVLink restores the whole
data       a ring all-reduce of a rank's gradients over its share of the machine's cards, after the
           last backward
tied       first and last stage sum the gradients of the embedding
"""

from dataclasses import dataclass, replace

from tables.devices import A100_FP16_TERAFLOPS, A100_MEMORY_RATE, DeviceParameters
from tables.form import Parameter
from tables.iteration import Job, pipeline_s, stage_cost, update_s
from tables.megatron import Device, layer_parameters, rank_memory
from tables.waves import A100_FP16

from dpipe.network.link import Link
from sc21.case import Case
from sc21.rows import Row, row_of

_VALUE_BYTES = 2
_AT_ONCE = Link(delay_ms=0.01, bandwidth_gbps=1e6)  # the stages' times include their hops


@dataclass(frozen=True)
class Cluster:
    """`card_gigabytes_per_s` is the rate of one GPU's network card in each direction."""

    device: Device
    gpus_per_machine: int
    card_gigabytes_per_s: float

    def device_of(self, tensor: int) -> Device:
        """With the link of its tensor-parallel group."""
        cards = self.card_gigabytes_per_s * self.gpus_per_machine
        inside = self.device.link_gigabytes_per_s
        return replace(
            self.device, link_gigabytes_per_s=inside if tensor <= self.gpus_per_machine else cards
        )

    def hop_us(self, case: Case) -> float:
        whole = case.shape.values * _VALUE_BYTES
        next_door = case.tensor * case.data < self.gpus_per_machine
        rate = self.device.link_gigabytes_per_s if next_door else self.card_gigabytes_per_s
        if not case.scatter_gather:
            return whole / rate / 1e3
        gathered = whole * (case.tensor - 1) / case.tensor
        return whole / case.tensor / rate / 1e3 + self.device.collective_us(gathered)

    def all_reduce_s(self, case: Case) -> float:
        t, d = case.tensor, case.data
        apart = t * d > self.gpus_per_machine
        cards = self.card_gigabytes_per_s * max(1, self.gpus_per_machine // t)
        rate = cards if apart else self.device.link_gigabytes_per_s
        table = case.shape.vocabulary(t) * case.shape.width
        blocks = case.num_layers // case.pipeline * layer_parameters(case.shape, t)
        ring = 2 * (d - 1) / d * (blocks + table) * _VALUE_BYTES / rate
        tied = table * _VALUE_BYTES / self.card_gigabytes_per_s * (case.pipeline > 1)
        return (ring + tied) / 1e9


_SELDOM = "assumed, and seldom the limit"
A100 = DeviceParameters(
    A100_FP16_TERAFLOPS,
    A100_MEMORY_RATE,
    Parameter(
        "all-reduce in the machine", 235, "GB/s", "assumed: what nccl-tests reach of NVLink's 300"
    ),
    # Fitted on the row that has only data parallelism.
    Parameter("share of both that kernels reach", 0.738, "", "fitted on 1.7 of table 1"),
    host_us=Parameter("host, for an operation", 20, "us", _SELDOM),
    collective_us=Parameter("host, for a collective", 40, "us", _SELDOM),
    checkpoint_us=Parameter("host, for what is recomputed", 100, "us", _SELDOM),
    tiles=A100_FP16,
)
CARD_RATE = Parameter("network card of each GPU, each way", 25, "GB/s", "nominal: 200 Gbit/s")
PARAMETERS = (*A100.all, CARD_RATE)
# With GPUs of 80 GB.
DGX_A100 = Cluster(A100.device(), gpus_per_machine=8, card_gigabytes_per_s=CARD_RATE.value)


def predicted(case: Case, cluster: Cluster = DGX_A100) -> Row:
    device = cluster.device_of(case.tensor)
    kind = "1f1b" if case.stages_per_rank == 1 else "interleaved"
    job = Job(
        case.shape,
        case.tensor,
        case.pipeline,
        case.data,
        case.batch,
        case.strategy,
        kind,
        case.stages_per_rank,
    )
    cost = stage_cost(job, device, hop_us=cluster.hop_us(case))
    seconds = pipeline_s(job, cost, _AT_ONCE) + cluster.all_reduce_s(case) + update_s(job, device)
    return row_of(case, seconds, memory_gb(case))


def memory_gb(case: Case) -> float | None:
    """Peak of the fullest GPU under 1F1B; None for an interleaved schedule: it is not modelled."""
    if case.stages_per_rank > 1:
        return None
    held = rank_memory(case.shape, case.tensor, case.pipeline, case.strategy, case.num_microbatches)
    return held.total / 1e9
