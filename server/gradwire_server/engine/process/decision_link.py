"""The link by which rank 0 hands its decisions to the other ranks of the engine, over a socket pair each.

A message is: uint32 length of the ``EngineDecision``, uint64 length of the payload (both little-endian), the serialized
decision. The payload is in shared memory, whose file descriptor comes with the message: it is written once, whatever
the number of ranks, and freed when the last of them has let go of the batch.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Sequence

from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.errors import GroupBroken, OperationError
from gradwire_server.engine.operations import limits
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.request import Request

_PREFIX = struct.Struct("<IQ")


class Followers:
    """The other ranks, as rank 0 sees them.

    Args:
        sockets: One to each of them; none in an engine of one process.
    """

    def __init__(self, sockets: Sequence[socket.socket] = ()) -> None:
        self._sockets = sockets

    def send(self, decision: Decision) -> None:
        """Hand on a decision.

        Raises:
            GroupBroken: A rank is gone.
        """
        if not self._sockets:
            return
        requests = [*decision.samples, *decision.requests]
        message = engine_pb2.EngineDecision(
            samples=[request.message for request in decision.samples],
            steps_samples=decision.steps_samples,
            stopped=[
                engine_pb2.EngineStopped(id=number, error=error.to_proto())
                for number, error in decision.stopped.items()
            ],
            requests=[request.message for request in decision.requests],
            withdrawn=decision.withdrawn,
            limits=[limits.to_wire(budget) for budget in decision.budgets],
            group_tokens=decision.group_tokens,
            payload_bytes=[len(request.payload) for request in requests],
        ).SerializeToString()
        size = sum(len(request.payload) for request in requests)
        content = _PREFIX.pack(len(message), size) + message  # in one piece, which wakes a rank once
        shared = [_shared([request.payload for request in requests])] if size else []
        try:
            for each in self._sockets:
                sent = socket.send_fds(each, [content], shared)
                each.sendall(content[sent:])
        except OSError as error:
            raise GroupBroken(f"a rank of the engine takes no decisions any more: {error}") from error
        finally:
            for fd in shared:
                os.close(fd)


class Leader:
    """Rank 0, as another rank sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> Decision:
        """Receive the next decision.

        Raises:
            GroupBroken: Rank 0 is gone.
        """
        prefix, shared, _, _ = socket.recv_fds(self._sock, _PREFIX.size, 1)
        length, size = _PREFIX.unpack(prefix + self._exactly(_PREFIX.size - len(prefix)))
        message = engine_pb2.EngineDecision.FromString(self._exactly(length))
        payload = memoryview(b"")
        if size:
            payload = memoryview(mmap.mmap(shared[0], size, flags=mmap.MAP_PRIVATE))  # writable, and nobody else's
            os.close(shared[0])
        requests, start = [], 0
        for each, length in zip([*message.samples, *message.requests], message.payload_bytes, strict=True):
            requests.append(Request.read(each, payload[start : start + length]))
            start += length
        return Decision(
            samples=requests[: len(message.samples)],
            steps_samples=message.steps_samples,
            stopped={each.id: OperationError.from_proto(each.error) for each in message.stopped},
            requests=requests[len(message.samples) :],
            withdrawn=frozenset(message.withdrawn),
            budgets=[limits.from_wire(each) for each in message.limits],
            group_tokens=message.group_tokens,
        )

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._sock.recv(count)
            if not part:
                raise GroupBroken("rank 0 of the engine is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _shared(payloads: Sequence[bytes | memoryview]) -> int:
    """Write payloads into new shared memory; returns its file descriptor."""
    fd = os.memfd_create("gradwire-batch")
    for payload in payloads:
        rest = memoryview(payload)
        while rest:
            rest = rest[os.write(fd, rest) :]
    return fd
