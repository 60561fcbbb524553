"""The seed document on RL algorithms: each loss takes the arguments, defaults, fields and metrics that it lists."""

from __future__ import annotations

from typing import Any

import pytest
from gradwire_losses.registry import get_loss, load_builtin_losses

load_builtin_losses()
REFERENCE = {"reference_model": "meta-llama/Llama-3.2-1B"}
PADDED = {"input_ids", "attention_mask"}
PAIRS = {f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "attention_mask")}
LOSSES: list[tuple[str, dict[str, Any], set[str], set[str]]] = [
    (
        "enhanced_ppo",
        {"use_gae": True, "gamma": 0.99, "gae_lambda": 0.95, "clip_epsilon": 0.2, "value_loss_coef": 0.5,
         "entropy_coef": 0.01, "beta": 0.01, "clip_value_loss": True} | REFERENCE,
        PADDED | {"old_log_probs", "rewards", "values", "old_values"},
        {"policy_loss", "value_loss", "entropy", "kl_divergence", "approx_kl", "clip_fraction", "advantage_mean",
         "advantage_std", "explained_variance", "value_mean", "return_mean", "reward_mean"},
    ),
    ("dpo", {"beta": 0.1, "label_smoothing": 0.0} | REFERENCE, PAIRS, set()),
    ("grpo", {"beta": 0.01, "clip_epsilon": 0.2} | REFERENCE,
     {"prompt_ids", "response_ids", "rewards", "response_masks"}, set()),
    (
        "importance_sampling",
        {"beta": 0.1, "clip_ratio": 10.0} | REFERENCE,
        PADDED | {"behavior_log_probs", "rewards", "advantages"},
        {"is_ratio_mean", "is_ratio_max", "is_ratio_min", "clipped_fraction"},
    ),
    (
        "conservative_ppo",
        {"conservative_coef": 0.1, "max_kl_divergence": 0.01, "clip_epsilon": 0.2} | REFERENCE,
        set(),
        {"kl_violation", "kl_penalty", "max_kl_threshold"},
    ),
    (
        "reward_modeling",
        {"margin": 1.0, "temperature": 0.1},
        PAIRS,
        {"preference_accuracy", "reward_margin", "chosen_reward_mean", "rejected_reward_mean", "chosen_reward_std",
         "rejected_reward_std"},
    ),
    ("causal_lm", {}, PADDED, set()),
]  # fmt: skip
DEFAULTS = {"gamma": 0.99, "gae_lambda": 0.95, "clip_epsilon": 0.2, "value_loss_coef": 0.5, "entropy_coef": 0.01,
            "beta": 0.01}  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs", "fields", "metrics"), LOSSES, ids=[each[0] for each in LOSSES])
def test_a_loss_as_written(name: str, kwargs: dict[str, Any], fields: set[str], metrics: set[str]) -> None:
    loss = get_loss(name)
    loss.config(**kwargs)
    taken = {field.name for field in loss.fields} | {field.padding_mask for field in loss.fields}
    assert fields <= taken
    assert metrics <= loss.metrics.keys()


def test_the_defaults_of_the_tables() -> None:
    config = get_loss("enhanced_ppo").config()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert (get_loss("dpo").config(**REFERENCE).beta, get_loss("dpo").config().label_smoothing) == (0.1, 0.0)


def test_its_example_is_there(request: pytest.FixtureRequest) -> None:
    assert "enhanced_ppo" in (request.config.rootpath / "examples/ppo_with_gae.py").read_text()
