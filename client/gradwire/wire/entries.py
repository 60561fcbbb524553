"""One operation of a run on the client: its request, and its entry in the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from gradwire_proto.codec import Column, digest, encode
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError
from gradwire.results import Columns


@dataclass(frozen=True)
class Request:
    """The message of one operation, and its tensors as bytes."""

    operation: pb.Operation
    specs: tuple[pb.TensorSpec, ...] = ()
    payload: bytes = b""
    digest: bytes = b""

    @staticmethod
    def of(operation: pb.Operation, columns: Mapping[str, Column] | None = None) -> Request:
        """Build a request; tensors are copied, so that later changes to the caller's arrays have no effect."""
        specs, buffers = encode(columns or {})
        return Request(operation, tuple(specs), b"".join(buffers), digest(buffers))

    @staticmethod
    def abandoned(forward_seq: int, why: str) -> Request:
        """Build the request of an operation that takes a number and fails."""
        return Request.of(pb.Operation(backward=pb.Backward(forward_seq=forward_seq, abandoned=why[:1000])))


@dataclass(eq=False)
class Entry:
    """An operation from its call until its result.

    Attributes:
        index: Position among this client's operations, from 1. The number in the run is the index plus the base.
        label: The operation's name, for messages.
        request: None while it is being built from an earlier operation's result, and once the server has it.
        failure_seen: Number of the newest failure that had been raised to the user at the call; 0 if none.
        expired_seen: Numbers of the failures that had been raised before their turn.
        on_result: Called with the result, on the event loop.
        on_error: Called with the error, on the event loop.
        cause: The client's reason for the failure, reported in place of the server's.
        acknowledged: True once the server has it.
        tries: How often the server refused it.
        traceparent: Trace context of the operation's span.
        timeout_s: Seconds after its acceptance from which on it fails; 0 for never.
        deadline: When they are over, on the event loop's clock; None before it is acknowledged, and for no limit.
    """

    index: int
    label: str
    request: Request | None
    failure_seen: int
    on_result: Callable[[pb.OperationResult, Columns], None]
    on_error: Callable[[BaseException], None]
    cause: BaseException | None = None
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)
    tries: int = 0
    traceparent: str = ""
    timeout_s: float = 0.0
    deadline: float | None = None
    expired_seen: tuple[int, ...] = ()


class Sender(Protocol):
    """Sends a queue's operations; called on the event loop. A protocol, as :mod:`.link` imports the queue."""

    def submitted(self) -> None:
        """Send the operations that were appended."""

    def filled(self, entry: Entry) -> None:
        """Send an operation whose request came after those of later ones."""

    def cancel(self, entry: Entry) -> None:
        """Ask the server to cancel an operation."""

    def watch_deadline(self, entry: Entry, at: float) -> None:
        """Ask the server, at this time on the event loop's clock, whether an operation is still to be executed."""


@dataclass
class LocalFailure:
    """The failure of an operation that was never sent."""

    error: BaseException
    seen: bool = False

    def mark_seen(self) -> None:
        self.seen = True


def check_timeout(timeout: float | None) -> None:
    """Check the ``timeout=`` of an operation.

    Raises:
        InvalidArgumentError: It is not a number of seconds.
    """
    if timeout is not None and not (isinstance(timeout, Real) and 0 < timeout < math.inf):
        raise InvalidArgumentError(
            f"timeout is {timeout!r}; it is a number of seconds, and None for no limit", field="timeout", rule="> 0"
        )
