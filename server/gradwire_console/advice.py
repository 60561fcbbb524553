"""Advice on a run's health: sentences on its figures, with what to do."""

from __future__ import annotations

import math
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
"""The newest gradient norm is a spike from this many times the usual one on."""
FEW, START = 5, 10
"""Newest values that show a model without a signal, and values whose mean is a loss's start."""
UNIFORM = 1e-4
"""How near to ln V, relatively, a loss is that of equal logits; one of a model that was just made is 1e-3 above."""
JUMP = 0.2
"""By how much the newest accuracies are above those before on average where they jump."""
ACCURACIES = ("token_accuracy", "preference_accuracy")
"""Measured by losses that fall as the model learns; those on rewards are about zero whatever it learns."""


@dataclass(frozen=True)
class Advice:
    """A remark.

    Attributes:
        name: Its subject, the same for all remarks of its kind.
        what: The observation.
        remedy: The advice.
    """

    name: str
    what: str
    remedy: str


class Measured(Protocol):
    """The measurements of a run: a :class:`.Record`, or its end.

    Attributes:
        non_finite: Trained batches whose loss was not finite, and steps without a finite gradient.
    """

    non_finite: int

    def newest(self, metric: str, count: int) -> Numbers:
        """The newest finite values of a metric, oldest first; empty if the run has no such metric."""
        ...

    def first(self, metric: str, count: int) -> Numbers:
        """The first finite values of a metric, oldest first; empty if they are not known."""
        ...


def advise(record: Measured, vocab_size: int = 0) -> list[Advice]:
    """Remarks on a run, the gravest first.

    Args:
        vocab_size: Logits of its model; 0 if that is not known.
    """
    advice = _dead(record, vocab_size) + _worse(record)

    def mean(metric: str) -> float:
        values = record.newest(metric, RECENT)
        return float(values.mean()) if len(values) else float("nan")

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


def _dead(record: Measured, vocab_size: int) -> list[Advice]:
    """Remarks on a model that computes no number, or from which nothing can be learned."""
    advice = []
    if record.non_finite:
        advice.append(Advice(
            "loss",
            f"NaN or infinity: {record.non_finite} batches or steps had no finite loss or gradient.",
            "Lower the learning rate, clip the gradient (max_grad_norm), and look at the batches' rewards and masks.",
        ))  # fmt: skip
    losses, uniform = record.newest("loss", FEW), math.log(max(vocab_size, 1))
    if uniform and len(losses) == FEW and np.allclose(losses, uniform, rtol=UNIFORM, atol=0):
        advice.append(Advice(
            "uniform_loss",
            f"The loss is {losses[-1]:.4g} nats, the logarithm of the vocabulary's {vocab_size:,} tokens: to the model"
            " all of them are equally likely.",
            "It has diverged, unless it is yet to learn: take an earlier checkpoint, a lower learning rate and more"
            " warm-up.",
        ))  # fmt: skip
    norms = record.newest("grad_norm", FEW)
    if len(norms) == FEW and not norms.any():
        advice.append(Advice(
            "zero_gradient",
            f"The gradient was exactly zero in the last {FEW} steps: nothing is learned.",
            "See whether the masks leave tokens to learn and whether rewards differ within a group; if the loss is high"
            " too, the model has diverged: take an earlier checkpoint and a lower learning rate.",
        ))  # fmt: skip
    return advice


def _worse(record: Measured) -> list[Advice]:
    """Remarks on a model that had learned more than it knows now."""
    learns = [name for name in ACCURACIES if len(record.newest(name, 1))]
    start, newest, recent = (record.first("loss", START), record.newest("loss", START), record.newest("loss", RECENT))
    advice = []
    if learns and len(start) == START and len(recent) == RECENT:
        begun, now = float(start.mean()), float(newest.mean())
        if now > begun + max(2 * float(start.std()), 0.01 * abs(begun)):
            advice.append(Advice(
                "loss_above_start",
                f"The loss is {now:.4g} on average, above the {begun:.4g} with which the run began.",
                "The model is worse than before the training: take an earlier checkpoint and a lower learning rate.",
            ))  # fmt: skip
    for name in learns:
        accuracies = record.newest(name, RECENT)
        if len(accuracies) == len(recent) == RECENT and _rise(accuracies) > JUMP and _rise(recent) > 0:
            advice.append(Advice(
                "accuracy_jump",
                f"{name} has risen by {_rise(accuracies):.2f} while the loss rose: more is not learned by that.",
                "Look at the model's answers and at the masks before you trust it, and at earlier checkpoints.",
            ))  # fmt: skip
    return advice


def _rise(values: Numbers) -> float:
    """How much the newest few values are above those before, on average."""
    return float(values[-FEW:].mean() - values[:-FEW].mean())
