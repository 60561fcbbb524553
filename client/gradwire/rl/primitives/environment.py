"""Demonstrate environments and rollouts: ``python -m gradwire.rl.primitives.environment [MODEL]``."""

from __future__ import annotations

from gradwire.rl.primitives.demonstration import demonstration_inference
from gradwire.rl.primitives.environments import BaseEnvironment, SimpleTextEnvironment, State
from gradwire.rl.primitives.rollouts import RolloutManager


class Letters(BaseEnvironment):
    """An environment that ends after a dozen different letters, or four turns."""

    def reset(self) -> State:
        return State(prompt="the state is", data={"letters": set()})

    def update_state(self, state: State, response: str) -> State:
        state.data["letters"] |= set(response)
        state.response, state.prompt = response, f"{state.prompt} {response}"
        return state

    def is_terminal(self, state: State) -> bool:
        return len(state.data["letters"]) >= 12 or state.step_count >= 4


def main() -> None:
    inference = demonstration_inference()
    text = SimpleTextEnvironment(inference, prompts=["Explain a model", "What is learning?"])
    for environment in (text, Letters(inference)):
        print(type(environment).__name__)
        manager = RolloutManager(environment, num_parallel=4)
        for trajectory in manager.collect_rollouts(min_trajectories=4):
            for step in trajectory.steps:
                print(f"  {trajectory.group}.{step.index}: {step.observation!r} -> {step.action.raw!r}")
        print(f"  {manager.get_statistics()['avg_trajectory_length']:.1f} steps on average")


if __name__ == "__main__":
    main()
