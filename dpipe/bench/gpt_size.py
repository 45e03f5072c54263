"""The GPT that a bench trains on two engines."""

from dataclasses import dataclass

from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel


@dataclass(frozen=True, kw_only=True)
class GptSize:
    """Without dropout, because two engines draw different random numbers. The head has a weight of
    its own, because torch's engine cannot share one between stages.
    """

    num_layers: int  # blocks; the embedding and the head are two layers more
    width: int
    num_heads: int
    context: int
    vocab_size: int

    def model(self) -> LayeredModel:
        return gpt(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            context=self.context,
            dropout=0.0,
            tied=False,
        )
