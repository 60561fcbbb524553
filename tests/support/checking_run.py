"""A stand-in for the run that reads batches as the server does and computes their losses; and what it is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gradwire.batches import to_columns
from gradwire.descriptions import LossField
from gradwire.rl import (
    Algorithm,
    AlgorithmConfig,
    GiGPOAlgorithm,
    GRPOAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    reward_function,
)
from gradwire.rl.algorithms.sources import Pace
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.types import Action, Prompt, State, StepData, Task, Trajectory
from gradwire_losses.batch import Scores
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss, load_builtin_losses

load_builtin_losses()


def settled(value: Any) -> asyncio.Future[Any]:
    """What comes a moment later, as from a server."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    loop.call_later(0.002, future.set_exception if isinstance(value, Exception) else future.set_result, value)
    return future


class CheckingRun:
    """Reads batches by the losses' own rules; its scores are numbers drawn from the batch."""

    run_id = "run-x"

    def __init__(self, head: str | None = None) -> None:
        self.head = head
        self.batches: list[tuple[str, dict[str, Any], Any]] = []
        self.steps = 0
        self.saved: dict[str, int] = {}
        self.emas = 0
        self.logprob, self.scored = -0.5, 0
        self.errors: list[Exception] = []

    async def info(self) -> Any:
        return SimpleNamespace(head=self.head, step=self.steps, base_model="tiny", lora={"rank": 4})

    async def model_info(self) -> Any:
        return SimpleNamespace(hidden_size=32)

    def forward_backward(self, batch: Any, loss_fn: str, kwargs: Mapping[str, Any]) -> Any:
        if self.errors:
            return settled(self.errors.pop(0))
        spec = get_loss(loss_fn)
        fields = [
            LossField(f.name, f.dtype, f.shapes, f.required, f.description, f.aligned_with, f.padding_mask)
            for f in spec.fields
        ]
        read = read_batch(spec, to_columns(loss_fn, fields, batch), vocab_size=256)
        config = spec.config(**{k: v for k, v in kwargs.items() if k != "reference_model"})
        tokens = int(read.row_lengths.sum())
        generator = torch.Generator().manual_seed(self.steps)
        scores = Scores(
            {name: -0.5 - 0.1 * torch.rand(tokens, generator=generator) for name in ("logprobs", "entropy", "values")}
        )
        output = spec.function(read, scores, config)
        self.batches.append((loss_fn, dict(kwargs), read))
        metrics = {name: float(metric.value()) for name, metric in output.metrics.items() if hasattr(metric, "value")}
        return settled(SimpleNamespace(metrics=metrics, num_loss_tokens=tokens, warnings=()))

    def optim_step(self, learning_rate: float, **options: Any) -> Any:
        self.steps += 1
        return settled(SimpleNamespace(grad_norm=1.0, skipped=False, learning_rate=learning_rate, step=self.steps))

    def compute_logprobs(self, batch: Any, temperature: float = 1.0) -> Any:
        """A constant for every token, which is what the sampler of ``rule_inference`` gives."""
        self.scored += 1
        return settled([np.full(int(np.sum(mask)), self.logprob, np.float32) for mask in batch["loss_mask"]])

    def compute_values(self, batch: Any) -> Any:
        """The value of a state: the number of tokens before it."""
        values = [np.flatnonzero(np.asarray(mask)).astype(np.float32) for mask in batch["loss_mask"]]
        return settled(values)

    def save_checkpoint(self, name: str, note: str, overwrite: bool) -> Any:
        self.saved[name] = self.steps
        return settled(SimpleNamespace(path=f"run-x/{name}"))

    def load_checkpoint(self, path: str) -> Any:
        self.steps = self.saved[path.split("/")[1]]
        return settled(None)

    def update_reference(self, ema: float) -> Any:
        self.emas += 1
        return settled(None)


class Doors(BaseEnvironment):
    """Two rooms: the left door is right. Prompts are one room each where ``forget``, else the whole conversation."""

    blocking = False

    def __init__(self, forget: bool = False) -> None:
        self.forget = forget

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "room 0"},))

    def step(self, state: State, action: Action) -> StepResult:
        if action.raw != "left":
            return StepResult("wall", terminated=True)
        return StepResult(f"room {state.step + 1}", terminated=state.step == 1)

    def build_prompt(self, state: State) -> Prompt:
        return state.messages[-1:] if self.forget else state.messages


def walk(text: str, number: int) -> str:
    return "left" if number % 2 else "right"


@reward_function(sandboxed=False)
def arrived(messages: list[dict[str, str]]) -> float:
    return float(messages[-1]["content"] == "room 2")


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"batch_size": 2, "group_size": 4, "learning_rate": 1e-3} | changes))


ALGORITHMS: dict[str, tuple[Any, str | None, str]] = {
    "ppo": (PPOAlgorithm, "value", "enhanced_ppo"),
    "grpo": (GRPOAlgorithm, None, "grpo"),
    "reinforce": (REINFORCEAlgorithm, None, "importance_sampling"),
    "gigpo": (GiGPOAlgorithm, None, "gigpo"),
}


async def collected(algorithm: Algorithm) -> list[Trajectory]:
    """The trajectories of the next iteration, which is not trained on."""
    source = await algorithm._ready()
    async with source.working(Pace.sync(algorithm.config), 1):
        return (await anext(source.parts())).trajectories


def steps(*keys: str, rewards: tuple[float, ...]) -> list[StepData]:
    ids, lps = np.array([7, 8]), np.array([-0.1, -0.2], np.float32)
    return [
        StepData(i, key, key, np.array([1, 2 + i]), Action("x"), ids, lps, reward=reward)
        for i, (key, reward) in enumerate(zip(keys, rewards))
    ]
