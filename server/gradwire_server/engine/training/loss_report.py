"""What a forward, or a forward and backward, reports: a loss and its metrics, put together from parts, and scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gradwire_losses.batch import Batch
from gradwire_losses.monitoring import usual_range_warnings
from gradwire_losses.outputs import Figure, LossOutput, Metric, merge_metrics, settled
from torch import Tensor

from gradwire_server.engine.training.accumulation import Key

NOTHING_SCORED = "no token of this batch was scored: its masks leave none, or its rows have one token each"


@dataclass(frozen=True)
class LossEvaluation:
    """What a forward or a forward and backward gave.

    Attributes:
        loss: None where no loss was asked for.
        metrics: by name, "loss" among them where there is one.
        outputs: by name: ``[T, ...]`` of the scored tokens or (SEQUENCE_SCORES) ``[S, ...]``, float32 on the CPU, in
            the batch's order.
        row_lengths: ``[S]`` scored tokens of each sequence.
        num_tokens: that went through the model, padding not counted.
        num_loss_tokens: that were scored.
        num_microbatches: forwards of the trunk, those computed again not counted.
        recomputed: whether the activation budget was exceeded and part was computed twice.
        out_of_memory: whether memory ran out, and smaller micro-batches had to do.
        warnings: for the person.
    """

    loss: float | None
    metrics: dict[str, float]
    outputs: dict[str, Tensor]
    row_lengths: Tensor
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    num_microbatches: int
    recomputed: bool = False
    out_of_memory: bool = False
    warnings: list[str] = field(default_factory=list)


class LossSums:
    """A loss's terms and metrics, put together from its parts; numbers once they are settled.

    Attributes:
        finite: whether terms, and what else was settled with them, are; False may be an overflow of mere totals.
    """

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._sums: dict[str, float] = {}
        self._units: dict[str, str] = {}
        self._counts: dict[str, float] = {}
        self._terms: list[dict[str, list[Figure]]] = []
        self._metrics: list[Mapping[str, Metric]] = []
        self.finite = True

    def add(self, output: LossOutput) -> None:
        """What the loss gave on one part; waits for nothing."""
        self._terms.append({name: [term.sum.detach(), term.count] for name, term in output.terms.items()})
        self._units |= {name: term.unit for name, term in output.terms.items()}
        self._metrics.append(dict(output.metrics))

    def settle(self, *checks: Any) -> None:
        """Waits for the figures of all parts, and for ``checks``: 0-d tensors, in lists, that are to be finite."""
        terms, self._metrics, checked = settled([self._terms, self._metrics, list(checks)])
        for part in terms:
            for name, (total, count) in part.items():
                self._sums[name] = self._sums.get(name, 0.0) + total
                self._counts[name] = count if self._units[name] == "sum" else self._counts.get(name, 0.0) + count
        self.finite = all(map(math.isfinite, [*self._sums.values(), *_flat(checked)]))

    @property
    def counts(self) -> dict[Key, float]:
        """What the gradient of each unit's terms is to be divided by."""
        by_key: dict[Key, float] = {}
        for name, unit in self._units.items():
            if by_key.setdefault((self._loss_name, unit), self._counts[name]) != self._counts[name]:
                raise ValueError(
                    f"terms of {self._loss_name} count different numbers of {unit}: give them different units"
                )
        return by_key

    def loss(self) -> float:
        return sum(total / self._counts[name] for name, total in self._sums.items() if self._counts[name])

    def metrics(self) -> dict[str, float]:
        merged = {name: metric.value() for name, metric in merge_metrics(self._metrics).items()}
        return {"loss": self.loss()} | merged


def reported(
    batch: Batch, scores: Mapping[str, Tensor], outputs: Collection[str], num_microbatches: int, sums: LossSums | None
) -> LossEvaluation:
    """The report on a batch.

    Args:
        scores: those of ``outputs``, of the whole batch, on any device.
        sums: settled; None where there was no loss.
    """
    metrics = sums.metrics() if sums else {}
    return LossEvaluation(
        loss=sums.loss() if sums else None,
        metrics=metrics,
        outputs={name: scores[name].detach().to("cpu", torch.float32) for name in outputs},
        row_lengths=batch.row_lengths,
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_loss_tokens=batch.num_scored,
        num_microbatches=num_microbatches,
        warnings=[
            *([NOTHING_SCORED] if sums and not batch.num_scored else ()),
            *batch.warnings,
            *usual_range_warnings(metrics),
        ],
    )


def _flat(numbers: Any) -> list[float]:
    return [one for part in numbers for one in _flat(part)] if isinstance(numbers, list) else [numbers]
