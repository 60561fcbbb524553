"""Limits on how much of the front a key's calls may occupy at once, so that no key waits long for another's.

A door takes a turn of the call's kind before it reads the body. A key's further calls wait for their turn unread, so a
flood costs the key that sends it. Calls never wait for another key's, except where several share the engine or the
tokenizing processes, which take turns of their own.

What is long is done in slices: a page of a stream, a message of submitted operations. A key has one slice at a time, so
that between two of its slices the event loop serves everyone else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from enum import Enum
from functools import partial

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.turns import ActiveKeys, Turns
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits

BODY_S = 60.0
"""Seconds in which a call's body must arrive."""
BODIES = 4
"""Bodies of one key that are received at a time."""


class CallKind(Enum):
    """Kinds of calls: how many of one key are executed at a time, and what bounds them besides.

    Attributes:
        of_key: Calls of one key at a time; further ones wait. None: ``key_streams`` of the limits, further ones are
            refused, since they may stay open for days.
        bounds: Further bounds, for people.
        beside_others: Calls of one key at a time while several keys are active.
    """

    READ = (2, "answered from memory, in slices")
    WRITE = (16, "waits for the disk; commits are shared by all keys", 4)
    CONVERT = (2, "processes of bounded memory, where keys take turns; short requests have one of their own")
    CREATE = (4, "`key_runs`; the memory that the adapter and the head need; a turn at the engine")
    UPLOAD = (2, "`max_upload_bytes`, `key_upload_bytes`; a turn at the engine")
    SAMPLE = (
        64,
        "`key_queued_operations`, `key_tokens_per_minute`, the bytes of what may be sampled; a turn at the engine",
    )
    FILE = (2, "`max_file_bytes`, `key_file_bytes`; one chunk of the key is written at a time")
    PAGES = (4, "one page or chunk of the key is read at a time")
    RESULTS = (None, "one page of the key is read at a time")
    SUBMIT = (
        None,
        "one message of the key is taken at a time; `max_incoming_bytes`, `key_queued_operations`, `key_queued_bytes`,"
        " `key_tokens_per_minute`; turns at the engine",
    )  # fmt: skip
    HTTP = (None, "`max_http_body_bytes`, `max_json_body_bytes`, `key_call_bytes`; what its operations are bound by")

    def __init__(self, of_key: int | None, bounds: str, beside_others: int | None = None) -> None:
        self.of_key, self.bounds, self.beside_others = of_key, bounds, beside_others or of_key


RPCS: dict[str, CallKind] = {
    "GetServerInfo": CallKind.READ,
    "ListModels": CallKind.READ,
    "ListLosses": CallKind.READ,
    "Encode": CallKind.CONVERT,
    "Decode": CallKind.CONVERT,
    "Render": CallKind.CONVERT,
    "GetTokenizerInfo": CallKind.CONVERT,
    "CreateRun": CallKind.CREATE,
    "GetRun": CallKind.READ,
    "ListRuns": CallKind.READ,
    "WatchRuns": CallKind.RESULTS,
    "DeleteRun": CallKind.WRITE,
    "ForkRun": CallKind.CREATE,
    "BeginUpload": CallKind.UPLOAD,
    "WriteUpload": CallKind.WRITE,
    "FinishUpload": CallKind.UPLOAD,
    "ListUploads": CallKind.READ,
    "DeleteUpload": CallKind.WRITE,
    "ShareRun": CallKind.WRITE,
    "GetHistory": CallKind.PAGES,
    "ListOperations": CallKind.PAGES,
    "ListQueues": CallKind.READ,
    "ListKeys": CallKind.READ,
    "GetUsage": CallKind.PAGES,
    "ListRecordings": CallKind.PAGES,
    "ReadRecording": CallKind.PAGES,
    "RecordRollouts": CallKind.WRITE,
    "OpenRun": CallKind.WRITE,
    "Submit": CallKind.SUBMIT,
    "Results": CallKind.RESULTS,
    "AckResults": CallKind.WRITE,
    "Cancel": CallKind.WRITE,
    "DiscardPending": CallKind.WRITE,
    "AcceptChanges": CallKind.WRITE,
    "MoveRun": CallKind.WRITE,
    "DrainEngine": CallKind.WRITE,
    "Sample": CallKind.SAMPLE,
    "StreamSample": CallKind.SAMPLE,
    "ListCheckpoints": CallKind.READ,
    "DeleteCheckpoint": CallKind.WRITE,
    "Download": CallKind.PAGES,
    "CreateJob": CallKind.WRITE,
    "GetJob": CallKind.READ,
    "ListJobs": CallKind.READ,
    "CancelJob": CallKind.WRITE,
    "PauseJob": CallKind.WRITE,
    "ResumeJob": CallKind.WRITE,
    "DeleteJob": CallKind.WRITE,
    "ListJobEvents": CallKind.PAGES,
    "ReadJobLog": CallKind.PAGES,
    "ReportJob": CallKind.WRITE,
    "UploadFile": CallKind.FILE,
    "GetFile": CallKind.READ,
    "ListFiles": CallKind.READ,
    "DeleteFile": CallKind.WRITE,
    "ReadFile": CallKind.PAGES,
    "CreateRolloutSession": CallKind.WRITE,
    "GetRolloutSession": CallKind.READ,
    "ListRolloutSessions": CallKind.READ,
    "EndRolloutSession": CallKind.WRITE,
    "DeleteRolloutSession": CallKind.WRITE,
    "GetRollout": CallKind.PAGES,
}
"""The kind of each RPC of ``training.proto``, ``jobs.proto`` and ``sessions.proto``."""

VIEWED = frozenset({CallKind.READ, CallKind.CONVERT, CallKind.PAGES, CallKind.RESULTS})
"""Kinds of the calls that a viewer's key may make: they change nothing, and take nothing of an engine."""


class Calls:
    """The calls of all keys."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._active = ActiveKeys()
        self._turns = {kind: Turns(partial(self._of_key, kind)) for kind in CallKind if kind.of_key is not None}
        self._bodies = Turns(BODIES)
        self._bytes = Turns(limits.key_call_bytes)
        self._slices = Turns(1)
        self._waiting: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    def _of_key(self, kind: CallKind) -> int:
        places = kind.beside_others if self._active.several else kind.of_key
        assert places is not None
        return places

    @asynccontextmanager
    async def turn(self, key: str, kind: CallKind) -> AsyncIterator[None]:
        """Wait for the turn of a call, and hold it in the body.

        Raises:
            ServiceError: LIMIT_EXCEEDED if too many calls of the key wait, or too many streams are open.
        """
        self._active.asked(key)
        if kind.of_key is None:
            said = "streams and HTTP requests of this key are open", "end one"
            with self._counted(self._streams, key, "key_streams", *said):
                yield
            return
        await self._wait(key, self._turns[kind])
        try:
            yield
        finally:
            self._turns[kind].give_back(key)

    @asynccontextmanager
    async def body(self, key: str, receive: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
        """Receive a call's body when the key holds few enough bytes, and count its bytes in the ``async with`` body.

        Raises:
            ServiceError: DEADLINE_EXCEEDED if it does not arrive.
        """
        await self._wait(key, self._bodies)
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    received = await receive()
            except TimeoutError:
                message = f"the request did not arrive within {BODY_S:.0f} s of its call; send it again"
                raise ServiceError(pb.ERROR_CODE_DEADLINE_EXCEEDED, message) from None
            await self._bytes.take(key, len(received))
        finally:
            self._bodies.give_back(key)
        try:
            yield received
        finally:
            self._bytes.give_back(key, len(received))

    def slice(self, key: str) -> AbstractAsyncContextManager[None]:
        """Wait until no other slice of the key is executed, and execute one in the body."""
        return self._slices.turn(key)

    async def _wait(self, key: str, turns: Turns) -> None:
        said = "calls of this key wait for their turn already", "await some"
        with self._counted(self._waiting, key, "key_waiting_calls", *said):
            await turns.take(key)

    @contextmanager
    def _counted(self, counts: Counter[str], key: str, name: str, what: str, do: str) -> Iterator[None]:
        """Count a call of a key within the body, up to the limit of this name."""
        limit = getattr(self._limits, name)
        if counts[key] >= limit:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"{limit} {what} (--limit {name}=N); {do}, then make this one again",
                rule=f"{name} = {limit}",
            )
        counts[key] += 1
        try:
            yield
        finally:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
