"""Rendering of conversations by the server: requests and rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeGuard

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError

Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content`` and any other keys that the model's template reads: ``tool_calls``,
``reasoning_content``. An assistant's message may have ``token_ids``, the tokens that were sampled for it."""
TrainOn = Literal["assistant", "last", "all"] | Callable[[Mapping[str, Any]], bool]
"""``"assistant"``: what the assistant writes, its end token included. ``"last"``: the last of its messages. ``"all"``:
every token. A function: the messages for which it is true."""

CHUNK_CHARS = 1 << 20
"""Conversations are sent in one request up to this many characters."""
TRAIN_ON = {"assistant": pb.TRAIN_ON_ASSISTANT, "last": pb.TRAIN_ON_LAST, "all": pb.TRAIN_ON_ALL}


class Rendered(TypedDict):
    """A conversation as a row of a batch.

    Attributes:
        input_ids: ``[tokens]``.
        loss_mask: ``[tokens]``, 1 for the tokens to train on.
    """

    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.int64]


@dataclass(frozen=True)
class RenderedTurns:
    """A row of a conversation, in which each learned turn begins where the sampler's prompt for it ends.

    Attributes:
        row: The row.
        conversation: Index of its conversation.
        num_messages: Of the conversation's messages, which the row begins with.
        remarks: How what is learned differs from what was asked for; in the first row of a conversation.
    """

    row: Rendered
    conversation: int
    num_messages: int
    remarks: tuple[str, ...] = ()


def is_one(messages: Conversation | Sequence[Conversation]) -> TypeGuard[Conversation]:
    """Return whether this is one conversation rather than a list of conversations."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgumentError(
            f"messages is a list of messages, or a list of such lists; this is {messages!r:.100}",
            field="messages", rule="a list",
        )  # fmt: skip
    return bool(messages) and isinstance(messages[0], Mapping)


def requests(
    conversations: Sequence[Conversation],
    *,
    model: str,
    tools: Sequence[Any] | None,
    train_on: TrainOn | None,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
    most: int,
    unroll: bool = False,
) -> Iterator[pb.RenderRequest]:
    """Yield the requests for these conversations, in order.

    Args:
        train_on: None: no mask is requested.
        most: Maximum number of conversations per request.
        unroll: Whether a learned turn may have a row of its own.
    """
    for name in ("messages", "tools", "conversation"):
        if name in template_kwargs:
            raise InvalidArgumentError(
                f"{name} cannot be a variable of the template", field=name, rule="a template's variable"
            )
    if train_on is not None and not callable(train_on) and train_on not in TRAIN_ON:
        raise InvalidArgumentError(
            f'train_on is "assistant", "last", "all" or a function of a message; this is {train_on!r}',
            field="train_on", rule="a known one",
        )  # fmt: skip
    shared = pb.RenderRequest(
        model=model,
        tools_json=_json([_schema(tool) for tool in tools], "tools") if tools else "",
        template_kwargs_json=_json(dict(template_kwargs), "template_kwargs") if template_kwargs else "",
        train_on=pb.TRAIN_ON_NOTHING if train_on is None else pb.TRAIN_ON_GIVEN
        if callable(train_on) else TRAIN_ON[train_on],
        add_generation_prompt=add_generation_prompt,
        unroll=unroll,
    )  # fmt: skip
    request, size = pb.RenderRequest(), 0
    request.CopyFrom(shared)
    for place, messages in enumerate(conversations):
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidArgumentError(
                f"conversation {place} is a list of messages; this is {messages!r:.100}",
                field="messages",
                rule="a list",
            )
        text = _json(list(messages), f"messages of conversation {place}")
        if request.conversations and (len(request.conversations) >= most or size + len(text) > CHUNK_CHARS):
            yield request
            request, size = pb.RenderRequest(), 0
            request.CopyFrom(shared)
            request.first = place
        train = [bool(train_on(each)) for each in messages] if callable(train_on) else ()
        request.conversations.add(messages_json=text, train=train)
        size += len(text)
    if request.conversations:
        yield request


def row_of(rendered: pb.RenderedConversation) -> Rendered:
    """Convert the server's answer to a row."""
    return {
        "input_ids": np.array(rendered.ids, np.int64),
        "loss_mask": np.frombuffer(rendered.loss_mask, np.uint8).astype(np.int64),
    }


def _schema(tool: Any) -> Any:
    if callable(schema := getattr(tool, "schema", None)):
        return schema()
    if isinstance(tool, Mapping):
        return dict(tool)
    raise InvalidArgumentError(
        f"a tool is its JSON schema, or a gradwire.rl.Tool (Tool.of(function)); this is {tool!r:.100}",
        field="tools", rule="a schema",
    )  # fmt: skip


def _json(value: Any, field: str) -> str:
    def plain(each: Any) -> Any:
        if isinstance(each, bytes) or hasattr(each, "getbands") or (isinstance(each, np.ndarray) and each.ndim > 1):
            raise TypeError(
                'an image is no part of messages: write {"type": "image"} in its place and give it as images'
            )
        if isinstance(each, np.ndarray | np.generic):
            return each.tolist()
        if isinstance(each, Mapping):
            return dict(each)
        if isinstance(each, Sequence):
            return list(each)
        raise TypeError(f"{type(each).__name__} is not JSON")

    try:
        return json.dumps(value, default=plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{field}: {error}", field=field.split()[0], rule="JSON") from error
