"""A conversation that a model is to go on with: what the sampler is asked, and the answer as a stream of parts.

Every protocol of conversations (chat completions, responses, messages) translates its request into a
:class:`.requests.ChatRequest` and these parts into its own events.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.core.rollouts.live import Answer, RolloutCall
from gradwire_server.doors.http.openai.answers import (
    FINISH_REASONS,
    OnStart,
    ScoredTokens,
    sampled,
    streamed,
    tokens_again,
    tokens_of,
    turn_of,
)
from gradwire_server.doors.http.openai.images import ConversationImages
from gradwire_server.doors.http.openai.names import find_model
from gradwire_server.doors.http.openai.reading import AnswerReader, Form, whole
from gradwire_server.doors.http.openai.reasoning_forms import reasoning_form_of
from gradwire_server.doors.http.openai.requests import ChatRequest, unsupported
from gradwire_server.doors.http.openai.tool_forms import form_of
from gradwire_server.doors.http.openai.tools import OfferedTools, forced_schema, messages_for_template, offered_tools
from gradwire_server.errors import invalid

OPENING_TOKENS = 16
"""Tokens at the end of a prompt in which the mark may be with which reasoning begins."""


@dataclass(frozen=True)
class AnswerDelta:
    """The new piece of one sample.

    Attributes:
        row: The sample's number.
        calls: Calls of tools in the form of chat completions, with the last part.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``, with the last part.
        stop_string: The stop string that ended the sample, with the last part.
        prompt: The prompt's tokens, scored, if the request wants that.
    """

    row: int
    content: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()
    finish_reason: str | None = None
    stop_string: str | None = None
    tokens: ScoredTokens = field(default_factory=ScoredTokens)
    prompt: ScoredTokens | None = None

    def __add__(self, other: AnswerDelta) -> AnswerDelta:
        """The two as one part of their sample."""
        return replace(
            other,
            content=self.content + other.content,
            reasoning=self.reasoning + other.reasoning,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True)
class Counts:
    """Tokens of the prompt, of all samples, those of the latter that are reasoning, and those of the prompt that an
    earlier request had computed."""

    prompt: int
    sampled: int
    reasoning: int
    cached: int = 0


class Conversation:
    """One request."""

    def __init__(self, core: Core, caller: Caller, asked: ChatRequest) -> None:
        self._core, self._caller, self._asked = core, caller, asked
        model = find_model(core, caller, asked.model)
        self.base, self._source = model.base, model.source
        self._offered = OfferedTools()
        self._form = Form()
        self._turn: RolloutCall | None = None

    async def request(self) -> pb.SampleRequest:
        """Return the request to the sampler."""
        asked = self._asked
        info = await self._core.texts.tokenizer_info(self._caller, self.base)
        offered = self._offered = offered_tools(*asked.offered)
        asked.ignore(offered.ignored)
        tools, must = offered.functions, offered.forced
        template = (info.tool_template if tools else "") or info.chat_template
        if tools and "tools" not in template:
            raise unsupported(f"the chat template of {self.base} takes no tools", "tools")
        schema = asked.response_format.json_schema_text() if asked.response_format is not None else ""
        if must:
            schema = forced_schema(must, template)
        call = asked.call(asked.max_completion_tokens or asked.max_tokens, schema)
        self._turn = await self._core.rollouts.call(self._caller)
        if self._turn is not None:
            await self._turn.begin(call, asked.given)
        call.top_logprobs = asked.top_logprobs or 0
        if tools and (stop := form_of(template).stop):
            call.stop.append(stop)
        ids, images = await self._prompt(template)
        begun = await self._reasoning_begun(template, ids)
        guided = call.json_schema or call.regex or call.grammar  # which hold the answer from its first character on
        specials = () if guided or call.keep_special_tokens else self._marking(template, info.special_token_ids)
        call.keep_special_tokens |= bool(specials)
        self._form = Form(template, tools, must, not guided, begun, specials)
        request = pb.SampleRequest(model=self._source, call=call, prompt_ids=[pb.TokenIds(ids=ids)])
        if images.numbers:
            request.images.extend(images.contents)
            request.prompt_images.add(images=images.numbers)
        return request

    def _marking(self, template: str, specials: Collection[str]) -> tuple[str, ...]:
        """The special tokens, if some of them mark reasoning or calls: they are read, and taken away afterwards."""
        reasoning = reasoning_form_of(template)
        form = form_of(template)
        marks = [*form.begins, form.stop] if self._offered.functions else []
        if reasoning is not None:
            marks += [reasoning.opens, reasoning.closes]
        return tuple(specials) if any(special in mark for special in specials for mark in marks) else ()

    async def answers(self, call: pb.SampleRequest, http: Request) -> tuple[list[AnswerDelta], Counts]:
        """All samples, whole."""
        async with turn_of(self._turn) as recorded:
            if recorded:
                parts, counts = _again(recorded)
                return list(map(self._given, parts)), counts
            answer = await sampled(self._core, self._caller, call, self._asked.model, http)
            parts = []
            for number, row in enumerate(answer.rows):
                read = whole(row.text, self._form)
                reason = _reason(row.finish_reason, read.calls)
                stop = await self._stop_string(call, row.tokens.ids) if self._turn is not None else None
                parts.append(
                    AnswerDelta(number, read.content, read.reasoning, read.calls, reason, stop, row.tokens, row.prompt)
                )
            await self._record(parts, answer.step)
        return list(map(self._given, parts)), Counts(
            answer.num_prompt_tokens, answer.num_sampled_tokens, 0, answer.num_cached_tokens
        )

    async def parts(
        self, call: pb.SampleRequest, on_start: OnStart | None = None
    ) -> AsyncGenerator[AnswerDelta | Counts]:
        """The samples' parts, as they grow, and the counts as the last. Text comes once it is certain what it is.

        In a rollout session the last part of each sample comes once all of them are recorded.
        """
        async with turn_of(self._turn) as recorded:
            if recorded:
                parts, counts = _again(recorded)
                for part in parts:
                    yield self._given(part)
                yield counts
                return
            if self._turn is None:
                async for each, _ in self._sampled(call, on_start):
                    yield self._given(each) if isinstance(each, AnswerDelta) else each
                return
            whole: dict[int, AnswerDelta] = {}
            last: list[AnswerDelta] = []
            async for each, step in self._sampled(call, on_start):
                if isinstance(each, AnswerDelta):
                    whole[each.row] = whole[each.row] + each if each.row in whole else each
                    if each.finish_reason is not None:
                        last.append(each)
                        continue
                else:
                    await self._record([whole[row] for row in sorted(whole)], step)
                    for part in last:
                        yield self._given(part)
                yield each

    def _given(self, part: AnswerDelta) -> AnswerDelta:
        """A part with its calls in the form in which their tools were offered."""
        return replace(part, calls=[self._offered.as_offered(call) for call in part.calls]) if part.calls else part

    async def _record(self, parts: Sequence[AnswerDelta], step: int | None) -> None:
        """Record whole samples, in a rollout session."""
        if self._turn is not None:
            answers = [
                Answer(
                    part.tokens.ids, [value or 0.0 for value in part.tokens.logprobs], part.finish_reason or "stop",
                    part.content, part.reasoning, part.calls, part.stop_string or "",
                )
                for part in parts
            ]  # fmt: skip
            await self._turn.record(answers, step)

    async def _sampled(
        self, call: pb.SampleRequest, on_start: OnStart | None
    ) -> AsyncGenerator[tuple[AnswerDelta | Counts, int | None]]:
        """The samples' parts and their counts, with the optimizer steps of a run's weights beside the latter."""
        readers: dict[int, AnswerReader] = {}
        ids = defaultdict[int, list[int]](list)
        reasoning = 0
        async for frame in streamed(self._core, self._caller, call, self._asked.model, on_start):
            for delta in _steps(frame.deltas, apart=bool(self._asked.logprobs)):
                reader = readers.get(delta.row) or readers.setdefault(delta.row, AnswerReader(self._form))
                content = thought = ""
                for text in delta.texts:
                    reasoning += reader.state == "reasoning"
                    read = reader.add(text)
                    content, thought = content + read.content, thought + read.reasoning
                reason = FINISH_REASONS.get(delta.stop_reason)
                calls: Sequence[dict[str, Any]] = ()
                if reason is not None:
                    read = reader.end()
                    content, thought = content + read.content, thought + read.reasoning
                    calls = read.calls
                    reason = _reason(reason, calls)
                ids[delta.row] += delta.token_ids
                stop = await self._stop_string(call, ids[delta.row]) if delta.stop_reason == "stop" else None
                yield AnswerDelta(delta.row, content, thought, calls, reason, stop, tokens_of(delta)), None
            if frame.HasField("result"):
                result = frame.result.sample
                counts = Counts(
                    result.num_prompt_tokens, result.num_sampled_tokens, reasoning, result.num_cached_tokens
                )
                yield counts, result.step if result.HasField("step") else None

    async def _stop_string(self, asked: pb.SampleRequest, ids: Sequence[int]) -> str | None:
        """The stop string that is the first in a sample's text; None if a stop token ended it."""
        if not asked.call.stop:
            return None
        (text,) = await self._core.texts.decode(
            self._caller, self.base, [ids], skip_special_tokens=not asked.call.keep_special_tokens
        )
        found = [(text.find(stop), stop) for stop in asked.call.stop if stop in text]
        return min(found)[1] if found else None

    async def _prompt(self, template: str) -> tuple[Sequence[int], ConversationImages]:
        """The ids of the conversation, ready for the assistant's turn, and its images."""
        asked, images = self._asked, ConversationImages()
        messages = messages_for_template(asked.messages, images)
        if images.numbers and not self._core.model_info(self.base).takes_images:
            raise unsupported(f"the messages have images, and the model {self.base} takes none", "messages")
        variables = self._variables(template)
        continued = ""
        if asked.continue_final_message:
            continued = _continued(messages, asked)
            messages.pop()
        request = pb.RenderRequest(
            model=self.base,
            conversations=[pb.Conversation(messages_json=json.dumps(messages))],
            tools_json=json.dumps(self._offered.functions) if self._offered.functions else "",
            template_kwargs_json=json.dumps(variables),
            train_on=pb.TRAIN_ON_NOTHING,
            add_generation_prompt=bool(continued) or asked.add_generation_prompt is not False,
        )
        if self._turn is not None and not continued and request.add_generation_prompt:
            del request.conversations[:]
            render = partial(self._core.texts.render, self._caller)
            return await self._turn.conversation(render, request, messages, images.of_messages(messages)), images
        rendered = await self._core.texts.render(self._caller, request)
        ids = list(rendered.rows[0].ids)
        if continued:
            (more,) = await self._core.texts.encode(self._caller, self.base, [continued], add_special_tokens=False)
            ids += more.ids
        if self._turn is not None:
            self._turn.tokens(ids)
        return ids, images

    def _variables(self, template: str) -> dict[str, Any]:
        """The template's variables: those of the request, and how much to think, if the template has a word for it."""
        asked = self._asked
        thinks = asked.enable_thinking
        if thinks is None and asked.reasoning_effort is not None:
            thinks = asked.reasoning_effort != "none"
        wanted = {"reasoning_effort": asked.reasoning_effort, "enable_thinking": thinks}
        known = {name: value for name, value in wanted.items() if value is not None and name in template}
        if asked.enable_thinking is not None and "enable_thinking" not in known:
            asked.ignore(["enable_thinking"])
        if asked.reasoning_effort not in (None, "none" if "enable_thinking" in known else None) and (
            "reasoning_effort" not in known
        ):
            asked.ignore(["reasoning_effort"])
        return known | (asked.chat_template_kwargs or {})

    async def _reasoning_begun(self, template: str, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens the reasoning."""
        form = reasoning_form_of(template)
        if form is None or self._asked.continue_final_message:
            return False
        end = [ids[-OPENING_TOKENS:]]
        (text,) = await self._core.texts.decode(self._caller, self.base, end, skip_special_tokens=False)
        return text.rstrip().endswith(form.opens.rstrip())


def _continued(messages: Sequence[Mapping[str, Any]], asked: ChatRequest) -> str:
    """The beginning of an answer that the last message is."""
    if asked.add_generation_prompt:
        message = "continue_final_message goes on with the last message, and add_generation_prompt begins another: one"
        raise invalid(message, "continue_final_message")
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str) or not last["content"] or len(messages) < 2:
        message = "continue_final_message needs a last message of the assistant's with text, and one before it"
        raise invalid(message, "continue_final_message")
    return str(last["content"])


def _steps(deltas: Iterable[pb.SampleDelta], *, apart: bool) -> Iterator[pb.SampleDelta]:
    """The deltas, or each of their tokens: next to log-probabilities, a text is that of one token, as with OpenAI.

    Guidance takes a part of several tokens for their texts, of which one may end the answer or be half a character.
    """
    for delta in deltas:
        count = len(delta.token_ids)
        if not apart or count < 2:
            yield delta
            continue
        width = len(delta.top_token_ids) // count
        for place in range(count):
            tops = slice(place * width, (place + 1) * width)
            yield pb.SampleDelta(
                row=delta.row,
                token_ids=[delta.token_ids[place]],
                logprobs=[delta.logprobs[place]],
                texts=[delta.texts[place]],
                stop_reason=delta.stop_reason if place == count - 1 else "",
                top_token_ids=delta.top_token_ids[tops],
                top_logprobs=delta.top_logprobs[tops],
            )


def _again(turns: Sequence[sessions.SessionTurn]) -> tuple[list[AnswerDelta], Counts]:
    """Recorded answers as they were given."""
    parts = [
        AnswerDelta(
            row, turn.text, turn.reasoning, json.loads(turn.tool_calls_json or "[]"), turn.finish_reason, None,
            tokens_again(turn),
        )
        for row, turn in enumerate(turns)
    ]  # fmt: skip
    return parts, Counts(turns[0].prompt_tokens, sum(len(turn.response_ids) for turn in turns), 0)


def _reason(reason: str, calls: Sequence[Mapping[str, Any]]) -> str:
    return "tool_calls" if calls and reason != "length" else reason
