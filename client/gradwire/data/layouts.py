"""Layouts of rows: conversations, preference pairs and prompts with answers, in the usual columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.data.messages import (
    FLAGS,
    flag,
    messages_of,
    plain,
    says_nothing,
    structure,
    tools_of,
    turn_of,
    written_messages,
)
from gradwire.data.rows import Conversation, Message, OtherKind, Preference, Prompt, Rating, Steps, Unfit, is_learned
from gradwire.data.sources import Row

Mapped = Mapping[str, str | Callable[[Row], Any]]
"""Field -> the column it is in, or a function of the row."""

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWERS = ("completion", "response", "answer", "output", "solution", "ground_truth")
CONVERSATIONS = ("messages", "conversations", "conversation")
RENDERED = ("messages", "tools", "add_generation_prompt", "model", "train_on")
"""Template variables that are set from other columns or settings; ``chat_template_kwargs`` may not name them."""
UNREAD = ("images", "image", "videos", "video", "audio", "audios")
"""Columns of what is no text."""
REFUSED = ("functions", "documents")
"""Columns of conversations that no recipe uses: OpenAI's older tools, and texts that few templates write."""
UNSAID: tuple[Any, ...] = (None, "", "[]", "{}", [], {}, (), 1, "1")
"""Values of a column that say nothing; a weight of 1 changes nothing."""


class Fields:
    """The fields of a row, in its columns.

    Attributes:
        row: The row.
        used: Columns that were read.
        tools: Tools in one column with the messages, as OpenAI's pairs have them.
        remarks: Sentences for a person on how the row was parsed, in words that are the same for other rows.
    """

    def __init__(self, row: Row, mapping: Mapped) -> None:
        self.row, self.mapping = row, mapping
        self.used: set[str] = set()
        self.tools: Any = None
        self.remarks: list[str] = []

    def pick(self, field: str, *usual: str) -> Any:
        """Return a field: the column or function that the mapping names, or the first usual column that has a value.

        Raises:
            Unfit: The mapping names a column that is not there; or a text of it cannot be encoded.
        """
        named = self.mapping.get(field)
        if callable(named):
            return plain(named(self.row), field)
        if named is not None and named not in self.row:
            raise Unfit(f"there is no column {named!r} for {field}; the row has {_columns(self.row)}")
        for name in (named,) if named is not None else usual:
            value = plain(self.row.get(name), str(name)) if name in self.row else None
            if value is not None:
                self.used.add(name)
                return value
        return None

    def missing(self, *fields: str) -> OtherKind:
        """The error for a row without these fields."""
        usual = {"prompt": PROMPTS, "completion": ANSWERS, "messages": CONVERSATIONS}
        for each in fields:
            for name in (each, *usual.get(each, ())):
                if name in self.row and plain(self.row[name], name) is None:
                    return OtherKind(f"{name} is null; it holds the {each}: write it there, or leave the row out")
        wanted = "messages, or as prompt and completion" if fields == ("prompt", "completion") else " and ".join(fields)
        return OtherKind(f"no column is recognised as {wanted}; the row has {_columns(self.row)}", *fields)

    @property
    def unused(self) -> list[str]:
        """Columns with a value that were not read."""
        named = {each for each in self.mapping.values() if isinstance(each, str)}
        reads_all = any(callable(each) for each in self.mapping.values())
        unused = [name for name, value in self.row.items() if name not in self.used | named and not _empty(value)]
        return [] if reads_all else unused


def conversation(fields: Fields) -> Conversation:
    """Read a conversation: ``messages``, ShareGPT ``conversations``, prompt and completion, or Alpaca's columns.

    ``weight`` of the row, and ``weight`` (0 or 1), ``train`` or ``masked`` of a message say what is learned. Messages
    may have images as OpenAI writes them: parts ``image_url`` whose URL holds the image itself.

    Raises:
        Unfit: The row has none of these layouts, or content that is not learned here (a column of images, a completion
            marked as bad), or no message that is learned.
    """
    _check_used(fields)
    text = fields.pick("text", *(("text",) if not _has_messages(fields) else ()))
    if text is not None:
        if not isinstance(text, str) or not text.strip():
            raise Unfit(f"text is a text to learn; this is {text!r:.60}")
        if written_messages(text, "text") is not None:
            raise Unfit("text holds messages: name its column as that of messages")
        _check_good(fields)
        return Conversation((), weight=_weight(fields), text=text)
    images: list[bytes] = []
    written = fields.pick("messages", *CONVERSATIONS)
    if written is not None:
        messages = _begun(fields, messages_of(written, "messages", images))
    else:
        asked, answer = _question(fields), fields.pick("completion", *ANSWERS)
        if asked is None or answer is None:
            raise fields.missing(*_absent(prompt=asked, completion=answer))
        prompt = turn_of(asked, "user", "prompt", images)
        before = _begun(fields, prompt)
        context, (rest,) = _split(before, turn_of(answer, "assistant", "completion", images))
        own = len(before) - len(prompt)  # of history, whose answers are learned; those of the prompt are not
        given = [{"weight": 0, **each} if each["role"] == "assistant" else each for each in context[own:]]
        messages = [*context[:own], *given, *rest]
    if not any(message["role"] == "assistant" for message in messages):
        raise OtherKind("there is no message of the assistant to learn from")
    _check_learned(messages)
    _check_good(fields)
    tools = _tools(fields, messages)
    return Conversation(tuple(messages), tools, _variables(fields), _weight(fields), images=tuple(images))


def preference(fields: Fields) -> Preference:
    """Read a preference pair: ``chosen`` and ``rejected``, behind the prompt and the messages they share.

    ``preferred_output`` and ``non_preferred_output``, with the messages and the tools in ``input``, are the same in
    OpenAI's words.

    Raises:
        Unfit: The row is not a preference pair, or both answers are the same.
    """
    chosen = fields.pick("chosen", "chosen", "chosen_response", "response_chosen", "preferred_output")
    rejected = fields.pick("rejected", "rejected", "rejected_response", "response_rejected", "non_preferred_output")
    if chosen is None or rejected is None:
        raise fields.missing(*_absent(chosen=chosen, rejected=rejected))
    asked = _question(fields, *CONVERSATIONS)
    before = _begun(fields, [] if asked is None else turn_of(asked, "user", "prompt"))
    better, worse = turn_of(chosen, "assistant", "chosen"), turn_of(rejected, "assistant", "rejected")
    if better == worse:
        raise Unfit("chosen and rejected are the same")
    context, (better, worse) = _split(before, better, worse)
    if all(message["role"] == "system" for message in context):
        raise fields.missing("prompt")
    if not better or not worse:
        raise Unfit("one answer is the beginning of the other")
    for name, answer in (("chosen", better), ("rejected", worse)):
        if answer[0]["role"] != "assistant":
            raise Unfit(
                f"chosen and rejected differ before the assistant answers, in what the {answer[0]['role']} says"
            )
        _check_says(answer, name)
    _check_used(fields, "weight")
    margin = _number(fields.pick("margin", "margin"), "margin", 0.0)
    tools = _tools(fields, [*context, *better, *worse])
    return Preference(tuple(context), tuple(better), tuple(worse), tools, _variables(fields), margin)


def rating(fields: Fields) -> Rating:
    """Read an answer with a ``label``: true or 1 if it is good, false or 0 if it is bad.

    Raises:
        Unfit: The row is not a rated answer.
    """
    label = fields.pick("label", "label")
    if label is None:
        raise fields.missing("label")
    _check_used(fields, "weight")
    given = fields.pick("messages", *CONVERSATIONS)
    if given is not None:
        messages = _begun(fields, messages_of(given, "messages"))
        if messages[-1]["role"] != "assistant":
            raise OtherKind("the last message is not the assistant's, which the label is about")
        context, answers = messages[:-1], messages[-1:]
    else:
        asked, answer = _question(fields), fields.pick("completion", *ANSWERS)
        if asked is None or answer is None:
            raise fields.missing(*_absent(prompt=asked, completion=answer))
        before = _begun(fields, turn_of(asked, "user", "prompt"))
        context, (answers,) = _split(before, turn_of(answer, "assistant", "completion"))
    _check_says(answers, "completion")
    tools = _tools(fields, [*context, *answers])
    return Rating(tuple(context), tuple(answers), flag(label, "label"), tools, _variables(fields))


def steps(fields: Fields) -> Steps:
    """Read an answer in steps: ``prompt``, ``completions`` and as many ``labels``.

    Raises:
        Unfit: The row is not an answer in steps.
    """
    asked = _question(fields)
    texts = structure(fields.pick("completions", "completions", "steps"), "completions")
    labels = structure(fields.pick("labels", "labels"), "labels")
    if absent := _absent(prompt=asked, completions=texts, labels=labels):
        raise fields.missing(*absent)
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) and each.strip() for each in texts):
        raise Unfit("completions is a list of texts, one for each step")
    if not isinstance(labels, Sequence) or len(labels) != len(texts):
        raise Unfit(f"there are {len(texts)} completions, and labels is {labels!r:.60}: one for each")
    _check_used(fields, "weight", "tools", "chat_template_kwargs")
    before = _begun(fields, turn_of(asked, "user", "prompt"))
    return Steps(tuple(before), tuple(texts), tuple(flag(each, "labels") for each in labels))


def prompt(fields: Fields) -> Prompt:
    """Read a prompt, and its answer if there is one.

    Raises:
        Unfit: The row has no prompt, or ends with an answer and is a conversation of which nothing is learned.
    """
    written = _question(fields, *CONVERSATIONS)
    if written is None:
        raise fields.missing("prompt")
    messages = _begun(fields, turn_of(written, "user", "prompt"))
    if messages and messages[-1]["role"] == "assistant":
        _check_learned(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise Unfit("the prompt is empty")
    _check_used(fields, "tools", "chat_template_kwargs")
    answer = fields.pick("answer", "answer", "ground_truth", "solution", *ANSWERS)
    fields.used |= set(fields.row)  # rewards and graders read any column
    return Prompt(tuple(messages), answer, dict(plain(fields.row, "a column")))


KINDS: Mapping[str, tuple[Callable[[Fields], Any], Sequence[str]]] = {
    "preferences": (preference, ("prompt", "chosen", "rejected", "system")),
    "steps": (steps, ("prompt", "completions", "labels", "system")),
    "ratings": (rating, ("prompt", "completion", "label", "messages", "system")),
    "conversations": (conversation, ("messages", "prompt", "completion", "system", "tools", "weight", "text")),
    "prompts": (prompt, ("prompt", "answer", "system")),
}
"""Kind of rows -> what reads one, and the fields that a mapping may name."""


def _absent(**fields: Any) -> list[str]:
    return [name for name, value in fields.items() if value is None]


def _empty(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str | Sequence | Mapping) and not len(value))


def _check_used(fields: Fields, *unused: str) -> None:
    """Check that a row has nothing that this kind of rows does not use.

    Raises:
        Unfit: It has; names the column.
    """
    for name in (*UNREAD, *REFUSED, *unused):
        if plain(fields.row.get(name), name) not in UNSAID:
            more = "more than text, in " if name in UNREAD else ""
            raise Unfit(f"there is {more}{name}, which would be left out here; drop the column, or the row")
        fields.used.add(name)


def _check_learned(messages: Sequence[Message]) -> None:
    """Check that some of the assistant's messages are learned, and that these say something.

    Raises:
        Unfit: None is, or one is empty.
    """
    learned = [message for message in messages if is_learned(message)]
    if not learned:
        raise Unfit("no message of the assistant is learned: each has the weight 0; leave the row out")
    _check_says(learned, "messages")


def _check_says(messages: Sequence[Message], field: str) -> None:
    """Check that the assistant says something in its messages.

    Raises:
        Unfit: It does not.
    """
    for message in messages:
        if message["role"] == "assistant" and says_nothing(message):
            raise Unfit(f"an answer in {field} is empty; leave it out, or give it the weight 0")


def _check_good(fields: Fields) -> None:
    label = fields.row.get("label")
    good = FLAGS.get(str(label).strip().lower())
    if good is not None:
        fields.used.add("label")
    if good is False:
        raise Unfit(
            f"label is {label!r}: the completion is a bad one, and it would be learned; leave such rows out, train by"
            " kto, or drop the column if it is about something else"
        )


def _variables(fields: Fields) -> Mapping[str, Any]:
    """Variables of the chat template that a row sets."""
    variables = structure(fields.pick("chat_template_kwargs", "chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, Mapping) or any(name in variables for name in RENDERED):
        raise Unfit(f"chat_template_kwargs maps variables of the template, none of {', '.join(RENDERED)}, to values")
    return variables


def _tools(fields: Fields, messages: Sequence[Message]) -> tuple[Any, ...]:
    column = fields.pick("tools", "tools")
    tools = tools_of(fields.tools or column)
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    if _has_null([each["function"]["arguments"] for several in calls for each in several]) or _has_null(tools):
        fields.remarks.append("a null in a tool's schema or in a call's arguments, which is learned as null")
    return tools


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_null, value.values() if isinstance(value, Mapping) else value))
    return value is None


def _has_messages(fields: Fields) -> bool:
    """Whether a row has more than plain text: then a column ``text`` is a rendering of it."""
    named = {"messages", "prompt", "completion"} & set(fields.mapping)
    usual = (*CONVERSATIONS, *PROMPTS, *ANSWERS)
    return bool(named) or any(not _empty(fields.row.get(name)) for name in usual)


def _weight(fields: Fields) -> float:
    return _number(fields.pick("weight", "weight"), "weight", 1.0)


def _number(value: Any, name: str, absent: float) -> float:
    try:
        number = absent if value in (None, "") else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise Unfit(f"{name} is a number from 0 on; this is {value!r:.60}")
    return number


def _question(fields: Fields, *more: str) -> Any:
    """The question of a row: a text or messages, with Alpaca's ``input`` behind its instruction, and those of OpenAI's
    ``input``; None if there is none.

    Args:
        more: Further columns that it may be in.
    """
    asked = fields.pick("prompt", *PROMPTS, *more)
    if "instruction" in fields.used and "prompt" not in fields.mapping and isinstance(asked, str):
        given = fields.pick("", "input")
        if isinstance(given, str) and given.strip():
            return f"{asked}\n\n{given}"
    given = asked
    if isinstance(asked, str) and asked.lstrip().startswith("{") and '"messages"' in asked:
        given = structure(asked, "prompt")
    if not isinstance(given, Mapping) or "messages" not in given:
        return asked
    fields.tools = given.get("tools")
    return given["messages"]


def _begun(fields: Fields, messages: list[Message]) -> list[Message]:
    """Messages behind the system's in a column and those of ``history`` (pairs of texts, as Alpaca's)."""
    text = fields.pick("system", "system", "system_prompt")
    if text is not None and not isinstance(text, str):
        raise Unfit(f"system is a text; this is {text!r:.60}")
    own = messages[:1] if messages and messages[0]["role"] == "system" else []
    said: list[Message] = [{"role": "system", "content": text}] if text else []
    pairs: Any = []
    if isinstance(given := fields.row.get("history"), list | tuple) or str(given).lstrip().startswith("["):
        pairs = structure(fields.pick("history", "history"), "history") or []
        if not all(
            isinstance(each, Sequence) and len(each) == 2 and all(isinstance(x, str) for x in each) for each in pairs
        ):
            raise Unfit(f"history is a list of pairs, a question and its answer; this is {pairs!r:.60}")
    earlier = [{"role": role, "content": text} for each in pairs for role, text in zip(("user", "assistant"), each)]
    return [*_one_system(said, own), *earlier, *messages[len(own) :]]


def _one_system(said: list[Message], own: list[Message]) -> list[Message]:
    """The one of two system messages that there is.

    Raises:
        Unfit: There are both, and they differ.
    """
    if said and own and said != own:
        raise Unfit("there are two system messages, in the column and in the messages, and they differ: leave one out")
    return own or said


def _split(before: list[Message], *answers: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The context of answers, which is what comes before them and what they share, and what each has behind it.

    Answers may repeat what comes before them, as whole conversations do.

    Raises:
        Unfit: They begin with another question than what comes before them ends with.
    """
    own = [each[:1] if each[0]["role"] == "system" else [] for each in answers]
    bare = [message for message in before if message["role"] != "system" or message is not before[0]]
    first = answers[0]
    if len(answers) > 1:
        pairs = zip(*answers)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, answers)))
    else:
        start = len(own[0])
        repeated = start + len(bare) if bare and _alike(first[start : start + len(bare)], bare) else start
        behind = (at for at in range(repeated, len(first)) if first[at]["role"] == "assistant")
        shared = next(behind, len(first))
    context, rests = first[:shared], [each[shared:] for each in answers]
    start = len(own[0]) if shared else 0
    system = _one_system(before[:1] if len(bare) < len(before) else [], context[:start])
    inside = range(start, shared - len(bare) + 1) if bare else (0,)
    if any(_alike(context[at : at + len(bare)], bare) for at in inside):
        return [*system, *context[start:]], rests
    begun = next(iter([*context[start:], *rests[0]]), before[0])
    if start or (begun["role"] == "user" and bare[-1]["role"] == "user"):
        raise Unfit(
            f"the answers begin with a question of their own, {str(begun['content'])!r:.60}, and the prompt is"
            f" {str(bare[-1]['content'])!r:.60}: leave one of them out"
        )
    return [*system, *bare, *context[start:]], rests


def _alike(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether messages have the same authors and contents; blanks at the ends make no difference."""

    def key(message: Message) -> Any:
        content = message["content"]
        return message["role"], content.strip() if isinstance(content, str) else content, message.get("tool_calls")

    return list(map(key, some)) == list(map(key, others))


def _columns(row: Row) -> str:
    names = (f"{name!s:.60} (empty)" if value is None else f"{name!s:.60}" for name, value in row.items())
    return ", ".join(itertools.islice(names, 30)) or "no columns"
