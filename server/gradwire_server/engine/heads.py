"""Scalar heads beside the output head: a value a token, or a reward a sequence. ``H`` hidden size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

HeadKind = Literal["", "value", "reward"]


class ScalarHead(nn.Module):
    """A linear map ``[N, H] -> [N]``, in float32 whatever the trunk's dtype.

    A value head starts at zero: until it has learned, advantages are returns and no value is worse than none. A
    reward head starts small and random, so that preferences have a gradient in the trunk from the first step on.

    Args:
        kind: ``"value"`` (the value of the state that token t was emitted in, read at token t - 1) or ``"reward"``
            (of a sequence, read at its last token).
        hidden_size: ``H``.
        seed: of the initial weights.
    """

    def __init__(self, kind: Literal["value", "reward"], hidden_size: int, seed: int, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))
        if kind == "reward":
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.weight, std=1.0 / (hidden_size + 1), generator=generator)
        self.to(device)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(-1)
