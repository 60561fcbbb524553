"""One session while its agent is at work, and one of its calls: limits, the prompt, the record.

The way of a call: ``begin`` (limits, sampling) -> ``conversation`` or ``tokens`` (the prompt, and where it stands in
the forest) -> ``turn`` (a place among the session's calls) -> the door samples -> ``record`` (on disk) -> the door
answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from gradwire_proto.chat import Message
from gradwire_proto.recognition import Asked, digest_of
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import SessionCall
from gradwire_server.core.rollouts.transcript import Ids, Place, Transcript, system_digest, system_of
from gradwire_server.errors import ServiceError
from gradwire_server.journal.session_records import StoredSession

SETTINGS: Sequence[Literal["temperature", "top_p", "top_k", "min_p"]] = ("temperature", "top_p", "top_k", "min_p")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling from the whole distribution, where a session fixes its sampling and says nothing of these."""
COMPLETIONS = "completions"
SYSTEM_CHARS = 2000
REPEATED_S = 600.0
"""Seconds after an answer in which a client's repetition of the call gets it again."""
Render = Callable[[pb.RenderRequest], Awaitable[pb.RenderResponse]]


@dataclass(frozen=True)
class Answer:
    """One answer as a door is about to give it.

    Attributes:
        ids, logprobs: The sampled tokens: ``[tokens]``.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``.
        text, reasoning, calls: The answer taken apart; calls in OpenAI's form.
        stop: The stop string before which the text ends; empty for none.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    text: str
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    stop: str = ""


@dataclass(eq=False)
class LiveSession:
    """A session in memory.

    Attributes:
        stored: Its row, with the counts of its turns.
        transcript: Its turns; None while they are on disk alone.
        active: Calls under way.
        used_s: ``time.monotonic()`` of the newest call's beginning or end.
        changing: Held while turns are read or written.
        computed: Calls that are being computed.
        places: Notified when one of them is done.
        answering: The calls that are being answered, by what a repetition is recognized by.
    """

    stored: StoredSession
    transcript: Transcript | None = None
    active: int = 0
    used_s: float = field(default_factory=time.monotonic)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    computed: int = 0
    places: asyncio.Condition = field(default_factory=asyncio.Condition)
    answering: dict[bytes, asyncio.Event] = field(default_factory=dict)

    @property
    def session(self) -> sessions.RolloutSession:
        return self.stored.session

    def check_open(self) -> None:
        """Check that the session has not ended.

        Raises:
            ServiceError: PERMISSION_DENIED, which clients do not repeat.
        """
        if self.session.state != "open":
            message = f"the rollout session {self.session.session_id} has ended: {self.session.end_reason}"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message, rule="session_ended")

    def limit_reached(self) -> str:
        """Why the session takes no further call; empty if it does."""
        session, limits = self.session, self.session.limits
        if session.num_turns >= limits.max_turns:
            return f"it has had its {limits.max_turns} turns (max_turns)"
        if limits.max_tokens and session.num_sampled_tokens >= limits.max_tokens:
            return f"it has sampled its {limits.max_tokens} tokens (max_tokens)"
        return self.time_is_up()

    def has_place(self) -> bool:
        """Whether one more call may be computed now: no more at a time than the session has turns left."""
        limits = self.session.limits
        places = min(limits.max_concurrent_calls, limits.max_turns - self.session.num_turns)
        return self.computed < max(1, places)

    def time_is_up(self) -> str:
        """Why its time is over; empty if it is not."""
        session, limits = self.session, self.session.limits
        if time.time() >= session.created_at + limits.max_seconds:
            return f"its {limits.max_seconds:g} s are over (max_seconds)"
        if not self.active and time.monotonic() >= self.used_s + limits.idle_s:
            return f"no call came for {limits.idle_s:g} s (idle_s)"
        return ""


@dataclass(frozen=True)
class _Prompt:
    ids: Ids
    place: Place
    asked: Asked | None = None
    rendered: pb.RenderedConversation = field(default_factory=pb.RenderedConversation)


class RolloutCall:
    """One call of a session's agent.

    Args:
        end: Ends the session, with a reason.
        write: Writes turns of the session.
    """

    def __init__(
        self,
        live: LiveSession,
        transcript: Transcript,
        call: SessionCall,
        end: Callable[[str], Awaitable[object]],
        write: Callable[[Sequence[journal_pb2.StoredTurn]], Awaitable[object]],
    ) -> None:
        self._live, self._transcript, self._call = live, transcript, call
        self._end, self._write = end, write
        self._prompts: list[_Prompt] = []
        self._tools: Sequence[str] = ()
        self._temperature = 1.0
        self._began = time.time()

    async def begin(self, call: pb.SampleCall, given: Collection[str]) -> None:
        """Set how to sample.

        Args:
            call: The agent's settings, which are changed.
            given: Names of its fields that the agent has set.

        Raises:
            ServiceError: PERMISSION_DENIED if the session has ended, or ends by one of its limits.
        """
        await self._check_limits()
        session = self._live.session
        sampling, limits = session.sampling, session.limits
        for name in SETTINGS:
            if sampling.HasField(name) and (sampling.fixed or name not in given):
                setattr(call, name, getattr(sampling, name))
            elif sampling.fixed:
                setattr(call, name, NEUTRAL[name])
        if sampling.fixed:
            call.repetition_penalty, call.presence_penalty, call.frequency_penalty = 1.0, 0.0, 0.0
            call.ClearField("seed")  # with one seed, the rollouts of a group would be equal
        most = [call.max_tokens] if call.HasField("max_tokens") else []
        most += [sampling.max_tokens] if sampling.max_tokens else []
        if limits.max_tokens:
            most.append(max(1, (limits.max_tokens - session.num_sampled_tokens) // (call.n or 1)))
        if most:
            call.max_tokens = min(most)
        self._temperature = call.temperature

    async def conversation(
        self,
        render: Render,
        request: pb.RenderRequest,
        messages: Sequence[Message],
        images: Mapping[int, Sequence[bytes]],
    ) -> Sequence[int]:
        """The prompt of a conversation, with the tokens that were sampled for the answers in it.

        Args:
            request: How to render it, without the messages.
            messages: As chat templates take them.
            images: Digests of the images of each message that has some.

        Raises:
            ServiceError: As for rendering.
        """
        session, transcript = self._live.session, self._transcript
        settings = digest_of(session.base_model, request.tools_json, request.template_kwargs_json)
        asked = transcript.answers.read(settings, messages, images)
        tools = json.loads(request.tools_json) if request.tools_json else []
        self._tools = [str(tool["function"]["name"]) for tool in tools]
        kept = session.history != "template"
        request.sampled_history = pb.SAMPLED_KEPT if kept else pb.SAMPLED_UNLESS_DROPPED
        reason = ""
        if asked.goes_on is not None:
            number, index = asked.goes_on
            before, stored = transcript.row(number), transcript.turns[number]
            request.behind.message, request.behind.last_id = index, int(before[-1])
            request.behind.prompt_chars, request.behind.prompt_digest = stored.prompt_chars, stored.prompt_digest
            row = await _rendered(render, request, asked.texts)
            reason = row.leaves
            if not reason:
                ids = np.concatenate([before, np.array(row.ids, np.uint32)])
                self._prompts = [_Prompt(ids, Place(number, len(before)), asked, row)]
                whole: list[int] = ids.tolist()
                return whole
            request.ClearField("behind")
        texts = list(asked.texts)
        for index, number in asked.seen.items():
            sampled = list(transcript.turns[number].turn.response_ids)
            texts[index] = json.dumps({**asked.messages[index], "token_ids": sampled})
        row = await _rendered(render, request, texts)
        ids = np.array(row.ids, np.uint32)
        self._prompts = [_Prompt(ids, transcript.place(ids, asked, reason), asked, row)]
        return row.ids  # a list of them would take longer than all else here

    def tokens(self, ids: Sequence[int], text: str = "") -> None:
        """Take a prompt that is no conversation, behind those that were taken.

        Args:
            text: The text that it is, if it was one.
        """
        row, rendered = np.array(ids, np.uint32), pb.RenderedConversation()
        if text:
            rendered.prompt_chars, rendered.prompt_digest = len(text), digest_of(text)
        self._prompts.append(_Prompt(row, self._transcript.place(row), None, rendered))

    async def text(
        self, text: str, decode: Callable[[Sequence[int]], Awaitable[str]], encode: Callable[[str], Awaitable[Ids]]
    ) -> list[int] | None:
        """The prompt of a text that begins with an earlier prompt and its answer; None for one that does not.

        Args:
            decode: Gives the text of tokens, special ones included.
            encode: Gives the tokens of a text that others are before.
        """
        for stored in reversed(self._transcript.turns):
            size, turn = stored.prompt_chars, stored.turn
            if turn.door != COMPLETIONS or not size or digest_of(text[:size]) != stored.prompt_digest:
                continue
            response, rest = list(turn.response_ids), text[size:]
            whole = await decode(response)
            if not rest.startswith(whole):  # a text has no end token, or another
                response = response[:-1]
                whole = await decode(response)
            if response and rest.startswith(whole):
                more = await encode(rest[len(whole) :])
                return [*self._transcript.prompt(turn.number).tolist(), *response, *more.tolist()]
        return None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[list[sessions.SessionTurn]]:
        """Wait for a place among the session's calls; yields the recorded answers of a call that this one repeats.

        A client that says that it repeats a call, or gives it the same idempotency key, gets the answer that was
        recorded of it; while the call is being answered it waits for that.
        """
        live, same = self._live, digest_of(self._call.path, self._call.body, self._call.idempotency_key)
        while self._may_repeat and (answering := live.answering.get(same)) is not None:
            await answering.wait()
        done = live.answering[same] = asyncio.Event()
        live.active += 1
        live.used_s = time.monotonic()
        try:
            recorded = self._recorded()
            if recorded:
                yield recorded
                return
            async with live.places:
                await live.places.wait_for(live.has_place)
                live.computed += 1
            try:
                await self._check_limits()  # those before this call may have reached one
                self._began = time.time()
                yield []
            finally:
                live.computed -= 1
                async with live.places:
                    live.places.notify_all()
        finally:
            live.active -= 1
            live.used_s = time.monotonic()
            if live.answering.get(same) is done:
                del live.answering[same]
            done.set()

    async def _check_limits(self) -> None:
        """Check that the session is open, and end it if it is at one of its limits."""
        self._live.check_open()
        if reason := self._live.limit_reached():
            await self._end(reason)
            self._live.check_open()

    @property
    def _may_repeat(self) -> bool:
        return bool(self._call.idempotency_key) or self._call.repeated

    def _recorded(self) -> list[sessions.SessionTurn]:
        """The answers that were recorded of the call that this one repeats."""
        call, since = self._call, time.time() - REPEATED_S
        if not self._may_repeat:
            return []
        found = [
            stored.turn
            for stored in self._transcript.turns
            if (stored.body, stored.idempotency_key) == (call.body, call.idempotency_key)
            and stored.turn.started_at + stored.turn.seconds > since
        ]
        return [turn for turn in found if turn.started_at == found[-1].started_at]

    async def record(self, answers: Sequence[Answer], step: int | None) -> None:
        """Write the answers of the call to disk, also if the client leaves meanwhile.

        Args:
            step: Optimizer steps of the weights; None for a base model.

        Raises:
            ServiceError: PERMISSION_DENIED if the session has ended; LIMIT_EXCEEDED, STORAGE_FULL.
        """
        await asyncio.shield(asyncio.ensure_future(self._record(answers, step)))

    async def _record(self, answers: Sequence[Answer], step: int | None) -> None:
        live = self._live
        async with live.changing:
            live.check_open()
            turns = self._turns(answers, step)
            await self._write(turns)
            for stored in turns:
                self._transcript.add(stored)
        session = live.session
        session.num_turns += len(turns)
        session.used_at = time.time()
        for stored in turns:
            session.num_prompt_tokens += stored.turn.prompt_tokens
            session.num_sampled_tokens += len(stored.turn.response_ids)

    def _turns(self, answers: Sequence[Answer], step: int | None) -> list[journal_pb2.StoredTurn]:
        call, begin = self._call, len(self._transcript.turns)
        samples = len(answers) // len(self._prompts)
        made = []
        for number, answer in enumerate(answers, begin):
            prompt, sample = self._prompts[(number - begin) // samples], (number - begin) % samples
            asked = prompt.asked
            digest = asked.chain[-1] if asked is not None else digest_of(prompt.ids.tobytes())
            place = self._transcript.again(digest, prompt.ids) or prompt.place
            if sample:
                place = Place(number - sample, len(prompt.ids), "other")
            stored = journal_pb2.StoredTurn(asked=digest, body=call.body, idempotency_key=call.idempotency_key)
            turn = stored.turn
            turn.number, turn.parent, turn.shared, turn.fork = number, place.parent, place.shared, place.fork
            if len(prompt.rendered.ids) == len(prompt.ids) - place.shared:  # which are copied without a list of them
                turn.prompt_suffix.MergeFrom(prompt.rendered.ids)
            else:
                turn.prompt_suffix.extend(prompt.ids[place.shared :].tolist())
            turn.prompt_tokens = len(prompt.ids)
            turn.response_ids.extend(answer.ids)
            turn.logprobs.extend(answer.logprobs)
            if step is not None:
                turn.versions.add(tokens=len(answer.ids), step=step)
            turn.finish_reason, turn.temperature = answer.finish_reason, self._temperature
            turn.door = _door(call.path)
            turn.text, turn.reasoning = answer.text, answer.reasoning
            turn.tool_calls_json = json.dumps(answer.calls, ensure_ascii=False) if answer.calls else ""
            turn.started_at, turn.seconds = self._began, time.time() - self._began
            stored.stop = answer.stop
            stored.prompt_chars, stored.prompt_digest = prompt.rendered.prompt_chars, prompt.rendered.prompt_digest
            if asked is not None:
                self._add_conversation(stored, asked, place)
            made.append(stored)
        return made

    def _add_conversation(self, stored: journal_pb2.StoredTurn, asked: Asked, place: Place) -> None:
        turn, known = stored.turn, self._transcript.known(asked)
        turn.system_digest = system_digest(asked.messages)
        turn.tool_names.extend(self._tools)
        if place.fork or place.parent < 0:
            turn.system = system_of(asked.messages)[:SYSTEM_CHARS]
        begin = asked.goes_on[1] + 1 if asked.goes_on is not None and not place.fork else max(known - 1, 0)
        new = asked.messages[begin:]
        turn.new_messages_json = json.dumps(new, ensure_ascii=False) if new else ""
        stored.num_messages = len(asked.messages)
        stored.chain_start = known
        stored.chain.extend(asked.chain[known:])
        stored.seen.extend(sorted(set(asked.seen.values())))


async def _rendered(render: Render, request: pb.RenderRequest, texts: Sequence[str]) -> pb.RenderedConversation:
    """The rendered conversation of messages in JSON."""
    del request.conversations[:]
    request.conversations.add(messages_json=f"[{','.join(texts)}]")
    return (await render(request)).rows[0]


def _door(path: str) -> str:
    """The name of a door by the path of a call."""
    for part, name in (("/chat/", "chat"), ("/messages", "messages"), ("/responses", "responses")):
        if part in path:
            return name
    return COMPLETIONS
