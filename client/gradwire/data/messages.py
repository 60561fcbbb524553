"""Messages in one form, whatever form a data set has them in: roles, texts or parts, reasoning, calls with values."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.data.rows import Message, OtherKind, Unfit
from gradwire.data.sources import JsonError, parsed_json

ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
    "bot": "assistant", "model": "assistant", "chatgpt": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "observation": "tool", "tool_response": "tool", "function_call": "assistant",
    "tool_call": "assistant",
}  # fmt: skip
"""The roles of other layouts, in our words."""
CALLING = ("function_call", "tool_call")
"""Roles of messages whose content is a call of a tool, or a list of calls."""
REASONING = ("reasoning_content", "reasoning", "thinking")
UNUSED = {
    "function_call": "write tool_calls", "train_detail": "write a weight", "training_detail": "write a weight",
}  # fmt: skip
"""Keys of other message formats -> advice to write the key that gradwire reads."""
READ = ("role", "from", "content", "value", "train", "masked", "weight", "tool_calls", *REASONING)
FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "1.0", "+", "good", "correct", "desirable", "chosen"), True),
    **dict.fromkeys(("false", "0", "0.0", "-", "-1", "-1.0", "bad", "incorrect", "undesirable", "rejected"), False),
}
"""Words and numbers for true and false."""
_PYTHONS = re.compile(r"""\s*\[?\s*\{\s*'\w+'\s*:""")
"""How Python shows mappings, as pandas writes them into CSV files."""


def messages_of(value: Any, field: str, images: list[bytes] | None = None) -> list[Message]:
    """Read a list of messages, also as JSON in a text.

    Args:
        field: Its name, for errors.
        images: Gets the messages' images; without it they may have none.

    Raises:
        OtherKind: The value is not a list of messages.
        Unfit: A message of it is not in a known form.
    """
    value = structure(value, field)
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        what = "is empty" if value in ("", [], ()) else f"is {value!r:.60}"
        raise OtherKind(f"{field} {what}; it must be a list of messages")
    return [_message(each, f"message {number} of {field}", images) for number, each in enumerate(value)]


def turn_of(value: Any, role: str, field: str, images: list[bytes] | None = None) -> list[Message]:
    """Read a text as one message, and messages as :func:`messages_of`.

    Raises:
        OtherKind, Unfit: It is neither.
    """
    if isinstance(value, str):
        if not value.strip():
            raise Unfit(f"{field} is empty")
        written = written_messages(value, field)
        return [{"role": role, "content": value}] if written is None else messages_of(written, field, images)
    if not isinstance(value, Mapping | Sequence):
        raise OtherKind(f"{field} is {value!r:.60}; it must be a text or a list of messages")
    return messages_of(value, field, images)


def written_messages(text: str, field: str) -> Any:
    """The messages that a text holds as JSON; None for any other text.

    Raises:
        Unfit: It holds them as Python shows them.
    """
    if not text.lstrip().startswith(("[", "{")):
        return None
    if _PYTHONS.match(text) and re.search("'(role|from)'", text):
        raise Unfit(f"{field} holds messages as Python shows them, {text!r:.60}; write them as JSON")
    try:
        value = plain(parsed_json(text), field)
    except JsonError:
        return None
    many = value if isinstance(value, list) else [value]
    return value if many and all(map(_is_message, many)) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"content", "value", "tool_calls"} & set(value):
        return False
    return str(value.get("role", value.get("from"))).lower() in ROLES


def _message(message: Any, where: str, images: list[bytes] | None) -> Message:
    if not isinstance(message, Mapping):
        raise OtherKind(f"{where} is no mapping; it is {message!r:.60}")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    known = ROLES.get(str(role).lower())
    if known is None:
        given, error = ("no role", OtherKind) if role is None else (f"the role {role!r}", Unfit)
        raise error(f"{where} has {given}; known are {', '.join(sorted(ROLES))}")
    rest = {key: each for key, each in message.items() if key not in READ and each is not None}
    for key in UNUSED.keys() & rest.keys():
        raise Unfit(f"{where} has {key}, which is not read; {UNUSED[key]}")
    calls = _calls(message.get("tool_calls"), where)
    if str(role).lower() in CALLING:
        calls, content = [*calls, *_calls(content, where, needed=True)], None
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _joined(content, where, images) if content else None
    if content is None and not calls:
        raise Unfit(f"{where} has no content")
    if content is not None and not isinstance(content, str | list):
        raise Unfit(f"{where} has the content {content!r:.60}, which is no text")
    read: dict[str, Any] = {"role": known, "content": "" if content is None else content, **rest}
    if reasoning := {message[name] for name in REASONING if isinstance(message.get(name), str)} - {""}:
        if len(reasoning) > 1:
            raise Unfit(f"{where} has reasoning twice, and differently: leave one of {', '.join(REASONING)}")
        read["reasoning_content"] = reasoning.pop()
    for name in REASONING:
        if message.get(name) is not None and not isinstance(message[name], str):
            raise Unfit(f"{where} has a {name} that is no text, {message[name]!r:.60}")
    if calls:
        read["tool_calls"] = calls
    if (learned := _learned(message, where)) is not None and known == "assistant":
        read["weight"] = int(learned)
    return read


def says_nothing(message: Message) -> bool:
    """Whether an assistant's message has neither text, nor calls, nor reasoning."""
    content = message["content"]
    return not (content.strip() if isinstance(content, str) else content) and not (
        message.get("tool_calls") or message.get("reasoning_content")
    )


def tools_of(value: Any) -> tuple[Any, ...]:
    """Read schemas of tools: a list, one of them, or their JSON; ``{"name": …, "parameters": …}`` alone as OpenAI
    writes it.

    Raises:
        Unfit: The value is not a list of schemas.
    """
    value = structure(value, "tools")
    if value is None or value == "":
        return ()
    tools = [structure(each, "tools") for each in ([value] if isinstance(value, Mapping) else value)]
    if isinstance(value, str) or not all(isinstance(each, Mapping) for each in tools):
        raise Unfit(f"tools is a list of schemas; this is {value!r:.60}")
    return tuple(
        {"type": "function", "function": each} if "name" in each and "type" not in each else each for each in tools
    )


def _calls(value: Any, where: str, *, needed: bool = False) -> list[Any]:
    """Calls of tools as OpenAI writes them, with objects as arguments: templates write them as JSON."""
    value = structure(value, f"{where}: its calls")
    if value is None or (not needed and value in ("", [], ())):
        return []
    calls = [value] if isinstance(value, Mapping) and needed else value
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
        what = "is no call of a tool" if needed else "has tool_calls that are no list"
        raise Unfit(f"{where} {what}, {value!r:.60}")
    return [_call(structure(each, f"{where}: its calls"), where) for each in calls]


def _call(call: Any, where: str) -> Any:
    holder = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(holder, Mapping) or not isinstance(holder.get("name"), str):
        raise Unfit(f"{where} has a tool call without a name, {call!r:.60}")
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = plain(parsed_json(arguments or "{}"), where)
        except JsonError:
            raise Unfit(f"{where} has a tool call whose arguments are no JSON object, {arguments!r:.60}") from None
    if arguments is None and not {"parameters", "args", "input"} & set(holder):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise Unfit(f"{where} has a tool call whose arguments are no JSON object, {holder!r:.60}")
    changed = {**holder, "arguments": arguments}
    if holder is not call:
        return {**call, "function": changed}
    more = {key: changed.pop(key) for key in ("id", "type") if key in changed}
    return {"type": "function", **more, "function": changed}


def _joined(parts: Sequence[Any], where: str, images: list[bytes] | None) -> str | list[dict[str, str]]:
    """The text of a content that is a list of parts; the parts, with the images left out, where it has any."""
    joined: list[dict[str, str]] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind == "image_url" and images is not None:
            images.append(_image(part, where))
            joined.append({"type": "image"})
            continue
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
            raise Unfit(f"{where} has a part that is no text, {part!r:.60}, which would be left out")
        joined.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in joined):
        return joined
    return "".join(part["text"] for part in joined)


def _image(part: Mapping[str, Any], where: str) -> bytes:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:"):
        raise Unfit(
            f"{where} has an image {url!r:.60}; nothing is fetched: write the image itself, as data:TYPE;base64,"
        )
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise binascii.Error("it does not begin with data:TYPE;base64,")
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unfit(f"{where} has an image that cannot be read: {error}") from None


def _learned(message: Message, where: str) -> bool | None:
    """Whether the message is learned; None if it does not say so."""
    for name, value in (("train", True), ("masked", False)):
        if message.get(name) is not None:
            return flag(message[name], f"{name} of {where}") is value
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise Unfit(f"{where} has the weight {weight!r:.20}; it is 0 (not learned) or 1. A row's own may be any number")
    return None if weight is None else bool(weight)


def flag(value: Any, field: str) -> bool:
    """Read true or false in one of the forms of :data:`FLAGS`.

    Raises:
        Unfit: It is neither.
    """
    found = FLAGS.get(str(value).strip().lower())
    if found is None:
        raise Unfit(f"{field} is true or false; this is {value!r:.40}")
    return found


def structure(value: Any, field: str) -> Any:
    """Return a list or mapping, which a CSV column holds as JSON.

    Raises:
        Unfit: The text begins like JSON and is not valid JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        if _PYTHONS.match(value):
            raise Unfit(f"{field} is written as Python shows it, {value!r:.60}; write it as JSON")
        try:
            return plain(parsed_json(value), field)
        except JsonError as error:
            raise Unfit(f"{field}: {error}") from None
    return value


def plain(value: Any, field: str) -> Any:
    """Return a value in lists, mappings, texts and numbers, with None for NaN, which pandas has for what is missing.

    Raises:
        Unfit: A text cannot be encoded: it holds half of a character.
    """
    try:
        return _plain(value, field)
    except RecursionError:
        raise Unfit(f"{field}: its brackets are nested too deeply") from None


def _plain(value: Any, field: str) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unfit(
                f"{field} holds half of a character, {value[error.start]!a}, at its character {error.start + 1}:"
                " a text that was cut within an emoji; mend the text, or leave the row out"
            ) from None
        return value
    if isinstance(value, Mapping):
        return {_plain(key, field): _plain(each, field) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), field)
    if isinstance(value, list | tuple):
        return [_plain(each, field) for each in value]
    return None if isinstance(value, float) and value != value else value
