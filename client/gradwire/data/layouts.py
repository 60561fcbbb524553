"""Layouts of rows: conversations, preference pairs and prompts with answers, in the usual columns."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.data.rows import Conversation, Message, OtherKind, Preference, Prompt, Rating, Steps, Unfit, is_learned
from gradwire.data.sources import Row

Mapped = Mapping[str, str | Callable[[Row], Any]]
"""Field -> the column it is in, or a function of the row."""

ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
    "bot": "assistant", "model": "assistant", "chatgpt": "assistant", "system": "system", "tool": "tool",
    "function": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
"""The roles of other layouts, in our words."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWERS = ("completion", "response", "answer", "output", "solution", "ground_truth")
CONVERSATIONS = ("messages", "conversations", "conversation")
RENDERED = ("messages", "tools", "add_generation_prompt", "model", "train_on")
"""What a template gets otherwise."""
UNREAD = ("images", "image", "videos", "video", "audio", "audios")
"""Columns of what is no text."""
UNUSED = ("functions", "documents")
"""Columns of conversations that no recipe uses: OpenAI's older tools, and texts that few templates write."""
UNUSED_IN_MESSAGES = {
    "function_call": "write tool_calls", "train_detail": "write a weight", "training_detail": "write a weight",
}  # fmt: skip
"""What other formats say in a message -> what says it here."""
UNSAID: tuple[Any, ...] = (None, "", "[]", "{}", [], {}, (), 1, "1")
"""Values of a column that say nothing; a weight of 1 changes nothing."""


def conversation(row: Row, mapping: Mapped) -> Conversation:
    """Read a conversation: ``messages``, ShareGPT ``conversations``, prompt and completion, or Alpaca's columns.

    ``weight`` of the row, and ``weight`` (0 or 1), ``train`` or ``masked`` of a message say what is learned. Messages
    may have images as OpenAI writes them: parts ``image_url`` whose URL holds the image itself.

    Raises:
        Unfit: The row is none of these, or has what is not learned here: a column of images, or a completion that it
            calls bad; or none of its messages is learned.
    """
    _check_used(row)
    text = _pick(row, mapping, "text", ("text",) if not _has_messages(row, mapping) else ())
    if text is not None:
        if not isinstance(text, str) or not text.strip():
            raise Unfit(f"text is a text to learn; this is {text!r:.60}")
        _check_good(row)
        return Conversation((), weight=_weight(row, mapping), text=text)
    written = _pick(row, mapping, "messages", CONVERSATIONS)
    images: list[bytes] = []
    if written is not None:
        messages = [*_system(row, mapping), *_messages(written, "messages", images)]
    else:
        prompt = _pick(row, mapping, "prompt", PROMPTS)
        answer = _pick(row, mapping, "completion", ANSWERS)
        if prompt is None or answer is None:
            absent = [name for name, value in (("prompt", prompt), ("completion", answer)) if value is None]
            wanted = absent[0] if len(absent) == 1 else "messages, or as prompt and completion"
            raise _missing(row, wanted, *absent)
        more = row.get("input") if "instruction" in row and isinstance(row.get("input"), str) else ""
        if more and isinstance(prompt, str) and "prompt" not in mapping:
            prompt = f"{prompt}\n\n{more}"
        messages = [*_asked(row, mapping, prompt), *_turn(answer, "assistant", "completion")]
    if not any(message["role"] == "assistant" for message in messages):
        raise OtherKind("there is no message of the assistant to learn from")
    _check_learned(messages)
    _check_good(row)
    tools = _pick(row, mapping, "tools", ("tools",)) or ()
    weight = _weight(row, mapping)
    return Conversation(tuple(messages), tuple(_parsed(tools)), _variables(row), weight, images=tuple(images))


def preference(row: Row, mapping: Mapped) -> Preference:
    """Read a preference pair: ``chosen`` and ``rejected``, with a ``prompt`` or with the messages they share.

    ``preferred_output`` and ``non_preferred_output``, with the messages and the tools in ``input``, are the same in
    OpenAI's words.

    Raises:
        Unfit: The row is none, or both answers are the same.
    """
    chosen = _pick(row, mapping, "chosen", ("chosen", "chosen_response", "response_chosen", "preferred_output"))
    rejected = _pick(
        row, mapping, "rejected", ("rejected", "rejected_response", "response_rejected", "non_preferred_output")
    )
    if chosen is None or rejected is None:
        absent = [name for name, value in (("chosen", chosen), ("rejected", rejected)) if value is None]
        raise _missing(row, " and ".join(absent), *absent)
    prompt = _pick(row, mapping, "prompt", (*PROMPTS, *CONVERSATIONS))
    tools = row.get("tools")
    if isinstance(prompt, Mapping) and "messages" in prompt:
        tools, prompt = prompt.get("tools") or tools, prompt["messages"]
    better, worse = _turn(chosen, "assistant", "chosen"), _turn(rejected, "assistant", "rejected")
    asked = _system(row, mapping) if prompt is None else _asked(row, mapping, prompt)
    shared = 0
    while shared < min(len(better), len(worse)) and better[shared] == worse[shared]:
        shared += 1
    if shared == len(better) == len(worse):
        raise Unfit("chosen and rejected are the same")
    asked = better[:shared] if shared else asked
    if not asked:
        raise _missing(row, "prompt", "prompt")
    if shared in (len(better), len(worse)):
        raise Unfit("one answer is the beginning of the other")
    _check_used(row, "weight")
    answers = tuple(better[shared:]), tuple(worse[shared:])
    margin = _number(row.get("margin"), "margin", 0.0)
    return Preference(tuple(asked), *answers, tuple(_parsed(tools) or ()), _variables(row), margin)


def rating(row: Row, mapping: Mapped) -> Rating:
    """Read an answer with a ``label``: true or 1 if it is good, false or 0 if it is bad.

    Raises:
        Unfit: The row is none.
    """
    label = _pick(row, mapping, "label", ("label",))
    if label is None:
        raise _missing(row, "label", "label")
    _check_used(row, "weight")
    more: Any = (tuple(_parsed(row.get("tools")) or ()), _variables(row))
    answer = _pick(row, mapping, "completion", ANSWERS)
    given = _pick(row, mapping, "messages", CONVERSATIONS)
    if given is not None:
        messages = [*_system(row, mapping), *_messages(given, "messages")]
        if messages[-1]["role"] != "assistant":
            raise OtherKind("the last message is not the assistant's, which the label is about")
        return Rating(tuple(messages[:-1]), (messages[-1],), _flag(label, "label"), *more)
    asked = _pick(row, mapping, "prompt", PROMPTS)
    if asked is None or answer is None:
        absent = [name for name, value in (("prompt", asked), ("completion", answer)) if value is None]
        raise _missing(row, " and ".join(absent), *absent)
    before = tuple(_asked(row, mapping, asked))
    return Rating(before, tuple(_turn(answer, "assistant", "completion")), _flag(label, "label"), *more)


def steps(row: Row, mapping: Mapped) -> Steps:
    """Read an answer in steps: ``prompt``, ``completions`` and as many ``labels``.

    Raises:
        Unfit: The row is none.
    """
    asked = _pick(row, mapping, "prompt", PROMPTS)
    texts = _parsed(_pick(row, mapping, "completions", ("completions", "steps")))
    labels = _parsed(_pick(row, mapping, "labels", ("labels",)))
    absent = [name for name, value in (("prompt", asked), ("completions", texts), ("labels", labels)) if value is None]
    if absent:
        raise _missing(row, " and ".join(absent), *absent)
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) and each.strip() for each in texts):
        raise Unfit("completions is a list of texts, one for each step")
    if not isinstance(labels, Sequence) or len(labels) != len(texts):
        raise Unfit(f"there are {len(texts)} completions, and labels is {labels!r:.60}: one for each")
    _check_used(row, "weight", "tools", "chat_template_kwargs")
    return Steps(tuple(_asked(row, mapping, asked)), tuple(texts), tuple(_flag(each, "labels") for each in labels))


def prompt(row: Row, mapping: Mapped) -> Prompt:
    """Read a prompt, and its answer if there is one.

    Raises:
        Unfit: The row has no prompt, or ends with an answer and is a conversation of which nothing is learned.
    """
    written = _pick(row, mapping, "prompt", (*PROMPTS, *CONVERSATIONS))
    if written is None:
        raise _missing(row, "prompt", "prompt")
    messages = _asked(row, mapping, written)
    if messages and messages[-1]["role"] == "assistant":
        _check_learned(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise Unfit("the prompt is empty")
    _check_used(row, "tools", "chat_template_kwargs")
    answer = _pick(row, mapping, "answer", ("answer", "ground_truth", "solution", *ANSWERS))
    return Prompt(tuple(messages), answer, dict(row))


def _check_used(row: Row, *unused: str) -> None:
    """Check that a row has nothing that this kind of rows does not use.

    Raises:
        Unfit: It has; names the column.
    """
    for name in (*UNREAD, *UNUSED, *unused):
        if row.get(name) not in UNSAID:
            more = "more than text, in " if name in UNREAD else ""
            raise Unfit(f"there is {more}{name}, which would be left out here; drop the column, or the row")


def _check_learned(messages: Sequence[Message]) -> None:
    """Check that the assistant's messages are not all left out of what is learned.

    Raises:
        Unfit: They are.
    """
    if not any(map(is_learned, messages)):
        raise Unfit("no message of the assistant is learned: each has the weight 0; leave the row out")


def _check_good(row: Row) -> None:
    if str(row.get("label")).lower() == "false":
        raise Unfit(
            "label is false: the completion is a bad one, and it would be learned; leave such rows out, or train by kto"
        )


def _variables(row: Row) -> Mapping[str, Any]:
    """Variables of the chat template that a row sets."""
    variables = _parsed(row.get("chat_template_kwargs") or {})
    if not isinstance(variables, Mapping) or any(name in variables for name in RENDERED):
        raise Unfit(f"chat_template_kwargs maps variables of the template, none of {', '.join(RENDERED)}, to values")
    return variables


def _pick(row: Row, mapping: Mapped, field: str, usual: Sequence[str]) -> Any:
    """Return a field: the column or function that the mapping names, or the first usual column that exists."""
    named = mapping.get(field)
    if callable(named):
        return named(row)
    if named is not None:
        if named not in row:
            raise Unfit(f"there is no column {named!r} for {field}; the row has {_columns(row)}")
        return row[named]
    return next((row[name] for name in usual if row.get(name) is not None), None)


def _has_messages(row: Row, mapping: Mapped) -> bool:
    """Whether a row has more than plain text: then a column ``text`` is a rendering of it."""
    named = {"messages", "prompt", "completion"} & set(mapping)
    return bool(named) or any(row.get(name) is not None for name in (*CONVERSATIONS, *PROMPTS, *ANSWERS))


def _flag(value: Any, field: str) -> bool:
    known = {"true": True, "1": True, "1.0": True, "+": True, "false": False, "0": False, "0.0": False, "-": False,
             "-1": False}  # fmt: skip
    flag = known.get(str(value).strip().lower())
    if flag is None:
        raise Unfit(f"{field} is true or false; this is {value!r:.40}")
    return flag


def _weight(row: Row, mapping: Mapped) -> float:
    return _number(_pick(row, mapping, "weight", ("weight",)), "weight", 1.0)


def _number(value: Any, name: str, absent: float) -> float:
    try:
        number = absent if value in (None, "") else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise Unfit(f"{name} is a number from 0 on; this is {value!r:.60}")
    return number


def _system(row: Row, mapping: Mapped) -> list[Message]:
    text = _pick(row, mapping, "system", ("system", "system_prompt"))
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _asked(row: Row, mapping: Mapped, prompt: Any) -> list[Message]:
    """The messages before an answer: the system's, those of ``history`` (pairs of texts, as Alpaca's), the prompt's."""
    pairs = _parsed(row.get("history")) if str(row.get("history")).lstrip().startswith("[") else None
    pairs = [] if pairs is None else pairs
    if not all(
        isinstance(each, Sequence) and len(each) == 2 and all(isinstance(x, str) for x in each) for each in pairs
    ):
        raise Unfit(f"history is a list of pairs, a question and its answer; this is {pairs!r:.60}")
    earlier = [{"role": role, "content": text} for each in pairs for role, text in zip(("user", "assistant"), each)]
    return [*_system(row, mapping), *earlier, *_turn(prompt, "user", "prompt")]


def _turn(value: Any, role: str, field: str) -> list[Message]:
    """Return a text as one message, and messages unchanged."""
    if isinstance(value, str):
        if not value.strip():
            raise Unfit(f"{field} is empty")
        return [{"role": role, "content": value}]
    return _messages(value, field)


def _messages(value: Any, field: str, images: list[bytes] | None = None) -> list[Message]:
    """Messages in our words.

    Args:
        images: Gets the messages' images; without it they may have none.
    """
    value = [value] if isinstance(value, Mapping) else _parsed(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        what = "is empty" if value in ("", [], ()) else f"is {value!r:.60}"
        raise OtherKind(f"{field} {what}; it must be a text or a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise OtherKind(f"message {number} of {field} is no mapping; it is {message!r:.60}")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        known = ROLES.get(str(role).lower())
        if known is None:
            given, error = ("no role", OtherKind) if role is None else (f"the role {role!r}", Unfit)
            raise error(f"message {number} of {field} has {given}; known are {', '.join(sorted(ROLES))}")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = _joined(content, f"message {number} of {field}", images)
        if content is None and not message.get("tool_calls"):
            raise Unfit(f"message {number} of {field} has no content")
        rest = {
            key: each for key, each in message.items()
            if key not in ("role", "from", "content", "value", "train", "masked", "weight") and each is not None
        }  # fmt: skip
        for key in UNUSED_IN_MESSAGES.keys() & rest.keys():
            raise Unfit(f"message {number} of {field} has {key}, which is not read; {UNUSED_IN_MESSAGES[key]}")
        if calls := rest.get("tool_calls"):
            rest["tool_calls"] = _calls(calls, f"message {number} of {field}")
        if (learned := _learned(message, known, f"message {number} of {field}")) is not None:
            rest["weight"] = int(learned)
        messages.append({"role": known, "content": content if content is not None else "", **rest})
    return messages


def _calls(calls: Any, where: str) -> list[Any]:
    """Calls of tools with objects as arguments, which OpenAI writes as JSON in a text; templates write them as JSON."""
    calls = _parsed(calls)
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise Unfit(f"{where} has tool_calls that are no list, {calls!r:.60}")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> Any:
    holder = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(holder, Mapping) or not isinstance(arguments := holder.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise Unfit(f"{where} has a tool call whose arguments are no JSON object, {arguments!r:.60}")
    changed = {**holder, "arguments": parsed}
    return changed if holder is call else {**call, "function": changed}


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


def _learned(message: Message, role: str, where: str) -> bool | None:
    """Whether the message is learned; None if it does not say so."""
    for name, value in (("train", True), ("masked", False)):
        if isinstance(given := message.get(name), bool):
            return given is value
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise Unfit(f"{where} has the weight {weight!r:.20}; it is 0 (not learned) or 1. A row's own may be any number")
    return None if weight is None or role != "assistant" else bool(weight)


def _parsed(value: Any) -> Any:
    """Return a list or mapping, which a CSV column holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise Unfit(f"not valid JSON: {error.msg}, character {error.pos + 1}") from None
    return value


def _missing(row: Row, wanted: str, *fields: str) -> OtherKind:
    usual = {"prompt": PROMPTS, "completion": ANSWERS, "messages": CONVERSATIONS}
    for each in fields:
        for name in (each, *usual.get(each, ())):
            if name in row and row[name] is None:
                return OtherKind(f"{name} is null; it holds the {each}: write it there, or leave the row out")
    return OtherKind(f"no column is recognised as {wanted}; the row has {_columns(row)}", *fields)


def _columns(row: Row) -> str:
    names = (f"{name!s:.60} (empty)" if value is None else f"{name!s:.60}" for name, value in row.items())
    return ", ".join(itertools.islice(names, 30)) or "no columns"
