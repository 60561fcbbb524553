"""What can be seen to be wrong with an operation before any model sees it."""

from __future__ import annotations

from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import Limits
from gradwire_server.runs import NAME, ORIGIN


def check(header: pb.OperationHeader, limits: Limits) -> pb.Error | None:
    """The error of an operation that breaks a rule. It becomes the operation's result, so that the operations
    numbered behind it are not left waiting."""
    kind = header.operation.WhichOneof("kind")
    if kind is None:
        return _invalid(
            "the operation is of a kind that this server does not know; is it older than the client?", "operation"
        )
    if header.payload_bytes > limits.max_payload_bytes:
        return _limit(f"a payload of {header.payload_bytes} bytes", "max_payload_bytes", limits.max_payload_bytes)
    if len(header.tensors) > limits.max_tensors:
        return _limit(f"{len(header.tensors)} tensors", "max_tensors", limits.max_tensors)
    try:
        codec.check(header.tensors, header.payload_bytes)
    except codec.CodecError as error:
        return pb.Error(code=pb.ERROR_CODE_INVALID_BATCH, message=str(error), field=error.field, rule=error.rule)
    for spec in header.tensors:
        rows = spec.level_sizes[0] if spec.level_sizes else spec.shape[0]
        if rows > limits.max_rows:
            return _limit(f"{rows} rows in {spec.name!r}", "max_rows", limits.max_rows, spec.name)
    if kind in ("save_checkpoint", "export"):
        name = header.operation.save_checkpoint.name if kind == "save_checkpoint" else header.operation.export.name
        if name and (not NAME.fullmatch(name) or name == ORIGIN):
            return _invalid(
                f"{name[:100]!r} is not a name: letters, digits, '.', '_', '-', 100 at most", "name", NAME.pattern
            )
    return None


def _invalid(message: str, field: str, rule: str = "") -> pb.Error:
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message, field=field, rule=rule)


def _limit(what: str, name: str, limit: int, field: str = "") -> pb.Error:
    message = f"{what}: the limit is {limit} (--limit {name}=N)"
    return pb.Error(code=pb.ERROR_CODE_LIMIT_EXCEEDED, message=message, field=field, rule=f"{name} = {limit}")
