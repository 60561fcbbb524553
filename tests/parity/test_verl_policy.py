"""Policy losses against verl 0.9.1's ``core_algos``: value and gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.kl import AdaptiveKL
from gradwire_losses.outputs import Mean
from parity.rollouts import Rollouts

core = pytest.importorskip("verl.trainer.ppo.core_algos")
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def actor(**settings: Any) -> Any:
    dro_beta = settings.pop("dro_beta", None)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    if dro_beta is not None:
        config = SimpleNamespace(policy_loss=SimpleNamespace(dro_beta=dro_beta), global_batch_info={})
    return config


def verl(name: str, data: Rollouts, mode: str = "token-mean", scale: bool = True, **settings: Any) -> torch.Tensor:
    mask = data.mask.double()
    loss, _ = core.get_policy_loss_fn(name)(
        old_log_prob=data.padded("old_log_probs"),
        log_prob=data.leaf,
        advantages=data.advantages(scale=scale)[:, None] * mask,
        response_mask=mask,
        loss_agg_mode=mode,
        config=actor(**settings),
    )
    return loss


CASES = [
    ("dapo", {"dual_clip": 1.5}, "vanilla", "token-mean", {"clip_ratio_high": 0.28, "clip_ratio_c": 1.5}),
    ("grpo", {"dual_clip": 3.0}, "vanilla", "seq-mean-token-mean", {}),
    (
        "gspo_token",
        {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2},
        "gspo",
        "seq-mean-token-mean",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    ),
    ("sapo", {}, "sapo", "seq-mean-token-mean", {}),
    ("gmpo", {}, "geo_mean", "token-mean", {"clip_ratio": 0.4, "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    (
        "dppo_tv",
        {"clip_epsilon": 0.02, "clip_epsilon_high": 0.05, "ratio_max": 1.5},
        "dppo_tv",
        "token-mean",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5},
    ),
    (
        "dppo_kl",
        {"clip_epsilon": 0.01, "clip_epsilon_high": 0.02, "ratio_max": 1.5},
        "dppo_kl",
        "token-mean",
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.5},
    ),
    ("group_cispo", {"ratio_min": 0.8, "ratio_max": 1.2}, "cispo", "token-mean", {}),
]


@pytest.mark.parametrize(
    ("loss", "kwargs", "name", "mode", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_policy_loss(loss: str, kwargs: Any, name: str, mode: str, settings: Any, rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    theirs = verl(name, data, mode, **settings)
    ours = data.ours(loss, "old_log_probs", **kwargs).loss()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(data.gradient(ours), data.gradient(theirs), **CLOSE)


@pytest.mark.parametrize(
    ("loss", "kwargs", "settings"),
    [
        ("kl_cov", {"cov_share": 0.3, "kl_cov_coef": 0.1}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.1}),
        (
            "clip_cov",
            {"cov_share": 1.0, "cov_min": 0.05, "cov_max": 0.4},
            {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.4},
        ),
    ],
    ids=["kl_cov", "clip_cov"],
)
def test_the_losses_of_covariance(loss: str, kwargs: Any, settings: Any, rng: np.random.Generator) -> None:
    """Of Clip-Cov every token within its bounds is taken: which of them are drawn is each library's own affair.

    verl's columns of advantages are 0 at padding, its means are over tokens as ours.
    """
    data = Rollouts(rng)
    theirs = verl(loss, data, policy_loss=PolicyLossConfig(loss_mode=loss, **settings))
    ours = data.ours(loss, "old_log_probs", **kwargs).loss()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(data.gradient(ours), data.gradient(theirs), **CLOSE)


def test_gpg(rng: np.random.Generator) -> None:
    """verl's alpha is samples over *non-zero rewards*, the paper's samples over those of groups that differ.

    With no reward at zero, and groups that all differ, both are 1.
    """
    data = Rollouts(rng)
    scores = torch.zeros_like(data.leaf)
    scores[torch.arange(9), data.lengths - 1] = data.rewards
    advantages, _ = core.compute_gpg_outcome_advantage(scores.detach(), data.mask.double(), data.index)
    theirs, _ = core.compute_policy_loss_gpg(
        data.padded("old_log_probs"), data.leaf, advantages, data.mask.double(), config=actor()
    )
    ours = data.ours("gpg").loss()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(data.gradient(ours), data.gradient(theirs), **CLOSE)


def test_gpg_of_zero_one_rewards_where_verl_counts_wrong_answers_as_without_gradient(rng: np.random.Generator) -> None:
    """Every group has a 0 and a 1: all samples have a gradient, so alpha is 1; verl's is samples over successes."""
    data = Rollouts(rng)
    data.columns["rewards"] = [[1.0, 0.0, 0.0], [1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    scores = torch.zeros_like(data.leaf)
    scores[torch.arange(9), data.lengths - 1] = data.rewards
    advantages, _ = core.compute_gpg_outcome_advantage(scores.detach(), data.mask.double(), data.index)
    theirs, _ = core.compute_policy_loss_gpg(
        data.padded("old_log_probs"), data.leaf, advantages, data.mask.double(), config=actor()
    )
    torch.testing.assert_close(3.0 * data.ours("gpg").loss(), theirs, **CLOSE)
    same = data.ours("gpg", mask_zero_spread=False, advantage_scale="nonzero").loss()
    torch.testing.assert_close(same, theirs, **CLOSE)


def test_dro(rng: np.random.Generator) -> None:
    """verl's mean over tokens is our sum over their number."""
    from gradwire_losses.batch import Scores
    from gradwire_losses.registry import get_loss
    from support.losses import read

    data = Rollouts(rng)
    advantages = data.advantages()
    theirs = verl("dro", data, dro_beta=0.3)
    ids = [row for group in data.columns["response_ids"] for row in group]
    columns = {
        "input_ids": ids,
        "target_tokens": ids,
        "logprobs": [row for group in data.columns["old_log_probs"] for row in group],
        "advantages": [[float(a)] * len(row) for a, row in zip(advantages, ids, strict=True)],
    }
    spec = get_loss("dro")
    ours = spec.function(read(spec, columns), Scores({"logprobs": data.leaf[data.mask]}), spec.config(beta=0.3)).loss()
    torch.testing.assert_close(ours / data.mask.sum(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kl", "target"), [(0.5, 0.1), (0.09, 0.1), (0.01, 0.1)])
def test_the_adaptive_coefficient(kl: float, target: float) -> None:
    controller = core.AdaptiveKLController(0.05, target, horizon=100)
    controller.update(kl, n_steps=8)
    assert AdaptiveKL(0.05, target, 100, Mean(kl * 7, 7), 8).value() == pytest.approx(controller.value)
