"""Rotary embeddings whose factors depend on how long a sequence is: LongRoPE and dynamic NTK scaling.

transformers chooses the factors by the longest position of a whole forward, so that a row's numbers depend on the rows
beside it and a sample's on when it crosses a boundary. Here all rows have the factors of the longest row that the model
serves, as in vLLM: the long ones of LongRoPE where the model's context exceeds its original length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def fix_rotary_factors(model: nn.Module, context_length: int) -> None:
    """Let all rows have the factors of a row as long as the context."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds):
            vars(module)["forward"] = partial(_with_last_position, module.forward, context_length - 1)


def _with_last_position(
    forward: Callable[..., tuple[Tensor, Tensor]], last: int, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    cos, sin = forward(x, F.pad(position_ids, (0, 1), value=last), *args, **kwargs)
    return cos[..., :-1, :], sin[..., :-1, :]
