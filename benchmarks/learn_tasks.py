"""Rewards and the environment of the lessons in :mod:`benchmarks.learn`."""

from __future__ import annotations

import difflib
import re
from typing import Any

from gradwire import rl


def reversed_share(response: str, ground_truth: str) -> float:
    """Ratio of matching blocks of the answer and the reversed text, as prime-rl's example reverse-text."""
    found = re.search(r"<reversed_text>(.*?)(</reversed_text>|$)", response, re.DOTALL)
    return difflib.SequenceMatcher(None, (found[1] if found else response).strip(), ground_truth).ratio()


def look(word: str) -> str:
    """What is in the box."""
    return f"The box holds the word {word}."


class Box(rl.ToolEnvironment):
    """A word in a box: the policy may write "look", which shows it, before it answers."""

    def __init__(self) -> None:
        super().__init__([look], max_turns=2, describe_tools=False, stop=())

    def parse_action(self, state: rl.State, raw: str) -> rl.Action:
        looks = "look" in raw.lower() and not state.step
        return rl.Action(raw, (rl.ToolCall("look", {"word": state.task.ground_truth}),) if looks else ())


def found(response: str, ground_truth: str, steps: list[dict[str, Any]]) -> rl.EvaluateResult:
    """1 for the word, of the last step."""
    right = float(ground_truth in response)
    worth = [0.0] * (len(steps) - 1) + [right]
    return rl.EvaluateResult(right, [rl.StepOutput(*each) for each in enumerate(worth)])
