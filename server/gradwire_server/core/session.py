"""A session in which a caller in this process writes to a run, without handling numbers, digests or result streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.incoming import Incoming
from gradwire_server.errors import ServiceError
from gradwire_server.journal.rows import StoredResult


@dataclass(frozen=True)
class Output:
    """The output of an operation.

    Attributes:
        result: Status, metrics and timings.
        columns: The result's tensors by name.
    """

    result: pb.OperationResult
    columns: Mapping[str, Column]


class SessionCalls(Protocol):
    """The methods of the core that a session needs; doors whose clients number their operations call the same ones.

    A protocol, as the core imports this module.
    """

    def receive(self, caller: Caller, header: pb.OperationHeader) -> Incoming: ...

    def submit(self, caller: Caller, incoming: Incoming) -> asyncio.Future[pb.SubmitAck]: ...

    def results(self, caller: Caller, run_id: str, from_seq: int = 0) -> Any: ...

    async def release_results(self, caller: Caller, run_id: str, up_to_seq: int, epoch: int) -> None: ...

    async def cancel(self, caller: Caller, run_id: str, seq: int, epoch: int) -> pb.CancelResponse: ...


class Session:
    """A run opened for writing. Created by :meth:`.core.Core.open_session`; an async context manager.

    Operations are executed in the order of the calls of :meth:`submit`. After a restart of the server, open the run
    again: acknowledged operations are still executed, and :meth:`result` of the new session returns their results.

    Attributes:
        epoch: Epoch of this writer. A newer writer has a higher one; from then on this session is refused.
    """

    def __init__(self, operations: SessionCalls, caller: Caller, run: pb.Run, *, keep_results: bool = False) -> None:
        self.run_id, self.epoch, self.next_seq = run.run_id, run.epoch, run.accepted_seq + 1
        self._operations, self._caller = operations, caller
        self._waiting: dict[int, asyncio.Future[Output]] = {}
        self._failure_seen = 0
        self._released, self._keep_results = run.released_seq, keep_results
        self._reader: asyncio.Task[None] | None = None
        self._next_read = 0

    def submit(self, operation: pb.Operation, columns: Mapping[str, Column] | None = None) -> asyncio.Future[Output]:
        """Submit an operation; the future resolves with its output.

        Raises (through the future):
            ServiceError: The operation was refused, or failed.
        """
        specs, buffers = codec.encode(columns or {})
        header = pb.OperationHeader(
            run_id=self.run_id,
            epoch=self.epoch,
            seq=self.next_seq,
            operation=operation,
            tensors=specs,
            payload_bytes=sum(buffer.nbytes for buffer in buffers),
            payload_digest=codec.digest(buffers),
            failure_seen=self._failure_seen,
        )
        waiting = self._expect(header.seq)
        incoming = self._operations.receive(self._caller, header)
        for buffer in buffers:
            incoming.add(bytes(buffer))
        try:
            accepted = self._operations.submit(self._caller, incoming)
        except ServiceError as error:
            self._refused(header.seq, error)
            return waiting
        if accepted.done() and (refused := accepted.exception()) is not None:
            self._refused(header.seq, refused)
            return waiting
        self.next_seq = header.seq + 1
        accepted.add_done_callback(lambda done: self._acknowledged(header.seq, done))
        return waiting

    def result(self, seq: int) -> asyncio.Future[Output]:
        """Future output of the operation with this number, also of an earlier session if its result is still kept."""
        return self._waiting[seq] if seq in self._waiting else self._expect(seq)

    async def cancel(self, seq: int) -> bool:
        """Cancel an operation that has not started; return whether it is cancelled."""
        return (await self._operations.cancel(self._caller, self.run_id, seq, self.epoch)).cancelled

    async def close(self) -> None:
        """End the session. Acknowledged operations are still executed."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- internals ----

    def _expect(self, seq: int) -> asyncio.Future[Output]:
        waiting: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = waiting
        if self._reader is not None and not self._reader.done() and seq < self._next_read:
            self._reader.cancel()  # it has passed this number
            self._reader = None
        if self._reader is None or self._reader.done():
            self._next_read = min(self._waiting)
            self._reader = asyncio.create_task(self._read(self._next_read))
        return waiting

    def _refused(self, seq: int, error: BaseException) -> None:
        self.next_seq = min(self.next_seq, seq)
        self._fail(seq, error)

    def _acknowledged(self, seq: int, accepted: asyncio.Future[pb.SubmitAck]) -> None:
        error = None if accepted.cancelled() else accepted.exception()
        if error is not None:
            self._refused(seq, error)

    def _fail(self, seq: int, error: BaseException) -> None:
        waiting = self._waiting.pop(seq, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    async def _read(self, from_seq: int) -> None:
        try:
            async for results in self._operations.results(self._caller, self.run_id, from_seq):
                for stored in results:
                    self._deliver(stored)
                newest = results[-1].header.seq
                self._next_read = newest + 1
                if newest > self._released and not self._keep_results:
                    self._released = newest
                    await self._operations.release_results(self._caller, self.run_id, newest, self.epoch)
        except ServiceError as error:
            released = error.code == pb.ERROR_CODE_RESULT_RELEASED  # an error of this number's future only
            for seq in [from_seq] if released else list(self._waiting):
                self._fail(seq, error)
            if self._waiting:
                self._next_read = min(self._waiting)
                self._reader = asyncio.create_task(self._read(self._next_read))

    def _deliver(self, stored: StoredResult) -> None:
        result = stored.header
        if result.status != pb.STATUS_SUCCEEDED:
            self._failure_seen = max(self._failure_seen, result.seq)
            self._fail(result.seq, ServiceError.of(result.error))
            return
        waiting = self._waiting.pop(result.seq, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Output(result, codec.decode(list(result.tensors), stored.payload)))
