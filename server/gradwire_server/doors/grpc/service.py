"""`gradwire.v1.TrainingService`: each RPC is one call on the core."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire_proto.history import to_columns
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceServicer

from gradwire_server.access.keys import Caller
from gradwire_server.checkpoint_files import SUMS
from gradwire_server.config import CHUNK_BYTES
from gradwire_server.core.core import Core
from gradwire_server.core.incoming import Incoming
from gradwire_server.doors.grpc.interceptors import CALLER
from gradwire_server.errors import ServiceError
from gradwire_server.observability.tracing import MAX_TRACEPARENT

if TYPE_CHECKING:
    from gradwire_server.journal.rows import StoredResult

log = logging.getLogger(__name__)

MOST_TOGETHER = 255
SLICE_FRAMES = 4
"""Frames of one message that are taken before others are served."""
ACKS_WAIT_S = 0.02
"""How long an acknowledgement waits for others if the client waits for none: a message costs either side 0.2 ms."""
ANSWERED_ACKS_WAIT_S = 0.2
"""Further wait of an acknowledgement whose operation has a result by then, which tells the client the same."""


def _broken(message: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, f"the stream of frames is broken: {message}")


def _refused(header: pb.OperationHeader, error: ServiceError) -> pb.SubmitAck:
    ack = pb.SubmitAck(run_id=header.run_id, seq=header.seq, error=error.error)
    ack.error.request_id = error.error.request_id or secrets.token_hex(8)
    code = pb.ErrorCode.Name(error.code)
    log.info("request %s: operation %d of %s refused: %s", ack.error.request_id, ack.seq, ack.run_id[:100], code)
    return ack


class Submissions:
    """The submissions of one Submit stream."""

    def __init__(self, core: Core, caller: Caller) -> None:
        self._core, self._caller = core, caller
        self._acks: asyncio.Queue[pb.SubmitAck | None] = asyncio.Queue()
        self._batched = self._patient = False
        self._outstanding = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def acks(
        self, frames: AsyncIterable[pb.SubmitFrame], stopping: asyncio.Event
    ) -> AsyncGenerator[pb.SubmitAck]:
        """Yield acknowledgements until the client has closed its side and received all of them.

        Raises:
            ServiceError: INVALID_ARGUMENT for frames out of order, SHUTTING_DOWN when the server stops. Operations
                already submitted to the core are not affected.
        """
        reader = asyncio.create_task(self._read(frames))
        stopper = asyncio.create_task(stopping.wait())
        for task in (reader, stopper):
            task.add_done_callback(lambda _: self._acks.put_nowait(None))
        try:
            while True:
                ack = await self._acks.get()
                if ack is not None:
                    if self._patient and not ack.HasField("error"):
                        await asyncio.sleep(ACKS_WAIT_S)
                        if self._batched and self._core.has_result(ack.run_id, ack.seq):
                            await asyncio.sleep(ANSWERED_ACKS_WAIT_S)
                    yield self._together(ack)
                elif reader.done():
                    reader.result()
                    return
                else:
                    raise ServiceError(
                        pb.ERROR_CODE_SHUTTING_DOWN, "the server is shutting down; submit again once it is back"
                    )
        finally:
            reader.cancel()
            stopper.cancel()
            await asyncio.gather(reader, stopper, return_exceptions=True)
            del task, reader, stopper  # an error's traceback holds this frame, and its task the error: a cycle

    def _together(self, ack: pb.SubmitAck) -> pb.SubmitAck:
        """Combine an acknowledgement with those queued after it, if the client accepts batches."""
        if not self._batched or self._acks.empty():
            return ack
        together = pb.SubmitAck()
        together.CopyFrom(ack)  # a repeated submission on another stream may share the message
        while not self._acks.empty() and len(together.more) < MOST_TOGETHER:
            following = self._acks.get_nowait()
            if following is None:
                self._acks.put_nowait(None)
                break
            together.more.append(following)
        return together

    async def _read(self, frames: AsyncIterable[pb.SubmitFrame]) -> None:
        incoming: Incoming | None = None
        try:
            async for first in frames:
                self._batched |= first.batched
                self._patient |= first.patient
                async with self._core.calls.slice(self._caller.name):
                    for place, frame in enumerate(chain((first,), first.more), 1):
                        incoming = self._take(frame, incoming)
                        if place % SLICE_FRAMES == 0:
                            await asyncio.sleep(0)
            if incoming is not None:
                raise _broken(f"it ended before the payload of operation {incoming.header.seq} was complete")
        finally:
            if incoming is not None:
                incoming.end()
        await self._idle.wait()

    def _take(self, frame: pb.SubmitFrame, incoming: Incoming | None) -> Incoming | None:
        """Add a frame to the operation that is being received; returns what is not complete then."""
        if frame.HasField("header"):
            if incoming is not None:
                raise _broken(f"a header came before the payload of operation {incoming.header.seq} was complete")
            incoming = self._begin(frame.header)
        elif incoming is None:
            raise _broken("a chunk came before a header")
        if len(frame.chunk) > CHUNK_BYTES:
            raise _broken(f"a chunk of {len(frame.chunk)} bytes; {CHUNK_BYTES} at most")
        incoming.add(frame.chunk)
        if not incoming.complete:
            return incoming
        self._hand_over(incoming)
        return None

    def _begin(self, given: pb.OperationHeader) -> Incoming:
        header = pb.OperationHeader()
        header.CopyFrom(given)  # a reference would keep the whole frame, with its chunk, in memory
        header.traceparent = header.traceparent[:MAX_TRACEPARENT]
        incoming = self._core.receive(self._caller, header)
        incoming.patient = self._patient
        return incoming

    def _hand_over(self, incoming: Incoming) -> None:
        header = incoming.header
        try:
            future = self._core.submit(self._caller, incoming)
        except ServiceError as error:
            self._acks.put_nowait(_refused(header, error))
            return
        self._outstanding += 1
        self._idle.clear()
        future.add_done_callback(lambda done: self._acknowledged(header, done))

    def _acknowledged(self, header: pb.OperationHeader, done: asyncio.Future[pb.SubmitAck]) -> None:
        error = done.exception()
        if isinstance(error, ServiceError):
            self._acks.put_nowait(_refused(header, error))
        elif error is None:
            self._acks.put_nowait(done.result())
        self._outstanding -= 1
        if not self._outstanding:
            self._idle.set()


async def file_frames(
    folder: Path, turn: Callable[[], AbstractAsyncContextManager[object]]
) -> AsyncGenerator[pb.DownloadFrame]:
    """Yield every regular file below a folder in chunks, in order of path; links are not followed.

    Args:
        turn: Waits for the caller's turn to read from the disk.
    """

    def list_files() -> list[tuple[Path, int]]:
        found = sorted(
            path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != SUMS
        )
        return [(path, path.stat().st_size) for path in found]

    async with turn():
        listed = await asyncio.to_thread(list_files)
    for path, size in listed:
        frame = pb.DownloadFrame(file=path.relative_to(folder).as_posix(), size_bytes=size)
        file = await asyncio.to_thread(path.open, "rb")
        try:
            left = size
            while left or frame.file:
                async with turn():
                    chunk = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
                if left and not chunk:
                    raise OSError(f"{path} was cut short while it was read")
                frame.chunk = chunk
                left -= len(chunk)
                yield frame
                frame = pb.DownloadFrame()
        finally:
            file.close()


TOGETHER_BYTES = 256 << 10
"""Consecutive results are sent in one message up to this total size."""


class TrainingService(TrainingServiceServicer):
    """The RPCs of the training service, documented in ``training.proto``.

    Attributes:
        stopping: Event that ends the Submit streams when set.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.stopping = asyncio.Event()

    # ---- the server ----

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        info, caller = self._core.info(), CALLER.get()
        info.key_name, info.role = caller.name, caller.role if caller.name else ""
        return info

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=self._core.models(request.name))

    async def ListLosses(self, request: pb.ListLossesRequest, context: Any) -> pb.ListLossesResponse:
        return pb.ListLossesResponse(losses=self._core.losses())

    async def Encode(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]  # passed on unparsed
        return await self._core.texts.convert(CALLER.get(), "Encode", request)

    async def Decode(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        return await self._core.texts.convert(CALLER.get(), "Decode", request)

    async def Render(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        return await self._core.texts.convert(CALLER.get(), "Render", request)

    async def GetTokenizerInfo(self, request: bytes, context: Any) -> bytes:  # type: ignore[override]
        return await self._core.texts.convert(CALLER.get(), "GetTokenizerInfo", request)

    # ---- runs ----

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.Run:
        return await self._core.runs.create(CALLER.get(), request.config, request.idempotency_key)

    async def ForkRun(self, request: pb.ForkRunRequest, context: Any) -> pb.Run:
        return await self._core.runs.fork(CALLER.get(), request)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        return self._core.runs.get(CALLER.get(), request.run_id)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        runs, token = await self._core.runs.page(CALLER.get(), request.page_size, request.page_token)
        return pb.ListRunsResponse(runs=runs, next_page_token=token)

    async def WatchRuns(self, request: pb.WatchRunsRequest, context: Any) -> AsyncIterator[pb.RunUpdates]:
        watched = self._core.runs.watch(CALLER.get(), request.cursor, with_points=request.with_points)
        async with aclosing(watched) as updates:
            async for update in updates:
                yield update

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        await self._core.runs.delete(CALLER.get(), request.run_id)
        return pb.DeleteRunResponse()

    async def BeginUpload(self, request: pb.BeginUploadRequest, context: Any) -> pb.Upload:
        return await self._core.uploads.begin(CALLER.get(), request)

    async def WriteUpload(self, request: pb.WriteUploadRequest, context: Any) -> pb.WriteUploadResponse:
        received = await self._core.uploads.write(
            CALLER.get(), request.upload_id, request.file, request.offset, request.chunk
        )
        return pb.WriteUploadResponse(received_bytes=received)

    async def FinishUpload(self, request: pb.FinishUploadRequest, context: Any) -> pb.Upload:
        return await self._core.uploads.finish(CALLER.get(), request.upload_id)

    async def ListUploads(self, request: pb.ListUploadsRequest, context: Any) -> pb.ListUploadsResponse:
        return pb.ListUploadsResponse(uploads=self._core.uploads.of(CALLER.get()))

    async def DeleteUpload(self, request: pb.DeleteUploadRequest, context: Any) -> pb.DeleteUploadResponse:
        await self._core.uploads.delete(CALLER.get(), request.upload_id)
        return pb.DeleteUploadResponse()

    async def ShareRun(self, request: pb.ShareRunRequest, context: Any) -> pb.Run:
        return await self._core.runs.share(CALLER.get(), request.run_id, request.reader, revoke=request.revoke)

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Any) -> AsyncIterator[pb.HistoryPage]:
        async with aclosing(self._core.runs.history(CALLER.get(), request.run_id, request.at_most)) as pages:
            async for points in pages:
                if request.columns:
                    yield pb.HistoryPage(columns=to_columns(points))
                else:
                    yield pb.HistoryPage(points=points)

    # ---- what people see ----

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Any) -> pb.ListOperationsResponse:
        return self._core.observed.operations(CALLER.get(), request.run_id, request.limit)

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Any) -> pb.ListQueuesResponse:
        return pb.ListQueuesResponse(runs=self._core.observed.queues(CALLER.get()))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=self._core.keys.listed(CALLER.get()))

    async def GetUsage(self, request: pb.GetUsageRequest, context: Any) -> pb.GetUsageResponse:
        return pb.GetUsageResponse(entries=await self._core.observed.usage(CALLER.get(), request))

    async def ListRecordings(self, request: pb.ListRecordingsRequest, context: Any) -> pb.ListRecordingsResponse:
        return pb.ListRecordingsResponse(recordings=await self._core.observed.recordings(CALLER.get(), request.run_id))

    async def ReadRecording(self, request: pb.ReadRecordingRequest, context: Any) -> AsyncIterator[pb.RecordingFrame]:
        recording, content = await self._core.observed.recording(CALLER.get(), request)
        yield pb.RecordingFrame(recording=recording, chunk=content[:CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(content), CHUNK_BYTES):
            yield pb.RecordingFrame(chunk=content[start : start + CHUNK_BYTES])

    async def RecordRollouts(self, request: pb.RecordRolloutsRequest, context: Any) -> pb.Recording:
        return await self._core.observed.record_rollouts(CALLER.get(), request)

    # ---- operations ----

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        run = await self._core.open_run(CALLER.get(), request.run_id, request.writer, takeover=request.takeover)
        return pb.OpenRunResponse(epoch=run.epoch, run=run)

    def Submit(self, request_iterator: AsyncIterator[pb.SubmitFrame], context: Any) -> AsyncGenerator[pb.SubmitAck]:
        return Submissions(self._core, CALLER.get()).acks(request_iterator, self.stopping)

    async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
        async with aclosing(self._core.results(CALLER.get(), request.run_id, request.from_seq)) as stream:
            async for results in stream:
                for frame in _together(results) if request.batched else chain.from_iterable(map(_frames, results)):
                    yield frame

    async def AckResults(self, request: pb.AckResultsRequest, context: Any) -> pb.AckResultsResponse:
        await self._core.release_results(CALLER.get(), request.run_id, request.up_to_seq, request.epoch)
        return pb.AckResultsResponse()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        return await self._core.cancel(
            CALLER.get(), request.run_id, request.seq, request.epoch, if_expired=request.if_expired
        )

    async def AcceptChanges(self, request: pb.AcceptChangesRequest, context: Any) -> pb.Run:
        return self._core.accept_changes(CALLER.get(), request.run_id)

    async def MoveRun(self, request: pb.MoveRunRequest, context: Any) -> pb.Run:
        engine = request.engine if request.HasField("engine") else None
        return await self._core.move_run(CALLER.get(), request.run_id, engine)

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Any) -> pb.DrainEngineResponse:
        count = await self._core.drain_engine(CALLER.get(), request.engine, undo=request.undo)
        return pb.DrainEngineResponse(num_moved=count)

    async def DiscardPending(self, request: pb.DiscardPendingRequest, context: Any) -> pb.DiscardPendingResponse:
        count = await self._core.discard_pending(CALLER.get(), request.run_id, request.epoch)
        return pb.DiscardPendingResponse(num_discarded=count)

    # ---- sampling outside a run ----

    async def Sample(self, request: pb.SampleRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
        for frame in _frames(await self._core.sample(CALLER.get(), request)):
            yield frame

    def StreamSample(self, request: pb.SampleRequest, context: Any) -> AsyncGenerator[pb.SampleFrame]:
        return self._core.stream_sample(CALLER.get(), request)

    # ---- checkpoints ----

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        return pb.ListCheckpointsResponse(checkpoints=self._core.runs.list_checkpoints(CALLER.get(), request.run_id))

    async def DeleteCheckpoint(self, request: pb.DeleteCheckpointRequest, context: Any) -> pb.DeleteCheckpointResponse:
        await self._core.runs.delete_checkpoint(CALLER.get(), request.checkpoint)
        return pb.DeleteCheckpointResponse()

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadFrame]:
        caller, source = CALLER.get(), request.WhichOneof("source") or "checkpoint"
        async with AsyncExitStack() as used:
            if source == "record":
                recording = self._core.recordings.folder(caller, request.record, signed=request.sign)
                folder = await used.enter_async_context(recording)
            else:
                reading = self._core.runs.folder(caller, **{source: getattr(request, source)})
                folder = await used.enter_async_context(reading)
            frames = file_frames(folder, partial(self._core.calls.slice, caller.name))
            async for frame in await used.enter_async_context(aclosing(frames)):
                yield frame


def _frames(result: StoredResult) -> Iterator[pb.ResultFrame]:
    result.header.payload_bytes = len(result.payload)
    view = memoryview(result.payload)
    yield pb.ResultFrame(header=result.header, chunk=bytes(view[:CHUNK_BYTES]))
    for start in range(CHUNK_BYTES, len(result.payload), CHUNK_BYTES):
        yield pb.ResultFrame(chunk=bytes(view[start : start + CHUNK_BYTES]))


def _together(results: Iterable[StoredResult]) -> Iterator[pb.ResultFrame]:
    """Yield the frames of results, small ones combined into one message."""
    first: pb.ResultFrame | None = None
    size = 0
    for frame in chain.from_iterable(map(_frames, results)):
        size += (length := frame.ByteSize())
        if first is not None and size <= TOGETHER_BYTES:
            first.more.append(frame)
            continue
        if first is not None:
            yield first
        first, size = frame, length
    if first is not None:
        yield first
