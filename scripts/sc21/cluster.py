"""Machines of eight A100s as the simulator sees them: Megatron's ranks in its order, tensor, data,
pipeline.

tensor     all-reduces of the layers (tables/megatron.py), over NVLink; of more than 8 ranks over
           the machines' cards
pipeline   dpipe's simulator; a hop holds up both its ends, as Megatron's does, and goes over a card
           of each GPU where the next stage is another machine's. Scattered, each of the t ranks
           sends 1/t, and NVLink gathers it
data       a ring over the gradients of a rank, through its share of a machine's cards, after the
           last backward
tied       first and last stage add up the gradients of the words' table
"""

from dataclasses import dataclass, replace

from tables.iteration import Job, pipeline_s, stage_cost, update_s
from tables.megatron import Device, layer_parameters, rank_memory

from dpipe.network.link import Link
from sc21.case import Case
from sc21.rows import Row, row_of

_VALUE_BYTES = 2
# Assumed, and seldom the limit here: the host, to issue an operation, a collective, a checkpoint.
_HOST_US = (20.0, 40.0, 100.0)
_AT_ONCE = Link(delay_ms=0.01, bandwidth_gbps=1e6)  # a hop's time is in the stages' already


@dataclass(frozen=True)
class Cluster:
    """`card_gigabytes_per_s` is what the network card of one GPU carries each way."""

    device: Device
    gpus_per_machine: int
    card_gigabytes_per_s: float

    def device_of(self, tensor: int) -> Device:
        """With the link of the group that a layer is spread over."""
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

    def agreement_s(self, case: Case) -> float:
        t, d = case.tensor, case.data
        apart = t * d > self.gpus_per_machine
        cards = self.card_gigabytes_per_s * max(1, self.gpus_per_machine // t)
        rate = cards if apart else self.device.link_gigabytes_per_s
        table = case.shape.vocabulary(t) * case.shape.width
        blocks = case.num_layers // case.pipeline * layer_parameters(case.shape, t)
        ring = 2 * (d - 1) / d * (blocks + table) * _VALUE_BYTES / rate
        tied = table * _VALUE_BYTES / self.card_gigabytes_per_s * (case.pipeline > 1)
        return (ring + tied) / 1e9


# Nominal figures of a DGX A100 (80 GB): NVLink 300 GB/s and a card of 200 Gbit/s each way for each
# GPU. The efficiency is fitted on the smallest model of table 1 alone; what the host takes is
# assumed, and seldom the limit.
DGX_A100 = Cluster(
    Device(312, 2039, 300, 0.728, 0.728, *_HOST_US), gpus_per_machine=8, card_gigabytes_per_s=25
)


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
    seconds = pipeline_s(job, cost, _AT_ONCE) + cluster.agreement_s(case) + update_s(job, device)
    return row_of(case, seconds, memory_gb(case))


def memory_gb(case: Case) -> float | None:
    """Of the fullest GPU under 1F1B; what an interleaved schedule holds is not known here."""
    if case.stages_per_rank > 1:
        return None
    held = rank_memory(case.shape, case.tensor, case.pipeline, case.strategy, case.num_microbatches)
    return held.total / 1e9
