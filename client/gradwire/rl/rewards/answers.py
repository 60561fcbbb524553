"""Rewards for equivalent answers: mathematics, and options of a question."""

from __future__ import annotations

import re
import string
from typing import Any

from gradwire.extras import require
from gradwire.rl.rewards.functions import RewardFunction
from gradwire.rl.rewards.sandbox import SandboxLimits

LETTERS = string.ascii_uppercase
_TOLD = re.compile(
    r"(?i:answer|option|choice)\s*(?i:is|:|=)?\s*(?i:option\s+)?(?:[*(\[]+([A-Za-z])[)\]*]|([A-Z])(?![A-Za-z]))"
)
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}")
_ALONE = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'])")


def math_answer(*, format_score: float = 0.0, limits: SandboxLimits | None = None, workers: int = 4) -> RewardFunction:
    r"""Return 1 if the answer equals the ground truth mathematically: ``\frac{1}{2}`` equals 0.5; sets have no order.

    Numbers, LaTeX and plain expressions, compared by the library ``math-verify`` (``gradwire[math]``). The answer is
    the last expression of the response, or the content of a ``\boxed{}``. Runs in the sandbox, because simplifying may
    not terminate.

    Args:
        format_score: Score of a wrong answer; a response without an answer gets 0.
        limits: Limits of one evaluation.
        workers: Evaluations at once.
    """
    math_verify = require("math_verify", "math", "the reward math_answer")

    def math_answer(response: str, ground_truth: Any) -> dict[str, Any]:
        truth = str(ground_truth)
        bare = "$" not in truth and "\\boxed" not in truth
        wanted = math_verify.parse(f"${truth}$" if bare else truth, parsing_timeout=None)
        if not wanted:
            raise ValueError(f"the ground truth {truth!r} cannot be parsed by math-verify")
        answer = math_verify.parse(response, parsing_timeout=None)
        if not answer:
            return {"score": 0.0, "reason": "there is no answer in the response"}
        is_right = math_verify.verify(wanted, answer, timeout_seconds=None)
        reason = f"the answer is {str(answer[-1])[:200]}" + ("" if is_right else f"; {truth[:200]} is right")
        return {"score": 1.0 if is_right else format_score, "reason": reason}

    return RewardFunction(math_answer, limits=limits, workers=workers)


def find_choice(text: str, options: int = 26) -> str | None:
    r"""Find the letter of the chosen option: in a ``\boxed{}``, after "answer", or the last letter that stands alone.

    Args:
        text: The policy's text.
        options: Number of options; other letters are ignored ("I" is a word).
    """
    letters = LETTERS[:options]
    for pattern in (_BOXED, _TOLD, _ALONE):
        said = [next(filter(None, match.groups())).upper() for match in pattern.finditer(text)]
        found = [letter for letter in said if letter in letters]
        if found:
            return str(found[-1])
    return None


def multiple_choice(*, format_score: float = 0.0) -> RewardFunction:
    """Return 1 if the response chooses the option whose letter is the ground truth.

    Args:
        format_score: Score of a wrong choice; a response without a choice gets 0.
    """

    def multiple_choice(response: str, ground_truth: Any, data: dict[str, Any]) -> dict[str, Any]:
        wanted, choice = str(ground_truth).strip().upper(), find_choice(response, len(data.get("options") or LETTERS))
        if len(wanted) != 1 or not wanted.isalpha():
            raise ValueError(
                f"the ground truth {ground_truth!r} is not the letter of an option; choice_tasks converts it to one"
            )
        if choice is None:
            return {"score": 0.0, "reason": "there is no choice in the response"}
        reason = f"the choice is {choice}" + ("" if choice == wanted else f"; {wanted} is right")
        return {"score": 1.0 if choice == wanted else format_score, "reason": reason}

    return RewardFunction(multiple_choice, sandboxed=False)
