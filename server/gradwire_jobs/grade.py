"""``python -m gradwire_jobs.grade``: validate the grader on stdin, and run it on a sample if there is one.

Graders are what a stranger wrote, so this is a process of its own. In and out go JSON objects.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from gradwire.rl.rewards.graders import GraderError, Multi, Sample, SampleError, grader_of


def main() -> None:
    """Answer the request on stdin."""
    json.dump(asyncio.run(answered(json.load(sys.stdin))), sys.stdout)


async def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """``{"wrong": sentence}``, or the reward with what led to it."""
    try:
        grader = grader_of(asked["grader"])
    except GraderError as error:
        return {"wrong": str(error)}
    if "sample" not in asked:
        return {}
    sample, began = Sample(asked["sample"], asked["item"]), time.monotonic()
    scores: dict[str, float] = {}
    reward, kind, error_text = 0.0, "", ""
    try:
        if isinstance(grader, Multi):
            scores = await grader.scores(sample)
            reward = grader.combined(scores)
        else:
            reward = await grader.grade(sample)
    except SampleError as error:
        kind, error_text = error.kind, str(error)
    finally:
        grader.close()
    seconds = time.monotonic() - began
    return {"name": grader.name, "reward": reward, "scores": scores, "error": kind, "details": error_text} | {
        "seconds": seconds
    }


if __name__ == "__main__":
    main()
