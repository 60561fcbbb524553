"""Rule-based rewards: the last number, a pattern, a schema, passing tests."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from gradwire.extras import require
from gradwire.rl.rewards._sandbox.grading import share_of_passed
from gradwire.rl.rewards.functions import RewardFunction
from gradwire.rl.rewards.sandbox import SandboxLimits

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:json|python|py)?\s*\n(.*?)```", re.DOTALL)


def find_last_number(text: str) -> float | None:
    """Find the last number of a text (``1,234.5`` counts as one), or None."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def last_number(*, tolerance: float = 1e-6, format_score: float = 0.0) -> RewardFunction:
    """Return 1 if the response's last number equals the ground truth's last number, as for GSM8K.

    Args:
        tolerance: Relative tolerance.
        format_score: Score of a wrong number; a response without a number gets 0.
    """

    def last_number(response: str, ground_truth: Any) -> dict[str, Any]:
        number, wanted = find_last_number(response), find_last_number(str(ground_truth))
        if wanted is None:
            raise ValueError(f"the ground truth {ground_truth!r} has no number")
        if number is None:
            return {"score": 0.0, "reason": "there is no number in the response"}
        is_right = abs(number - wanted) <= tolerance * max(1.0, abs(wanted))
        reason = f"the last number is {number:.15g}" + ("" if is_right else f"; {wanted:.15g} is right")
        return {"score": 1.0 if is_right else format_score, "reason": reason}

    return RewardFunction(last_number, sandboxed=False)


def regex_match(pattern: str | None = None, *, limits: SandboxLimits | None = None) -> RewardFunction:
    """Return 1 if the pattern (default: the ground truth) matches in the response. Sandboxed: patterns can be very
    slow."""
    if pattern is not None:
        re.compile(pattern)

    def regex_match(response: str, ground_truth: Any) -> float:
        return float(re.search(pattern if pattern is not None else str(ground_truth), response) is not None)

    return RewardFunction(regex_match, limits=limits)


def find_json(text: str) -> Any:
    """Find JSON in a text: the whole text, its last fenced block, or from its first brace on.

    Raises:
        ValueError: There is none.
    """
    blocks = _BLOCK.findall(text)
    start = min((at for bracket in "{[" if (at := text.find(bracket)) >= 0), default=-1)
    for candidate in (text, *blocks[-1:], *([text[start:]] if start >= 0 else [])):
        try:
            return json.JSONDecoder().raw_decode(candidate.strip())[0]
        except (json.JSONDecodeError, RecursionError):
            continue
    raise ValueError("there is no JSON in it")


def json_schema(schema: dict[str, Any] | None = None, *, valid_json_score: float = 0.0) -> RewardFunction:
    """Return 1 if the response contains JSON of this schema (by default the ground truth's); needs ``jsonschema``.

    Args:
        schema: JSON schema.
        valid_json_score: Score of valid JSON that breaks the schema.
    """
    jsonschema = require("jsonschema", "rl", "the reward json_schema")

    def json_schema(response: str, ground_truth: Any) -> dict[str, Any]:
        try:
            value = find_json(response)
        except ValueError as error:
            return {"score": 0.0, "reason": str(error)}
        broken = next(iter(jsonschema.Draft202012Validator(schema or ground_truth).iter_errors(value)), None)
        return {"score": 1.0} if broken is None else {"score": valid_json_score, "reason": str(broken.message)[:500]}

    return RewardFunction(json_schema, sandboxed=False)


def find_code(text: str) -> str:
    """Find the last fenced block of a text, or return all of it."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def code_passes(*, limits: SandboxLimits | None = None, workers: int = 4) -> RewardFunction:
    """Return the share of the ground truth's tests that the response's code passes, run in a separate process.

    The ground truth is a list of statements (``"assert add(1, 2) == 3"``), each run with the code's names,
    or of ``{"input": …, "output": …}`` for whole programs (standard input and output); a single test needs no list.
    The expected results are never in the process that runs the code: see
    :class:`~gradwire.rl.rewards.PolicyProgram`. Code that runs longer than ``limits.time_s`` fails the remaining tests.
    """
    limits = limits or SandboxLimits()
    program = {
        "time_s": limits.time_s, "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes,
        "open_files": limits.open_files, "result_bytes": limits.result_bytes, "network": limits.network,
        "isolation": limits.isolation or "required",
    }  # fmt: skip

    def code_passes(response: str, ground_truth: Any) -> dict[str, Any]:
        return share_of_passed(find_code(response), ground_truth, program)

    # The tests need time of their own, and starting the program needs processes.
    around = replace(limits, time_s=limits.time_s + 5, max_processes=limits.max_processes + 4)
    return RewardFunction(code_passes, limits=around, workers=workers)
