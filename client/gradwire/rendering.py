"""Texts and tokens: the calls that use a model's own tokenizer and chat template, and their requests and rows."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeGuard, overload

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import ServerInfo, TokenizerInfo
from gradwire.errors import InvalidArgumentError, type_of
from gradwire.sampling import token_ids
from gradwire.wire.processes import Connected
from gradwire.wire.requests import message
from gradwire.wire.transport import Transport

Conversation = Sequence[Mapping[str, Any]]
"""Messages with ``role`` and ``content`` and any other keys that the model's template reads: ``tool_calls``,
``reasoning_content``. An assistant's message may have ``token_ids``, the tokens that were sampled for it."""
TrainOn = Literal["assistant", "last", "all"] | Callable[[Mapping[str, Any]], bool]
"""``"assistant"``: what the assistant writes, its end token included. ``"last"``: the last of its messages. ``"all"``:
every token. A function: the messages for which it is true."""

LEFT_OUT = (
    "the chat template%s does not write %s, which the model therefore never sees: say it in a user's message, or give "
    "the model's folder a template that has a place for it"
)
logger = logging.getLogger("gradwire")
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
        num_messages: Number of the conversation's first messages with which the row begins.
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
    keep_sampled: bool = False,
) -> Iterator[pb.RenderRequest]:
    """Yield the requests for these conversations, in order.

    Args:
        train_on: None: no mask is requested.
        most: Maximum number of conversations per request.
        unroll: Whether a learned turn may have a row of its own.
        keep_sampled: Whether ``token_ids`` stand there whole.
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
        sampled_history=pb.SAMPLED_KEPT if keep_sampled else pb.SAMPLED_AS_WRITTEN,
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


class Texts(Connected):
    """Tokenizing and rendering of texts, tokens and conversations with a model's tokenizer and chat template."""

    def __init__(self, transport: Transport, info: ServerInfo) -> None:
        self._transport, self._info = transport, info
        self._said: dict[str, set[str]] = {}

    async def encode(self, model: str, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Convert texts to rows of token ids with the model's own tokenizer."""
        request = message(pb.EncodeRequest, model=model, texts=_texts(texts), add_special_tokens=add_special_tokens)
        answer = await self._transport.unary(lambda stub: stub.Encode, request)
        return [list(sequence.ids) for sequence in answer.sequences]

    async def decode(self, model: str, ids: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Convert rows of token ids to texts with the model's own tokenizer."""
        request = pb.DecodeRequest(
            model=model, sequences=[token_ids(row) for row in ids], skip_special_tokens=skip_special_tokens
        )
        return list((await self._transport.unary(lambda stub: stub.Decode, request)).texts)

    async def tokenizer_info(self, model: str = "") -> TokenizerInfo:
        """Fetch a model's vocabulary size, special tokens and chat template; by default of the server's only model."""
        request = message(pb.GetTokenizerInfoRequest, model=model)
        return TokenizerInfo.from_message(await self._transport.unary(lambda stub: stub.GetTokenizerInfo, request))

    @overload
    async def render(
        self,
        messages: Conversation,
        tools: Sequence[Any] | None = None,
        train_on: TrainOn | None = "assistant",
        add_generation_prompt: bool = False,
        *,
        model: str = "",
        keep_sampled: bool = False,
        **template_kwargs: Any,
    ) -> Rendered: ...

    @overload
    async def render(
        self,
        messages: Sequence[Conversation],
        tools: Sequence[Any] | None = None,
        train_on: TrainOn | None = "assistant",
        add_generation_prompt: bool = False,
        *,
        model: str = "",
        keep_sampled: bool = False,
        **template_kwargs: Any,
    ) -> list[Rendered]: ...

    async def render(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Sequence[Any] | None = None,
        train_on: TrainOn | None = "assistant",
        add_generation_prompt: bool = False,
        *,
        model: str = "",
        keep_sampled: bool = False,
        **template_kwargs: Any,
    ) -> Rendered | list[Rendered]:
        """Convert conversations to token ids and a loss mask with the model's own chat template, for ``causal_lm``.

        The ids equal those of ``apply_chat_template``, but for a token across the border of a prompt, which is divided
        there. The mask selects the model's output: from the end of the prompt that a sampler gets, to the token that
        ends the turn; of it only ``{% generation %}`` where the template has that. An answer that the template writes
        otherwise in the history than for the model that answers is not learned, which is logged:
        :meth:`render_turns` gives it a row of its own.

        Args:
            messages: One conversation, or a list of them. An assistant's message may have ``token_ids``: its sampled
                tokens, which then replace its text where the template keeps the text.
            tools: JSON schemas, or :class:`gradwire.rl.Tool`.
            train_on: ``"assistant"``, ``"last"`` (the assistant's last message), ``"all"``, or a function of a
                message; for other roles, the mask covers content and end token. None: no mask.
            add_generation_prompt: End with the opening of the assistant's turn.
            model: A model of the server; may be omitted if it has only one.
            keep_sampled: ``token_ids`` stand there whole, also where the template drops reasoning from the history.
            template_kwargs: Further variables of the template, such as ``enable_thinking=False``.

        Raises:
            UnsupportedError: The model has no template, or the template does not show the tokens of a message.
            InvalidArgumentError: The conversation is malformed, or the template refuses it.
        """
        one = is_one(messages)
        rows = [
            each.row
            async for each in self._rendered(
                [messages] if one else messages,  # type: ignore[list-item, arg-type]
                model=model, tools=tools, train_on=train_on, add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs, keep_sampled=keep_sampled,
            )
        ]  # fmt: skip
        return rows[0] if one else rows

    async def render_turns(
        self,
        conversations: Sequence[Conversation],
        tools: Sequence[Any] | None = None,
        train_on: TrainOn = "assistant",
        *,
        model: str = "",
        **template_kwargs: Any,
    ) -> list[RenderedTurns]:
        """Convert conversations to rows that hold all learned turns, each behind the prompt that a sampler gets for it.

        A template may write an answer in the history otherwise than the model writes it, as without its reasoning;
        :meth:`render` does not learn it then, and here it has a row of its own. A conversation's last learned turn is
        in its first row.

        Args:
            conversations: A list of conversations; the other arguments are those of :meth:`render`.

        Raises:
            InvalidArgumentError: As for :meth:`render`; or the template writes an answer behind its prompt nowhere.
            UnsupportedError: As for :meth:`render`.
        """
        return [
            each
            async for each in self._rendered(
                conversations, model=model, tools=tools, train_on=train_on, template_kwargs=template_kwargs, unroll=True
            )
        ]

    async def _rendered(
        self, conversations: Sequence[Conversation], *, model: str, add_generation_prompt: bool = False,
        unroll: bool = False, **asked: Any,
    ) -> AsyncIterator[RenderedTurns]:  # fmt: skip
        most = self._info.limits.get("max_encode_texts", 1024)
        for request in requests(
            conversations, model=model, add_generation_prompt=add_generation_prompt, unroll=unroll, most=most, **asked
        ):
            answer = await self._transport.unary(lambda stub: stub.Render, request, timeout_s=None)
            self._tell_of(model, {part for row in answer.rows for part in row.left_out}, LEFT_OUT)
            if not unroll:
                self._tell_of(model, {remark for row in answer.rows for remark in row.remarks}, "render%s: %s")
            for row in answer.rows:
                place = request.first + row.conversation
                yield RenderedTurns(row_of(row), place, row.num_messages, tuple(row.remarks))

    def _tell_of(self, model: str, said: set[str], words: str) -> None:
        """Log once what is particular about rendered conversations."""
        for each in sorted(said - self._said.get(model, set())):
            logger.warning(words, f" of {model}" if model else "", each)
        self._said.setdefault(model, set()).update(said)


def _texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InvalidArgumentError(
            f"texts must be a list of strings, not {type_of(texts)}", field="texts", rule="a list"
        )
    return list(texts)
