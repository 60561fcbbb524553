"""A stand-in for a run's rollout sessions: calls are recorded as a server would, of answers that a test scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from gradwire.rollout import Main, Rollout, Turn

Answer = Callable[[str], str]


class ScriptedSession:
    """One session; :meth:`call` is what an agent does with its client."""

    key = "gws-scripted"
    url = "http://127.0.0.1:9/sessions/s"

    def __init__(self, number: int, answer: Answer, options: dict[str, Any]) -> None:
        self.session_id, self.options, self._answer = f"s{number}", options, answer
        self.turns: list[Turn] = []
        self.ended = ""
        self.rewards: tuple[float, dict[int, float]] | None = None

    def call(self, text: str, **about: Any) -> str:
        """Answer a prompt that goes on with everything before it, one token a character."""
        if len(self.turns) >= self.options["limits"].max_turns:
            self.ended = self.ended or "it has had its turns (max_turns)"
            raise PermissionError("the session has ended")
        said = self._answer(text)
        codes = [np.frombuffer(each.encode("latin-1"), np.uint8).astype(np.int64) for each in (text, said)]
        turn = Turn(
            len(self.turns), codes[0], codes[1], np.full(len(said), -0.5, np.float32), np.zeros(len(said), np.int64),
            len(self.turns) - 1, text=said, messages=({"role": "user", "content": text},),
        )  # fmt: skip
        self.turns.append(replace(turn, **about))
        return said

    def environment(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key, "ANTHROPIC_BASE_URL": self.url}

    async def rollout(self, main: Main = "longest") -> Rollout:
        return Rollout(self.session_id, tuple(self.turns), end_reason=self.ended, main=main)

    async def end(self, reason: str = "done", reward: float | None = None, turn_rewards: Any = None) -> None:
        self.ended = self.ended or reason
        if reward is not None:
            self.rewards = (reward, dict(turn_rewards))


class ScriptedSessions:
    """An inference module of which environments with a loop of their own need the sessions alone."""

    version = 0
    codec: Any = None

    def __init__(self, answer: Answer = str.upper, calls: int = 0) -> None:
        self._answer, self._calls = answer, calls
        self.made: list[ScriptedSession] = []

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version

    async def rollout_session(self, **options: Any) -> ScriptedSession:
        """Make a session; with ``calls`` it has some already, as if a program had made them."""
        session = ScriptedSession(len(self.made), self._answer, options)
        self.made.append(session)
        for _ in range(self._calls):
            session.call("go")
        return session
