"""Heads beside the output head: a value per token, or a reward or class scores per token or sequence.

Legend: ``H`` hidden size, ``N`` places, ``C`` classes.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn

from gradwire_server.engine.errors import OperationError

HeadKind = Literal["value", "reward", "classification"]
HEAD_KINDS: tuple[str, ...] = ("", "value", "reward", "classification")


class Head(nn.Module):
    """A linear map in float32, whatever the trunk's dtype: ``[N, H] -> [N]``, or ``[N, H] -> [N, C]`` to classify.

    A value head starts at zero, so that advantages equal returns until it has learned. The others start small and
    random, so that preferences and classes give the trunk a gradient from the first step, and have no bias, as in
    transformers, whose ``...ForSequenceClassification`` loads them from an export.

    Args:
        kind: ``"value"`` (value of the state in which token t was emitted, read at token t - 1), ``"reward"`` or
            ``"classification"`` (of a sequence, read at its last token, or of each token, read at that token).
        hidden_size: ``H``.
        seed: Seed of the initial weights.
        num_labels: ``C``, for a classification.
    """

    def __init__(
        self, kind: HeadKind, hidden_size: int, seed: int, device: torch.device, *, num_labels: int = 0
    ) -> None:
        super().__init__()
        self.kind = kind
        outputs = num_labels if kind == "classification" else 1
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32)) if kind == "value" else None
        if kind != "value":
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.weight, std=1.0 / (hidden_size + 1), generator=generator)
        self.to(device)

    @torch.no_grad()
    def zero(self) -> None:
        """Set all weights to zero, where a value head starts."""
        for parameter in self.parameters():
            parameter.zero_()

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        return outputs if self.kind == "classification" else outputs.squeeze(-1)


def make_head(config: training_pb2.RunConfig, hidden_size: int, device: torch.device) -> Head | None:
    """Make the head that a run's configuration asks for, or None.

    Raises:
        OperationError: INVALID_ARGUMENT, with the field.
    """
    if config.head not in HEAD_KINDS:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"head is {config.head!r}; it is 'value', 'reward', 'classification' or nothing",
            field="head",
            rule="'', 'value', 'reward' or 'classification'",
        )
    if config.head == "classification" and config.num_labels < 2:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"a classification head needs num_labels, and it is {config.num_labels}",
            field="num_labels",
            rule="num_labels >= 2",
        )
    if not config.head:
        return None
    return Head(cast(HeadKind, config.head), hidden_size, config.seed, device, num_labels=config.num_labels)
