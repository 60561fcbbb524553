"""Parts of a conversation that a chat template leaves out without a word, such as the system message or the tools."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradwire_proto.chat import Message, TemplateError

from gradwire_server.tokenizing.chat_template import REASONING

Written = Callable[[Sequence[Message], list[Any] | None], str]
"""Messages and tools -> text; raises :class:`TemplateError`."""


KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING)
"""Keys of messages that are used, or have no text of their own."""

MOST, MOST_KEYS = 10_000, 8
"""Parts that are remembered, and keys of a conversation that are tried, at most."""


class LeftOut:
    """Finds what a template does not write, by writing another word in its place; each part is tried once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bool] = {}

    def parts(self, template: str, written: Written, messages: Sequence[Message], tools: list[Any] | None) -> list[str]:
        """Name the parts of this conversation that do not show in its text, in words for people.

        Args:
            template: Key of the template with its variables.
        """
        names = []
        if len(self._known) > MOST:
            self._known.clear()
        for part, probe, changed, changed_tools in _changed(messages, tools):
            if (template, part) not in self._known:
                try:
                    self._known[template, part] = probe not in written(changed, changed_tools)
                except TemplateError:  # it refuses the probe, so it reads the part
                    self._known[template, part] = False
            if self._known[template, part]:
                names.append(part)
        return names


def _changed(
    messages: Sequence[Message], tools: list[Any] | None
) -> Iterator[tuple[str, str, Sequence[Message], list[Any] | None]]:
    """Yield each part with a word, and the conversation with that word in the part."""
    probe = f"probe{secrets.token_hex(8)}"

    def put(index: int, **values: Any) -> list[Message]:
        return [*messages[:index], {**messages[index], **values}, *messages[index + 1 :]]

    for index in range(len(messages))[::-1]:
        if messages[index].get("role") == "system" and isinstance(messages[index].get("content"), str):
            yield "the system message", probe, put(index, content=probe), tools
            break
    if tools and (named := _named(tools[0], probe)):
        yield "the tools", probe, messages, [named, *tools[1:]]
    for index in range(len(messages))[::-1]:
        calls = messages[index].get("tool_calls")
        if isinstance(calls, list) and calls and (named := _named(calls[0], probe)):
            yield "tool calls", probe, put(index, tool_calls=[named, *calls[1:]]), tools
            break
    last = messages[-1]
    if last.get("role") == "assistant" and any(isinstance(last.get(name), str) for name in REASONING):
        reasoning = {name: probe for name in REASONING if name in last}
        yield "the reasoning of the last message", probe, put(len(messages) - 1, **reasoning), tools
    others = {key: index for index, message in enumerate(messages) for key in message if key not in KNOWN}
    for key in sorted(others)[:MOST_KEYS]:
        yield f"{key!r:.40} of messages", probe, put(others[key], **{key: probe}), tools


def _named(schema: Any, name: str) -> Any:
    """A tool or a call with another name; None for what has none."""
    changed = copy.deepcopy(schema)
    holder = changed.get("function", changed) if isinstance(changed, dict) else None
    if not isinstance(holder, dict) or "name" not in holder:
        return None
    holder["name"] = name
    return changed
