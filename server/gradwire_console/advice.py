"""What a run's figures say about its health, in words, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gradwire_console.series import Numbers

RECENT = 20
SPAN = 5 * RECENT
"""Newest values of a metric that are looked at."""
KL, CLIPPED, SILENT, SAMPLER_KL, ENTROPY = 0.1, 0.3, 0.5, 0.05, 0.05
"""From which mean of the newest values on a figure is remarked on: approximate KL (nats), clipped share, share of
groups without signal, KL between sampler and trainer (nats); and below which mean entropy (nats)."""
SPIKE = 10.0
"""How many times the usual gradient norm the newest one is a spike."""


@dataclass(frozen=True)
class Advice:
    """A remark.

    Attributes:
        name: What it is about, the same for all remarks of its kind.
        what: What is seen.
        remedy: What may be done.
    """

    name: str
    what: str
    remedy: str


class Measured(Protocol):
    """What a run measured: a :class:`.Record`, or its end.

    Attributes:
        non_finite: Trained batches whose loss was not finite.
    """

    non_finite: int

    def newest(self, metric: str, count: int) -> Numbers:
        """The newest values of a metric, oldest first; empty if the run has no such metric."""
        ...


def advise(record: Measured) -> list[Advice]:
    """Remarks on a run, the gravest first."""
    advice = []

    def mean(metric: str) -> float:
        values = record.newest(metric, RECENT)
        return float(values.mean()) if len(values) else float("nan")

    if record.non_finite:
        advice.append(Advice(
            "loss",
            f"{record.non_finite} batches had a loss that is not a finite number.",
            "Lower the learning rate, clip the gradient (max_grad_norm), and look at the batches' rewards and masks.",
        ))  # fmt: skip
    norms = record.newest("grad_norm", SPAN)
    if len(norms) > RECENT and norms[-1] > SPIKE * (usual := float(np.median(norms[:-1]))) > 0:
        advice.append(Advice(
            "grad_norm",
            f"The gradient norm jumped to {norms[-1]:.3g}; {usual:.3g} is usual here.",
            "Clip it with max_grad_norm; look at the newest batch.",
        ))  # fmt: skip
    for name in ("approx_kl", "kl_divergence"):
        if (value := mean(name)) > KL:
            advice.append(Advice(
                "kl",
                f"{name} is {value:.3g} nats a token on average.",
                "The policy moves far in a step: lower the learning rate, reuse batches less, or weigh the KL.",
            ))  # fmt: skip
            break
    if (value := mean("clip_fraction")) > CLIPPED:
        advice.append(Advice(
            "clip_fraction",
            f"{value:.0%} of the tokens are clipped.",
            "Their gradient is lost: lower the learning rate, or sample more often.",
        ))  # fmt: skip
    if (value := mean("entropy")) < ENTROPY:
        advice.append(Advice(
            "entropy",
            f"The entropy has fallen to {value:.3g} nats a token.",
            "Answers hardly differ any more: sample hotter, add an entropy bonus, or take an earlier checkpoint.",
        ))  # fmt: skip
    if (value := mean("zero_spread_groups")) > SILENT:
        advice.append(Advice(
            "zero_spread_groups",
            f"{value:.0%} of the groups give no signal: all their rewards are equal.",
            "Take harder or easier tasks, larger groups, or a reward of more than two values.",
        ))  # fmt: skip
    if (value := mean("sampler_kl")) > SAMPLER_KL:
        advice.append(Advice(
            "sampler_kl",
            f"Sampler and trainer differ by {value:.3g} nats a token.",
            "Share the weights after every step, check temperature and precision, or use sampler_correction.",
        ))  # fmt: skip
    return advice
