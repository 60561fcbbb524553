"""The turns of one session: which of them a conversation goes on with, and where a prompt left an earlier one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.chat import Message, read_json
from gradwire_proto.recognition import Answers, Asked, digest_of
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import sessions_pb2 as sessions

Ids = npt.NDArray[np.uint32]
KEPT_ROWS = 4
"""Turns whose whole prompts and responses are kept together; others are put together of their parents' again."""


@dataclass(frozen=True)
class Place:
    """Where a prompt stands in the forest.

    Attributes:
        parent: Number of a turn; -1 for none.
        shared: Tokens of that turn's prompt and response with which the prompt begins.
        fork: Why these are not all; empty where they are.
    """

    parent: int = -1
    shared: int = 0
    fork: str = ""


class Transcript:
    """The turns of a session, in memory."""

    def __init__(self, turns: Sequence[journal_pb2.StoredTurn] = ()) -> None:
        self.turns: list[journal_pb2.StoredTurn] = []
        self.answers = Answers()
        self._by_asked: defaultdict[bytes, list[int]] = defaultdict(list)
        self._sizes: dict[bytes, int] = {}
        self._systems: set[str] = set()
        self._rows: dict[int, Ids] = {}
        for turn in turns:
            self.add(turn)

    def add(self, stored: journal_pb2.StoredTurn) -> None:
        """Add the next turn."""
        turn, number = stored.turn, len(self.turns)
        self.turns.append(stored)
        self.answers.add(_message(turn), turn.response_ids, stored.asked, [stored.stop] if stored.stop else [])
        self._by_asked[stored.asked].append(number)
        self._sizes |= {each: stored.chain_start + place for place, each in enumerate(stored.chain)}
        self._systems.add(turn.system_digest)

    def row(self, number: int) -> Ids:
        """The prompt of a turn and its response: ``[tokens]``."""
        missing = []
        while number >= 0 and number not in self._rows:
            missing.append(number)
            number = self.turns[number].turn.parent
        row = self._rows[number] if number >= 0 else np.zeros(0, np.uint32)
        for number in reversed(missing):
            turn = self.turns[number].turn
            own = [np.array(each, np.uint32) for each in (turn.prompt_suffix, turn.response_ids)]
            row = np.concatenate([row[: turn.shared], *own])
        if missing:
            self._rows[number] = row
            while len(self._rows) > KEPT_ROWS:
                del self._rows[next(iter(self._rows))]
        return row

    def prompt(self, number: int) -> Ids:
        """The prompt of a turn: ``[tokens]``."""
        return self.row(number)[: self.turns[number].turn.prompt_tokens]

    def place(self, ids: Ids, asked: Asked | None = None, reason: str = "") -> Place:
        """Where a prompt stands: at the turn with whose prompt and response it shares most.

        Args:
            asked: The conversation; None for a prompt that is not a conversation.
            reason: Why it may leave an earlier turn, if that is known.
        """
        best, shared = -1, 0
        for number in self._leaves():
            row = self.row(number)
            size = min(len(row), len(ids))
            differs = np.flatnonzero(row[:size] != ids[:size])
            same = int(differs[0]) if len(differs) else size
            if same and same >= shared:
                best, shared = number, same
        leaf = best
        while best >= 0 and self.turns[best].turn.parent >= 0 and shared <= self.turns[best].turn.shared:
            best = self.turns[best].turn.parent
        if best < 0:
            return Place()
        if shared == len(self.row(best)):
            return Place(best, shared)
        return Place(best, shared, reason or self._reason(leaf, asked))

    def again(self, digest: bytes, ids: Ids) -> Place | None:
        """Where a prompt stands that was answered already, at its newest answer; None for a new one."""
        for number in reversed(self._by_asked.get(digest, ())):
            if np.array_equal(self.prompt(number), ids):
                return Place(number, len(ids), "retry")
        return None

    def _leaves(self) -> list[int]:
        parents = {stored.turn.parent for stored in self.turns if not stored.turn.fork}
        return [stored.turn.number for stored in self.turns if stored.turn.number not in parents]

    def _reason(self, leaf: int, asked: Asked | None) -> str:
        """Why a conversation leaves the one of a turn."""
        if asked is None:
            return "other"
        known = self.known(asked)
        if system_digest(asked.messages) not in self._systems:
            return "system"
        if known == 0:
            return "tools"
        size = len(asked.chain) - 1
        return "compaction" if known - 1 < size < self.turns[leaf].num_messages else "edit"

    def known(self, asked: Asked) -> int:
        """Number of first messages shared with an earlier conversation, the settings counted as one; 0 for none."""
        return next((at for at in range(len(asked.chain), 0, -1) if asked.chain[at - 1] in self._sizes), 0)

    def used(self) -> list[bool]:
        """Whether each turn's answer was used: a later conversation has it, or nothing was asked in its place."""
        later = {number for stored in self.turns for number in (*stored.seen, *_continued(stored))}
        newest = {stored.asked: stored.turn.started_at for stored in self.turns}
        return [stored.turn.number in later or newest[stored.asked] == stored.turn.started_at for stored in self.turns]


def _continued(stored: journal_pb2.StoredTurn) -> tuple[int, ...]:
    return () if stored.turn.fork else (stored.turn.parent,)


def _message(turn: sessions.SessionTurn) -> dict[str, Any]:
    """The message that a turn's answer is, as chat templates take it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls_json:
        message["tool_calls"] = [_parsed(call) for call in json.loads(turn.tool_calls_json)]
    return message


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        arguments = read_json(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def system_of(messages: Sequence[Message]) -> str:
    """The system message that a conversation begins with; empty for none."""
    if not messages or messages[0].get("role") != "system":
        return ""
    content = messages[0].get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def system_digest(messages: Sequence[Message]) -> str:
    """Its digest in hex; empty for none."""
    system = system_of(messages)
    return digest_of(system).hex() if system else ""
