"""GiGPO with PPO's objective on a task of many steps: find the key, carry it to the door, open it.

A corridor, told in text. Each turn the policy reads its position and writes one letter: l and r walk, g grabs the key,
o opens the door with it. Only the open door counts as success; the reward function also scores single steps. Episodes
of one corridor pass through the same places, and GiGPO compares their actions there.

Prints held-out success before, during and after, and writes the trajectories for `gradwire trajectories view`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import gradwire
from _support.small_model import small_model
from gradwire.rl import (
    Action,
    AlgorithmConfig,
    BaseEnvironment,
    EvaluateResult,
    GiGPOAlgorithm,
    Prompt,
    State,
    StepOutput,
    StepResult,
    Task,
    reward_function,
)

LETTERS = "lrgo"
MAX_STEPS = 14


class Corridor(BaseEnvironment):
    """Places 0 to 3. ``task.data``: the policy's start (``at``), and the places of key and door."""

    blocking = False
    max_steps = MAX_STEPS

    def reset(self, task: Task, seed: int) -> State:
        return self.seen(State(task, data={"at": task.data["at"], "key": task.data["key"]}))

    def seen(self, state: State) -> State:
        at, key = state.data["at"], state.data["key"]
        text = f"{at}{'k' if key is None else key}{state.task.data['door']}"
        return state.having(messages=({"role": "user", "content": text},))

    def build_prompt(self, state: State) -> Prompt:
        return self.observation(state)

    def step(self, state: State, action: Action) -> StepResult:
        at, key, letter = state.data["at"], state.data["key"], action.raw
        if letter == "l":
            at = max(0, at - 1)
        elif letter == "r":
            at = min(3, at + 1)
        elif letter == "g" and at == key:
            key = None
        elif letter == "o" and key is None and at == state.task.data["door"]:
            return StepResult("open", terminated=True, data={"at": at, "key": key})
        moved = (at, key) != (state.data["at"], state.data["key"])
        return StepResult("" if moved else "nothing", data={"at": at, "key": key})

    def update_state(self, state: State, action: Action, result: StepResult) -> State:
        after = super().update_state(state, action, result)
        return after if after.terminated else self.seen(after)


@reward_function
def opened(messages: list[dict[str, str]], steps: list[dict[str, Any]]) -> EvaluateResult:
    """Return 1 for an open door. Among the steps, opening it is worth 1 and grabbing the key 0.3."""
    seen = [step["observation"] for step in steps] + [messages[-1]["content"]]
    outputs = []
    for index, (before, after) in enumerate(itertools.pairwise(seen)):
        reward = 1.0 if after == "open" else 0.3 if before[1:2] != "k" and after[1:2] == "k" else 0.0
        outputs.append(StepOutput(step_index=index, base_reward=reward))
    return EvaluateResult(score=float(seen[-1] == "open"), step_outputs=outputs, metrics={"steps": float(len(steps))})


def corridors(seed: int) -> tuple[list[Task], list[Task]]:
    """Every corridor, one in five of them held out."""
    places = [(at, key, door) for at, key, door in itertools.product(range(4), repeat=3) if key != door]
    random.Random(seed).shuffle(places)
    tasks = [Task(f"{at}{key}{door}", data={"at": at, "key": key, "door": door}) for at, key, door in places]
    return tasks[len(tasks) // 5 :], tasks[: len(tasks) // 5]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--omega", type=float, default=1.0, help="weight of the step level; 0 leaves GRPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/gigpo"))
    parser.add_argument("--debug", action="store_true", help="log every stage of the credit: A_E, states, G_k, A_S")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("gradwire.rl.gigpo").setLevel(logging.DEBUG if args.debug else logging.WARNING)

    train, held_out = corridors(args.seed)
    config = AlgorithmConfig(
        batch_size=16, group_size=8, learning_rate=1e-3, max_tokens=1, num_minibatches=2, warmup_iterations=5,
        eval_every=10, eval_temperature=1.0, eval_trajectories=4, seed=args.seed,
        checkpoint_dir=args.output, save_every=20, record_every=10,
        loss_kwargs={"entropy_coef": 0.02},
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        model = small_model(Path(folder) / "corridor", characters="0123k" + LETTERS, hidden_size=64, num_layers=2)
        async with gradwire.connect(models=[str(model)]) as service:
            run = await service.create_run((await service.list_models())[0].name, seed=args.seed)
            async with GiGPOAlgorithm(
                service, run, train, opened, config, environment=Corridor(), eval_tasks=held_out, omega=args.omega
            ) as algorithm:
                print(f"before: held-out success {(await algorithm.evaluate())['eval/success']:.2f}")
                for metrics in await algorithm.train(args.iterations):
                    if "eval/success" in metrics:
                        print(f"held-out success {metrics['eval/success']:.2f}, steps {metrics['eval/steps']:.1f}")
    print(f"trajectories: python -m gradwire.rl.viewer {args.output / 'trajectories.jsonl'} --html trajectories.html")


if __name__ == "__main__":
    asyncio.run(main())
