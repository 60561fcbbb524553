"""GRPO, its variants, RLOO and GKD against TRL 1.16: the trainers' own methods on given numbers, value and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.divergence import score_divergence
from parity.rollouts import SAMPLES, Rollouts

pytest.importorskip("trl")
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def trainer(data: Rollouts, method: Any, **settings: Any) -> Any:
    same = lambda value, **_: value  # noqa: E731
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(
            gather=same, gather_for_metrics=same, reduce=same, num_processes=1, pad_across_processes=same
        ),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=16,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    for name, value in settings.items():
        if name in args:
            args[name] = value
        else:
            setattr(fake, name, value)
    fake.args = SimpleNamespace(**args)
    fake.get_gamma_weights = GRPOTrainer.get_gamma_weights
    fake.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(fake, *a)
    fake._get_per_token_logps_and_entropies = lambda *a, **k: (data.leaf, data.entropy, None)
    return fake


def inputs(data: Rollouts, **more: Any) -> dict[str, Any]:
    mask = data.mask.long()
    ones = torch.ones(len(mask), 1, dtype=torch.long)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": data.advantages(),
        "old_per_token_logps": data.padded("old_log_probs"),
        "ref_per_token_logps": data.padded("ref_log_probs"),
        "num_items_in_batch": mask.sum(),
    } | more


def check(data: Rollouts, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(data.gradient(ours), data.gradient(theirs), **CLOSE)


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2}
VESPO = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 0.5}
WIDE = {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2}
CASES = [
    ("grpo", {"beta": 0.0}, {}),
    ("grpo", {"beta": 0.3}, {"beta": 0.3}),
    ("grpo", {"beta": 0.0, "dual_clip": 1.4}, {"delta": 1.4}),
    ("grpo", {"beta": 0.0, "reduction": "token_mean"}, {"loss_type": "bnpo"}),
    ("grpo", {"beta": 0.0, "reduction": "sequence_mean_token_sum"}, {"loss_type": "luspo"}),
    ("dapo", {"beta": 0.2}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.2}),
    ("group_gspo", WIDE, SEQUENCE),
    ("group_gspo", WIDE | {"reduction": "sequence_mean_token_sum"}, SEQUENCE | {"loss_type": "luspo"}),
    ("sapo", {}, {"loss_type": "sapo"}),
    ("group_cispo", {"ratio_max": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ("vespo", {}, {"loss_type": "vespo"}),
    ("vespo", VESPO, {"loss_type": "vespo"} | VESPO),
    ("grpo", {"beta": 0.3, "use_bias_correction_kl": True}, {"beta": 0.3, "use_bias_correction_kl": True}),
    ("grpo", {"beta": 0.1, "top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3, "beta": 0.1}),
]


@pytest.mark.parametrize(
    ("loss", "kwargs", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else str(sorted(x))
)
def test_grpo(loss: str, kwargs: Any, settings: Any, rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    fields = ("old_log_probs", "ref_log_probs") if kwargs.get("beta") else ("old_log_probs",)
    theirs = GRPOTrainer._compute_loss(trainer(data, GRPOTrainer, **settings), None, inputs(data))
    check(data, data.ours(loss, *fields, **kwargs).loss(), theirs)


def test_dr_grpo(rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    fake = trainer(data, GRPOTrainer, loss_type="dr_grpo")
    theirs = GRPOTrainer._compute_loss(fake, None, inputs(data, advantages=data.advantages(scale=False)))
    check(data, data.ours("dr_grpo", "old_log_probs", reduction_divisor=16.0).loss(), theirs)


def test_rewards_over_the_batchs_deviation(rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    advantages = data.advantages(scale=False) / (data.rewards.std() + 1e-4)
    theirs = GRPOTrainer._compute_loss(trainer(data, GRPOTrainer), None, inputs(data, advantages=advantages))
    check(data, data.ours("grpo", "old_log_probs", scale_rewards="batch").loss(), theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampler_correction(mode: str, rng: np.random.Generator) -> None:
    """The weight of a token or response, by the formulas of ``_generate_and_score_completions``."""
    data = Rollouts(rng)
    difference = data.padded("old_log_probs") - data.padded("sampler_log_probs")
    if mode.startswith("sequence"):
        difference = (difference * data.mask).sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = 0.5, 1.5
    ratio = (
        ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    )
    fake = trainer(data, GRPOTrainer, use_vllm=True, vllm_importance_sampling_correction=True)
    theirs = GRPOTrainer._compute_loss(fake, None, inputs(data, importance_sampling_ratio=ratio))
    settings = {"sampler_correction": mode, "sampler_ratio_min": low, "sampler_ratio_max": high}
    check(data, data.ours("grpo", "old_log_probs", "sampler_log_probs", **settings).loss(), theirs)


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_gmpo(quantile: float, rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    settings = {"epsilon_low": 0.4, "epsilon_high": 0.4, "beta": 0.1, "top_entropy_quantile": quantile}
    theirs = GMPOTrainer._compute_loss(trainer(data, GMPOTrainer, **settings), None, inputs(data))
    ours = data.ours("gmpo", "old_log_probs", "ref_log_probs", beta=0.1, top_entropy_quantile=quantile).loss()
    check(data, ours, theirs)


def test_rloo(rng: np.random.Generator) -> None:
    data = Rollouts(rng)
    kl = ((data.padded("old_log_probs") - data.padded("ref_log_probs")) * data.mask).sum(-1)
    rewards = (data.rewards - 0.05 * kl).split(list(SAMPLES))
    advantages = torch.cat([g - (g.sum() - g) / (len(g) - 1) for g in rewards])
    batch = inputs(data, advantages=advantages, old_logps=(data.padded("old_log_probs") * data.mask).sum(1))
    theirs = RLOOTrainer._compute_loss(trainer(data, RLOOTrainer), None, batch)
    check(data, data.ours("rloo", "old_log_probs", "ref_log_probs").loss(), theirs)


def test_grpo_divides_by_micro_batches_where_trl_averages_their_means(rng: np.random.Generator) -> None:
    """TRL's ``bnpo`` is a mean of the micro-batches' token means; ours is that of all tokens, however they are cut."""
    data = Rollouts(rng)
    whole = data.ours("grpo", "old_log_probs", reduction="token_mean", beta=0.0).loss()
    everything = inputs(data)
    halves = []
    for rows in (slice(0, 2), slice(2, 9)):
        part = {name: value[rows] if value.dim() else value for name, value in everything.items()}
        fake = trainer(data, GRPOTrainer, loss_type="bnpo")
        fake._get_per_token_logps_and_entropies = lambda *a, r=rows, **k: (data.leaf[r], data.entropy[r], None)
        halves.append(GRPOTrainer._compute_loss(fake, None, part))
    counts = torch.stack([data.mask[:2].sum(), data.mask[2:].sum()]).double()
    torch.testing.assert_close((torch.stack(halves) * counts).sum() / counts.sum(), whole, **CLOSE)
    if counts[0] != counts[1]:
        assert torch.stack(halves).mean().item() != pytest.approx(whole.item(), rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gkd(beta: float, temperature: float, rng: np.random.Generator) -> None:
    hidden = torch.from_numpy(rng.normal(size=(7, 5))).requires_grad_()
    student, teacher = torch.from_numpy(rng.normal(size=(11, 5))), torch.from_numpy(rng.normal(size=(11, 4)))
    teacher_hidden = torch.from_numpy(rng.normal(size=(7, 4)))
    ours = score_divergence(
        hidden, OutputHead(student), teacher_hidden, OutputHead(teacher), beta=beta, temperature=temperature
    ).mean()
    theirs = GKDTrainer.generalized_jsd_loss(
        (hidden @ student.T)[None],
        (teacher_hidden @ teacher.T)[None],
        labels=torch.zeros(1, 7, dtype=torch.long),
        beta=beta,
        temperature=temperature,
    )
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for mine, other in zip(torch.autograd.grad(ours, hidden), torch.autograd.grad(theirs, hidden), strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)
