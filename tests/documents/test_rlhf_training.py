"""The seed document on RLHF: its classes, settings and defaults, and the data set that torch batches."""

from __future__ import annotations

from dataclasses import fields

import gradwire.rlhf as rlhf
import pytest
import torch

DEFAULTS = {
    "base_model": "gpt2", "use_lora": True, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "learning_rate": 1e-5,
    "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 4, "max_steps": 1000, "init_kl_coef": 0.2, "target_kl": 6.0,
    "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "vf_coef": 0.1, "max_new_tokens": 128, "temperature": 1.0, "top_k": 50,
    "top_p": 0.95,
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_setting_has_the_documents_default(name: str) -> None:
    assert getattr(rlhf.TrainingConfig(), name) == DEFAULTS[name]


def test_the_other_settings_of_its_examples() -> None:
    rlhf.TrainingConfig(device="cuda", batch_size=32, mixed_precision="fp16")
    rlhf.TrainingConfig(gradient_accumulation_steps=4, lora_r=4)
    rlhf.RewardModelConfig(base_model="gpt2", use_lora=True, batch_size=8, num_epochs=3, lora_dropout=0.2)


def test_the_classes_and_the_results_fields() -> None:
    for name in ("FeedbackDataset", "PPODataset", "RewardModel", "RLHFTrainer", "TrainingResult", "train_reward_model"):
        assert hasattr(rlhf, name), name
    said = {"model_path", "reward_model_path", "feedback_count", "final_reward_mean", "final_reward_std",
            "training_steps", "reward_history", "kl_history", "loss_history"}  # fmt: skip
    assert said <= {field.name for field in fields(rlhf.TrainingResult)}


def test_torch_batches_the_feedback() -> None:
    rows = [{"prompt": f"q{n}", "response": "a", "score": n / 10} for n in range(10)]
    data = rlhf.FeedbackDataset(rows)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    batches = list(loader)
    assert [len(batch.prompt) for batch in batches] == [4, 4, 2]
    scores = torch.cat([batch.score for batch in batches])
    torch.testing.assert_close(scores.sort().values, torch.arange(10, dtype=torch.float64) / 10)
    train, held_out = torch.utils.data.random_split(data, [8, 2])
    assert (len(train), len(held_out)) == (8, 2)
