"""The guard before the routes of every protocol: keys, bounded bodies, unforeseen errors, metrics.

A caller without a valid key, or with too many requests under way, is refused before the body is read. A body is
received in its key's turn, and counts against the bytes that the key's calls may hold while the request is served. The
key is checked again with every part of the body and of the answer, so that a revoked one gets nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial

from gradwire_http.request_headers import PROTOBUF, headers_of, media_type
from gradwire_proto.recognition import digest_of
from gradwire_proto.v1 import training_pb2 as pb
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gradwire_server.access.calls import CallKind
from gradwire_server.access.keys import SESSION_KEY, Caller, Keys, SessionCall
from gradwire_server.core.core import Core
from gradwire_server.doors.http.bodies import (
    BEGINNING_BYTES,
    ENCODINGS,
    FORM_BYTES,
    BodyLimit,
    OversizedBodyError,
    check_json,
    decompressed,
    unknown_encoding,
)
from gradwire_server.doors.http.errors import LOGGED, error_response, internal_error
from gradwire_server.doors.http.protocol import IGNORED, DirectCall, ErrorBody, HttpProtocol
from gradwire_server.errors import ServiceError

MAX_KEY_CHARS = 200
DISCARD_BYTES, DISCARD_S = 1 << 30, 20.0
"""Limits of reading a refused body to its end: bytes and seconds."""
SIGNED_FOR = "gradwire.signed_for"
"""The name, in a request's scope, of the key's owner for whom its URL was signed; set by the route that read it."""
SESSION = "gradwire.session"
"""The name, in a request's scope, of the id of the rollout session under whose URL it came."""
_ROUTE = "gradwire.route"
"""Key of a scope that a direct route answers: the route's path."""


class GuardedProtocol:
    """A protocol's application behind keys and limits; an ASGI application."""

    def __init__(self, core: Core, protocol: HttpProtocol) -> None:
        self._core, self._protocol = core, protocol
        self.error_body = protocol.error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began, status = time.monotonic(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._serve(scope, receive, counted)
        finally:
            route = scope.get(_ROUTE) or getattr(scope.get("route"), "path", "") or "other"
            self._core.metrics.http_request(self._protocol.name, route, status, time.monotonic() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _Headers(scope["headers"])
        started = False

        async def starting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        path = scope["path"].removeprefix(self._protocol.prefix)
        posted = path if scope["method"] == "POST" else ""
        direct = self._protocol.direct.get(posted)
        try:
            if path.startswith(self._protocol.open_paths):
                answered = _Answer(partial(self._check_signed, scope), self._protocol.error_body, scope, starting)
                await self._protocol.app(scope, answered.checked(receive), answered.send)
                return
            scope["gradwire.caller"] = caller = self._caller(scope, path, headers)
            if scope["method"] not in ("GET", "HEAD"):
                caller.check_may_change()
            answered = _Answer(partial(self._core.keys.check, caller), self._protocol.error_body, scope, starting)
            limit = BodyLimit.of(self._core.config.limits, headers.media_type)
            calls = self._core.calls
            if any(fnmatchcase(posted, each) for each in self._protocol.uploads):
                async with calls.turn(caller.name, CallKind.HTTP):
                    upload = _Upload(headers, answered.checked(receive), self._core.config.limits.max_file_bytes)
                    await self._protocol.app(scope, upload.receive, answered.send)
                    await upload.discard_rest()
                return
            try:
                async with (
                    calls.turn(caller.name, CallKind.HTTP),
                    calls.body(caller.name, lambda: _body(headers, answered.checked(receive), limit)) as content,
                ):
                    self._core.keys.check(caller)
                    if headers.media_type != PROTOBUF:
                        await check_json(content, self._core.config.limits)
                    if caller.session is not None:
                        call = dataclasses.replace(caller.session, body=digest_of(content))
                        scope["gradwire.caller"] = caller = dataclasses.replace(caller, session=call)
                    answer = None
                    try:
                        with self._core.keys.until_revoked(caller):
                            if direct is not None:
                                scope[_ROUTE] = path
                                answer = await direct(
                                    DirectCall(caller, content, headers.media_type, headers.traceparent)
                                )
                            if answer is None:
                                await self._protocol.app(scope, _replayed(content, receive), answered.send)
                    except ServiceError as error:
                        await answered.refuse(error)
                    if answer is not None:
                        await answer(scope, receive, answered.send)
            except OversizedBodyError as error:
                answer = await self._oversized(posted, error, scope, headers)
                await answer(scope, receive, answered.send)
        except ServiceError as error:
            await error_response(error.error, self._protocol.error_body)(scope, receive, send)
        except _Disconnected:
            return
        except Exception as error:  # the outermost handler: callers see only errors that were written for them
            if LOGGED in scope:
                return
            reason = internal_error(error, scope["path"])
            if not started:
                await error_response(reason, self._protocol.error_body)(scope, receive, send)

    def _caller(self, scope: Scope, path: str, headers: _Headers) -> Caller:
        """The caller that a request's key names, or the owner of the rollout session whose agent sends it.

        Raises:
            ServiceError: UNAUTHENTICATED; PERMISSION_DENIED for what a session's key does not open.
        """
        session_id = scope.get(SESSION, "")
        if not (session_id or headers.secret.startswith(SESSION_KEY)):
            return self._core.keys.caller(headers.secret)
        call = SessionCall(session_id, path, b"", headers.idempotency_key, headers.repeated)
        caller = self._core.rollouts.caller(headers.secret, call)
        served = any(fnmatchcase(path, each) for each in self._protocol.for_agents)
        if not served or scope["method"] not in ("GET", "HEAD", "POST"):
            message = f"a rollout session's key opens completions, conversations, models, tokenizers, not {path[:200]}"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)
        return caller

    def _check_signed(self, scope: Scope) -> None:
        """Check that the key for which a URL was signed, if one was, is not revoked."""
        if (owner := scope.get(SIGNED_FOR)) is not None:
            check_signed(self._core.keys, owner)

    async def _oversized(self, path: str, oversized: OversizedBodyError, scope: Scope, headers: _Headers) -> Response:
        reason, route = oversized.reason.error, self._protocol.oversized.get(path)
        answer = None
        if route is not None:
            scope[_ROUTE], caller = path, scope["gradwire.caller"]
            self._core.keys.check(caller)
            call = DirectCall(caller, oversized.beginning, headers.media_type, headers.traceparent)
            answer = await route(call, reason)
        return answer or error_response(reason, self._protocol.error_body, 413)


def check_signed(keys: Keys, owner: str) -> None:
    """Check that the key for which a URL was signed is not revoked."""
    if not keys.may_call(owner):
        message = "the key that asked for this URL is not valid any more"
        raise ServiceError(pb.ERROR_CODE_UNAUTHENTICATED, message)


class _Answer:
    """The answer to a request, which ends when its key is revoked.

    Args:
        check: Raises a ServiceError if the key is not valid any more.
    """

    def __init__(self, check: Callable[[], None], body: ErrorBody, scope: Scope, send: Send) -> None:
        self._check, self._body, self._scope, self._send = check, body, scope, send
        self._started = self._ended = self._of_events = False

    def checked(self, receive: Receive) -> Receive:
        """A ``receive`` that raises once the key is revoked, or says that the client has left once it is answered."""

        async def checking() -> Message:
            message = await receive()
            try:
                self._check()
            except ServiceError:
                if not self._started:
                    raise
                return {"type": "http.disconnect"}
            return message

        return checking

    async def send(self, message: Message) -> None:
        """Send a part of the answer, or, to a key that was revoked, the refusal, and nothing after it."""
        if self._ended:
            return
        try:
            self._check()
        except ServiceError as error:
            await self.refuse(error)
            return
        if message["type"] == "http.response.start":
            self._started = True
            if ignored := self._scope.get(IGNORED):
                named = (b"gradwire-ignored", ", ".join(ignored).encode())
                message = {**message, "headers": [*message["headers"], named]}
            self._of_events = media_type(headers_of(message["headers"]).get("content-type", "")) == "text/event-stream"
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, error: ServiceError) -> None:
        """End the answer, if it has not ended."""
        if self._ended:
            return
        self._ended = True
        response = error_response(error.error, self._body)
        if not self._started:
            await response(self._scope, _nothing, self._send)
        elif self._of_events:
            last = b"event: error\ndata: " + bytes(response.body) + b"\n\n"
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        # A file gets no last part: its reader would take what has come for the whole of it.


class _Upload:
    """A body that its route reads part by part.

    Args:
        most: Bytes of the file in it.
    """

    def __init__(self, headers: _Headers, receive: Receive, most: int) -> None:
        self._headers, self._receive = headers, receive
        self._limit = BodyLimit(most + FORM_BYTES, "max_file_bytes")
        self._size, self._more = 0, True

    async def receive(self) -> Message:
        """The next part.

        Raises:
            ServiceError: LIMIT_EXCEEDED; INVALID_ARGUMENT for a body that is compressed.
        """
        if self._headers.encoding not in ("", "identity"):
            raise unknown_encoding(self._headers.encoding)
        if self._headers.length.isdigit():
            self._limit.check(int(self._headers.length))
        message = await self._receive()
        self._size += len(message.get("body", b""))
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        self._limit.check(self._size)
        return message

    async def discard_rest(self) -> None:
        """Read what the route left, so that a client that is still sending gets the answer."""
        if self._more and not self._headers.waits:
            with contextlib.suppress(_Disconnected):
                await _discard(self._receive, 0)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


class _Disconnected(Exception):
    """The client went away while it sent the body."""


class _Headers:
    """The headers that matter here."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        headers = headers_of(raw)
        bearer = headers.get("authorization", "")
        self.secret = headers.get("x-api-key") or (bearer[7:] if bearer[:7].lower() == "bearer " else "")
        self.encoding = headers.get("content-encoding", "").strip().lower()
        self.length = headers.get("content-length", "")
        self.waits = bool(headers.get("expect"))  # sends its body only when it is asked for
        self.media_type = media_type(headers.get("content-type", ""))
        self.traceparent = headers.get("traceparent", "")
        self.idempotency_key = headers.get("idempotency-key", "")[:MAX_KEY_CHARS]
        self.repeated = headers.get("x-stainless-retry-count", "0") not in ("", "0")


async def _body(headers: _Headers, receive: Receive, limit: BodyLimit) -> bytes:
    if headers.encoding not in ENCODINGS:
        raise unknown_encoding(headers.encoding)
    received = io.BytesIO()  # parts beside the whole would be the body twice
    more = True
    try:
        if headers.length.isdigit() and int(headers.length) > limit.bytes:
            raise limit.exceeded(headers.length)
        while more:
            part, more = await _part(receive)
            received.write(part)
            limit.check(received.tell())
    except ServiceError as error:
        beginning = received.getvalue()[:BEGINNING_BYTES]
        received.close()
        if more and not headers.waits:
            beginning += await _discard(receive, BEGINNING_BYTES - len(beginning))
        raise OversizedBodyError(error, beginning, headers.encoding) from None
    return await decompressed(received.getvalue(), headers.encoding, limit)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """The next part of a body, and whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _Disconnected
    return message.get("body", b""), message.get("more_body", False)


async def _discard(receive: Receive, kept: int) -> bytes:
    """Read the rest of a body that is refused: clients that are still sending would see a reset connection instead of
    the answer. Returns the first ``kept`` bytes of it."""
    beginning, size, more = b"", 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while more and size < DISCARD_BYTES:
                part, more = await _part(receive)
                beginning += part[: kept - len(beginning)]
                size += len(part)
    return beginning


def _replayed(content: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body already read, then what the connection gives."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
