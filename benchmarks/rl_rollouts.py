"""Tokens per second of 256 episodes of very unequal length at once, against lock-step batches of the same size.

A small model on the server; 1,280 episodes, most of one to three turns, 1.5 % of sixty. In lock-step the next 256 start
when all of the last have ended; otherwise each place is taken again at once. Both take turns in one run.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import gradwire
import numpy as np
from _support.small_model import small_model
from gradwire.rl import Action, BaseEnvironment, RolloutManager, RunInference, SamplingParams, State, StepResult, Task

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns, cpu_seconds

FULL, LOCKSTEP = "places kept full", "lock-step"


class TurnsGame(BaseEnvironment):
    """A game with as many turns as the task says; the policy always sees the same two letters."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "go"},))

    def build_prompt(self, state: State) -> str:
        return "go"

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult(terminated=state.step + 1 >= int(str(state.task.prompt)))


async def compare(size: Size) -> list[Figure]:
    rng = np.random.default_rng(0)
    episodes, parallel, longest = size.pick(1280, 40), size.pick(256, 8), size.pick(60, 6)
    lengths = [str(turns) for turns in np.where(rng.random(episodes) < 0.015, longest, rng.integers(1, 4, episodes))]
    table = Turns(FULL, LOCKSTEP)
    calls: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "small", hidden_size=32, num_layers=2)
        async with gradwire.connect(models=[f"small={model}"]) as service:
            inference = await RunInference.of(service, await service.create_run("small"))
            for side in (LOCKSTEP, FULL) * (size.repeats + 1):
                manager = RolloutManager(
                    inference,
                    TurnsGame(),
                    num_parallel=parallel,
                    maintain_parallel_count=side == FULL,
                    max_steps_per_rollout=99,
                    params=SamplingParams(max_tokens=4, ignore_eos=True),
                )
                began, cpu = time.perf_counter(), cpu_seconds()
                figures = (await manager.collect(lengths)).statistics
                table.add(side, figures.sampler.tokens, time.perf_counter() - began, cpu_seconds() - cpu)
                calls[side] = f"{figures.sampler.calls} calls of {figures.avg_batch:.0f} prompts"
    table.drop_first()
    detail = f"{episodes:,} episodes; {table.said('tokens')}; {calls[FULL]} against {calls[LOCKSTEP]}"
    return [Figure("unequal episodes: places kept full, against lock-step", table.ratio(), "x", 3.0, detail=detail,
                   samples=table.rates)]  # fmt: skip


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
