"""Answers of a new version beside those of the version that it started from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradwire
from gradwire.rlhf import RewardModel, TrainingConfig
from gradwire.rlhf.origins import find_origin
from gradwire.whole_files import replace_json

from gradwire_feedback.training.generation import TOP_K, TOP_P
from gradwire_feedback.training.plan import Plan
from gradwire_feedback.training.server import TrainingServer

log = logging.getLogger(__name__)

EXAMPLES_FILE = "examples.json"
EXAMPLES = 4


@dataclass(frozen=True)
class Example:
    """Answers to one prompt with the same seed, and the scores that the reward model predicts; None without one."""

    prompt: str
    before: str
    after: str
    before_score: float | None = None
    after_score: float | None = None


async def write_examples(
    plan: Plan, feedbacks: Sequence[Mapping[str, Any]], folder: Path, server: TrainingServer
) -> None:
    """Answer a few of the training's prompts with both versions, and write the answers beside the new one.

    Raises:
        gradwire.GradwireError: An error of the training server.
    """
    if (folder / EXAMPLES_FILE).exists():
        return
    config, prompts = TrainingConfig(**plan.config), list(dict.fromkeys(row["prompt"] for row in feedbacks))[:EXAMPLES]
    async with server.connection() as service:
        start = await find_origin(service, plan.policy_config.base_model)
        end = await find_origin(service, str(folder / "policy"))
        room = start.context_tokens - config.max_new_tokens
        rows = [row[-room:] for row in await service.encode(start.model, prompts)]
        both = []
        for model in (start.checkpoint or start.model, end.checkpoint):
            sampled = await service.sampling_client(model).sample(
                rows, max_tokens=config.max_new_tokens, temperature=1.0, top_k=TOP_K, top_p=TOP_P, seed=config.seed
            )
            both.append([(each[0].text or "").replace("\0", "") for each in sampled.samples])
        scores = await _predicted(service, plan, folder, prompts, both)
    examples = [
        Example(prompt, before, after, *predicted)
        for prompt, before, after, predicted in zip(prompts, *both, scores, strict=True)
    ]
    replace_json(folder / EXAMPLES_FILE, [asdict(each) for each in examples], indent=1)


async def _predicted(
    service: gradwire.ServiceClient, plan: Plan, folder: Path, prompts: list[str], both: list[list[str]]
) -> list[tuple[float | None, float | None]]:
    if plan.method == "dpo":
        return [(None, None)] * len(prompts)
    path = plan.reward_model_path or str(folder / "reward_model")
    model = await RewardModel.from_pretrained_async(path, service)
    try:
        scores = await model.score_async(prompts * 2, both[0] + both[1])
    finally:
        await model.close_async()
    values = [float(value) for value in scores]
    return list(zip(values[: len(prompts)], values[len(prompts) :]))


def read_examples(folder: Path) -> list[Example]:
    """Return the examples of a version; none if its file is missing or damaged, which is logged."""
    try:
        return [Example(**each) for each in json.loads((folder / EXAMPLES_FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        log.warning("no examples in %s: %s", folder, error)
        return []
