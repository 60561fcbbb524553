"""Rollout sessions: their creation, their keys, their end, and what is told of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial

from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import digest_of
from gradwire_server.access.keys import SESSION_KEY, Caller, Keys, SessionCall
from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.jobs.files import new_id
from gradwire_server.core.rollouts.live import LiveSession, RolloutCall
from gradwire_server.core.rollouts.transcript import Transcript
from gradwire_server.errors import ServiceError, check_length, invalid, key_reused, unknown_session
from gradwire_server.journal.session_records import SessionRecords, StoredSession
from gradwire_server.limits import Limits

log = logging.getLogger(__name__)

PATH = "/sessions"
"""Where sessions are, below the HTTP door's root."""
OPEN, ENDED = "open", "ended"
HISTORIES = ("keep", "template")
LOOK_S = 2.0
"""Seconds between two looks for sessions whose time is over."""
LOADED_BYTES = 256 << 20
"""Size of the turns that are in memory; those of sessions without a call go first."""
MAX_TASK_CHARS = 1 << 16
MAX_REASON_CHARS = 500
MAX_PAGE = 1000


@dataclasses.dataclass(frozen=True)
class Source:
    """The weights that a session samples from.

    Attributes:
        model: A run's id, a checkpoint's path, or a base model.
        run_id: The run; empty for a base model.
        step: Optimizer steps of a checkpoint's weights.
    """

    model: str
    base_model: str
    run_id: str = ""
    step: int | None = None


@dataclasses.dataclass
class _Held:
    """Totals over a key's sessions: open ones, ended ones, and the bytes of their turns on disk."""

    open: int = 0
    ended: int = 0
    bytes: int = 0


class RolloutSessions:
    """The sessions of a server.

    Args:
        keys: The API keys, whose checks include those of sessions from now on.
        find: Finds what a caller may sample from by its name.

    Attributes:
        url: Address of the HTTP door; empty while there is none.
        open_door: Opens one, if it may be opened when it is needed.
    """

    def __init__(
        self, limits: Limits, keys: Keys, records: SessionRecords, find: Callable[[Caller, str], Source]
    ) -> None:
        self._limits, self._keys, self._records, self._find = limits, keys, records, find
        self.url = ""
        self.open_door: Callable[[], Awaitable[object]] | None = None
        self._known: dict[str, LiveSession] = {}
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        self._by_digest: dict[str, str] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._creating = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the sessions, and begin to end those whose time is over."""
        for stored in await self._records.load():
            self._add(stored)
        self._keys.check_session = self._check
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Stop to look at the time."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    # ---- the owner's calls ----

    async def create(self, caller: Caller, request: sessions.CreateRolloutSessionRequest) -> sessions.RolloutSession:
        """Create a session, or give the one that this idempotency key has made a new key; on disk when this returns.

        Raises:
            ServiceError: UNKNOWN_MODEL, UNKNOWN_RUN, UNKNOWN_CHECKPOINT, INVALID_ARGUMENT, LIMIT_EXCEEDED; UNSUPPORTED
                if the server has no HTTP door; ALREADY_EXISTS if the key made another session.
        """
        async with self._creating:
            if not self.url and self.open_door is not None:
                await self.open_door()
        if not self.url:
            message = (
                "agents reach their sessions over HTTP, which this server does not serve: install gradwire[http], and"
                " start it with --http PORT"
            )
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="http")
        session, content = self._made(caller, request), request.SerializeToString(deterministic=True)
        key = SESSION_KEY + secrets.token_urlsafe(32)
        async with self._creating:
            made = self._by_key.get((caller.name, request.idempotency_key)) if request.idempotency_key else None
            if made is not None:
                live = self._known[made]
                if live.stored.request != content:
                    raise key_reused(f"the rollout session {made}", "settings")
                await self._records.update(live.session, key_digest=digest_of(key))
                del self._by_digest[live.stored.key_digest]
                live.stored = dataclasses.replace(live.stored, key_digest=digest_of(key))
                self._by_digest[digest_of(key)] = made
                return self._told(live, key)
            self._check_room(caller.name)
            stored = StoredSession(session, digest_of(key), request.idempotency_key, content)
            await self._records.insert(stored)
            return self._told(self._add(stored), key)

    def get(self, caller: Caller, session_id: str) -> sessions.RolloutSession:
        """A session.

        Raises:
            ServiceError: UNKNOWN_SESSION, also for one of another key.
        """
        return self._told(self._of(caller, session_id))

    def page(
        self, caller: Caller, request: sessions.ListRolloutSessionsRequest
    ) -> tuple[list[sessions.RolloutSession], str]:
        """A page of the caller's sessions, an admin's of all, newest first, and the next page's token, "" at the end.

        Raises:
            ServiceError: INVALID_ARGUMENT for an unknown token or state.
        """
        if request.state not in ("", OPEN, ENDED):
            raise invalid(f"state is {request.state[:50]!r}; there are {OPEN}, {ENDED}", "state")
        size = min(request.page_size or 100, MAX_PAGE)
        mine = [
            live
            for live in reversed(self._known.values())
            if (caller.sees_all or live.session.owner == caller.name)
            and request.run_id in ("", live.session.run_id)
            and request.group in ("", live.session.group)
            and request.state in ("", live.session.state)
        ]
        start = 0
        if request.page_token:
            ids = [live.session.session_id for live in mine]
            if request.page_token not in ids:
                raise invalid("unknown page_token; list again", "page_token")
            start = ids.index(request.page_token) + 1
        page = [self._told(live) for live in mine[start : start + size]]
        return page, page[-1].session_id if start + size < len(mine) else ""

    async def end(self, caller: Caller, request: sessions.EndRolloutSessionRequest) -> sessions.RolloutSession:
        """End a session, and note rewards; one that has ended stays ended as it did. On disk when this returns.

        Raises:
            ServiceError: UNKNOWN_SESSION; PERMISSION_DENIED for a session that the caller may only read;
                INVALID_ARGUMENT for a reward of a turn that there is not.
        """
        live = self._of(caller, request.session_id, write=True)
        session = live.session
        if not all(map(math.isfinite, (request.reward, *request.turn_rewards.values()))):
            raise invalid("rewards are finite numbers", "reward")
        if any(number >= session.num_turns for number in request.turn_rewards):
            raise invalid(f"the session has {session.num_turns} turns, numbered from 0", "turn_rewards")
        await self._end(live, (request.reason or "ended by its owner")[:MAX_REASON_CHARS])
        if request.HasField("reward") or request.turn_rewards:
            if request.HasField("reward"):
                session.reward = request.reward
            session.turn_rewards.update(request.turn_rewards)
            await self._records.update(session)
        return self._told(live)

    async def delete(self, caller: Caller, session_id: str) -> None:
        """Delete a session with its turns.

        Raises:
            ServiceError: As for :meth:`end`.
        """
        await self._delete([self._of(caller, session_id, write=True)])

    async def rollout(self, caller: Caller, session_id: str, first: int = 0) -> AsyncGenerator[sessions.RolloutFrame]:
        """Yield a session with its turns, from a number on, in frames of about ``CHUNK_BYTES`` at most.

        Raises:
            ServiceError: UNKNOWN_SESSION.
        """
        live = self._of(caller, session_id)
        transcript = await self._transcript(live)
        frame, size = sessions.RolloutFrame(session=self._told(live)), 0
        for stored, used in list(zip(transcript.turns, transcript.used(), strict=True))[first:]:
            length = stored.turn.ByteSize()
            if size and size + length > CHUNK_BYTES:
                yield frame
                frame, size = sessions.RolloutFrame(), 0
            frame.turns.append(stored.turn)
            frame.turns[-1].used = used
            size += length
        yield frame

    # ---- the agents' calls ----

    def caller(self, secret: str, call: SessionCall) -> Caller:
        """The caller of an agent's call: the session's owner, in the session.

        The secret is looked up by its digest, which tells nothing of it in whatever time.

        Args:
            call: The call; its session is empty where only the key says which one it is.

        Raises:
            ServiceError: UNAUTHENTICATED; PERMISSION_DENIED if the session has ended.
        """
        found = self._by_digest.get(digest_of(secret)) if secret.startswith(SESSION_KEY) else None
        if found is None and not self._keys.required and call.session_id in self._known:
            found = call.session_id  # a server without keys takes whatever key an agent has
        if found is None or call.session_id not in ("", found):
            message = "this is not the key of the rollout session; it was told when the session was created"
            raise ServiceError(pb.ERROR_CODE_UNAUTHENTICATED, message)
        live = self._known[found]
        live.check_open()
        call = dataclasses.replace(call, session_id=found)
        return dataclasses.replace(self._keys.of(live.session.owner), session=call)

    async def call(self, caller: Caller) -> RolloutCall | None:
        """The call that a door is to record; None for a caller without a session.

        Raises:
            ServiceError: UNKNOWN_SESSION, PERMISSION_DENIED.
        """
        if caller.session is None:
            return None
        live = self._known.get(caller.session.session_id)
        if live is None:
            raise unknown_session(caller.session.session_id)
        live.check_open()
        live.used_s = time.monotonic()
        write = partial(self._write, live)
        return RolloutCall(live, await self._transcript(live), caller.session, partial(self._end, live), write)

    def source(self, caller: Caller) -> Source | None:
        """The weights that a caller in a session samples from, whatever model it names; None outside a session."""
        if caller.session is None:
            return None
        self._check(caller.session)
        session = self._known[caller.session.session_id].session
        return Source(session.model, session.base_model, session.run_id, session.step or None)

    def _check(self, call: SessionCall) -> None:
        live = self._known.get(call.session_id)
        if live is None:
            raise unknown_session(call.session_id)
        live.check_open()

    # ---- states ----

    def _made(self, caller: Caller, request: sessions.CreateRolloutSessionRequest) -> sessions.RolloutSession:
        """The session that a request describes."""
        given, limits = request.limits, self._limits
        for name, text in (("group", request.group), ("name", request.name), ("key", request.idempotency_key)):
            check_length(text, "max_name_chars", limits.max_name_chars, name)
        if len(request.task_json) > MAX_TASK_CHARS:
            message = f"task has {len(request.task_json)} characters as JSON; {MAX_TASK_CHARS} at most: keep the rest"
            raise invalid(f"{message} in a file, and name that", "task")
        try:
            json.dumps(json.loads(request.task_json or "null"), ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise invalid("task is no JSON, or has half of a surrogate pair, which is no character", "task") from None
        if request.history not in ("", *HISTORIES):
            raise invalid(f"history is {request.history[:50]!r}; there are {', '.join(HISTORIES)}", "history")
        if not all(each >= 0 for each in (given.max_seconds, given.idle_s)):
            raise invalid("limits are seconds of 0 or more", "limits")
        sampling = request.sampling
        if not 0 <= sampling.temperature < math.inf or not 0 <= sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            raise invalid("temperature is 0 or more, top_p and min_p are from 0 to 1", "sampling")
        source = self._find(caller, request.model)
        holding = sessions.SessionLimits(
            max_turns=min(given.max_turns or limits.max_session_turns, limits.max_session_turns),
            max_tokens=given.max_tokens,
            max_seconds=min(given.max_seconds or limits.max_session_seconds, limits.max_session_seconds),
            max_concurrent_calls=min(given.max_concurrent_calls or limits.max_session_calls, limits.max_session_calls),
            idle_s=given.idle_s or limits.session_idle_seconds,
        )
        return sessions.RolloutSession(
            session_id=new_id("gwsession-"), owner=caller.name, model=source.model, base_model=source.base_model,
            run_id=source.run_id, step=source.step, task_json=request.task_json, group=request.group,
            name=request.name, state=OPEN, limits=holding, sampling=sampling, history=request.history or HISTORIES[0],
            created_at=time.time(),
        )  # fmt: skip

    def _add(self, stored: StoredSession) -> LiveSession:
        session = stored.session
        live = LiveSession(stored)
        self._known[session.session_id] = live
        self._by_digest[stored.key_digest] = session.session_id
        held = self._held[session.owner]
        held.bytes += session.size_bytes
        if session.state == OPEN:
            held.open += 1
        else:
            held.ended += 1
        if stored.idempotency_key:
            self._by_key[session.owner, stored.idempotency_key] = session.session_id
        return live

    def _of(self, caller: Caller, session_id: str, *, write: bool = False) -> LiveSession:
        live = self._known.get(session_id)
        own = live is not None and live.session.owner == caller.name
        if live is None or not (own or caller.sees_all):
            raise unknown_session(session_id)
        if write and not own and caller.role != "admin":
            message = "only its owner and an admin's key change a rollout session"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)
        return live

    def _told(self, live: LiveSession, key: str = "") -> sessions.RolloutSession:
        told = sessions.RolloutSession()
        told.CopyFrom(live.session)
        told.url, told.key = f"{self.url}{PATH}/{told.session_id}", key
        return told

    def _check_room(self, owner: str) -> None:
        count = self._held[owner].open
        if count >= self._limits.key_sessions:
            message = (
                f"this key has {count} open rollout sessions, the most that it may have (--limit key_sessions=N); end"
                " some, then make this one"
            )
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED, message, rule=f"key_sessions = {self._limits.key_sessions}"
            )

    async def _end(self, live: LiveSession, reason: str) -> None:
        async with live.changing:
            session = live.session
            if session.state != OPEN:
                return
            self._mark_ended(session, reason)
            await self._records.update(session)
        await self._make_room(live.session.owner)

    def _mark_ended(self, session: sessions.RolloutSession, reason: str) -> None:
        session.state, session.end_reason, session.ended_at = ENDED, reason, time.time()
        held = self._held[session.owner]
        held.open, held.ended = held.open - 1, held.ended + 1

    async def _delete(self, deleted: Iterable[LiveSession]) -> None:
        ids = []
        for live in deleted:
            async with live.changing:  # no turn is being written
                session = live.session
                if self._known.pop(session.session_id, None) is None:
                    continue
                if session.state == OPEN:
                    self._mark_ended(session, "it was deleted")
                held = self._held[session.owner]
                held.ended, held.bytes = held.ended - 1, held.bytes - session.size_bytes
                self._by_digest.pop(live.stored.key_digest, None)
                self._by_key.pop((session.owner, live.stored.idempotency_key), None)
                ids.append(session.session_id)
        if ids:
            await self._records.delete(ids)

    async def _write(self, live: LiveSession, turns: Iterable[journal_pb2.StoredTurn]) -> None:
        """Write turns of a session, whose owner's oldest ended ones go where they need the room."""
        limit, held = self._limits.key_session_bytes, self._held[live.session.owner]
        await self._make_room(live.session.owner)
        if held.bytes >= limit:
            message = f"the turns of this key's open rollout sessions have {limit} bytes (--limit key_session_bytes=N)"
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, f"{message}: end some", rule="key_session_bytes")
        size = await self._records.add_turns(live.session.session_id, turns)
        held.bytes += size
        live.session.size_bytes += size

    async def _make_room(self, owner: str) -> None:
        """Delete a key's oldest ended sessions beyond what it may keep."""
        held, gone = self._held[owner], list[LiveSession]()
        size, count = held.bytes, held.ended

        def fits() -> bool:
            return size < self._limits.key_session_bytes and count <= self._limits.key_sessions

        if fits():
            return
        for live in [each for each in self._known.values() if each.session.owner == owner]:
            if fits():
                break
            if live.session.state == OPEN:
                continue
            gone.append(live)
            size, count = size - live.session.size_bytes, count - 1
        await self._delete(gone)

    async def _transcript(self, live: LiveSession) -> Transcript:
        """The turns of a session, read from disk if they are not in memory."""
        async with live.changing:
            if live.transcript is None:
                turns = await self._records.turns(live.session.session_id)
                if len(turns) < live.session.num_turns and live.session.state == OPEN:
                    self._mark_ended(live.session, "some of its turns are damaged on disk")
                    await self._records.update(live.session)
                live.transcript = Transcript(turns)
                self._forget(live)
            return live.transcript

    def _forget(self, but: LiveSession) -> None:
        """Leave turns on disk alone, of the sessions that were not used for longest."""
        loaded = [live for live in self._known.values() if live.transcript is not None]
        size = sum(live.session.size_bytes for live in loaded)
        for live in sorted(loaded, key=lambda each: each.used_s):
            if size <= LOADED_BYTES:
                return
            if live is not but and not live.active and not live.changing.locked():
                live.transcript = None
                size -= live.session.size_bytes

    async def _look(self) -> None:
        """End the sessions whose time is over."""
        while True:
            await asyncio.sleep(LOOK_S)
            for live in [each for each in self._known.values() if each.session.state == OPEN]:
                if reason := live.time_is_up():
                    try:
                        await self._end(live, reason)
                    except ServiceError as error:  # the disk is full: the next look tries it again
                        log.warning("session %s cannot be ended: %s", live.session.session_id, error)
