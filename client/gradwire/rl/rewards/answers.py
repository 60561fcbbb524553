"""Rewards for answers that mean the same in other words: mathematics, and options of a question."""

from __future__ import annotations

import re
import string
from typing import Any

from gradwire.rl.extras import require
from gradwire.rl.rewards.functions import RewardFunction
from gradwire.rl.rewards.sandbox import SandboxLimits

LETTERS = string.ascii_uppercase
_TOLD = re.compile(
    r"(?i:answer|option|choice)\s*(?i:is|:|=)?\s*(?i:option\s+)?(?:[*(\[]+([A-Za-z])[)\]*]|([A-Z])(?![A-Za-z]))"
)
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}")
_ALONE = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'])")


def math_answer(*, format_score: float = 0.0, limits: SandboxLimits | None = None, workers: int = 4) -> RewardFunction:
    r"""1 when the response's answer equals the ground truth as mathematics: ``\frac{1}{2}`` is 0.5, sets have no order.

    Numbers, LaTeX and plain expressions, by the library ``math-verify`` (``gradwire[math]``); what the response says
    last, or in a ``\boxed{}``, is its answer. In the sandbox, since simplifying can take for ever.

    Args:
        format_score: for a response with a wrong answer; one with none gets 0.
        limits: of one evaluation.
        workers: evaluations at once.
    """
    math_verify = require("math_verify", "math", "the reward math_answer")

    def math_answer(response: str, ground_truth: Any) -> float:
        truth = str(ground_truth)
        bare = "$" not in truth and "\\boxed" not in truth
        wanted = math_verify.parse(f"${truth}$" if bare else truth, parsing_timeout=None)
        if not wanted:
            raise ValueError(f"the ground truth {truth!r} is no mathematics that math-verify reads")
        found = math_verify.parse(response, parsing_timeout=None)
        if not found:
            return 0.0
        return 1.0 if math_verify.verify(wanted, found, timeout_seconds=None) else format_score

    return RewardFunction(math_answer, limits=limits, workers=workers)


def find_choice(text: str, options: int = 26) -> str | None:
    r"""The letter of the option that a text chooses: in a ``\boxed{}``, after "answer", or the last that stands alone.

    Args:
        text: of the policy.
        options: how many there are; other letters are none of them ("I" is a word).
    """
    letters = LETTERS[:options]
    for pattern in (_BOXED, _TOLD, _ALONE):
        said = [next(filter(None, match.groups())).upper() for match in pattern.finditer(text)]
        found = [letter for letter in said if letter in letters]
        if found:
            return str(found[-1])
    return None


def multiple_choice(*, format_score: float = 0.0) -> RewardFunction:
    """1 when the response chooses the option whose letter is the ground truth.

    Args:
        format_score: for a response that chooses another; one that chooses none gets 0.
    """

    def multiple_choice(response: str, ground_truth: Any, data: dict[str, Any]) -> float:
        wanted, found = str(ground_truth).strip().upper(), find_choice(response, len(data.get("options") or LETTERS))
        if len(wanted) != 1 or not wanted.isalpha():
            raise ValueError(f"the ground truth {ground_truth!r} is no option's letter; choice_tasks makes it one")
        return 0.0 if found is None else 1.0 if found == wanted else format_score

    return RewardFunction(multiple_choice, sandboxed=False)
