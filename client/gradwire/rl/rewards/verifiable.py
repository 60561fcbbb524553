"""Rewards that a rule decides: the last number, a pattern, a schema, tests that pass."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from gradwire.rl.extras import require
from gradwire.rl.rewards._sandbox.grading import share_of_passed
from gradwire.rl.rewards.functions import RewardFunction
from gradwire.rl.rewards.sandbox import SandboxLimits

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:json|python|py)?\s*\n(.*?)```", re.DOTALL)


def find_last_number(text: str) -> float | None:
    """The last number of a text (``1,234.5`` is one), or None."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def last_number(*, tolerance: float = 1e-6, format_score: float = 0.0) -> RewardFunction:
    """1 when the response's last number is the ground truth's last number, as GSM8K wants it.

    Args:
        tolerance: relative.
        format_score: for a response with a wrong number; one with none gets 0.
    """

    def last_number(response: str, ground_truth: Any) -> float:
        found, wanted = find_last_number(response), find_last_number(str(ground_truth))
        if wanted is None:
            raise ValueError(f"the ground truth {ground_truth!r} has no number")
        if found is None:
            return 0.0
        return 1.0 if abs(found - wanted) <= tolerance * max(1.0, abs(wanted)) else format_score

    return RewardFunction(last_number, sandboxed=False)


def regex_match(pattern: str | None = None, *, limits: SandboxLimits | None = None) -> RewardFunction:
    """1 when the pattern (by default the ground truth) is found in the response; sandboxed: patterns can run away."""
    if pattern is not None:
        re.compile(pattern)

    def regex_match(response: str, ground_truth: Any) -> float:
        return float(re.search(pattern if pattern is not None else str(ground_truth), response) is not None)

    return RewardFunction(regex_match, limits=limits)


def find_json(text: str) -> Any:
    """The JSON of a text: all of it, of its last fenced block, or from its first brace on.

    Raises:
        ValueError: when there is none.
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
    """1 when the response holds JSON of this schema (by default the ground truth's); needs ``jsonschema``.

    Args:
        schema: JSON schema.
        valid_json_score: for JSON that breaks the schema.
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
    """The last fenced block of a text, or all of it."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def code_passes(*, limits: SandboxLimits | None = None, workers: int = 4) -> RewardFunction:
    """The share of the ground truth's tests that the response's code passes, in a process of its own.

    The ground truth is a list of statements (``"assert add(1, 2) == 3"``), each with the names that the code defines,
    or of whole programs' ``{"input": …, "output": …}`` (standard input and output); one alone need be in no list.
    What the tests expect is never in the process that runs the code: see
    :class:`~gradwire.rl.rewards.PolicyProgram`. Code that runs longer than ``limits.time_s`` fails the tests that are
    left.
    """
    limits = limits or SandboxLimits()
    program = {
        "time_s": limits.time_s, "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes,
        "open_files": limits.open_files, "result_bytes": limits.result_bytes, "network": limits.network,
        "isolation": limits.isolation or "required",
    }  # fmt: skip

    def code_passes(response: str, ground_truth: Any) -> dict[str, Any]:
        return share_of_passed(find_code(response), ground_truth, program)

    # The tests take time of their own, and what starts the program takes processes.
    around = replace(limits, time_s=limits.time_s + 5, max_processes=limits.max_processes + 4)
    return RewardFunction(code_passes, limits=around, workers=workers)
