"""PPO, GRPO, REINFORCE and GiGPO side by side: held-out success before and after, on three small tasks, with seeds.

sums   the demo's: two numbers of three digits, added digit by digit.
boxes  a tool task of two turns: look into the box that is asked for, then say what is in it.
guess  a number from 0 to 6 in three turns, with a hint after each: higher or lower.

The model is the demo's, with letters for the boxes and signs for the hints. It first imitates careless pupils: on sums
they slip at three carries in ten, on boxes they are right half of the time, and they guess at random. From there each
algorithm is told no more than whether an answer was right. A seed draws the tasks and what is held out of them, the
pupils, and the rollouts.

Prints a table, writes the curves as `curves.svg` and each training's numbers as JSONL under --output, and ends with 1
if a training did not raise its held-out success. --write-docs puts table and curves into docs/rl.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradwire
from _support.comparison import Training, draw, means, table
from _support.small_model import EOS, small_model
from _support.tasks import ARITHMETIC_CHARACTERS, arithmetic
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
BOXES = "abcd"
DEMONSTRATIONS = 64  # a step of imitation
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- results: begin (examples/rl_algorithms.py --write-docs) -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Setting:
    """A task of the comparison.

    Attributes:
        demonstrations: Prompts and the pupils' answers.
        train, held_out: Tasks.
        environment: The environment.
        config: Settings that differ between the tasks.
        characters: The model's vocabulary.
        ppo: Settings of PPO only.
        iterations: Number of training iterations.
    """

    demonstrations: Sequence[tuple[str, str]]
    train: Sequence[Task]
    held_out: Sequence[Task]
    environment: BaseEnvironment
    config: dict[str, Any]
    characters: str = ARITHMETIC_CHARACTERS + "abcd?-"
    ppo: dict[str, Any] = field(default_factory=dict)
    iterations: int = 24


def sums(seed: int) -> Setting:
    made = arithmetic(seed, demonstrations=400 * DEMONSTRATIONS, prompts=4096)
    train, held_out = ([Task(each.prompt, each.number) for each in part] for part in (made.prompts, made.held_out))
    demonstrations = [(each.prompt, f"{each.answer}{EOS}") for each in made.demonstrations]
    config = {"max_tokens": 40, "learning_rate": 3e-4}
    return Setting(demonstrations, train, held_out, SimpleTextEnvironment(), config)


class Boxes(BaseEnvironment):
    """``c?`` asks what is in box c. A box's letter looks into it; anything else is the answer."""

    blocking = False
    max_steps = 4

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": str(task.prompt)},))

    def build_prompt(self, state: State) -> str:
        return "".join(message["content"] for message in state.messages)

    def step(self, state: State, action: Action) -> StepResult:
        if action.raw not in tuple(BOXES):
            return StepResult(terminated=True)
        asked = str(state.task.prompt)[0]
        content = str(state.task.ground_truth) if action.raw == asked else "-"
        looked = ToolResult(ToolCall("look", {"box": action.raw}), content)
        return StepResult(content, tool_results=(looked,), role="tool")


def boxes(seed: int) -> Setting:
    rng = random.Random(seed)
    tasks = [Task(f"{box}?", str(content)) for box, content in itertools.product(BOXES, range(10))]
    rng.shuffle(tasks)
    train, held_out = tasks[len(tasks) // 5 :], tasks[: len(tasks) // 5]
    demonstrations = []
    for task in rng.choices(train, k=200 * DEMONSTRATIONS):
        prompt, content = str(task.prompt), str(task.ground_truth)
        box = prompt[0]
        if rng.random() < 0.5:
            demonstrations.append((prompt, box if rng.random() < 0.5 else rng.choice("abcd0123")))
        else:
            looked = f"{prompt}{box}{content}"
            demonstrations.append((looked, content if rng.random() < 0.5 else rng.choice("0123456789")))
    config = {"max_tokens": 1, "learning_rate": 1e-3, "eval_trajectories": 16}
    # The critic learns in the policy's own trunk, and large steps of it cost the policy its start.
    return Setting(demonstrations, train, held_out, Boxes(), config, ppo={"learning_rate": 3e-4})


class Guess(BaseEnvironment):
    """A number from 0 to 6 that the policy never sees. After a wrong guess the hint is ``>`` (higher) or ``<``.

    Three turns are the task's own limit: an episode without the right number by then has failed.
    """

    blocking = False
    max_steps = 3

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": str(task.prompt)},))

    def build_prompt(self, state: State) -> str:
        return "".join(message["content"] for message in state.messages)

    def step(self, state: State, action: Action) -> StepResult:
        secret = str(state.task.ground_truth)
        if action.raw == secret:
            return StepResult(terminated=True)
        return StepResult(">" if action.raw < secret else "<")


def guess(seed: int) -> Setting:
    """All prompts are equal, so no task can be memorised: the held-out numbers are the same seven."""
    rng = random.Random(seed)
    tasks = [Task("?", str(secret), task_id=str(secret)) for secret in range(7)]
    demonstrations = []
    for _ in range(100 * DEMONSTRATIONS):
        turns = "".join(rng.choice("0123456") + rng.choice("<>") for _ in range(rng.randrange(3)))
        demonstrations.append((f"?{turns}", rng.choice("0123456")))
    config = {"max_tokens": 1, "learning_rate": 3e-3, "eval_trajectories": 16}
    return Setting(demonstrations, tasks, tasks, Guess(), config, characters="0123456?<>", iterations=72)


SETTINGS = {"sums": sums, "boxes": boxes, "guess": guess}


async def imitate(service: gradwire.ServiceClient, model: str, setting: Setting, seed: int) -> str:
    """Train a run to imitate the pupils; return its checkpoint."""
    run = await service.create_run(model, seed=seed)
    steps = len(setting.demonstrations) // DEMONSTRATIONS
    for step in range(steps):
        pupils = setting.demonstrations[DEMONSTRATIONS * step : DEMONSTRATIONS * (step + 1)]
        prompts = await service.encode(model, [prompt for prompt, _ in pupils])
        rows = await service.encode(model, [prompt + answer for prompt, answer in pupils])
        mask = [[0] * len(prompt) + [1] * (len(row) - len(prompt)) for prompt, row in zip(prompts, rows)]
        run.forward_backward({"input_ids": rows, "loss_mask": mask}, "causal_lm")
        warm, cool = min(1.0, (step + 1) / 20), (1 + math.cos(math.pi * step / steps)) / 2
        await run.optim_step(learning_rate=3e-3 * warm * cool)
    return (await run.save_checkpoint(name="imitation")).path


async def train(
    service: gradwire.ServiceClient, start: str, name: str, task: str, seed: int, setting: Setting,
    args: argparse.Namespace,
) -> Training:  # fmt: skip
    run = await service.fork_run(start, head="value" if name == "PPO" else None, seed=seed)
    iterations = args.iterations or setting.iterations
    config = AlgorithmConfig(
        batch_size=16, group_size=8, warmup_iterations=5, seed=seed, eval_every=max(1, iterations // 6),
        eval_temperature=1.0, checkpoint_dir=args.output / f"{name}-{task}-{seed}", **setting.config,
    )  # fmt: skip
    if name == "PPO":
        config = replace(config, **setting.ppo)
    async with ALGORITHMS[name](
        service, run, setting.train, last_number(), config,
        environment=setting.environment, eval_tasks=setting.held_out,
    ) as algorithm:  # fmt: skip
        curve = [(0, (await algorithm.evaluate())["eval/success"])]
        for iteration, metrics in enumerate(await algorithm.train(iterations), 1):
            if "eval/success" in metrics:
                curve.append((iteration, metrics["eval/success"]))
    return Training(name, task, seed, curve)


async def compare(args: argparse.Namespace) -> list[Training]:
    trainings = []
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        models = {
            task: small_model(Path(folder) / task, characters=SETTINGS[task](0).characters, context_length=64)
            for task in args.tasks
        }
        async with gradwire.connect(models=[f"{task}={path}" for task, path in models.items()]) as service:
            for task, seed in itertools.product(args.tasks, range(args.seeds)):
                setting = SETTINGS[task](seed)
                start = await imitate(service, task, setting, seed)
                for name in ALGORITHMS:
                    trainings.append(await train(service, start, name, task, seed, setting, args))
                    print(f"{name} on {task}, seed {seed}: {trainings[-1]}", flush=True)
    return trainings


def write_docs(trainings: Sequence[Training], tasks: Sequence[str]) -> None:
    """Replace the rows of these tasks in the page's table of means, and draw a picture of each task."""
    for task in tasks:
        draw([each for each in trainings if each.task == task], DOCS / f"rl_curves_{task}.svg")
    before, begin, rest = (DOCS / "rl.md").read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    head, *lines = means(trainings).splitlines()
    kept = [
        line
        for line in old.splitlines()
        if line.startswith(tuple(f"| {task} |" for task in set(SETTINGS) - set(tasks)))
    ]
    order = list(SETTINGS)
    rows = sorted([*kept, *lines[1:]], key=lambda line: order.index(line.split(" ")[1]))
    (DOCS / "rl.md").write_text("\n".join([f"{before}{begin}", head, lines[0], *rows, f"{end}{after}"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, help="by default as many as the task needs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--output", type=Path, default=Path("runs/rl_algorithms"))
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    trainings = asyncio.run(compare(args))
    args.output.mkdir(parents=True, exist_ok=True)
    draw(trainings, args.output / "curves.svg")
    print("", table(trainings), sep="\n")
    if args.write_docs:
        write_docs(trainings, args.tasks)
    return 0 if all(each.after > each.before for each in trainings) else 1


if __name__ == "__main__":
    sys.exit(main())
