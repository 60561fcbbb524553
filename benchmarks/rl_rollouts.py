"""Tokens per second of 256 episodes of very unequal length at once, against lock-step batches of the same size.

A small model on the server; 1,280 episodes, most of one to three turns, 1.5 % of sixty. In lock-step the next 256 start
when all of the last have ended; otherwise each place is taken again at once. Both take turns in one run; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gradwire
import numpy as np
from _support.small_model import small_model
from gradwire.rl import Action, BaseEnvironment, RolloutManager, RunInference, SamplingParams, State, StepResult, Task


class Turns(BaseEnvironment):
    """As many turns as the task says; the policy always sees the same two letters."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "go"},))

    def build_prompt(self, state: State) -> str:
        return "go"

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult(terminated=state.step + 1 >= int(str(state.task.prompt)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = [str(turns) for turns in np.where(rng.random(1280) < 0.015, 60, rng.integers(1, 4, 1280))]
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "small", hidden_size=32, num_layers=2)
        async with gradwire.connect(models=[f"small={model}"]) as service:
            inference = await RunInference.of(service, await service.create_run("small"))
            for maintain in (False, True) * args.repeats:
                manager = RolloutManager(
                    inference,
                    Turns(),
                    num_parallel=256,
                    maintain_parallel_count=maintain,
                    max_steps_per_rollout=99,
                    params=SamplingParams(max_tokens=4, ignore_eos=True),
                )
                figures = (await manager.collect(lengths)).statistics
                rates[maintain].append(figures.tokens_per_second)
                name = "places kept full" if maintain else "lock-step"
                calls, batch = figures.sampler.calls, figures.avg_batch
                print(f"{name:16} {figures.tokens_per_second:7.0f} tokens/s  {calls:4} calls of {batch:.0f} prompts")
    print(f"ratio of medians: {statistics.median(rates[True]) / statistics.median(rates[False]):.2f}")


if __name__ == "__main__":
    asyncio.run(main())
