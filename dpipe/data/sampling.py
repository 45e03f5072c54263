"""Drawing tokens from a model's distribution, one at a time."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

# Below it the likeliest token has all of the distribution, and logits / temperature may overflow.
_COLD = 1e-6


class KeyCache(Protocol):
    """What layers may keep of the tokens that they have seen: then new ones alone pass through."""

    def begin(self) -> None:
        """Keep keys and values from here on; the next token is a text's first."""

    def end(self) -> None:
        """Forget them, and keep none."""


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
    keys: KeyCache | None = None,
    device: str = "cpu",
) -> list[int]:
    """`ids` and `num_tokens` more, each drawn from the model's distribution over the last `context`
    ones.

    A model's vocabulary may be larger than the tokenizer's `vocab_size`: words beyond it are never
    drawn. Any integer is a `seed`. It ends early behind the token `end`. With `keys` a token goes
    through the layers once, until the text is longer than `context`. The layers are on `device`;
    tokens are drawn on the CPU, where a seed gives the same numbers on any machine.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    out = list(ids)
    num_seen = 0
    if keys is not None:
        keys.begin()
    for _ in range(num_tokens):
        if len(out) > len(ids) and out[-1] == end:
            break
        window = torch.tensor([out[-context:]], device=device)
        if keys is not None and len(out) <= context:
            window = window[:, num_seen:]
            num_seen = len(out)
        elif keys is not None:
            keys.end()  # the window moves on, and with it every position
        x: tuple[torch.Tensor, ...] = (window,)
        for layer in layers:
            returned = layer(*x)
            x = returned if isinstance(returned, tuple) else (returned,)
        out.append(_drawn(x[0][0, -1, :vocab_size].float().cpu(), temperature, generator))
    if keys is not None:
        keys.end()
    return out


def _drawn(
    logits_V: torch.Tensor,  # noqa: N803 - V: vocabulary
    temperature: float,
    generator: torch.Generator,
) -> int:
    if temperature < _COLD:
        return int(logits_V.argmax())
    probabilities_V = torch.softmax(logits_V / temperature, dim=-1)  # noqa: N806
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
