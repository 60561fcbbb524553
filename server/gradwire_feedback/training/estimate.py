"""Estimate of a training's cost: time from measured steps, memory from the model's size."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from gradwire.rlhf import TrainingConfig, TrainingProgress
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.database.connection import Database
from gradwire_feedback.database.tables import StepProbe
from gradwire_feedback.settings import Settings
from gradwire_feedback.training.plan import Plan, rows_of, train
from gradwire_feedback.training.server import TrainingServer

PROBE_FEEDBACK = 16
PROBE_STEPS = 3
TIMED_SETTINGS = (
    "base_model", "use_lora", "lora_r", "batch_size", "mini_batch_size", "gradient_accumulation_steps", "ppo_epochs",
    "max_new_tokens",
)  # fmt: skip
"""Settings on which the duration of a step depends."""

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
TRAINED_BYTES = 16
"""Bytes per trained parameter: float32 weight, gradient, and two moments of AdamW."""
ACTIVATIONS_PER_UNIT = 34
"""Activations of a transformer layer in units of tokens * hidden size, at 16 bits (Korthikanti et al. 2022,
arXiv:2205.05198, equation 2 without the attention term)."""

_one_probe = asyncio.Lock()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of each stage, and of writing the model."""

    reward_model: float
    policy: float
    export: float


async def estimate(
    database: Database, server: TrainingServer, settings: Settings, agent_id: str, plan: Plan
) -> dict[str, Any]:
    """Return the fields of a dry run's answer.

    The first estimate for a model and its settings trains a few steps on the agent's own feedback; the measured times
    are kept in the database.

    Raises:
        gradwire.GradwireError: The training server cannot use the settings.
    """

    def read() -> list[dict[str, Any]]:
        with database.read() as session:
            return rows_of(session, agent_id, plan)

    feedbacks = await run_in_threadpool(read)
    config = TrainingConfig(**plan.config)
    async with _one_probe:  # concurrent measurements would distort each other
        times = await _step_times(database, server, settings, plan, feedbacks)
    reward_steps = 0
    if plan.method == "ppo" and plan.reward_model_path is None:
        rewards = plan.reward_config
        reward_steps = rewards.num_epochs * math.ceil(len(feedbacks) / rewards.batch_size)
    seconds = reward_steps * times.reward_model + config.max_steps * times.policy + times.export
    scores = np.array([row["score"] for row in feedbacks if "score" in row])
    return {
        "feedback_count": len(feedbacks),
        "estimated_steps": config.max_steps,
        "estimated_time_minutes": seconds / 60,
        "estimated_memory_gib": memory_gib(await server.model_info(config.base_model), config),
        "score_mean": float(scores.mean()) if len(scores) else None,
        "score_std": float(scores.std()) if len(scores) else None,
        "model_configuration": plan.config,
    }


async def _step_times(
    database: Database, server: TrainingServer, settings: Settings, plan: Plan, feedbacks: Sequence[Mapping[str, Any]]
) -> StepTimes:
    device, rewards = (await server.service.server_info()).device, plan.reward_config
    relevant = [device, settings.service or "embedded", plan.method, *(plan.config[name] for name in TIMED_SETTINGS)]
    relevant += [rewards.lora_r, rewards.batch_size]
    digest = hashlib.sha256(json.dumps(relevant).encode()).hexdigest()

    def known() -> StepTimes | None:
        with database.read() as session:
            row = session.get(StepProbe, digest)
            return StepTimes(**row.measured) if row else None

    def keep(times: StepTimes) -> None:
        with database.write() as session:
            session.merge(StepProbe(digest=digest, measured=asdict(times)))

    times = await run_in_threadpool(known)
    if times is None:
        times = await asyncio.to_thread(lambda: asyncio.run(_measure(server, settings, plan, feedbacks)))
        await run_in_threadpool(keep, times)
    return times


async def _measure(
    server: TrainingServer, settings: Settings, plan: Plan, feedbacks: Sequence[Mapping[str, Any]]
) -> StepTimes:
    """Train a few steps of both stages on some of the feedback, and discard the result."""
    some = [feedbacks[i] for i in np.linspace(0, len(feedbacks) - 1, min(len(feedbacks), PROBE_FEEDBACK)).astype(int)]
    probe = replace(plan, config=plan.config | {"max_steps": PROBE_STEPS}, reward_model_path=None)
    moments: dict[str, list[tuple[int, float]]] = {
        "reward_model": [], "policy": [], "preferences": [], "export": [],
    }  # fmt: skip

    def note(progress: TrainingProgress) -> None:
        moments[progress.stage].append((progress.step, time.perf_counter()))

    folder = settings.models_dir / ".probes"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as output:
        await train(probe, some, Path(output), server, note)
        await server.discard(Path(output))
    main = "preferences" if plan.method == "dpo" else "policy"
    return StepTimes(*(_seconds_a_step(moments[stage]) for stage in ("reward_model", main, "export")))


def _seconds_a_step(moments: Sequence[tuple[int, float]]) -> float:
    """Mean over the steps after the first, which includes one-time setup."""
    if not moments:
        return 0.0
    (first, start), (last, end) = moments[0], moments[-1]
    return (end - start) / (last - first) if last > first else 0.0


def memory_gib(model: gradwire.ModelInfo, config: TrainingConfig) -> float:
    """Estimate the engine's peak memory.

    Weights (one base model for an adapter; policy, reward model and reference for full training), optimizer state,
    activations of a mini-batch, and its logits in float32 with their gradient. Prompts are assumed as long as answers.
    """
    width = BYTES_OF.get(model.dtype, 4)
    weights = model.num_parameters * width
    if config.use_lora:  # seven linear layers with a total of about 18 hidden sizes of inputs and outputs
        adapter = model.num_layers * config.lora_r * 18 * model.hidden_size
        held = weights + 2 * adapter * TRAINED_BYTES
    else:
        held = 3 * weights + 2 * model.num_parameters * TRAINED_BYTES
    tokens = config.mini_batch_size * min(2 * config.max_new_tokens, model.context_length)
    activations = tokens * model.num_layers * model.hidden_size * ACTIVATIONS_PER_UNIT * width / 2
    logits = 2 * 4 * tokens * model.vocab_size
    return (held + activations + logits) / 2**30
