"""Terminal output of a training and its policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gradwire.router.evaluation import BUDGETS, CALL_TARGETS, Report
from gradwire.router.policy import LinearPolicy

CURVES = ("mean_reward", "policy_loss", "value_loss", "entropy", "approx_kl", "explained_variance")
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 48


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)


def update_line(figures: Mapping[str, float | None]) -> str:
    """Format one update: reward, losses, entropy and the policy's KL."""
    names = {
        "mean_reward": "reward",
        "policy_loss": "policy loss",
        "value_loss": "value loss",
        "entropy": "entropy",
        "approx_kl": "kl",
        "clip_fraction": "clipped",
        "explained_variance": "explained",
        "evaluation_reward": "held out",
    }
    said = [
        f"{label} {figures[name]:.4f}" for name, label in names.items() if isinstance(figures.get(name), int | float)
    ]
    return f"update {figures['update']:.0f}: " + "  ".join(said)


def curve(numbers: Sequence[float]) -> str:
    """Draw numbers as at most 48 block characters, lowest to highest; each block is the mean of its part."""
    parts = [float(part.mean()) for part in np.array_split(np.array(numbers), min(len(numbers), WIDTH))]
    low, high = min(parts), max(parts)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((part - low) * scale)] for part in parts)


def show_curves(console: Console, history: Sequence[Mapping[str, Any]]) -> None:
    """Show the curves of a training, from the first to the last update."""
    table = _table("The training")
    for name in ("figure", "first", "curve", "last"):
        table.add_column(name)
    for name in (*CURVES, "evaluation_reward"):
        numbers = [each[name] for each in history if each.get(name) is not None]
        if numbers:
            table.add_row(name, f"{numbers[0]:.4f}", curve(numbers), f"{numbers[-1]:.4f}")
    console.print(table)


def show_report(console: Console, report: Report) -> None:
    """Show routers side by side, and where the policy sends requests."""
    title = f"{report.requests:,} held-out requests; expected outcomes"
    table = _table(title)
    table.add_column("router", no_wrap=True)
    names = ["reward", "of gap", "quality", "cost", "time", "APGR"]
    for name in [*names, *(f"CPT {target:.0%}" for target in CALL_TARGETS)]:
        table.add_column(name, justify="right", no_wrap=True)
    for router in report.routers:
        cpt = router.cpt or {}
        table.add_row(
            router.name,
            f"{router.reward:.4f}",
            f"{router.recovered:.0%}",
            f"{router.quality:.3f}",
            f"{router.cost:.3f}",
            f"{router.latency:.3f}",
            "" if router.apgr is None else f"{router.apgr:.3f}",
            *(f"{share:.1%}" for share in cpt.values()),
        )
    console.print(table)
    console.print(
        "single: always the best mode; of gap: share of the reward gap between it and the oracle. "
        f"PGR: share of the quality gap between {report.weak} and {report.strong} when a share of the requests goes to "
        f"{report.strong}; APGR: its mean over those shares; CPT: the smallest share that recovers this much."
    )
    policy = report.routers[0]
    if policy.pgr:
        pgr = "  ".join(f"{budget:.0%} {share:.2f}" for budget, share in zip(BUDGETS, policy.pgr))
        console.print(f"policy's PGR by share of calls to {report.strong}: {pgr}")
    shares = "  ".join(f"{mode} {share:.1%}" for mode, share in report.shares.items())
    console.print(f"policy's choices: {shares}")
    by_seed = "  ".join(f"{reward:.4f}" for reward in report.reward_by_seed)
    console.print(f"policy's reward by seed: {by_seed}")


def show_weights(console: Console, policy: LinearPolicy, top: int | None) -> None:
    """Show the effect of features on modes: weights minus their mean over modes, because only differences matter."""
    weights = policy.parameters["policy_weight"]
    weights = weights - weights.mean(axis=1, keepdims=True)
    bias = policy.parameters["policy_bias"] - policy.parameters["policy_bias"].mean()
    table = _table("Effect of each feature on each mode, in logits")
    table.add_column("feature")
    for mode in policy.modes:
        table.add_column(mode, justify="right", no_wrap=True)
    table.add_column("value", justify="right")
    rows = [
        (name, weights[column], float(policy.parameters["value_weight"][column]))
        for column, name in enumerate(policy.features.columns)
        if name not in policy.features.stage_names
    ]
    rows.sort(key=lambda row: -float(np.abs(row[1]).max()))
    for name, pushes, value in [*rows[:top], ("(no feature)", bias, float(policy.parameters["value_bias"]))]:
        table.add_row(name, *(_push(float(push)) for push in pushes), f"{value:+.2f}")
    console.print(table)
    console.print(
        "A feature of 1 adds its number to the mode's logit; 0.7 doubles the odds; `a x b` is a product. "
        "Features with the strongest effect come first. `value` is what it adds to the expected reward."
    )


def _push(push: float) -> str:
    style = "green" if push > 0.7 else "red" if push < -0.7 else "dim"
    return f"[{style}]{push:+.2f}[/]"
