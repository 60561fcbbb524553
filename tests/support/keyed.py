"""Calls with an API key, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import grpc
import grpc.aio
from gradwire_proto.v1 import training_pb2 as pb

FILES = {"adapter_config.json": b'{"base_model_name_or_path": "tiny"}', "adapter_model.safetensors": b"weights"}
BEGIN_UPLOAD = pb.BeginUploadRequest(
    kind="adapter",
    files=[
        pb.UploadFile(
            name=name, size_bytes=len(content), digest=blake2b(content, digest_size=32).digest(), head=content
        )
        for name, content in FILES.items()
    ],
)


async def uploaded(stub: Any) -> str:
    """Id of an upload that has arrived and is not finished; a fake engine takes any."""
    begun = await stub.BeginUpload(BEGIN_UPLOAD)
    for name, content in FILES.items():
        await stub.WriteUpload(pb.WriteUploadRequest(upload_id=begun.upload_id, file=name, chunk=content))
    return str(begun.upload_id)


class Keyed:
    """A stub that sends a key with every call; none when it is empty."""

    def __init__(self, stub: Any, secret: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {secret}"),) if secret else ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._stub, name), metadata=self._metadata)


WRITE_FAILED = "Internal error from Core"
"""What grpc's client says if the server ends a call while a message is written, and the reason has not come yet."""


async def outcome(stub: Any, rpc: str, *requests: Any) -> pb.Error | Any:
    """The first answer of an RPC, or the structured error: of the call, or of the acknowledgement."""
    call = getattr(stub, rpc)
    try:
        if rpc == "Submit":
            stream = call()
            for request in requests:
                await stream.write(request)
            answer = await stream.read()
            stream.cancel()
            return answer.error if answer is not grpc.aio.EOF and answer.HasField("error") else answer
        answered = call(*requests)
        if hasattr(answered, "read"):
            answer = await answered.read()
            answered.cancel()
            return answer
        return await answered
    except grpc.RpcError as error:
        if error.details() == WRITE_FAILED:
            return await outcome(stub, rpc, *requests)
        return error_of(error)


def error_of(error: Any) -> pb.Error:
    """The structured error of a failed call, which every one must have."""
    metadata = dict(error.trailing_metadata() or ())
    assert "gradwire-error-bin" in metadata, f"no error from the server: {error.code()} {error.details()}"
    found = pb.Error.FromString(metadata["gradwire-error-bin"])
    assert found.code and found.message and found.request_id, found
    return found


def code_of(answer: Any) -> str:
    """ "yes", or the code in lower case."""
    if not isinstance(answer, pb.Error):
        return "yes"
    return pb.ErrorCode.Name(answer.code).removeprefix("ERROR_CODE_").lower()
