"""Settings: the documented defaults and presets, and what is refused by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from gradwire import InvalidArgumentError
from gradwire.rlhf import RewardModelConfig, RLHFTrainer, TrainingConfig

DEFAULTS = {
    "base_model": "gpt2", "use_lora": True, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "learning_rate": 1e-5,
    "batch_size": 8, "mini_batch_size": 4, "gradient_accumulation_steps": 1, "ppo_epochs": 4, "max_steps": 1000,
    "init_kl_coef": 0.2, "target_kl": 6.0, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "vf_coef": 0.1,
    "max_new_tokens": 128, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "device": None, "mixed_precision": None,
    "seed": 0,
}  # fmt: skip


def test_the_defaults() -> None:
    assert asdict(TrainingConfig()) == DEFAULTS
    reward = asdict(RewardModelConfig())
    assert {name: reward[name] for name in ("base_model", "use_lora", "num_epochs", "lora_dropout")} == {
        "base_model": "gpt2", "use_lora": True, "num_epochs": 3, "lora_dropout": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "own"),
    [
        (TrainingConfig.quick, {"max_steps": 100, "batch_size": 4, "learning_rate": 1e-4}),
        (
            TrainingConfig.production,
            {"base_model": "gpt2-medium", "max_steps": 5000, "batch_size": 16, "learning_rate": 1e-5, "lora_r": 16},
        ),
        (
            TrainingConfig.memory_constrained,
            {"lora_r": 4, "batch_size": 4, "mini_batch_size": 2, "gradient_accumulation_steps": 4},
        ),
    ],
)
def test_presets_are_the_defaults_but_for_what_they_name(preset: Any, own: dict[str, Any]) -> None:
    assert asdict(preset()) == DEFAULTS | own
    assert preset(max_new_tokens=16).max_new_tokens == 16


def test_the_documented_examples_can_be_made() -> None:
    TrainingConfig(device="cuda", batch_size=32, mixed_precision="fp16")
    TrainingConfig(base_model="facebook/opt-125m", learning_rate=1e-6, init_kl_coef=0.5)
    RewardModelConfig(base_model="gpt2", use_lora=True, batch_size=8, num_epochs=3, learning_rate=1e-5)
    RewardModelConfig(num_epochs=2, lora_dropout=0.2)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mini_batch_size": 16}, "mini_batch_size"),
        ({"batch_size": 6}, "batch_size"),
        ({"gradient_accumulation_steps": 9}, "gradient_accumulation_steps"),
        ({"use_lora": False, "lora_r": 16}, "lora_r"),
        ({"use_lora": False, "lora_dropout": 0.0}, "lora_dropout"),
        ({"init_kl_coef": 0}, "target_kl"),
        ({"device": "cpu", "mixed_precision": "fp16"}, "mixed_precision"),
        ({"mixed_precision": "int8"}, "mixed_precision"),
        ({"base_model": ""}, "base_model"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"batch_size": 8.0}, "batch_size"),
        ({"max_steps": True}, "max_steps"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 0}, "temperature"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"gamma": 1.01}, "gamma"),
        ({"target_kl": -1}, "target_kl"),
        ({"lora_r": "8"}, "lora_r"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TrainingConfig(**settings)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert caught.value.rule


def test_settings_that_go_together_are_taken() -> None:
    TrainingConfig(use_lora=False)
    TrainingConfig(init_kl_coef=0, target_kl=None)
    TrainingConfig(batch_size=4, mini_batch_size=2, gradient_accumulation_steps=8)


def test_the_reward_model_takes_the_policys_settings_and_an_adapters_larger_steps() -> None:
    config = RewardModelConfig.of(TrainingConfig(base_model="opt", lora_r=4, batch_size=16, learning_rate=1e-6, seed=3))
    assert replace(config, learning_rate=None) == RewardModelConfig(base_model="opt", lora_r=4, batch_size=16, seed=3)
    assert config.learning_rate == pytest.approx(1e-5)
    assert RewardModelConfig.of(TrainingConfig(use_lora=False)).learning_rate == TrainingConfig().learning_rate == 1e-5
    assert RewardModelConfig().learning_rate is None


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"mixed_precision": "bf16"}])
def test_a_server_that_is_given_keeps_its_device(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="leave") as caught:
        RLHFTrainer(TrainingConfig(**settings), address="127.0.0.1:1")
    assert caught.value.field == next(iter(settings))
