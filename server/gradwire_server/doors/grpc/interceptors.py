"""Interceptor around every RPC: authenticates the caller, waits for the caller's turn, and maps exceptions to errors.

A caller without a valid key is refused before its body is read. The body of a call that waits for its turn is not read
either: every handler receives a stream of messages, and gRPC reads one when it is asked for. Requests and responses of
conversions between text and tokens pass through unparsed.

An exception that is not a ServiceError is returned as INTERNAL with a request id; the log holds its traceback under
that id. A message that cannot be parsed is an INVALID_ARGUMENT, where gRPC alone would report UNKNOWN."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import jobs_pb2, sessions_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import RPCS, VIEWED, CallKind
from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.headers import Oversized
from gradwire_server.doors.wire_format import TooManyFieldsError, check_fields
from gradwire_server.errors import ERROR_METADATA, Code, ServiceError, limit_exceeded

GRPC_STATUS: dict[Code, grpc.StatusCode] = {
    pb.ERROR_CODE_UNSPECIFIED: grpc.StatusCode.INTERNAL,
    pb.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
    pb.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_INVALID_BATCH: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_UNKNOWN_LOSS: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_RUN: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_CHECKPOINT: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_OPERATION: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_CODE_SEQ_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_CODE_SEQ_GAP: grpc.StatusCode.OUT_OF_RANGE,
    pb.ERROR_CODE_STALE_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_RUN_BUSY: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_ABORTED_PREDECESSOR: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    pb.ERROR_CODE_ABANDONED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.ERROR_CODE_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_CODE_NON_FINITE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_QUARANTINED: grpc.StatusCode.ABORTED,
    pb.ERROR_CODE_STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_CHECKPOINT_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_PAYLOAD_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.ERROR_CODE_RESULT_RELEASED: grpc.StatusCode.OUT_OF_RANGE,
    pb.ERROR_CODE_REWOUND: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_NOTHING_TO_STEP: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_RUN_PARKED: grpc.StatusCode.FAILED_PRECONDITION,
    pb.ERROR_CODE_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.ERROR_CODE_UNKNOWN_JOB: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_FILE: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
}


log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
_OPEN = "/grpc.health.v1.Health/"
_ENGINES = "/gradwire.v1.EngineService/"
_REQUESTS = {
    method.name: method.input_type
    for file in (pb.DESCRIPTOR, jobs_pb2.DESCRIPTOR, sessions_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}

CALLER: ContextVar[Caller] = ContextVar("gradwire_caller")
"""The caller of the current RPC."""


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor of every handler except the health service's: authenticates callers, waits for their turn, and maps
    errors."""

    def __init__(self, core: Core) -> None:
        self._core, self._oversized = core, Oversized()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        self._oversized.count(details.invocation_metadata)
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        engine = details.method.startswith(_ENGINES)
        try:
            caller = self._core.keys.caller(_secret(details.invocation_metadata), engine=engine)
            if not engine and RPCS.get(details.method.rpartition("/")[2]) not in VIEWED:
                caller.check_may_change()
        except ServiceError as error:
            return _refusing(error, details.method)
        self._core.metrics.grpc_call(details.method.rpartition("/")[2])
        if engine:
            return _lending(handler, self._core, caller, details.method)
        return _guarded(handler, self._core, caller, details.method)


def _secret(metadata: Any) -> str:
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    return given.removeprefix("Bearer ") if isinstance(given, str) else ""


def _refusing(error: ServiceError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses without reading the request; as a stream handler it fits every kind of method."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        _refuse(context, error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _lending(handler: Any, core: Core, caller: Caller, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of an agent's call, which lasts as long as its engine and waits for no turn."""

    async def checked(requests: AsyncIterable[Any]) -> AsyncGenerator[Any]:
        async with _opened(requests) as messages:
            async for message in messages:
                core.keys.check(caller)
                yield message

    async def lend(requests: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:
        try:
            with core.keys.until_revoked(caller):
                async with (
                    aclosing(checked(requests)) as messages,
                    aclosing(handler.stream_stream(messages, context)) as responses,
                ):
                    async for response in responses:
                        yield response
        except Exception as error:  # as below
            _refuse(context, error, method)

    return grpc.stream_stream_rpc_method_handler(lend, handler.request_deserializer, handler.response_serializer)


def _guarded(handler: Any, core: Core, caller: Caller, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that waits for the call's turn before it reads the body, whatever the kind of the method."""
    name = method.rpartition("/")[2]
    keys, calls, kind = core.keys, core.calls, RPCS[name]
    serialized = kind is CallKind.CONVERT
    message, limit = _REQUESTS[name], core.config.limits.max_message_fields

    async def parse(body: bytes) -> Any:
        if serialized:
            return body
        try:
            await check_fields(body, message, limit)
        except TooManyFieldsError:
            raise limit_exceeded("a message with more fields", "max_message_fields", limit, "") from None
        return handler.request_deserializer(body)

    unary = None if handler.request_streaming else handler.unary_stream or handler.unary_unary

    async def parsed(requests: AsyncIterable[bytes]) -> AsyncGenerator[Any]:
        async with _opened(requests) as messages:
            async for request in messages:
                keys.check(caller)
                yield await parse(request)

    @asynccontextmanager
    async def taken(requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        CALLER.set(caller)
        with keys.until_revoked(caller):
            async with calls.turn(caller.name, kind):
                if handler.request_streaming:
                    async with aclosing(parsed(requests)) as messages:
                        yield messages
                    return
                async with calls.body(caller.name, lambda: _first(requests)) as body:
                    keys.check(caller)
                    yield await parse(body)

    async def one(requests: AsyncIterable[bytes], context: Any) -> Any:
        try:
            async with taken(requests) as request:
                answer = await (unary or handler.stream_unary)(request, context)
                keys.check(caller)
                return answer
        except Exception as error:  # the outermost handler: callers see only errors that were written for them
            _refuse(context, error, method)

    async def many(requests: AsyncIterable[bytes], context: Any) -> AsyncIterator[Any]:
        try:
            async with (
                taken(requests) as request,
                aclosing((unary or handler.stream_stream)(request, context)) as responses,
            ):
                async for response in responses:
                    keys.check(caller)
                    yield response
        except Exception as error:  # as above
            _refuse(context, error, method)

    serialize = None if serialized else handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(many, None, serialize)
    return grpc.stream_unary_rpc_method_handler(one, None, serialize)


def _opened(requests: AsyncIterable[Any]) -> aclosing[AsyncGenerator[Any]]:
    """A call's messages, closed at the end.

    Where the last was not read they hold a cycle, which is left to the garbage collector: it held the event loop for up
    to 0.1 s where hundreds of calls a second were refused.
    """
    messages: Any = aiter(requests)  # gRPC gives an asynchronous generator
    return aclosing(messages)


async def _first(requests: AsyncIterable[bytes]) -> bytes:
    """The only message of a call.

    Raises:
        ServiceError: INVALID_ARGUMENT if there is none.
    """
    async with _opened(requests) as messages:
        async for request in messages:
            return bytes(request)
    raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "the call has no request")


def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    """Give a call its error, which is sent when its handler returns.

    ``context.abort`` would raise an exception that the context keeps, and with it all frames: one more cycle a call.
    """
    refusal = _refusal(error, method)
    log.info("request %s of %s refused: %s", refusal.request_id, method, pb.ErrorCode.Name(refusal.code))
    context.set_code(GRPC_STATUS.get(refusal.code, grpc.StatusCode.INTERNAL))
    # Metadata is limited to 8 KiB, and gRPC encodes every byte that is not ASCII as three characters.
    context.set_details(refusal.message.encode("ascii", "replace").decode())
    context.set_trailing_metadata(((ERROR_METADATA, refusal.SerializeToString()),))


def _refusal(error: Exception, method: str) -> pb.Error:
    """Convert an exception to the caller's error. An unexpected one is logged, and reported as INTERNAL."""
    refusal = pb.Error(request_id=secrets.token_hex(8))
    if isinstance(error, ServiceError):
        refusal.MergeFrom(error.error)
    elif isinstance(error, DecodeError):
        refusal.code = pb.ERROR_CODE_INVALID_ARGUMENT
        refusal.message = "the message cannot be parsed; client and server may be of different versions"
    else:
        name = refusal.request_id
        log.error("request %s of %s failed", name, method, exc_info=error, extra={"request_id": name})
        refusal.code = pb.ERROR_CODE_INTERNAL
        refusal.message = f"the server made a mistake; its log has it as request {name}"
    if len(refusal.message) > MAX_MESSAGE_CHARS:
        refusal.message = refusal.message[:MAX_MESSAGE_CHARS] + "…"
    return refusal
