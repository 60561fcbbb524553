"""`gradwire.v1.TrainingService`: each RPC is a call on the runs, the scheduler or the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceServicer

from gradwire_server.access.keys import Keys
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.core.run_creation import Creator
from gradwire_server.core.tokenizing import Tokenizers
from gradwire_server.doors.grpc import files
from gradwire_server.doors.grpc.interceptors import CALLER
from gradwire_server.doors.grpc.submissions import Submissions
from gradwire_server.engine_client.process import EngineClient, EngineDied
from gradwire_server.errors import RpcError, unknown_checkpoint
from gradwire_server.journal.journal import StoredResult
from gradwire_server.journal.run_records import RunRecord, RunRecords
from gradwire_server.scheduling.checks import check_sample_request
from gradwire_server.scheduling.scheduler import Scheduler

PROTOCOL = 1
TOGETHER_BYTES = 256 << 10
"""Results up to this size, taken together, go in one message."""


class TrainingService(TrainingServiceServicer):
    """The service over the core objects. `stopping` ends its streams."""

    def __init__(
        self, config: ServerConfig, engine: EngineClient, runs: RunRecords, scheduler: Scheduler, keys: Keys
    ) -> None:
        self._config, self._engine, self._runs, self._scheduler = config, engine, runs, scheduler
        self._keys = keys
        self._creator = Creator(scheduler, runs, config.limits, config.all_models)
        self._tokenizers = Tokenizers(engine.hello.tokenizer_files)
        self._began = time.monotonic()
        self.stopping = asyncio.Event()

    def _run(self, run_id: str, *, write: bool = False) -> RunRecord:
        return self._runs.get(run_id, CALLER.get(), write=write)

    # ---- the server ----

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        return pb.ServerInfo(
            version=version("gradwire"),
            protocol=PROTOCOL,
            device=self._engine.hello.device,
            engine_ready=self._engine.is_ready,
            uptime_s=time.monotonic() - self._began,
            durability=self._config.durability,
            limits=self._config.limits.model_dump() | {"max_chunk_bytes": CHUNK_BYTES},
            engine=self._engine.vitals.to_proto(),
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=self._engine.hello.models)

    async def ListLosses(self, request: pb.ListLossesRequest, context: Any) -> pb.ListLossesResponse:
        return pb.ListLossesResponse(losses=self._engine.hello.losses)

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        self._check_count(len(request.texts), "texts")
        limit = self._config.limits.max_text_chars
        longest = max(map(len, request.texts), default=0)
        if longest > limit:
            message = f"a text of {longest} characters; {limit} at most (--limit max_text_chars=N)"
            raise RpcError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field="texts", rule=f"max_text_chars = {limit}")
        model = self._creator.model(request.model, "model")
        found = await self._tokenizers.encode(model, request.texts, request.add_special_tokens)
        return pb.EncodeResponse(sequences=[pb.TokenIds(ids=ids) for ids in found])

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        self._check_count(len(request.sequences), "sequences")
        model = self._creator.model(request.model, "model")
        sequences = [sequence.ids for sequence in request.sequences]
        return pb.DecodeResponse(texts=await self._tokenizers.decode(model, sequences, request.skip_special_tokens))

    def _check_count(self, count: int, field: str) -> None:
        limit = self._config.limits.max_encode_texts
        if count > limit:
            message = f"{count} {field}; {limit} at most (--limit max_encode_texts=N)"
            raise RpcError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, field=field, rule=f"max_encode_texts = {limit}")

    # ---- runs ----

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.Run:
        return (await self._creator.create(request, CALLER.get().name)).to_proto()

    async def ForkRun(self, request: pb.ForkRunRequest, context: Any) -> pb.Run:
        return (await self._creator.fork(request, CALLER.get())).to_proto()

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        return self._run(request.run_id).to_proto()

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        page, token = self._runs.page(CALLER.get(), request.page_size, request.page_token)
        return pb.ListRunsResponse(runs=[record.to_proto() for record in page], next_page_token=token)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
        await self._scheduler.delete(self._run(request.run_id, write=True))
        return pb.DeleteRunResponse()

    async def ShareRun(self, request: pb.ShareRunRequest, context: Any) -> pb.Run:
        record = self._run(request.run_id, write=True)
        if not request.revoke and (not self._keys.has(request.reader) or request.reader == record.owner):
            raise RpcError(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{request.reader[:100]!r} is not the name of another key of this server",
                field="reader",
            )
        await self._runs.share(record, request.reader, request.revoke)
        return record.to_proto()

    # ---- operations ----

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        record = self._run(request.run_id, write=True)
        limit = self._config.limits.max_name_chars
        if len(request.writer) > limit:
            raise RpcError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"writer has {len(request.writer)} characters; {limit} at most (--limit max_name_chars=N)",
                field="writer",
                rule=f"max_name_chars = {limit}",
            )
        epoch = await self._scheduler.open(record, request.takeover, request.writer)
        return pb.OpenRunResponse(epoch=epoch, run=record.to_proto())

    async def Submit(
        self, request_iterator: AsyncIterator[pb.SubmitFrame], context: Any
    ) -> AsyncIterator[pb.SubmitAck]:
        submissions = Submissions(self._scheduler, self._runs, self._config.limits, CALLER.get())
        async for ack in submissions.acks(request_iterator, self.stopping):
            yield ack

    async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
        queue = self._scheduler.queue(self._run(request.run_id))
        async for results in self._scheduler.results.results(queue, request.from_seq):
            self._run(request.run_id)  # it may be shared no longer
            for frame in _together(results) if request.batched else chain.from_iterable(map(_frames, results)):
                yield frame

    async def AckResults(self, request: pb.AckResultsRequest, context: Any) -> pb.AckResultsResponse:
        queue = self._scheduler.queue(self._run(request.run_id, write=True))
        queue.check_epoch(request.epoch)  # an older writer forgets nothing that the newer one has yet to fetch
        await self._scheduler.results.release(queue, request.up_to_seq)
        return pb.AckResultsResponse()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        queue = self._scheduler.queue(self._run(request.run_id, write=True))
        cancelled = await self._scheduler.admission.cancel(queue, request.seq, request.epoch)
        return pb.CancelResponse(cancelled=cancelled)

    # ---- sampling outside a run ----

    async def Sample(self, request: pb.SampleRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
        refusal = check_sample_request(request, self._config.limits)
        if refusal is not None:
            raise RpcError.of(refusal)
        asked = pb.SampleRequest()
        asked.CopyFrom(request)
        if request.model in self._config.all_models or "/" not in request.model:
            asked.model = self._creator.model(request.model, "model")
        else:
            self._runs.checkpoint(request.model, CALLER.get())
        try:
            usage = self._scheduler.usage(CALLER.get().name)
            reply, payload = await self._scheduler.dispatcher.sample(asked, usage)
        except EngineDied as error:
            message = "the engine ended while it sampled; it is being started again, try again"
            raise RpcError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message) from error
        for frame in _frames(StoredResult(reply.result, payload)):
            yield frame

    # ---- checkpoints ----

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        checkpoints = self._run(request.run_id).checkpoints.values()
        return pb.ListCheckpointsResponse(checkpoints=sorted(checkpoints, key=lambda saved: (saved.seq, saved.name)))

    async def DeleteCheckpoint(self, request: pb.DeleteCheckpointRequest, context: Any) -> pb.DeleteCheckpointResponse:
        record, checkpoint = self._runs.checkpoint(request.checkpoint, CALLER.get(), write=True)
        await self._scheduler.delete_checkpoint(record, checkpoint.name)
        return pb.DeleteCheckpointResponse()

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadFrame]:
        if request.WhichOneof("source") == "export":
            run_id, _, name = request.export.partition("/")
            folder = self._runs.folder(self._run(run_id).run_id, "exports", name)
        else:
            record, checkpoint = self._runs.checkpoint(request.checkpoint, CALLER.get())
            folder = self._runs.folder(record.run_id, "checkpoints", checkpoint.name)
        if not await asyncio.to_thread(folder.is_dir):
            raise unknown_checkpoint(request.export or request.checkpoint)
        async for frame in files.frames(folder):
            yield frame


def _frames(result: StoredResult) -> Iterator[pb.ResultFrame]:
    result.header.payload_bytes = len(result.payload)
    view = memoryview(result.payload)
    yield pb.ResultFrame(header=result.header, chunk=bytes(view[:CHUNK_BYTES]))
    for start in range(CHUNK_BYTES, len(result.payload), CHUNK_BYTES):
        yield pb.ResultFrame(chunk=bytes(view[start : start + CHUNK_BYTES]))


def _together(results: Iterable[StoredResult]) -> Iterator[pb.ResultFrame]:
    """The frames of results, small ones in one message."""
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
