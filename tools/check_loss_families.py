"""Train a small model with every loss through a real server, and print the effect of each.

    python tools/check_loss_families.py [LOSS ...]

Tokens are good or bad. Supervised losses see texts of good tokens, good responses are preferred to bad ones,
and a sampled response's reward is its share of good tokens. Each loss has a held-out metric that it should change; the
table, the first of ``tools/loss_checks.md``, gives it before and after, and the number of warnings in the
results. The exit status is 1 if a metric did not change as expected. ``tools/measure_losses.py`` measures the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _support.small_model import small_model
from loss_check_batches import (
    RESPONSE,
    Data,
    Run,
    Samples,
    kto_batch,
    labelled_batch,
    pair_batch,
    ranked_batch,
    reward,
    scored_batch,
    step_batch,
    stored_teacher_batch,
    target_batch,
    text_batch,
    token_batch,
    unpaired_batch,
    valued_batch,
    without_prompts,
    without_rewards,
)

HELD_OUT = Data(1)
HELD_PROMPTS, HELD_TEXTS = HELD_OUT.prompts(32), HELD_OUT.texts(32)
HELD_GOOD, HELD_BAD = HELD_OUT.pairs(32)


# ------------------------------------------------------------------ held-out metrics


async def nll(run: Run) -> float:
    """Negative log-likelihood of good texts per token."""
    return -float(np.concatenate(await run.compute_logprobs(HELD_TEXTS)).mean())


async def margin(run: Run) -> float:
    """Difference of the log-probabilities of good and bad responses per token, in nats."""
    good, bad = await run.compute_logprobs(HELD_GOOD), await run.compute_logprobs(HELD_BAD)
    return float(np.mean([a[-RESPONSE:].mean() - b[-RESPONSE:].mean() for a, b in zip(good, bad, strict=True)]))


async def share(run: Run) -> float:
    """Share of good tokens in samples."""
    result = await run.sample(HELD_PROMPTS, n=4, max_tokens=RESPONSE, seed=7, ignore_eos=True)
    return float(np.mean([reward(sample.token_ids) for samples in result.samples for sample in samples]))


async def reward_accuracy(run: Run) -> float:
    good, bad = await run.compute_rewards(HELD_GOOD), await run.compute_rewards(HELD_BAD)
    return float(np.mean(good > bad))


def metric(name: str, batch: dict[str, Any]) -> Callable[[Run, Check], Awaitable[float]]:
    """A metric of the loss itself, on a held-out batch."""

    async def figure(run: Run, check: Check) -> float:
        return (await run.forward(batch, check.loss, check.kwargs)).metrics[name]

    return figure


# ------------------------------------------------------------------ the losses


@dataclass(frozen=True)
class Check:
    """A loss, its batches, and the metric that it should change.

    Attributes:
        make: Builds a batch from data, or from samples of the run.
        figure: The held-out metric.
        rises: Whether higher is better.
        by: Minimum change of the metric.
    """

    loss: str
    make: Callable[[Data], dict[str, Any]] | Callable[[Samples], dict[str, Any]]
    figure: Callable[..., Awaitable[float]]
    rises: bool
    by: float
    label: str = ""
    online: bool = False
    head: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    learning_rate: float = 3e-3

    @property
    def name(self) -> str:
        return f"`{self.loss}` {self.label}".strip()


def online(loss: str, make: Callable[[Samples], dict[str, Any]], **more: Any) -> Check:
    return Check(loss, make, share, True, 0.15, online=True, **more)


def preference(loss: str, label: str = "", by: float = 0.3, **kwargs: Any) -> Check:
    return Check(loss, pair_batch, margin, True, by, label=label, kwargs=kwargs)


BASE = {"reference_model": "base"}
DPO_TYPES = ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
             "aot_unpaired", "apo_zero", "apo_down", "sigmoid_norm"]  # fmt: skip
TINKER_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]
GROUP_LOSSES = ["grpo", "dapo", "group_gspo", "gspo_token", "gmpo", "sapo", "group_cispo", "rloo", "opo",
                "gpg", "reinforce_plus_plus_baseline"]  # fmt: skip


def checks(teacher: str) -> list[Check]:
    held = Data(2)
    return [
        Check("causal_lm", text_batch, nll, False, 0.5),
        Check("causal_lm", text_batch, nll, False, 0.5, label="dft", kwargs={"loss_type": "dft"}, steps=40),
        Check("causal_lm", text_batch, nll, False, 0.5, label="smoothed", kwargs={"label_smoothing": 0.1}),
        Check("cross_entropy", target_batch, nll, False, 0.5),
        *(
            preference("dpo", kind, loss_type=kind, **BASE, **({"label_smoothing": 0.1} if kind == "exo_pair" else {}))
            for kind in DPO_TYPES
        ),
        # Its slope has the wrong sign where policy and reference agree: it starts late.
        preference("dpo", "discopop", by=0.1, loss_type="discopop", discopop_tau=0.5, **BASE),
        preference("dpo", "weighted", use_weighting=True, **BASE),
        preference("dpo", "forward_kl", f_divergence_type="forward_kl", **BASE),
        preference("simpo"),
        preference("orpo"),
        preference("cpo"),
        Check("kto", kto_batch, margin, True, 0.3, kwargs=BASE),
        Check("bco", unpaired_batch, margin, True, 0.3, kwargs=BASE),
        Check("reward_modeling", lambda d: without_prompts(pair_batch(d)), reward_accuracy, True, 0.2, head="reward"),
        Check("plackett_luce", ranked_batch, reward_accuracy, True, 0.2, head="reward"),
        Check("score_regression", scored_batch, metric("mse", scored_batch(held)), False, 0.02, head="reward",
              steps=40),
        Check("process_reward", step_batch, metric("step_accuracy", step_batch(held)), True, 0.2, head="reward"),
        Check(
            "sequence_classification", labelled_batch, metric("accuracy", labelled_batch(held)), True, 0.2,
            head="classification",
        ),
        Check("token_classification", token_batch, metric("accuracy", token_batch(held)), True, 0.2,
              head="classification"),
        Check("value_only", valued_batch, metric("value_loss", valued_batch(held)), False, 0.01, head="value"),
        online("enhanced_ppo", Samples.rows, head="value", kwargs=BASE),
        online("enhanced_ppo", Samples.rows, label="whitened", head="value", kwargs=BASE | {"whiten_advantages": True}),
        *(online(loss, Samples.groups, kwargs=BASE) for loss in GROUP_LOSSES),
        online("dr_grpo", Samples.groups, kwargs=BASE | {"reduction_divisor": RESPONSE}),
        online("gigpo", Samples.steps, kwargs=BASE),
        online("reinforce", lambda s: s.rows(centred=True)),
        online("reinforce_plus_plus", Samples.rows),
        online("remax", lambda s: s.rows() | {"greedy_rewards": [g for g in s.greedy for _ in range(4)]}, steps=40),
        online("importance_sampling", lambda s: s.rows("behavior_log_probs", centred=True), kwargs=BASE),
        *(online(loss, Samples.tinker, label="tinker") for loss in TINKER_LOSSES),
        Check("gkd", text_batch, nll, False, 0.5, kwargs={"reference_model": teacher}),
        online("on_policy_distillation", without_rewards, kwargs={"reference_model": teacher}),
        Check("top_k_distillation", stored_teacher_batch, share, True, 0.3),
    ]  # fmt: skip


# ------------------------------------------------------------------ running the checks


@dataclass(frozen=True)
class Outcome:
    check: Check
    before: float
    after: float
    warnings: int

    @property
    def moved(self) -> bool:
        return (self.after - self.before) * (1 if self.check.rises else -1) >= self.check.by


async def figure(check: Check, run: Run) -> float:
    takes_check = check.figure not in (nll, margin, share, reward_accuracy)
    return await (check.figure(run, check) if takes_check else check.figure(run))


async def train(service: gradwire.ServiceClient, check: Check) -> Outcome:
    labels = {"num_labels": 2} if check.head == "classification" else {}
    run = await service.create_run("small", head=check.head, seed=3, **labels)
    data, warnings = Data(11), 0
    before = await figure(check, run)
    for _ in range(check.steps):
        batch = check.make(await Samples.of(run, data) if check.online else data)  # type: ignore[arg-type]
        result, step = run.forward_backward(batch, check.loss, check.kwargs), run.optim_step(check.learning_rate)
        warnings += len((await result).warnings)
        await step
    outcome = Outcome(check, before, await figure(check, run), warnings)
    await service.delete_run(run.run_id)
    return outcome


async def bounded(service: gradwire.ServiceClient) -> tuple[float, float, float]:
    """KL to the base after PPO for a reward, with and without ``conservative_ppo``; and the bound of the former.

    The penalty is soft and begins at four fifths of the bound.
    """
    bound, final = 0.05, []
    for loss, kwargs in (
        ("enhanced_ppo", BASE | {"beta": 0.0}),
        ("conservative_ppo", BASE | {"max_kl_divergence": 0.8 * bound, "conservative_coef": 1000.0}),
    ):
        run, data = await service.create_run("small", head="value", seed=3), Data(11)
        for _ in range(25):
            run.forward_backward((await Samples.of(run, data)).rows(), loss, kwargs)
            await run.optim_step(1e-3)
        fresh = (await Samples.of(run, data)).rows()
        final.append((await run.forward(fresh, loss, kwargs)).metrics["kl_divergence"])
    return final[0], final[1], bound


async def teacher(service: gradwire.ServiceClient) -> str:
    """Train a checkpoint on good texts."""
    run, data = await service.create_run("small", seed=5), Data(13)
    for _ in range(30):
        run.forward_backward(text_batch(data), "causal_lm")
        await run.optim_step(3e-3)
    return (await run.save_checkpoint("teacher")).path


async def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = small_model(Path(folder) / "model", hidden_size=48, num_layers=2)
        async with gradwire.connect(models=[f"small={path}"], state_dir=Path(folder) / "state") as service:
            todo = [check for check in checks(await teacher(service)) if not names or check.loss in names]
            failed = 0
            print("| loss | before | after | warnings |\n| --- | --- | --- | --- |")
            for check in todo:
                outcome = await train(service, check)
                failed += not outcome.moved
                verdict = "" if outcome.moved else " DID NOT MOVE"
                numbers = f"{outcome.before:.3f} | {outcome.after:.3f} | {outcome.warnings} |"
                print(f"| {check.name} | {numbers}{verdict}", flush=True)
            if not names or "conservative_ppo" in names:
                free, held, bound = await bounded(service)
                failed += not held <= bound < free
                print(f"conservative_ppo: KL to the base {held:.3f} with a bound of {bound}, {free:.3f} without")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("losses", nargs="*", help="names; all by default")
    sys.exit(asyncio.run(main(parser.parse_args().losses)))
