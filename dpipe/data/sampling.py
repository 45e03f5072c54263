"""Drawing tokens from a model's distribution, one at a time."""

from collections.abc import Sequence

import torch
from torch import nn

# Below it the likeliest token has all of the distribution, and logits / temperature may overflow.
_COLD = 1e-6


@torch.no_grad()
def continue_ids(
    layers: Sequence[nn.Module],
    ids: Sequence[int],
    num_tokens: int,
    context: int,
    vocab_size: int,
    temperature: float,
    seed: int,
    end: int | None = None,
) -> list[int]:
    """`ids` and `num_tokens` more, each drawn from the model's distribution over the last `context`
    ones.

    A model's vocabulary may be larger than the tokenizer's `vocab_size`: words beyond it are never
    drawn. Any integer is a `seed`. It ends early behind the token `end`.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    out = list(ids)
    for _ in range(num_tokens):
        if len(out) > len(ids) and out[-1] == end:
            break
        window = torch.tensor([out[-context:]])
        x: tuple[torch.Tensor, ...] = (window,)
        for layer in layers:
            returned = layer(*x)
            x = returned if isinstance(returned, tuple) else (returned,)
        logits_V = x[0][0, -1, :vocab_size].float()  # noqa: N806 - V: vocabulary
        if temperature < _COLD:
            out.append(int(logits_V.argmax()))
        else:
            probabilities_V = torch.softmax(logits_V / temperature, dim=-1)  # noqa: N806
            out.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    return out
