"""Conversations to token ids and loss masks, with a model's own chat template and tokenizer."""

from __future__ import annotations

import copy
import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from gradwire_proto import chat
from gradwire_proto.chat import Message, TemplateError
from gradwire_proto.v1 import training_pb2 as pb
from tokenizers import Encoding, Tokenizer

from gradwire_server.errors import ServiceError, check_length, limit_exceeded
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.chat_template import REASONING, ChatTemplate
from gradwire_server.tokenizing.known_texts import KnownTexts
from gradwire_server.tokenizing.learned_turns import LearnedTurns, Row, TurnError

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


CACHED_BYTES = 16 << 20
"""Size of a model's cache of rendered conversations: some four bytes a token."""
PATIENCE_S = 60.0
HISTORIES: Mapping[int, chat.History] = {
    pb.SAMPLED_AS_WRITTEN: "as written",
    pb.SAMPLED_UNLESS_DROPPED: "unless dropped",
    pb.SAMPLED_KEPT: "kept",
}
"""A call that writes its conversations for longer is given up: the time grows with the square of the messages."""


class Renderer:
    """Renders conversations of one model.

    Args:
        model: Its name, for messages.
        known: The ids of texts that its tokenizer had last.
        num_ids: Ids that the model has, which may be more than its tokenizer's: a sampler draws any of them.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        limits: Limits,
        known: KnownTexts,
        num_ids: int = 0,
    ) -> None:
        self._model, self._tokenizer, self._template, self._limits = model, tokenizer, template, limits
        self._known = known
        self._specials = {
            number: token.content
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }  # fmt: skip
        self._vocabulary = tokenizer.get_vocab_size()
        self._num_ids = max(self._vocabulary, num_ids)
        self._cache = _Cache()
        self._left_out = LeftOut()

    def info(self) -> pb.TokenizerInfo:
        """Describe the tokenizer and its template."""
        sources = self._template.sources
        return pb.TokenizerInfo(
            model=self._model,
            vocab_size=self._vocabulary,
            special_tokens=self._template.special_tokens,
            special_token_ids={text: number for number, text in self._specials.items()},
            chat_template=sources.get("default", ""),
            chat_template_names=[name for name in sources if name != "default"],
            tool_template=sources.get("tool_use", ""),
        )

    def render(self, owner: str, request: pb.RenderRequest) -> pb.RenderResponse:
        """Render each conversation. Blocks.

        Args:
            owner: Name of the caller's key; what one key had rendered is not looked up for another.

        Raises:
            ServiceError: LIMIT_EXCEEDED; INVALID_ARGUMENT for what is no conversation or what the template refuses;
                UNSUPPORTED for a model without a template, and for messages whose tokens it does not tell apart.
        """
        if not self._template.sources:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"the model {self._model!r} has no chat template: add a chat_template.jinja to its folder (that of the"
                " instruct model, if this is its base), or write the conversations as text and use encode",
                field="model",
            )
        tools, variables = self._settings(request)
        shared = (
            request.tools_json, request.template_kwargs_json, request.train_on, request.add_generation_prompt,
            request.unroll, request.sampled_history, request.behind.SerializeToString(),
        )  # fmt: skip
        until = time.monotonic() + PATIENCE_S
        response = pb.RenderResponse()
        for number, conversation in enumerate(request.conversations):
            place = request.first + number
            key = hashlib.blake2b(
                repr((owner, shared, conversation.messages_json, list(conversation.train))).encode(), digest_size=16
            ).digest()
            rows = self._cache.get(key)
            if rows is None:
                if time.monotonic() > until:
                    message = f"rendering took more than {PATIENCE_S:.0f} s; send fewer conversations, or shorter ones"
                    raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field="messages", row=place)
                rows = pb.RenderResponse(rows=self._render(owner, conversation, place, request, tools, variables))
                self._cache.put(key, rows)
            for row in rows.rows:
                response.rows.add(conversation=number).MergeFrom(row)
        return response

    def _render(
        self,
        owner: str,
        conversation: pb.Conversation,
        place: int,
        request: pb.RenderRequest,
        tools: list[Any] | None,
        variables: Mapping[str, Any],
    ) -> list[pb.RenderedConversation]:
        messages = self._messages(conversation, place)
        prompt = request.add_generation_prompt
        marks: dict[str, list[chat.Span]] = {}

        def with_tools(
            written: Sequence[chat.Message], add_generation_prompt: bool, tools: list[Any] | None
        ) -> tuple[str, list[chat.Span]]:
            values = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
            return self._template.write(name, written, values)

        def write(written: Sequence[chat.Message], add_generation_prompt: bool) -> str:
            text, spans = with_tools(written, add_generation_prompt, tools)
            if len(text) > self._limits.max_text_chars:
                raise limit_exceeded(
                    f"the rendered conversation has {len(text)} characters",
                    "max_text_chars", self._limits.max_text_chars, "messages",
                )  # fmt: skip
            if spans:
                marks[text] = spans
            return text

        def decode(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

        form = chat.Chat(write, self._specials, decode)
        try:
            name = self._template.choose(variables.get("chat_template"), tools)
            trained = self._trained(conversation, messages, request.train_on, place)
            written = chat.plain(messages)
            new = {each["role"] for each in written} - {each["role"] for each in written[: request.behind.message]}
            unread = chat.left_out(form, written, add_generation_prompt=prompt) if new else None
            if unread is not None:
                raise _invalid(
                    f"conversation {place}, message {unread}: the chat template of {self._model!r} does not know the"
                    f" role {messages[unread]['role']!r} and leaves the message out; roles are system, user, assistant"
                    " and, where the template has them, tool and others",
                    "messages", place,
                )  # fmt: skip
            text = write(written, prompt)
            if request.HasField("behind"):
                return [self._behind(owner, form, written, text, request)]
            history = HISTORIES[request.sampled_history]
            known = marks if self._template.marks_generation(name) else None
            given = {index: each[chat.SAMPLED] for index, each in enumerate(messages) if each.get(chat.SAMPLED)}
            whole = (
                chat.cut(form, messages, add_generation_prompt=prompt, history=history)
                if given
                else [chat.Piece(0, text)]
            )
            ends = [*(piece.start for piece in whole[1:]), len(text)]
            kept = {
                piece.message: (piece.start, end)
                for piece, end in zip(whole, ends)
                if len(piece.token_ids or ()) == len(given.get(piece.message, ())) > 0
            }
            turns = LearnedTurns(form, self._encoding, written, text, known, kept, unroll=request.unroll)
            for index in reversed(trained):
                if _is_assistant(messages[index]):
                    turns.learn(index)
                    continue
                turn = chat.find_turn(form, written, text, index, add_generation_prompt=prompt)
                turns.rows[0].spans.add((turn.start, turn.end))

            def shown(changed: Sequence[chat.Message], others: list[Any] | None) -> str:
                apart = len(turns.rows) > 1 and changed[:-1]  # a row may have what the whole text has not
                before = with_tools(changed[:-1], True, others)[0] if apart else ""
                return with_tools(changed, prompt, others)[0] + before

            left_out = self._left_out.parts(
                f"{name} {messages[-1]['role']} {len(turns.rows) > 1} {request.template_kwargs_json}",
                shown, written, tools,
            )  # fmt: skip
            rows = []
            for row in turns.learned:
                pieces = whole if row is turns.rows[0] else [chat.Piece(0, row.text)]
                if given and row is not turns.rows[0] and row.messages is not None:
                    pieces = chat.cut(form, messages[: row.count])
                rows.append(self._encode(owner, pieces, row, request.train_on))
                rows[-1].num_messages = row.count
        except chat.TemplateError as error:
            raise ServiceError(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"conversation {place}: the chat template of {self._model!r} refuses it: {str(error)[:500]}",
                field="messages", row=place,
            ) from error  # fmt: skip
        except TurnError as error:
            raise _invalid(f"conversation {place}, message {error.index}: {error}", "messages", place) from error
        except chat.UnclearTurnError as error:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"conversation {place}: {error}, so that its tokens cannot be told from the others'; use"
                ' train_on="all", or put {% generation %} ... {% endgeneration %} around what the assistant writes in'
                " the model's chat template",
                field="messages", row=place,
            ) from error  # fmt: skip
        rows[0].left_out.extend(left_out)
        rows[0].remarks.extend(dict.fromkeys(turns.remarks))
        _note_prompt(rows[0], text, request)
        return rows

    def _behind(
        self, owner: str, form: chat.Chat, messages: Sequence[chat.Message], text: str, request: pb.RenderRequest
    ) -> pb.RenderedConversation:
        """The tokens behind an assistant's turn, or why the conversation is no longer the one that had that turn."""
        asked, message = request.behind, messages[request.behind.message]
        try:
            span = chat.turn_span(form, messages, text, asked.message)
        except chat.UnclearTurnError:
            return pb.RenderedConversation(leaves="other")
        if request.sampled_history != pb.SAMPLED_KEPT:
            prompt = text[: asked.prompt_chars]
            if _text_digest(prompt) != asked.prompt_digest:
                before = form.tried(messages[: asked.message], True) or ""  # without what came later
                return pb.RenderedConversation(
                    leaves="reasoning" if _text_digest(before) == asked.prompt_digest else "other"
                )
            if not chat.has_reasoning(message, text[asked.prompt_chars : span[1]]):
                return pb.RenderedConversation(leaves="reasoning")
        rest = chat.behind(form, text, span, asked.last_id)
        row = pb.RenderedConversation(ids=self._ids_behind(owner, asked.last_id, rest))
        _note_prompt(row, text, request)
        return row

    def _ids_behind(self, owner: str, last: int, text: str) -> list[int]:
        """The tokens of a text behind a token: behind a special one as in the whole text, where some tokenizers put no
        blank that they put before every text."""
        before = self._specials.get(last)
        ids = self._known.ids(owner, (before or "") + text)
        return ids[1:] if before and ids[:1] == [last] else self._known.ids(owner, text)

    def _encoding(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode(
        self, owner: str, pieces: Sequence[chat.Piece], row: Row, train_on: pb.TrainOn.ValueType
    ) -> pb.RenderedConversation:
        ids: list[int] = []
        mask = bytearray()
        spans = sorted(row.spans)
        ends = [piece.start for piece in pieces[1:]] + [max((end for _, end in spans), default=0)]
        for piece, stop in zip(pieces, ends):
            if piece.token_ids is not None:
                ids += piece.token_ids
                learned = any(start < stop and piece.start < end for start, end in spans)
                mask += bytes([learned]) * len(piece.token_ids)
                continue
            if train_on == pb.TRAIN_ON_NOTHING:
                ids += self._known.ids(owner, piece.text)
                continue
            for part, place in self._parts(piece, row):
                ids += part.ids
                mask += bytes(chat.covered(part.offsets, spans, place))
        if train_on == pb.TRAIN_ON_ALL:
            mask = bytearray(b"\1" * len(ids))
        return pb.RenderedConversation(ids=ids, loss_mask=b"" if train_on == pb.TRAIN_ON_NOTHING else bytes(mask))

    def _parts(self, piece: chat.Piece, row: Row) -> list[tuple[Encoding, int]]:
        """The tokens of a text with the place of its first character, in two where a token reaches over the end of the
        prompt of its last learned turn: the sampler's ends there."""
        if piece.text != row.text:
            return [(self._encoding(piece.text), piece.start)]
        at = max(row.starts, default=0)
        if at and row.divides(at):
            parts = [self._encoding(piece.text[:at]), self._encoding(piece.text[at:])]
            apart = [*parts[0].ids, *parts[1].ids]
            texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in (row.encoding.ids, apart)]
            if texts[0] == texts[1]:  # not so where a tokenizer puts a blank before every text
                return [(parts[0], 0), (parts[1], at)]
        return [(row.encoding, 0)]

    def _trained(
        self,
        conversation: pb.Conversation,
        messages: Sequence[chat.Message],
        train_on: pb.TrainOn.ValueType,
        place: int,
    ) -> list[int]:
        """The messages whose tokens are looked for."""
        if train_on in (pb.TRAIN_ON_ALL, pb.TRAIN_ON_NOTHING):
            return []
        if train_on == pb.TRAIN_ON_GIVEN:
            if len(conversation.train) != len(messages):
                message = f"conversation {place} has {len(messages)} messages, and train {len(conversation.train)}"
                raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="train", row=place)
            return [index for index, wanted in enumerate(conversation.train) if wanted]
        written = [index for index, message in enumerate(messages) if _is_assistant(message)]
        return written[-1:] if train_on == pb.TRAIN_ON_LAST else written

    def _messages(self, conversation: pb.Conversation, place: int) -> list[chat.Message]:
        check_length(conversation.messages_json, "max_text_chars", self._limits.max_text_chars, "messages")
        messages = _json(conversation.messages_json, list, "messages", place)
        if len(messages) > self._limits.max_messages:
            raise limit_exceeded(
                f"conversation {place} has {len(messages)} messages",
                "max_messages", self._limits.max_messages, "messages",
            )  # fmt: skip
        if not messages:
            raise _invalid(f"conversation {place} has no messages", "messages", place)
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise _invalid(
                    f'conversation {place}, message {index} is no mapping with a "role"; it is {str(message)[:100]}',
                    "messages", place,
                )  # fmt: skip
            ids = message.get(chat.SAMPLED)
            if ids is not None and not (
                isinstance(ids, list) and all(type(each) is int and 0 <= each < self._num_ids for each in ids)
            ):
                raise _invalid(
                    f"conversation {place}, message {index}: token_ids is a list of ids from 0 to"
                    f" {self._num_ids - 1}",
                    "messages", place,
                )  # fmt: skip
        return cast("list[chat.Message]", messages)

    def _settings(self, request: pb.RenderRequest) -> tuple[list[Any] | None, dict[str, Any]]:
        for name in ("tools_json", "template_kwargs_json"):
            check_length(
                getattr(request, name), "max_kwargs_chars", self._limits.max_kwargs_chars, name.removesuffix("_json")
            )
        tools = _json(request.tools_json, list, "tools") if request.tools_json else None
        variables = _json(request.template_kwargs_json, dict, "template_kwargs") if request.template_kwargs_json else {}
        return tools, variables


class _Cache:
    """The conversations rendered last, as far as their tokens fit."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> pb.RenderResponse | None:
        with self._lock:
            rows = self._rows.get(key)
            if rows is None:
                return None
            self._rows.move_to_end(key)
        return pb.RenderResponse.FromString(rows)

    def put(self, key: bytes, response: pb.RenderResponse) -> None:
        rows = response.SerializeToString()
        with self._lock:
            if key in self._rows:
                return
            self._rows[key] = rows
            self._size += len(rows)
            while self._size > CACHED_BYTES:
                self._size -= len(self._rows.popitem(last=False)[1])


def _note_prompt(row: pb.RenderedConversation, text: str, request: pb.RenderRequest) -> None:
    """Note what was written, for a request that goes on with it."""
    if request.sampled_history == pb.SAMPLED_UNLESS_DROPPED:
        row.prompt_chars, row.prompt_digest = len(text), _text_digest(text)


def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _is_assistant(message: chat.Message) -> bool:
    return message.get("role") == "assistant"


def _json(text: str, kind: type, field: str, place: int | None = None) -> Any:
    try:
        parsed = chat.read_json(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, kind):
        where = "" if place is None else f"conversation {place}: "
        raise _invalid(f"{where}{field} is no JSON of a {kind.__name__}", field, place)
    return parsed


def _invalid(message: str, field: str, row: int | None) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field, row=row)
