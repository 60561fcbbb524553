"""A written conversation cut into pieces: which text each message became, and where sampled tokens take its place.

A chat template turns messages into one text and says nothing about which part of it came from which message. Here each
message's part is found by writing the conversation again without what follows it, and where that changes what came
before (templates that drop earlier reasoning), by writing it with another content in the message's place.

Functions on text only: the server brings its template and tokenizer, the client a tokenizer object of its user's.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = Mapping[str, Any]
Span = tuple[int, int]
"""First character, and the one behind the last."""
History = Literal["as written", "unless dropped", "kept"]
SAMPLED = "token_ids"
"""Key of an assistant's message: the tokens that were sampled for it, kept where its text is."""
KNOWN_ROLES = ("system", "user", "assistant")
_HALVES = re.compile(r"[\ud800-\udfff]")
_MAY_HAVE_HALVES = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def encodable(text: str) -> str:
    """A text with U+FFFD for each half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return _HALVES.sub("\ufffd", text)


def read_json(text: str) -> Any:
    """The value of a JSON text whose texts are :func:`encodable`: models write halves of pairs as escapes.

    Raises:
        ValueError: The text is not valid JSON.
        RecursionError: It is nested too deep.
    """
    value = json.loads(text)
    if not _MAY_HAVE_HALVES.search(text):
        return value
    return json.loads(encodable(json.dumps(value, ensure_ascii=False)))


class TemplateError(Exception):
    """A template cannot write these messages; the message is the template's own."""


class UnclearTurnError(Exception):
    """Nothing tells which part of the written conversation is a message's.

    Attributes:
        index: of the message.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the template does not show where message {index} begins and ends")
        self.index = index


@dataclass(frozen=True)
class Chat:
    """A template with its settings, and the special tokens of its tokenizer.

    Attributes:
        write: ``(messages, add_generation_prompt) -> text``; raises :class:`TemplateError`.
        specials: id -> text of each special token.
        decode: token ids -> text, special tokens left out.
    """

    write: Callable[[Sequence[Message], bool], str]
    specials: Mapping[int, str]
    decode: Callable[[Sequence[int]], str]

    def tried(self, messages: Sequence[Message], add_generation_prompt: bool) -> str | None:
        """The text, or None where the template refuses these messages."""
        try:
            return self.write(messages, add_generation_prompt) if messages else None
        except TemplateError:
            return None


@dataclass(frozen=True)
class Turn:
    """Where a message stands in the text of a conversation.

    Attributes:
        start: first character that the message's author writes, after the generation prompt.
        stop: end of the content.
        end: end of the token that ends the turn; ``stop`` where the template writes none.
    """

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A stretch of the conversation: text to encode, or tokens that stand in its place.

    Attributes:
        start: place of its first character.
        text: to encode; empty for tokens.
        token_ids: sampled tokens; None for text.
        message: of the sampled tokens; -1 for text.
    """

    start: int
    text: str
    token_ids: tuple[int, ...] | None = None
    message: int = -1


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates take them: without sampled tokens, and without keys whose value is None."""
    return [
        {key: value for key, value in message.items() if value is not None and key != SAMPLED} for message in messages
    ]


def left_out(chat: Chat, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> int | None:
    """A message whose role the template does not know and leaves out without a word; None if there is none.

    Of each role but system, user and assistant, which templates know, the last message with a content is tried.

    Args:
        messages: as :func:`plain` gives them.
    """
    last = {message["role"]: index for index, message in enumerate(messages) if message.get("content")}
    for index in sorted(index for role, index in last.items() if role not in KNOWN_ROLES):
        probe = f"probe{secrets.token_hex(8)}"
        changed = [*messages[:index], _with_content(messages[index], probe), *messages[index + 1 :]]
        written = chat.tried(changed, add_generation_prompt)
        if written is not None and probe not in written:
            return index
    return None


def find_turn(
    chat: Chat, messages: Sequence[Message], text: str, index: int, *, add_generation_prompt: bool = False
) -> Turn:
    """Find a message in the text of its conversation.

    Args:
        messages: as :func:`plain` gives them.
        text: what the template writes for all of them.

    Raises:
        UnclearTurnError: where the template writes the others differently once this message is another.
    """
    if messages[index].get("role") == "assistant":
        before = chat.tried(messages[:index], True)
        through = chat.tried(messages[: index + 1], False)
        if before is not None and through is not None and text.startswith(through) and through.startswith(before):
            return _with_end(chat, text, len(before), len(through))
    return _find_by_probe(chat, messages, text, index, add_generation_prompt)


def _find_by_probe(chat: Chat, messages: Sequence[Message], text: str, index: int, add_generation_prompt: bool) -> Turn:
    probe = f"probe{secrets.token_hex(8)}"
    message = _with_content(messages[index], probe)
    for put in ({key: message[key] for key in ("role", "content")}, message):
        changed = chat.tried([*messages[:index], put, *messages[index + 1 :]], add_generation_prompt)
        if changed is not None and probe in changed:
            break
    else:
        raise UnclearTurnError(index)
    at = changed.index(probe)
    after = changed[at + len(probe) :]
    same = _common(text, changed[:at])
    opening, written, closing = _frame(chat, messages[:index], put, probe)
    begun = next((size for size in range(len(opening), 0, -1) if changed[:at].endswith(opening[:size])), 0)
    stop = len(text) - len(after)
    if same < at - begun or stop < same or not text.endswith(after):
        raise UnclearTurnError(index)
    start = min(at - begun + min(begun, written), same)
    end = stop + (_shared_end(chat, closing, after) if closing else len(_special_at(chat, after)))
    return _with_end(chat, text, start, end, stop)


def _shared_end(chat: Chat, closing: str, after: str) -> int:
    """How much of what a message ends with at the end of a conversation ends it here, too: all, or up to a whole
    special token, since some templates write one more behind the last message."""
    shared = closing[: _common(closing, after)]
    if shared == closing:
        return len(shared.rstrip())
    return max(
        (shared.rfind(word) + len(word) for word in chat.specials.values() if word and word in shared), default=0
    )


def _frame(chat: Chat, before: Sequence[Message], put: Message, probe: str) -> tuple[str, int, str]:
    """Return the template's text before a message, its number of characters in the prompt, and the text behind."""
    other = f"other{secrets.token_hex(8)}"
    known = [*before[:-1], _with_content(before[-1], other)] if before else []
    alone = chat.tried([*known, put], False)
    if alone is None or probe not in alone or (known and other not in alone):
        return "", 0, ""
    opening, _, closing = alone.partition(other)[2 if known else 0].partition(probe)
    prompt = chat.tried(known, True) if put.get("role") == "assistant" else None
    if prompt is None:
        return opening, len(opening), closing
    prompt = prompt.partition(other)[2]
    agreed = _common(prompt, opening)
    return opening, agreed if agreed in (len(prompt), len(opening)) else len(opening), closing


def _with_content(message: Message, text: str) -> Message:
    content = text if isinstance(message.get("content", ""), str) else [{"type": "text", "text": text}]
    return {**message, "content": content}


def _with_end(chat: Chat, text: str, start: int, end: int, stop: int | None = None) -> Turn:
    """The turn whose text, up to the next one, is ``start`` to ``end``; blanks behind its end token are not its own."""
    held = text[start:end].rstrip()
    last = max((word for word in chat.specials.values() if word and held.endswith(word)), key=len, default="")
    until = start + len(held)
    if not last:
        return Turn(start, until, until) if stop is None else Turn(start, stop, max(stop, until))
    return Turn(start, until - len(last) if stop is None else min(stop, until - len(last)), until)


def _special_at(chat: Chat, text: str) -> str:
    return max((word for word in chat.specials.values() if word and text.startswith(word)), key=len, default="")


def _common(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    return next(at for at, (a, b) in enumerate(zip(one, other)) if a != b)


def cut(
    chat: Chat, messages: Sequence[Message], *, add_generation_prompt: bool = False, history: History = "as written"
) -> list[Piece]:
    """The conversation as pieces, with the sampled tokens of messages that have them.

    A message's tokens are kept as far as the template keeps its text: whole, or from behind the reasoning that it
    drops. Where its content is no longer what was sampled, or a token reaches over that border, its text is encoded.

    Args:
        history: ``"unless dropped"``: a message's tokens stand for it in whatever form the template writes it, unless
            that drops the reasoning. ``"kept"``: they do also then, behind the prompt that the model had.

    Raises:
        TemplateError: where the template cannot write the conversation.
    """
    written = plain(messages)
    text = chat.write(written, add_generation_prompt)
    pieces: list[Piece] = []
    at = 0
    for index, message in enumerate(messages):
        sampled = message.get(SAMPLED)
        if sampled is None or message.get("role") != "assistant":
            continue
        try:
            turn = find_turn(chat, written, text, index, add_generation_prompt=add_generation_prompt)
        except UnclearTurnError:
            continue
        ids = [int(token) for token in sampled]
        whole = history == "kept" or (history != "as written" and has_reasoning(message, text[turn.start : turn.end]))
        kept = ids if whole else _kept(chat, ids, text[turn.start : turn.stop])
        if kept is None:
            continue
        opening = _opening(chat, written[:index], text[at : turn.start]) if history == "kept" else ""
        pieces += [Piece(at, text[at : turn.start] + opening), Piece(turn.start, "", tuple(kept), index)]
        at = turn.end if kept and kept[-1] in chat.specials else turn.stop
        if whole:
            at = len(text) - len(behind(chat, text, (turn.start, turn.end), kept[-1] if kept else None))
    pieces.append(Piece(at, text[at:]))
    return [piece for piece in pieces if piece.text or piece.token_ids]


def has_reasoning(message: Message, written: str) -> bool:
    """Whether what a template wrote of a message has its reasoning, if it has any. Blanks make no difference."""
    reasoning = message.get("reasoning_content")
    return not isinstance(reasoning, str) or _bare(reasoning) in _bare(written)


def turn_span(chat: Chat, messages: Sequence[Message], text: str, index: int) -> Span:
    """A span that ends where an assistant's message ends, with the token that ends it, in a conversation with an opened
    next turn; it begins before what the message ends with, and not before the message if that is empty.

    Args:
        messages: as :func:`plain` gives them.
        text: what the template writes for all of them.

    Raises:
        UnclearTurnError: as for :func:`find_turn`.
    """
    through = chat.tried(messages[: index + 1], False)
    if through is not None and text.startswith(through):
        said = [messages[index].get(name) for name in ("content", "tool_calls", "reasoning_content")]
        empty = not any(each.strip() if isinstance(each, str) else each for each in said)
        start = len(chat.tried(messages[:index], True) or "") if empty else 0
        return start, max(start, len(through.rstrip()))
    turn = find_turn(chat, messages, text, index, add_generation_prompt=True)
    return turn.start, turn.end


def behind(chat: Chat, text: str, span: Span, last: int | None) -> str:
    """The text behind a turn, whose end token is in it unless it was sampled.

    Args:
        span: of the turn in the text, with the token that ends it.
        last: the last sampled token.
    """
    start, end = span
    held = text[start:end]
    closing = max((word for word in chat.specials.values() if word and held.endswith(word)), key=len, default="")
    if last is None or last not in chat.specials:
        return text[end - len(closing) :]
    rest = text[end:]
    return rest if closing else rest.removeprefix(chat.specials[last])


def _opening(chat: Chat, before: Sequence[Message], written: str) -> str:
    """Return the mark that opens the reasoning, where a prompt ends with it and the history leaves it out."""
    prompt, alone = chat.tried(before, True), chat.tried(before, False)
    if prompt is None or alone is None or not prompt.startswith(alone):
        return ""
    opened = prompt[len(alone) :]
    size = next((size for size in range(len(opened), 0, -1) if written.endswith(opened[:size])), 0)
    return opened[size:] if size else ""


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _kept(chat: Chat, sampled: list[int], written: str) -> list[int] | None:
    """The sampled tokens whose text the template wrote; None where it wrote another. Blanks make no difference."""
    wrote, text = _bare(written), _bare(chat.decode(sampled))
    if not wrote:
        return sampled if not text else None
    place = text.rfind(wrote)
    if place <= 0:
        return sampled if place == 0 or (text and wrote.endswith(text)) else None
    rest = text[place:]
    first = bisect_left(range(len(sampled)), -len(rest) + 1, key=lambda at: -len(_bare(chat.decode(sampled[at:])))) - 1
    return sampled[first:] if first >= 0 and _bare(chat.decode(sampled[first:])) == rest else None


def covered(offsets: Sequence[Span], spans: Sequence[Span], shift: int = 0) -> list[bool]:
    """For each token whether any of its text lies in a span; a token that reaches over a span's border counts.

    Args:
        offsets: of each token in its piece; blanks that a tokenizer leaves out of them belong to the token behind.
        spans: in order, none touching another.
        shift: the piece's place.
    """
    result, until, place = [], 0, 0
    for first, last in offsets:
        first, until = min(first, until), max(until, last)
        while place < len(spans) and spans[place][1] <= shift + first:
            place += 1
        result.append(place < len(spans) and shift + until > spans[place][0] and until > first)
    return result
