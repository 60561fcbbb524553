"""Graders and settings of jobs, validated and tried in a process of their own: the front imports no recipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from gradwire_http.child_processes import start_process

from gradwire_server.access.turns import Turns
from gradwire_server.errors import ServiceError, invalid

log = logging.getLogger(__name__)

AT_ONCE, OF_KEY = 4, 2
PATIENCE_S = 60.0
MAX_LINE = 1 << 24
Ask = Callable[[dict[str, Any]], Awaitable[str]]
"""Puts a question of a grader, the fields of ``gradwire.rl.rewards.graders.Question``, to a model."""
_turns = Turns(OF_KEY, AT_ONCE)


async def validate(owner: str, grader: Any, field: str) -> None:
    """Check that a grader of a key's can be built.

    Raises:
        ServiceError: INVALID_ARGUMENT with the reason.
    """
    await _answer(owner, {"grader": grader}, field, None)


async def check_settings(owner: str, recipe: str, settings: dict[str, Any], field: str) -> None:
    """Check that a recipe takes settings.

    Raises:
        ServiceError: INVALID_ARGUMENT with the reason.
    """
    await _answer(owner, {"recipe": recipe, "settings": settings}, field, None)


async def run(owner: str, grader: Any, sample: str, item: dict[str, Any], field: str, ask: Ask) -> dict[str, Any]:
    """Grade a sample: its ``reward``, the ``scores`` of several graders, and what went wrong, if anything did.

    Raises:
        ServiceError: INVALID_ARGUMENT for what is no grader.
    """
    return await _answer(owner, {"grader": grader, "sample": sample, "item": item}, field, ask)


async def _answer(owner: str, asked: dict[str, Any], field: str, ask: Ask | None) -> dict[str, Any]:
    async with _turns.turn(owner):
        process = await start_process(
            sys.executable, "-m", "gradwire_jobs.grade", limit=MAX_LINE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, env={k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")},
        )  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await _talked(process, asked, ask)
        except (ValueError, TimeoutError, ConnectionError):
            log.warning("a check ended without an answer: exit code %s", process.returncode)
            answer = {"wrong": f"its check gave no answer within {PATIENCE_S:.0f} s"}
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if wrong := answer.get("wrong"):
        raise invalid(wrong, field)
    return answer


async def _talked(process: asyncio.subprocess.Process, asked: dict[str, Any], ask: Ask | None) -> dict[str, Any]:
    """Ask the process, and answer its questions until it has found out."""
    assert process.stdin is not None and process.stdout is not None
    said: dict[str, Any] = asked
    while True:
        process.stdin.write(json.dumps(said).encode() + b"\n")
        await process.stdin.drain()
        reply: dict[str, Any] = json.loads(await process.stdout.readline())
        if "question" not in reply or ask is None:
            return reply
        try:
            said = {"text": await ask(reply["question"])}
        except ServiceError as error:
            said = {"error": error.error.message}
