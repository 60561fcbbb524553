"""One caller's operations on one run, for a caller in this process: numbers, digests and results are the session's."""

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
from gradwire_server.journal.journal import StoredResult


@dataclass(frozen=True)
class Output:
    """What an operation gave.

    Attributes:
        result: its figures.
        columns: its tensors by name.
    """

    result: pb.OperationResult
    columns: Mapping[str, Column]


class Operations(Protocol):
    """What a session needs of the core; doors whose callers bring numbers of their own call the same methods."""

    def receive(self, caller: Caller, header: pb.OperationHeader) -> Incoming: ...

    def submit(self, caller: Caller, incoming: Incoming) -> asyncio.Future[pb.SubmitAck]: ...

    def results(self, caller: Caller, run_id: str, from_seq: int = 0) -> Any: ...

    async def release_results(self, caller: Caller, run_id: str, up_to_seq: int, epoch: int) -> None: ...

    async def cancel(self, caller: Caller, run_id: str, seq: int, epoch: int) -> bool: ...


class Session:
    """A run that this caller writes to. Made by :meth:`.core.Core.open_session`; an async context manager.

    Operations are carried out in the order of the calls of :meth:`submit`. After a restart of the server the run is
    opened anew: what was acknowledged is carried out, and :meth:`result` still gives its results.

    Attributes:
        run_id: the run.
        epoch: this writer's; a newer writer has a higher one, and this one is refused from then on.
        next_seq: the number of the next operation.
    """

    def __init__(self, operations: Operations, caller: Caller, run: pb.Run) -> None:
        self.run_id, self.epoch, self.next_seq = run.run_id, run.epoch, run.accepted_seq + 1
        self._operations, self._caller = operations, caller
        self._waiting: dict[int, asyncio.Future[Output]] = {}
        self._failure_seen = 0
        self._released = run.released_seq
        self._reader: asyncio.Task[None] | None = None

    def submit(self, operation: pb.Operation, columns: Mapping[str, Column] | None = None) -> asyncio.Future[Output]:
        """Submits an operation; the future has what it gives.

        Raises (through the future):
            ServiceError: why the operation was refused, or failed.
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
        """What an operation of this number gives, also one of an earlier session whose result is still kept."""
        return self._waiting[seq] if seq in self._waiting else self._expect(seq)

    async def cancel(self, seq: int) -> bool:
        """Cancels an operation that has not started; whether it was still to be had."""
        return await self._operations.cancel(self._caller, self.run_id, seq, self.epoch)

    async def close(self) -> None:
        """Ends the session. What was acknowledged is carried out all the same."""
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

    # ---- within ----

    def _expect(self, seq: int) -> asyncio.Future[Output]:
        waiting: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = waiting
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(min(self._waiting)))
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
                if newest > self._released:
                    self._released = newest
                    await self._operations.release_results(self._caller, self.run_id, newest, self.epoch)
        except ServiceError as error:
            for seq in list(self._waiting):
                self._fail(seq, error)

    def _deliver(self, stored: StoredResult) -> None:
        result = stored.header
        if result.status != pb.STATUS_SUCCEEDED:
            self._failure_seen = max(self._failure_seen, result.seq)
            self._fail(result.seq, ServiceError.of(result.error))
            return
        waiting = self._waiting.pop(result.seq, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Output(result, codec.decode(list(result.tensors), stored.payload)))
