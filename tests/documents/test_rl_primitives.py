"""The seed document on RL primitives: its imports, constructors and settings, typed as it has them."""

from __future__ import annotations

import gradwire.rl.primitives as primitives
import pytest


@pytest.mark.parametrize(
    "name",
    ["InferenceModule", "SimpleTextEnvironment", "SVRLEnvironment", "ConversationEnvironment", "RolloutManager",
     "RolloutConfig", "BackpropModule", "BackpropConfig", "PPOAlgorithm", "GRPOAlgorithm", "REINFORCEAlgorithm",
     "AlgorithmConfig", "BaseEnvironment", "State", "SVRLRewardComputer", "ParetoRewardComputer", "HuggingFaceBackend",
     "VLLMBackend"],
)  # fmt: skip
def test_the_names_are_there(name: str) -> None:
    assert callable(getattr(primitives, name))


def test_the_settings_as_written() -> None:
    primitives.AlgorithmConfig(
        batch_size=32, ppo_epochs=4, learning_rate=1e-6, checkpoint_dir="./checkpoints", save_every=10, use_wandb=True,
        wandb_project="my-rl-project",
    )  # fmt: skip
    primitives.RolloutConfig(num_parallel=32, maintain_parallel_count=False, verbose=True, enable_progress_bar=True)
    primitives.BackpropConfig(gamma=0.99, gae_lambda=0.95, ppo_clip_range=0.2, kl_coef=0.1, normalize_advantages=True)


def test_pareto_by_functions_and_names() -> None:
    functions = [len, max, min]
    primitives.ParetoRewardComputer(objective_functions=functions, objective_names=["accuracy", "efficiency", "safety"])
    primitives.ParetoRewardComputer(objectives=functions)
    with pytest.raises((TypeError, ValueError), match="objective_names"):
        primitives.ParetoRewardComputer(objective_functions=functions, objective_names=["accuracy"])


@pytest.mark.parametrize("name", ["complete_training_example.py", "inference_examples.py", "backprop_usage.py"])
def test_its_examples_are_there(name: str, request: pytest.FixtureRequest) -> None:
    assert (request.config.rootpath / "examples" / name).exists()
