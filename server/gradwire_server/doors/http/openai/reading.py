"""An answer's text taken apart while it grows: reasoning, content, calls of tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from gradwire_server.doors.http.openai.reasoning_forms import ReasoningForm, reasoning_form_of
from gradwire_server.doors.http.openai.tools import certain_content, read_answer, read_forced

HEADER_CHARS = 200
"""Characters that the head of a message may have; what is longer is text."""


@dataclass(frozen=True)
class Form:
    """The form of an answer, as far as it is known before the answer begins.

    Attributes:
        template: The model's chat template.
        tools: Tools that may be called.
        forced: Tools of which one must be called; the answer is then that call.
        reasons: Whether the answer may begin with reasoning.
        begun: Whether the prompt ended within the reasoning.
        specials: Special tokens that the text shows, and that belong to nobody once it is taken apart.
    """

    template: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    forced: Sequence[Mapping[str, Any]] = ()
    reasons: bool = True
    begun: bool = False
    specials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """The new piece of an answer: text, and, at its end, the calls in OpenAI's form."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()


class AnswerReader:
    """Reads one answer, part by part.

    Attributes:
        state: ``"reasoning"`` while what comes is reasoning; ``"begin"`` until that is known.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self._reasoning = reasoning_form_of(form.template) if form.reasons and not form.forced else None
        self._pending, self._content, self._sent = "", "", 0
        self._fresh = True  # nothing but space has come since the reasoning began or ended
        self.state: Literal["begin", "reasoning", "content"] = "begin" if self._reasoning else "content"
        if self._reasoning and form.begun:
            self.state = "reasoning"

    def add(self, text: str) -> Read:
        """Add a part; what is returned stays true whatever follows."""
        reasoning = self._split(text, last=False)
        return Read(self._certain(), reasoning)

    def end(self) -> Read:
        """End the answer."""
        reasoning = self._split("", last=True)
        form = self._form
        content: str | None
        if form.forced:
            content, calls = None, read_forced(self._content, form.forced)
            content = None if calls else self._content
        elif form.tools:
            content, calls = read_answer(self._content, form.template, form.tools)
        else:
            content, calls = self._content, []
        return Read(self._new(without(content or "", form.specials)), reasoning, calls)

    def _certain(self) -> str:
        form = self._form
        if form.forced:
            return ""
        text = self._content
        if form.tools:
            text = certain_content(text, form.template, [str(tool["function"]["name"]) for tool in form.tools])
        return self._new(without(text[: len(text) - _begun_size(text, form.specials)], form.specials))

    def _new(self, whole: str) -> str:
        new = whole[self._sent :]
        self._sent += len(new)
        return new

    def _split(self, text: str, *, last: bool) -> str:
        """Move what has come to the content; returns what is reasoning."""
        form = self._reasoning
        if form is None:
            self._content += text
            return ""
        self._pending += text
        reasoning, before = "", -1
        while self._pending and before != len(self._pending):
            before = len(self._pending)
            if self.state == "reasoning":
                reasoning += self._take_reasoning(form, last)
            elif form.header is not None:
                self._take_messages(form, form.header, last)
            else:
                self._take_beginning(form, last)
        return reasoning

    def _take_beginning(self, form: ReasoningForm, last: bool) -> None:
        begun = self._pending.lstrip()
        if self.state == "begin":
            if begun.startswith(form.opens):
                self.state, self._pending, self._fresh = "reasoning", begun[len(form.opens) :], True
                return
            if form.opens.startswith(begun) and not last:
                return
            self.state, self._fresh = "content", False
        if self._fresh:  # behind the reasoning
            self._pending, self._fresh = begun, not begun
        self._content, self._pending = self._content + self._pending, ""

    def _take_reasoning(self, form: ReasoningForm, last: bool) -> str:
        if self._fresh:
            self._pending = self._pending.lstrip()
            self._fresh = not self._pending
        reasoning, rest = self._pending, ""
        if form.closes in reasoning:
            reasoning, _, rest = reasoning.partition(form.closes)
            self.state, self._fresh = "content", True
        elif not last:
            reasoning = reasoning[: len(reasoning) - _begun_size(reasoning, (form.closes, *self._form.specials))]
            reasoning, rest = reasoning.rstrip(), self._pending[len(reasoning.rstrip()) :]
        self._pending = rest
        return without(reasoning.rstrip(), self._form.specials)

    def _take_messages(self, form: ReasoningForm, header: re.Pattern[str], last: bool) -> None:
        marks = (form.closes, *(mark for mark in ("<|start|>", "<|channel|>") if mark != form.closes))
        pending = self._pending
        at = min((pending.find(mark) for mark in marks if mark in pending), default=-1)
        if at < 0:
            kept = 0 if last else _begun_size(pending, marks)
            self._content, self._pending = (
                self._content + pending[: len(pending) - kept],
                pending[len(pending) - kept :],
            )
            return
        self._content, pending = self._content + pending[:at], pending[at:]
        head = header.match(pending)
        if pending.startswith(form.closes):
            self._pending = pending[len(form.closes) :]
        elif head is not None:
            self._pending = pending[head.end() :]
            if head[1] == "analysis" and "to=" not in head[0]:
                self.state, self._fresh = "reasoning", True
            elif "to=" in head[0]:
                self._content += head[0]
        elif last or len(pending) > HEADER_CHARS:
            self._content, self._pending = self._content + pending, ""
        else:
            self._pending = pending


def whole(text: str, form: Form) -> Read:
    """All of an answer that has ended."""
    reader = AnswerReader(form)
    first, rest = reader.add(text), reader.end()
    return Read(first.content + rest.content, first.reasoning + rest.reasoning, rest.calls)


def without(text: str, specials: Collection[str]) -> str:
    """A text without the special tokens in it."""
    return _pattern(tuple(specials)).sub("", text) if specials else text


@lru_cache(maxsize=16)
def _pattern(specials: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))


@lru_cache(maxsize=16)
def _firsts(marks: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Characters with which marks begin, and how long a beginning may be."""
    return frozenset(mark[0] for mark in marks), max(map(len, marks), default=1) - 1


def _begun_size(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text with which one of the marks may begin."""
    firsts, longest = _firsts(marks)
    for place in range(max(0, len(text) - longest), len(text)):
        if text[place] in firsts and any(mark.startswith(text[place:]) for mark in marks):
            return len(text) - place
    return 0
