"""PPO, GRPO, REINFORCE and GiGPO side by side: held-out success before and after, on two small tasks.

sums   one digit plus one digit: the last digit of the sum.
boxes  a tool task of two turns: look into the box that is asked for, then say what is in it.

The policy first imitates pupils who are right half of the time; reinforcement has to find out which half.
Prints a table, and writes curves (JSONL) for each training under --output.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
from pathlib import Path
from typing import Literal

import gradwire
import numpy as np
from _support.small_model import small_model
from gradwire.rl import (
    Action,
    Algorithm,
    AlgorithmConfig,
    BaseEnvironment,
    GiGPOAlgorithm,
    GRPOAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    SimpleTextEnvironment,
    State,
    StepResult,
    Task,
    ToolCall,
    ToolResult,
    last_number,
)

ALGORITHMS: dict[str, type[Algorithm]] = {
    "PPO": PPOAlgorithm,
    "GRPO": GRPOAlgorithm,
    "REINFORCE": REINFORCEAlgorithm,
    "GiGPO-PPO": GiGPOAlgorithm,
}


class Boxes(BaseEnvironment):
    """``c?`` asks what is in box c. A box's letter looks into it, whatever else is written is the answer."""

    blocking = False
    max_steps = 4

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": str(task.prompt)},))

    def build_prompt(self, state: State) -> str:
        return "".join(message["content"] for message in state.messages)

    def step(self, state: State, action: Action) -> StepResult:
        if action.raw not in ("a", "b", "c", "d"):
            return StepResult(terminated=True)
        asked = str(state.task.prompt)[0]
        content = str(state.task.ground_truth) if action.raw == asked else "-"
        looked = ToolResult(ToolCall("look", {"box": action.raw}), content)
        return StepResult(content, tool_results=(looked,), role="tool")


def split(tasks: list[Task], seed: int) -> tuple[list[Task], list[Task]]:
    """Four in five to practise on, the fifth held out."""
    random.Random(seed).shuffle(tasks)
    return tasks[len(tasks) // 5 :], tasks[: len(tasks) // 5]


def sums(seed: int) -> tuple[list[Task], list[Task]]:
    return split([Task(f"{a}+{b}=", str((a + b) % 10)) for a, b in itertools.product(range(10), repeat=2)], seed)


def boxes(seed: int) -> tuple[list[Task], list[Task]]:
    return split([Task(f"{box}?", str(content)) for box, content in itertools.product("abcd", range(10))], seed)


Lesson = tuple[str, str, str]
"""A prompt, the right character after it, and those that a pupil may write instead."""


def lessons(task: Task) -> list[Lesson]:
    prompt, truth = str(task.prompt), str(task.ground_truth)
    if prompt.endswith("="):
        return [(prompt, truth, "0123456789")]
    box = prompt[0]
    return [(prompt, box, "abcd0123"), (f"{prompt}{box}{truth}", truth, "0123456789")]


async def imitate(service: gradwire.ServiceClient, model: str, tasks: list[Task], seed: int) -> str:
    """A checkpoint of a run that has seen these tasks solved by pupils who are right half of the time."""
    run = await service.create_run(model, seed=seed)
    rng = np.random.default_rng(seed)
    known = [lesson for task in tasks for lesson in lessons(task)]
    for step in range(200):
        chosen = [known[index] for index in rng.integers(len(known), size=64)]
        texts = [prompt + (right if rng.random() < 0.5 else rng.choice(list(wrong))) for prompt, right, wrong in chosen]
        rows = await service.encode(model, texts)
        batch = {"input_ids": rows, "loss_mask": [[0] * (len(row) - 1) + [1] for row in rows]}
        run.forward_backward(batch, "causal_lm")
        await run.optim_step(learning_rate=3e-3 * (1 - step / 200))
    return (await run.save_checkpoint(name="imitation")).path


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/rl_algorithms"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        path = small_model(Path(folder) / "small", characters="0123456789+=?-abcd", hidden_size=64, num_layers=2)
        async with gradwire.connect(models=[f"small={path}"]) as service:
            for seed, (name, make) in itertools.product(range(args.seeds), ALGORITHMS.items()):
                for task, (train, held_out) in {"sums": sums(seed), "boxes": boxes(seed)}.items():
                    head: Literal["value"] | None = "value" if name == "PPO" else None
                    start = await imitate(service, "small", train, seed)
                    run = await service.fork_run(start, head=head, seed=seed)
                    # The critic learns in the policy's own trunk, and large steps of it cost the policy its start.
                    rate = 3e-4 if name == "PPO" else 1e-3
                    config = AlgorithmConfig(
                        batch_size=16, group_size=8, learning_rate=rate, max_tokens=1, warmup_iterations=5, seed=seed,
                        eval_temperature=1.0, eval_trajectories=16,
                        checkpoint_dir=args.output / f"{name}-{task}-{seed}",
                    )  # fmt: skip
                    environment = SimpleTextEnvironment() if task == "sums" else Boxes()
                    async with make(
                        service, run, train, last_number(), config, environment=environment, eval_tasks=held_out
                    ) as algorithm:
                        before = (await algorithm.evaluate())["eval/success"]
                        await algorithm.train(args.iterations)
                        after = (await algorithm.evaluate())["eval/success"]
                    rows.append((name, task, seed, before, after))
    print(f"\n{'algorithm':10} {'task':6} {'seed':>4} {'before':>7} {'after':>7}")
    for name, task, seed, before, after in sorted(rows):
        print(f"{name:10} {task:6} {seed:>4} {before:>7.2f} {after:>7.2f}")
    if any(after <= before for *_, before, after in rows):
        raise SystemExit("some held-out success did not rise")


if __name__ == "__main__":
    asyncio.run(main())
