"""The rows that a conversation is learned in: each learned turn stands behind the prompt that a sampler gets for it.

A template may write an answer in the history otherwise than the model writes it: without its reasoning, or behind
another prompt. Such a turn has a row of its own, which ends with it.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradwire_proto import chat
from gradwire_proto.chat import Message, Span
from tokenizers import Encoding

from gradwire_server.tokenizing.chat_template import REASONING

_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
NO_PROMPT = "an answer is not learned: the template has no prompt for it, as for one before the first question"
REWRITTEN = (
    "an earlier answer is not learned: in the history the template writes it, or what is before it, otherwise than for"
    " the model that answers"
)
UNWRITTEN = "the template writes nothing of this answer"
CLOSED = "the reasoning of an answer is left out: the prompt for it says that there is none"
EMPTY = "an answer without reasoning is learned behind an empty one, which the prompt for it begins"


class TurnError(Exception):
    """A turn that cannot be learned; the message says why.

    Attributes:
        index: Index of the message.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclass
class Row:
    """A text with learned turns.

    Attributes:
        text: The template's text, or one put together of its pieces.
        count: Messages of the conversation that it holds.
        messages: The messages that the template wrote; None for a text that is put together.
        spans: The learned spans of the text.
        starts: Where learned turns begin.
        last: Index of the last message that is learned.
    """

    encode: Callable[[str], Encoding]
    text: str
    count: int
    messages: Sequence[Message] | None = None
    spans: set[Span] = field(default_factory=set)
    starts: set[int] = field(default_factory=set)
    last: int = -1

    @cached_property
    def encoding(self) -> Encoding:
        """The tokens of the whole text."""
        return self.encode(self.text)

    def divides(self, at: int) -> bool:
        """Whether a token reaches over this place: behind a prompt that ends there, other tokens are sampled."""
        offsets = self.encoding.offsets
        number = bisect_left(offsets, at, key=lambda each: each[0]) - 1
        return number >= 0 and offsets[number][1] > at


class LearnedTurns:
    """Finds the rows of a conversation.

    Args:
        messages: As :func:`gradwire_proto.chat.plain` gives them.
        text: The template's text for all of them.
        marks: The spans that the template marks in a text that it wrote; None for a template without such marks.
        sampled: Where sampled tokens stand in the text: message -> span. They are the turn, whatever the template
            writes.
        unroll: Whether a turn may have a row of its own; otherwise one that needs it is not learned.

    Attributes:
        rows: The rows, that of the whole conversation first, even if nothing of it is learned.
        remarks: Sentences for a person on the rows.
    """

    def __init__(
        self,
        form: chat.Chat,
        encode: Callable[[str], Encoding],
        messages: Sequence[Message],
        text: str,
        marks: Mapping[str, list[Span]] | None,
        sampled: Mapping[int, Span],
        *,
        unroll: bool,
    ) -> None:
        self._form, self._encode, self._messages = form, encode, messages
        self._marks, self._sampled, self._unroll = marks, sampled, unroll
        self.rows = [Row(encode, text, len(messages), messages)]
        self.remarks: list[str] = []

    @property
    def learned(self) -> list[Row]:
        """The rows of which something is learned, that with the last learned turn first; at least one."""
        return sorted((row for row in self.rows if row.spans), key=lambda row: -row.last) or self.rows[:1]

    def learn(self, index: int) -> None:
        """Learn an assistant's message; later messages come first.

        Raises:
            TurnError: It stands behind its prompt in no text that the template writes.
        """
        prompt = self._form.tried(self._messages[:index], True)
        if prompt is None:
            self.remarks.append(NO_PROMPT)
            return
        start, end = self._sampled.get(index, (-1, -1))
        if self.rows[0].text[: max(0, start)] == prompt:
            self._add(self.rows[0], index, start, end)
            return
        own = self._messages[: index + 1]
        through = self._form.tried(own, False) or ""
        if through.startswith(prompt):
            for row in self.rows:
                found = self._end(row.text, through) if row.text.startswith(prompt) else None
                if found is not None and not (row.starts and row.divides(len(prompt))):  # the tokens of a later prompt
                    self._add(row, index, len(prompt), found)
                    return
        if not self._unroll:
            self.remarks.append(REWRITTEN)
            return
        if through.startswith(prompt):
            row = Row(self._encode, through, index + 1, own)
        else:
            text = self._behind(prompt, through, index)
            if text is None:
                raise TurnError(index, _difference(prompt, through))
            row = Row(self._encode, text, index + 1)
        self.rows.append(row)
        self._add(row, index, len(prompt), self._end(row.text, row.text) or len(row.text))

    def _add(self, row: Row, index: int, start: int, end: int) -> None:
        written = row.text[start:end]
        for word in self._form.specials.values():
            written = written.replace(word, "")
        if not written.strip() and index not in self._sampled:
            if self._unroll:
                raise TurnError(index, f"{UNWRITTEN}: it has no place for calls of tools, or for reasoning alone")
            self.remarks.append(f"an answer is not learned: {UNWRITTEN}")
            return
        row.starts.add(start)
        row.last = max(row.last, index)
        if self._marks is None or (row.messages is None and row.text not in self._marks):
            row.spans.add((start, end))
            return
        row.spans |= {(max(a, start), b) for a, b in self._marks.get(row.text, ()) if a < end and start < b}

    def _end(self, text: str, through: str) -> int | None:
        """Where the turn that ends one text ends in another that begins with it: behind the token that ends it, as far
        as they share them, since some templates write one more at the end; None if the other begins otherwise."""
        specials = [word for word in self._form.specials.values() if word]
        while not text.startswith(held := through.rstrip()):
            last = max((word for word in specials if held.endswith(word)), key=len, default="")
            through = held[: len(held) - len(last)].rstrip()
            if not last or not through.endswith(tuple(specials)):
                return None
        return len(held)

    def _behind(self, prompt: str, through: str, index: int) -> str | None:
        """A text that begins with the prompt and goes on with the turn as the model writes it; None if there is none.

        Args:
            through: The template's text up to the turn, behind another prompt.
        """
        before, message = self._messages[:index], self._messages[index]
        content = message.get("content")
        content = content if isinstance(content, str) else ""
        bare = {key: value for key, value in message.items() if key not in REASONING}

        def written(changed: Message) -> str:
            return self._form.tried([*before, changed], False) or ""

        for changed in (bare, {**bare, "content": _THOUGHT.sub("", content, count=1)}):
            if changed != message and (text := written(changed)).startswith(prompt):
                self.remarks.append(CLOSED)
                return text
        probe = f"probe{secrets.token_hex(8)}"
        head, found, tail = written({**bare, "content": probe}).partition(probe)
        opening = prompt[len(head) :].rstrip() if prompt.startswith(head) else ""
        if found and opening and content.lstrip().startswith(opening):  # which the template takes away
            return prompt + content.lstrip()[len(opening) :].lstrip("\n") + tail
        if bare == message:
            text = written({**bare, "reasoning_content": probe})
            if probe in text and (text := text.replace(probe, "", 1)).startswith(prompt):
                self.remarks.append(EMPTY)
                return text
        return self._spliced(prompt, through, index)

    def _spliced(self, prompt: str, through: str, index: int) -> str | None:
        """The turn behind its prompt, where they differ only before the assistant's turn is opened."""
        before = self._form.tried(self._messages[:index], False)
        if before is None or not prompt.startswith(before):
            return None
        try:
            turn = chat.find_turn(self._form, self._messages[: index + 1], through, index)
        except chat.UnclearTurnError:
            return None
        if not through[: turn.start].endswith(prompt[len(before) :]):
            return None
        return prompt + through[turn.start : turn.end]


def _difference(prompt: str, written: str) -> str:
    same = next((at for at, (a, b) in enumerate(zip(prompt, written)) if a != b), min(len(prompt), len(written)))
    start = max(0, same - 20)
    return (
        f"the prompt for this answer ends with {prompt[start:][-60:]!r}, and the template writes it behind"
        f" {written[start : same + 20]!r}: give the answer the reasoning that the prompt begins, in its content as the"
        " model writes it, or set the template's variables"
    )
