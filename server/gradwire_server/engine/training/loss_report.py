"""Report of a forward or forward and backward: loss and metrics combined from parts, and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gradwire_losses.batch import Batch
from gradwire_losses.monitoring import usual_range_warnings
from gradwire_losses.outputs import Figure, LossOutput, Metric, merge_metrics, settled
from torch import Tensor

from gradwire_server.engine.lanes import Key
from gradwire_server.engine.scoring.planner import MicroBatch

NOTHING_SCORED = "no token of this batch was scored: its masks leave none, or its rows have one token each"


@dataclass(frozen=True)
class LossEvaluation:
    """Result of a forward or a forward and backward.

    Attributes:
        loss: The loss; None without one.
        metrics: Metrics by name, including "loss" if there is one.
        outputs: Scores by name: ``[T, ...]`` of the scored tokens or (SEQUENCE_SCORES) ``[S, ...]``, float32 on the
            CPU, in the batch's order.
        row_lengths: ``[S]`` scored tokens of each sequence.
        num_tokens: Number of tokens in the batch, without padding.
        num_computed_tokens: Number of those computed: of a micro-batch's rows that begin alike, one for all of them.
        num_loss_tokens: Number of scored tokens.
        num_microbatches: Number of forwards of the trunk, without recomputed ones.
        recomputed: Whether the activation budget was exceeded, so that part was computed twice.
        activations: Number of micro-batches of a backward by what became of their activations.
        warnings: Sentences for a person.
    """

    loss: float | None
    metrics: dict[str, float]
    outputs: dict[str, Tensor]
    row_lengths: Tensor
    num_sequences: int
    num_tokens: int
    num_computed_tokens: int
    num_loss_tokens: int
    num_microbatches: int
    recomputed: bool = False
    activations: Mapping[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class LossSums:
    """A loss's terms and metrics, combined from its parts; numbers are available after :meth:`settle`.

    Attributes:
        finite: Whether all terms and checks are finite; False may also come from an overflow of a total.
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
        """Add the loss's output on one part, without waiting for the device."""
        self._terms.append({name: [term.sum.detach(), term.count] for name, term in output.terms.items()})
        self._units |= {name: term.unit for name, term in output.terms.items()}
        self._metrics.append(dict(output.metrics))

    def add_metrics(self, metrics: Mapping[str, Metric]) -> None:
        """Add metrics that are not the loss's own."""
        self._metrics.append(metrics)

    def settle(self, *checks: Any, outputs: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Wait for the figures of all parts and of ``checks``: 0-d tensors, possibly in lists, that must be finite.

        Returns:
            The ``outputs``, copied to the host in the same transfer.
        """
        wanted = outputs or {}
        (terms, self._metrics, checked), copies = settled(
            [self._terms, self._metrics, list(checks)], list(wanted.values())
        )
        for part in terms:
            for name, (total, count) in part.items():
                self._sums[name] = self._sums.get(name, 0.0) + total
                self._counts[name] = count if self._units[name] == "sum" else self._counts.get(name, 0.0) + count
        self.finite = all(map(math.isfinite, [*self._sums.values(), *_flat(checked)]))
        return dict(zip(wanted, copies, strict=True))

    @property
    def counts(self) -> dict[Key, float]:
        """Divisor of the gradient of each unit's terms, by key."""
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
    batch: Batch,
    outputs: Mapping[str, Tensor],
    micros: Sequence[MicroBatch],
    sums: LossSums | None,
    *,
    recomputed: bool = False,
    activations: Mapping[str, int] | None = None,
) -> LossEvaluation:
    """Make the report on a batch.

    Args:
        outputs: Wanted scores of the whole batch, on the host.
        micros: Its micro-batches; none if nothing was computed.
        sums: The settled loss; None without a loss.
        recomputed, activations: See :class:`LossEvaluation`.
    """
    metrics = sums.metrics() if sums else {}
    return LossEvaluation(
        loss=sums.loss() if sums else None,
        metrics=metrics,
        outputs={name: values.to(torch.float32) for name, values in outputs.items()},
        row_lengths=batch.row_lengths,
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_computed_tokens=sum(micro.distinct_tokens for micro in micros),
        num_loss_tokens=batch.num_scored,
        num_microbatches=len(micros),
        recomputed=recomputed,
        activations=activations or {},
        warnings=[
            *([NOTHING_SCORED] if sums and not batch.num_scored else ()),
            *batch.warnings,
            *usual_range_warnings(metrics),
        ],
    )


def _flat(numbers: Any) -> list[float]:
    return [one for part in numbers for one in _flat(part)] if isinstance(numbers, list) else [numbers]
