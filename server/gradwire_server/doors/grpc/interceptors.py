"""Interceptor around every RPC: authenticates the caller and maps exceptions to errors of the protocol.

A caller without a valid key is refused before its body is read. An exception that is not a ServiceError is returned as
INTERNAL with a request id; the log holds its traceback under that id. A message that cannot be parsed is an
INVALID_ARGUMENT, where gRPC alone would report UNKNOWN.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller, Keys
from gradwire_server.doors.grpc.errors import GRPC_STATUS
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

ERROR_METADATA = "gradwire-error-bin"
MAX_MESSAGE_CHARS = 1000
_OPEN = "/grpc.health.v1.Health/"

CALLER: ContextVar[Caller] = ContextVar("gradwire_caller")
"""The caller of the current RPC."""


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that authenticates callers and maps errors, for every handler except the health service's."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        try:
            caller = self._keys.caller(_secret(details.invocation_metadata))
        except ServiceError as error:
            return _refusing(error, details.method)
        return _guarded(handler, self._keys, caller, details.method)


def _secret(metadata: Any) -> str:
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    return given.removeprefix("Bearer ") if isinstance(given, str) else ""


def _refusing(error: ServiceError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses without reading the request; as a stream handler it fits every kind of method."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await _abort(context, error.error, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guarded(handler: Any, keys: Keys, caller: Caller, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    parse = handler.request_deserializer

    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for request in requests:
            keys.check(caller)
            yield parse(request)

    def take(request: Any) -> Any:
        CALLER.set(caller)
        return parsed(request) if handler.request_streaming else parse(request)

    async def one(request: Any, context: Any) -> Any:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        try:
            return await behaviour(take(request), context)
        except Exception as error:  # the outermost handler: callers see only errors that were written for them
            await _refuse(context, error, method)

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
        try:
            async with aclosing(behaviour(take(request), context)) as responses:
                async for response in responses:
                    keys.check(caller)
                    yield response
        except Exception as error:  # as above
            await _refuse(context, error, method)

    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        many if handler.response_streaming else one, None, handler.response_serializer
    )
    return wrapped


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ServiceError):
        await _abort(context, error.error, method)
    if isinstance(error, DecodeError):
        message = "the message cannot be parsed; client and server may be of different versions"
        await _abort(context, pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message), method)
    request_id = secrets.token_hex(8)
    log.error("request %s of %s failed", request_id, method, exc_info=error, extra={"request_id": request_id})
    message = f"the server made a mistake; its log has it as request {request_id}"
    await _abort(context, pb.Error(code=pb.ERROR_CODE_INTERNAL, message=message, request_id=request_id), method)
    raise AssertionError("abort raises")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], reason: pb.Error, method: str) -> NoReturn:
    error = pb.Error()
    error.CopyFrom(reason)
    error.request_id = reason.request_id or secrets.token_hex(8)
    if len(error.message) > MAX_MESSAGE_CHARS:
        error.message = error.message[:MAX_MESSAGE_CHARS] + "…"
    log.info("request %s of %s refused: %s", error.request_id, method, pb.ErrorCode.Name(error.code))
    metadata = ((ERROR_METADATA, error.SerializeToString()),)
    status = GRPC_STATUS.get(error.code, grpc.StatusCode.INTERNAL)
    # Metadata is limited to 8 KiB, and gRPC encodes every byte that is not ASCII as three characters.
    await context.abort(status, error.message.encode("ascii", "replace").decode(), metadata)
    raise AssertionError("abort raises")
