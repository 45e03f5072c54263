"""One point of a table or figure: a GPT, its parallel layout, and its batch."""

from dataclasses import dataclass

from tables.megatron import Shape, Strategy

from dpipe.report.efficiency import train_flops
from dpipe.stage.flops import gpt_layer_flops

CONTEXT, VOCABULARY = 2048, 51_200


@dataclass(frozen=True)
class Case:
    """`series` is its line in the plot and `x` the label of its point. `published` are TFLOP/s per
    GPU as the paper counts them.
    """

    series: str
    x: str
    num_layers: int
    width: int
    num_heads: int
    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    batch: int
    stages_per_rank: int = 1
    recompute: bool = True
    scatter_gather: bool = True
    published: float | None = None
    fitted: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def shape(self) -> Shape:
        return Shape(
            self.num_layers, self.width, self.num_heads, CONTEXT, VOCABULARY, self.micro_batch
        )

    @property
    def strategy(self) -> Strategy:
        return "full-recompute" if self.recompute else "baseline"

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.data // self.micro_batch

    @property
    def model_flops(self) -> float:
        """Operations of a step, without recomputation."""
        return train_flops(self._forward_flops)

    @property
    def done_flops(self) -> float:
        """Operations of a step, with the second forward pass of every recomputed block."""
        return self.model_flops + self.recompute * sum(self._forward_flops[1:-1])

    @property
    def _forward_flops(self) -> tuple[float, ...]:
        return gpt_layer_flops(
            batch_size=self.batch,
            context=CONTEXT,
            width=self.width,
            num_layers=self.num_layers,
            vocab_size=VOCABULARY,
        )
