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


@dataclass(eq=False)
class Request:
    """A request of the front process.

    Attributes:
        columns: Tensors of its payload; empty unless it is an operation.
        error: Why the payload could not be decoded; None if it could.
        payload: The bytes of the columns, as they arrived.
        images: Done when its images are read ahead; None if they are not.
        run_id: The run that the request reads or changes; empty if none.
        samples: Whether it asks for samples, of a run or outside one.
        leaves_run: Whether it leaves its run as it is, so that it may be executed while samples of it are in progress.
        ends: Whether the engine ends once it is answered.
    """

    message: engine_pb2.EngineRequest
    columns: Columns
    error: codec.CodecError | None
    payload: bytes | memoryview = b""
    images: Future[None] | None = None
    run_id: str = field(init=False)
    samples: bool = field(init=False)
    leaves_run: bool = field(init=False)
    ends: bool = field(init=False)

    def __post_init__(self) -> None:
        message, kind = self.message, self.message.WhichOneof("kind")
        self.run_id, self.ends = _run_of(message, kind), kind == "shutdown"
        self.samples = kind == "sample" or (kind == "operation" and kind_of(message.operation.operation).samples)
        self.leaves_run = self.samples or kind == "share_weights"

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
    def tokens(self) -> int:
        """A lower bound of the tokens of its batch, the length of its longest column; 1 without any."""
        return max((len(column.values) for column in self.columns.values()), default=1)

    @property
    def only_samples(self) -> bool:
        """Whether it asks for samples, and not for scores of their prompts too."""
        message = self.message
        call = message.sample.call if message.HasField("sample") else message.operation.operation.sample
        return self.samples and not call.prompt_logprobs

    @property
    def ready(self) -> bool:
        """Whether none of its images is still being read."""
        return self.images is None or self.images.done()


def _run_of(message: engine_pb2.EngineRequest, kind: str | None) -> str:
    if kind == "operation":
        return message.operation.run_id
    if kind == "sample":
        return message.sampled_run
    if kind == "share_weights":
        return message.share_weights.run_id
    if kind == "create_run":
        return message.create_run.run_id
    return message.drop_run.run_id if kind == "drop_run" else ""


@dataclass(frozen=True)
class Outcome:
    """A handler's result: an ``OperationResult`` with its ``kind`` set, and its tensors."""

    result: training_pb2.OperationResult
    columns: Columns = field(default_factory=dict)
