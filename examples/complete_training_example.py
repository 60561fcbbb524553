"""Whole trainings with the blocking toolkit: PPO, GRPO on self-verification, Pareto objectives, parts of one's own.

A random model of a few thousand parameters stands in for a real one: put any transformers model in its place.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gradwire.rl.primitives import (
    AlgorithmConfig,
    BackpropModule,
    BaseEnvironment,
    GRPOAlgorithm,
    InferenceModule,
    ParetoRewardComputer,
    PPOAlgorithm,
    RolloutManager,
    SimpleTextEnvironment,
    State,
    SVRLEnvironment,
    SVRLRewardComputer,
)
from gradwire.rl.primitives.demonstration import random_model

PROMPTS = ["Explain AI:", "What is ML?", "Name a colour:", "Count to three:"]


class ShareOfVowels:
    """A reward of one's own: any object with ``compute_rewards``."""

    def compute_rewards(self, trajectories: list[Any], method: str = "absolute") -> list[float]:
        return [sum(c in "aeiou" for c in t.response) / max(1, len(t.response)) for t in trajectories]


class TwoDrafts(BaseEnvironment):
    """An environment of one's own: a draft, then a second answer that has read it."""

    def reset(self) -> State:
        return State(prompt=str(self.task))

    def step(self, state: State) -> State:
        state.response = self.inference.generate([self.build_prompt(state)])[0]
        state.step_count += 1
        return state

    def build_prompt(self, state: State) -> str:
        return str(state.prompt) if not state.step_count else f"{state.prompt} {state.response} Again: "

    def is_terminal(self, state: State) -> bool:
        return state.step_count == 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="trajectories per iteration")
    args = parser.parse_args()

    model, tokenizer = random_model()
    inference = InferenceModule(model=model, tokenizer=tokenizer, max_new_tokens=12)
    pareto = ParetoRewardComputer(
        objective_functions=[lambda t: len(set(t.response)), lambda t: -len(t.response)],
        objective_names=["variety", "brevity"],
    )
    answers = SimpleTextEnvironment(inference, prompts=PROMPTS)
    questions = [{"prompt": f"What is {n} * 3?", "ground_truth": 3 * n} for n in range(2, 6)]
    verified = SVRLEnvironment(inference, ["calculator"], budget=10.0, prompts=questions)
    trainings = [
        ("PPO, one answer", PPOAlgorithm, answers, ShareOfVowels(), "absolute"),
        ("GRPO, self-verification", GRPOAlgorithm, verified, SVRLRewardComputer(), "absolute"),
        ("GRPO, Pareto objectives", GRPOAlgorithm, answers, pareto, "pareto"),
        ("PPO, parts of one's own", PPOAlgorithm, TwoDrafts(inference, prompts=PROMPTS), ShareOfVowels(), "absolute"),
    ]
    with BackpropModule(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3)) as backprop:
        for name, algorithm, environment, rewards, method in trainings:
            training = algorithm(
                env=environment,
                rollout_manager=RolloutManager(environment, num_parallel=16),
                reward_computer=rewards,
                backprop=backprop,
                config=AlgorithmConfig(batch_size=args.batch_size, reward_method=method),
            )
            metrics = training.train(num_iterations=args.iterations)
            print(f"{name}: reward {metrics[0]['rewards/reward']:.3f} to {metrics[-1]['rewards/reward']:.3f}")


if __name__ == "__main__":
    main()
