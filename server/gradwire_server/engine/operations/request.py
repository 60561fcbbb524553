"""A decoded request to the engine, and the outcome of executing it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.operation_kinds import kind_of

Columns = Mapping[str, Column]


@dataclass(frozen=True, eq=False)
class Request:
    """A request of the front process.

    Attributes:
        message: The decoded request.
        columns: Tensors of its payload; empty unless it is an operation.
        error: Why the payload could not be decoded; None if it could.
        payload: The bytes of the columns, as they arrived.
        reading: Done when its images are read; None if nothing of it is read ahead.
    """

    message: engine_pb2.EngineRequest
    columns: Columns
    error: codec.CodecError | None
    payload: bytes | memoryview = b""
    reading: Future[None] | None = None

    @classmethod
    def read(cls, message: engine_pb2.EngineRequest, payload: memoryview) -> Request:
        """Decode a request's payload."""
        columns: Columns = {}
        error = None
        if message.HasField("operation"):
            try:
                columns = codec.decode(message.operation.tensors, payload)
            except codec.CodecError as damage:
                error = damage
        return cls(message, columns, error, payload)

    @cached_property
    def run_id(self) -> str:
        """The run that the request reads or changes; empty if none."""
        kind = self.message.WhichOneof("kind")
        if kind == "operation":
            return self.message.operation.run_id
        if kind == "sample":
            return self.message.sampled_run
        if kind == "share_weights":
            return self.message.share_weights.run_id
        if kind == "create_run":
            return self.message.create_run.run_id
        return self.message.drop_run.run_id if kind == "drop_run" else ""

    @cached_property
    def samples(self) -> bool:
        """Whether it asks for samples, of a run or outside one."""
        return self.message.HasField("sample") or kind_of(self.message.operation.operation).samples

    @cached_property
    def tokens(self) -> int:
        """A lower bound of the tokens of its batch, the length of its longest column; 1 without any."""
        return max((len(column.values) for column in self.columns.values()), default=1)

    @property
    def is_read(self) -> bool:
        """Whether nothing of it is still being read."""
        return self.reading is None or self.reading.done()

    @property
    def reads(self) -> bool:
        """Whether it leaves its run as it is, so that it may be executed while samples of it are in progress."""
        return self.samples or self.message.HasField("share_weights")

    @property
    def ends(self) -> bool:
        """Whether the engine ends once it is answered."""
        return self.message.HasField("shutdown")


@dataclass(frozen=True)
class Outcome:
    """A handler's result: an ``OperationResult`` with its ``kind`` set, and its tensors."""

    result: training_pb2.OperationResult
    columns: Columns = field(default_factory=dict)
