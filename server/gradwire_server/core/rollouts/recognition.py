"""What an answer, a message and a conversation are recognized by when an agent sends them back.

Agents change what they were given: they drop the reasoning, trim texts, merge blocks, and write the arguments of calls
with other blanks and another order of keys. What they keep is the ids of the calls, or the text and the arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from gradwire_proto.chat import read_json

Message = Mapping[str, Any]


def digest_of(*parts: bytes | str) -> bytes:
    """Digest of a sequence of parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "little"))
        found.update(raw)
    return found.digest()


def answer_key(text: Any, calls: Iterable[Mapping[str, Any]]) -> bytes:
    """What an answer is recognized by: its text without blanks, and its calls in any order."""
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
