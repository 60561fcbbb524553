"""Graders of reinforcement jobs, validated and tried in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

AT_ONCE = 4
PATIENCE_S = 60.0
_places = asyncio.Semaphore(AT_ONCE)


async def validate(grader: Any, field: str) -> None:
    """Check that a grader can be built.

    Raises:
        ServiceError: INVALID_ARGUMENT with the reason.
    """
    await _answer({"grader": grader}, field)


async def run(grader: Any, sample: str, item: dict[str, Any], field: str) -> dict[str, Any]:
    """Grade a sample: its ``reward``, the ``scores`` of several graders, and what went wrong, if anything did.

    Raises:
        ServiceError: INVALID_ARGUMENT for what is no grader.
    """
    return await _answer({"grader": grader, "sample": sample, "item": item}, field)


async def _answer(asked: dict[str, Any], field: str) -> dict[str, Any]:
    async with _places:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gradwire_jobs.grade",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, env={k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")},
        )  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):
                told, _ = await process.communicate(json.dumps(asked).encode())
            answer: dict[str, Any] = json.loads(told)
        except (ValueError, TimeoutError):
            log.warning("a grader ended without an answer: exit code %s", process.returncode)
            answer = {"wrong": f"the grader gave no answer within {PATIENCE_S:.0f} s"}
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if wrong := answer.get("wrong"):
        raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, wrong, field=field)
    return answer
