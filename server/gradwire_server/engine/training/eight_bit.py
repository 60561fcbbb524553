"""AdamW with moments in 8 bits, by bitsandbytes (``gradwire[quantize]``).

Blocks of 256 entries share a scale (Dettmers et al. 2022, arXiv:2110.02861), which takes 2 bytes a trained weight where
AdamW takes 8. bitsandbytes keeps tensors of fewer than 4,096 entries in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError

MOMENTS = ("state1", "state2", "absmax1", "absmax2", "step")
"""Tensors kept per parameter; those held in float32 have no ``absmax``."""


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the optimizer of parameter groups.

    Raises:
        OperationError: UNSUPPORTED without bitsandbytes, or for float64 weights.
    """
    if any(each.dtype == torch.float64 for group in groups for each in group["params"]):
        raise _unsupported("adamw8bit knows no float64 weights, and the server's are: use 'adamw'")
    optimizer: torch.optim.Optimizer = _class()(groups, lr=0.0)
    return optimizer


def allocate(optimizer: Any, parameter: Tensor) -> None:
    """Make a parameter's moments, all zero."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            if each is parameter:
                optimizer.init_state(group, parameter, group_index, index)


@cache
def _class() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise _unsupported(
            "optim_step(optimizer='adamw8bit') needs bitsandbytes, which is not installed on the server: "
            "pip install 'gradwire[quantize]'"
        ) from None

    class CountedAdamW8bit(AdamW8bit):  # type: ignore[misc]
        """bitsandbytes' AdamW whose count of steps is a tensor, as checkpoints need it."""

        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            self.state[p]["step"] = torch.zeros((), dtype=torch.float32)

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]
            steps = state["step"]
            state["step"] = int(steps)
            super().update_step(group, p, gindex, pindex)
            state["step"] = steps.fill_(state["step"])

    return CountedAdamW8bit


def _unsupported(message: str) -> OperationError:
    return OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, message, field="optimizer")
