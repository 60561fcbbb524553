"""Limits of one run's queue: how many operations and bytes it may hold, and how far ahead a number may be."""

from __future__ import annotations

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import Limits
from gradwire_server.errors import ServiceError


def check_distance(seq: int, next_seq: int, limits: Limits) -> None:
    """Check that a number is not too far ahead of the next one.

    Raises:
        ServiceError: SEQ_GAP.
    """
    if seq >= next_seq + limits.max_window:
        raise ServiceError(
            pb.ERROR_CODE_SEQ_GAP,
            f"operation {seq} is too far ahead: {next_seq} is expected next, and at most {limits.max_window}"
            " numbers wait (--limit max_window=N); submit the missing ones first",
        )


def check_queue(operations: int, queued_bytes: int, size: int, limits: Limits) -> None:
    """Check that a queue may hold another operation.

    Args:
        operations: Operations in the queue.
        queued_bytes: Bytes of their payloads. An empty queue takes an operation of any size.
        size: Bytes of the new operation's payload.

    Raises:
        ServiceError: LIMIT_EXCEEDED.
    """
    if operations >= limits.max_queued_operations:
        raise ServiceError(
            pb.ERROR_CODE_LIMIT_EXCEEDED,
            f"the run has {limits.max_queued_operations} operations queued (--limit max_queued_operations=N); await"
            " some results, then submit this one again",
        )
    if queued_bytes + size > limits.max_queued_bytes and queued_bytes:
        raise ServiceError(
            pb.ERROR_CODE_LIMIT_EXCEEDED,
            f"the run's queued operations hold {queued_bytes} bytes, and this one would pass"
            f" {limits.max_queued_bytes} (--limit max_queued_bytes=N); await some results, then"
            " submit this one again",
        )


def check_window(next_seq: int, waiting_bytes: int, size: int, limits: Limits) -> None:
    """Check that another operation may wait for a missing number.

    Args:
        next_seq: The missing number.
        waiting_bytes: Bytes of the payloads that wait for it. The first one may have any size.
        size: Bytes of the new operation's payload.

    Raises:
        ServiceError: LIMIT_EXCEEDED.
    """
    if waiting_bytes and waiting_bytes + size > limits.max_window_bytes:
        raise ServiceError(
            pb.ERROR_CODE_LIMIT_EXCEEDED,
            f"{waiting_bytes} bytes wait for operation {next_seq}, and this one would pass {limits.max_window_bytes}"
            " (--limit max_window_bytes=N); submit the missing one, then this one again",
            rule=f"max_window_bytes = {limits.max_window_bytes}",
        )
