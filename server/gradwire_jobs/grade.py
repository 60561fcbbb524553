"""``python -m gradwire_jobs.grade``: validate the grader on stdin and run it on a sample, or check a recipe's settings.

Graders are what a stranger wrote, so this is a process of its own, of bounded memory. In and out go lines of JSON: the
request; questions to models, each with its answer on the line that follows; and what was found.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict
from typing import Any

from gradwire.recipes.command import settings_of
from gradwire.recipes.settings import SettingsError
from gradwire.rl.rewards.graders import GraderError, Multi, Question, Sample, SampleError, grader_of
from gradwire.rl.rewards.graders.source import Python

MEMORY_BYTES = 4 << 30


class ParentJudge:
    """Has the process that started this one ask its models."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def answer(self, question: Question) -> str:
        async with self._turn:
            _tell({"question": asdict(question)})
            reply = json.loads(await asyncio.to_thread(sys.stdin.readline))
        if "error" in reply:
            raise SampleError("model_grader_server_error", reply["error"])
        return str(reply["text"])


def main() -> None:
    """Answer the request on stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _tell(asyncio.run(answered(json.loads(sys.stdin.readline()))))


async def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """``{"wrong": sentence}``, or the reward with what led to it."""
    try:
        if "recipe" in asked:
            settings_of(asked["recipe"], asked["settings"])
            return {}
        grader = grader_of(asked["grader"], judge=ParentJudge())
    except (GraderError, SettingsError) as error:
        return {"wrong": str(error)}
    for each in grader.graders.values() if isinstance(grader, Multi) else (grader,):
        if isinstance(each, Python) and (refusal := await each.refusal()):
            return {"wrong": f"python graders are {refusal}"}
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


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
