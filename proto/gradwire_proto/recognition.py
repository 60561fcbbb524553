"""Keys that recognize an answer, a message and a conversation when an agent or an environment sends them back.

Agents change what they were given: they drop the reasoning, trim texts, merge blocks, and write the arguments of calls
with other blanks and another order of keys. What they keep is the ids of the calls, or the text and the arguments.

The server recognizes the answers of a session so, and the client those of an episode.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_proto.chat import Message, read_json


@dataclass(frozen=True)
class Asked:
    """A conversation as it is read.

    Attributes:
        messages: The messages, with recognized answers as the model gave them.
        texts: The same as JSON.
        seen: The answers that were recognized: index of the message -> number.
        goes_on: The last of these up to which the conversation is the one that was asked and answered: its number, and
            the index of its message; None for a conversation that none begins.
        chain: Digests of the conversation's beginnings: its settings alone, then with each message.
    """

    messages: Sequence[Message]
    texts: Sequence[str]
    seen: Mapping[int, int]
    goes_on: tuple[int, int] | None
    chain: Sequence[bytes]


@dataclass(frozen=True)
class _Answer:
    """An answer as chat templates take it, the same as JSON, and what it is recognized by."""

    message: Message
    text: str
    key: bytes
    token_ids: Sequence[int]
    asked: bytes


class Answers:
    """The answers of one session or episode."""

    def __init__(self) -> None:
        self._answers: list[_Answer] = []
        self._by_call: dict[str, int] = {}
        self._by_key: defaultdict[bytes, list[int]] = defaultdict(list)

    def add(self, message: Message, token_ids: Sequence[int], asked: bytes, stops: Iterable[str] = ()) -> None:
        """Add the next answer; they are numbered from 0.

        Args:
            message: As chat templates take it.
            token_ids: The tokens that were sampled for it.
            asked: Digest of the conversation that it answers: the last of :attr:`Asked.chain`.
            stops: Strings before which it ended, and which may be put back.
        """
        calls, number = message.get("tool_calls", ()), len(self._answers)
        answer = _Answer(message, json.dumps(message), answer_key(message["content"], calls), token_ids, asked)
        self._answers.append(answer)
        self._by_call |= dict.fromkeys(call_ids(message), number)
        for key in {answer.key, *(answer_key(message["content"] + stop, calls) for stop in stops)}:
            self._by_key[key].append(number)

    def read(self, settings: bytes, messages: Sequence[Message], images: Mapping[int, Sequence[bytes]]) -> Asked:
        """Recognize the answers in a conversation.

        Args:
            settings: Digest of what is written before the messages: tools, and variables of the template.
            messages: As chat templates take them.
            images: Digests of the images of each message that has some.
        """
        shown, texts, seen, goes_on, chain = list(messages), list[str](), dict[int, int](), None, [settings]
        for index, message in enumerate(messages):
            number = self._recognized(message, chain[-1]) if message.get("role") == "assistant" else None
            if number is None:
                texts.append(json.dumps(message))
                chain.append(digest_of(chain[-1], texts[-1], *images.get(index, ())))
                continue
            answer = self._answers[number]
            if answer.asked == chain[-1]:
                goes_on = number, index
            seen[index] = number
            shown[index] = answer.message
            texts.append(answer.text)
            chain.append(digest_of(chain[-1], f"turn {number}"))
        return Asked(shown, texts, seen, goes_on, chain)

    def token_ids(self, number: int) -> Sequence[int]:
        """The tokens that were sampled for an answer."""
        return self._answers[number].token_ids

    def _recognized(self, message: Message, before: bytes) -> int | None:
        """Number of the answer that a message repeats; None for no answer, or for several with different tokens."""
        calls, text = message.get("tool_calls") or [], message.get("content")
        known = {self._by_call.get(each) for each in call_ids(message)}
        if len(known) == 1 and (number := next(iter(known))) is not None:
            given = text or self._answers[number].message["content"]
            return number if answer_key(given, calls) == self._answers[number].key else None
        found = self._by_key.get(answer_key(text, calls), [])
        fitting = [number for number in found if self._answers[number].asked == before]
        if fitting:
            return fitting[-1]
        responses = {tuple(self._answers[number].token_ids) for number in found}
        return found[-1] if len(responses) == 1 else None


def digest_of(*parts: bytes | str) -> bytes:
    """Digest of a sequence of parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "little"))
        found.update(raw)
    return found.digest()


def answer_key(text: Any, calls: Iterable[Mapping[str, Any]]) -> bytes:
    """The key of an answer: a digest of its text without blanks, and of its calls in any order."""
    said = sorted(json.dumps([_function(call).get("name"), _arguments(call)], sort_keys=True) for call in calls)
    return digest_of("".join(text.split()) if isinstance(text, str) else json.dumps(text), *said)


def call_ids(message: Message) -> list[str]:
    """The ids of a message's calls."""
    return [str(call["id"]) for call in message.get("tool_calls") or () if call.get("id")]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = _function(call).get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return _plain(arguments)


def _plain(value: Any) -> Any:
    """JSON data with 1 in place of 1.0, which JavaScript does not tell apart."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
