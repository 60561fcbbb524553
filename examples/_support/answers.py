"""Answers of a policy to problems: sampled, judged, and made into training rows and preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradwire
import numpy as np

from _support.tasks import Preference, Problem, is_right

Row = dict[str, Any]


async def sample(
    run: gradwire.TrainingClient, prompts: Sequence[list[int]], max_tokens: int, n: int = 1
) -> list[list[gradwire.Sample]]:
    """Sample ``n`` answers per prompt from the policy at temperature 1."""
    parts = [
        run.sample(prompts[start : start + 256], n=n, max_tokens=max_tokens, temperature=1.0)
        for start in range(0, len(prompts), 256)
    ]
    return [samples for part in parts for samples in (await part).samples]


def accuracy(problems: Sequence[Problem], answers: Sequence[Sequence[gradwire.Sample]]) -> float:
    return float(np.mean([is_right(problem, each[0].text or "") for problem, each in zip(problems, answers)]))


def said(problem: Problem, answer: gradwire.Sample) -> str:
    verdict = "right" if is_right(problem, answer.text or "") else f"wrong, it is {problem.number}"
    return f"{answer.text}   ({verdict})"


def compared(problems: Sequence[Problem], answers: Sequence[Sequence[gradwire.Sample]]) -> list[Preference]:
    """Pair right answers with wrong ones to the same prompt; uses the worked answer if the policy gave no right one."""
    pairs = []
    for problem, samples in zip(problems, answers):
        texts = [each.text or "" for each in samples]
        right = [text for text in texts if is_right(problem, text)] or [problem.answer]
        wrong = [text for text in texts if not is_right(problem, text)]
        pairs += [Preference(problem.prompt, chosen, rejected) for chosen, rejected in zip(right, wrong)]
    return pairs


def row(prompt: list[int], answer: Sequence[int]) -> Row:
    """Build a row in which only the answer is trained on."""
    return {"input_ids": [*prompt, *answer], "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def rollout_rows(prompts: Sequence[list[int]], answers: Sequence[Sequence[gradwire.Sample]]) -> list[Row]:
    return [row(prompt, each[0].token_ids.tolist()) for prompt, each in zip(prompts, answers)]
