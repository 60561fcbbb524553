"""A gRPC server with the real service definition that follows the rules of numbers and failures and computes nothing.

What it answers, and when it breaks, is a test's to script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import gradwire
import grpc
import numpy as np
from gradwire_proto.codec import Column, decode, digest, encode
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceServicer, add_TrainingServiceServicer_to_server

from support.server import free_port

Columns = dict[str, Column]
Answer = tuple[pb.OperationResult, Columns]

ROW_LOSS = pb.LossInfo(
    name="row_loss",
    fields=[
        pb.LossField(
            name="input_ids", dtype="int", shapes=["[rows, tokens]"], required=True, padding_mask="attention_mask"
        ),
        pb.LossField(name="labels", dtype="int", shapes=["[rows, tokens]"], aligned_with="input_ids"),
        pb.LossField(name="rewards", dtype="float", shapes=["[rows]", "[rows, tokens]"], aligned_with="input_ids"),
    ],
    config_schema_json=json.dumps({"properties": {"beta": {"type": "number"}, "reference_model": {}}}),
    layout="rows",
)


@dataclass
class Received:
    """One operation as it arrived."""

    seq: int
    kind: str
    operation: pb.Operation
    columns: Columns
    failure_seen: int
    epoch: int


@dataclass
class Script:
    """Behaviour of the scripted server, and a record of the requests.

    Attributes:
        answer: Returns an operation's result; raises a pb.Error wrapped in :class:`Fails` to fail it.
        break_submit: (number of operations received) -> whether to break the stream of operations now, unacknowledged.
        break_results: (number of results sent) -> whether to break the stream of results now.
        refuse: (operation) -> the error of its acknowledgement, if it is refused.
        hold: Cleared: nothing is answered.
    """

    answer: Callable[[Received], Answer] = lambda received: plain(received)
    break_submit: Callable[[int], bool] = lambda count: False
    break_results: Callable[[int], bool] = lambda count: False
    refuse: Callable[[Received], pb.Error | None] = lambda received: None
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[Received] = field(default_factory=list)
    opened: list[pb.OpenRunRequest] = field(default_factory=list)
    acked_up_to: int = 0
    cancelled: list[int] = field(default_factory=list)
    metadata: list[tuple[str, Any]] = field(default_factory=list)

    def kinds(self) -> list[tuple[int, str]]:
        return [(each.seq, each.kind) for each in self.received]


class Fails(Exception):
    def __init__(self, code: pb.ErrorCode.ValueType, message: str = "no", **fields: Any) -> None:
        self.error = pb.Error(code=code, message=message, **fields)


def plain(received: Received) -> Answer:
    """Succeed with the right kind of result; its loss or step is the operation's number."""
    result = pb.OperationResult()
    if received.kind == "optim_step":
        result.optim_step.step = received.seq
    elif received.kind in ("forward_backward", "forward", "kept_forward", "backward"):
        result.loss.loss = received.seq
    elif received.kind == "save_checkpoint":
        result.checkpoint.path = f"run/{received.operation.save_checkpoint.name}"
    else:
        result.empty.SetInParent()
    return result, {}


class ScriptedService(TrainingServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.epoch = 0
        self.accepted = 0
        self.digests: dict[int, bytes] = {}
        self.waiting: dict[int, Received] = {}
        self.results: dict[int, tuple[pb.OperationResult, bytes]] = {}
        self.changed = asyncio.Condition()
        self.failure = 0
        self.results_sent = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def GetServerInfo(self, request: Any, context: Any) -> pb.ServerInfo:
        self.script.metadata = list(context.invocation_metadata())
        return pb.ServerInfo(version="scripted", protocol=1, limits={"max_payload_bytes": 64 << 20})

    async def ListLosses(self, request: Any, context: Any) -> pb.ListLossesResponse:
        return pb.ListLossesResponse(losses=[ROW_LOSS])

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.ModelInfo(name="tiny", vocab_size=7)])

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.Run:
        if request.config.base_model != "tiny":
            error = pb.Error(code=pb.ERROR_CODE_UNKNOWN_MODEL, message="no such model", field="base_model")
            context.set_trailing_metadata((("gradwire-error-bin", error.SerializeToString()),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        return pb.Run(run_id="run-a", config=request.config)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        return pb.Run(run_id=request.run_id, accepted_seq=self.accepted)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        self.script.opened.append(request)
        self.epoch += 1
        return pb.OpenRunResponse(epoch=self.epoch, run=pb.Run(run_id=request.run_id, accepted_seq=self.accepted))

    async def Submit(self, requests: AsyncIterator[pb.SubmitFrame], context: Any) -> AsyncIterator[pb.SubmitAck]:
        header, chunks = pb.OperationHeader(), b""
        async for frame in _one_by_one(requests):
            if frame.HasField("header"):
                header, chunks = frame.header, b""
            chunks += frame.chunk
            assert len(frame.chunk) <= 1 << 20
            if len(chunks) < header.payload_bytes:
                continue
            assert header.payload_digest == digest([chunks])
            received = Received(
                header.seq,
                header.operation.WhichOneof("kind"),
                header.operation,
                decode(list(header.tensors), chunks),
                header.failure_seen,
                header.epoch,
            )
            self.script.received.append(received)
            if self.script.break_submit(len(self.script.received)):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
            if header.epoch != self.epoch:
                error = pb.Error(code=pb.ERROR_CODE_STALE_EPOCH, message="another writer")
                yield pb.SubmitAck(seq=header.seq, error=error)
                continue
            refusal = self.script.refuse(received)
            if refusal is not None:
                yield pb.SubmitAck(seq=header.seq, error=refusal)
                continue
            known = header.seq in self.digests
            assert not known or self.digests[header.seq] == header.payload_digest
            if not known:
                self.digests[header.seq] = header.payload_digest
                self.waiting[header.seq] = received
                while self.accepted + 1 in self.waiting:
                    self.accepted += 1
                task = asyncio.create_task(self._work())
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            yield pb.SubmitAck(seq=header.seq, duplicate=known)

    async def _work(self) -> None:
        await self.script.hold.wait()
        async with self.changed:
            while (received := self.waiting.pop(len(self.results) + 1, None)) is not None:
                self.results[received.seq] = self._answer(received)
            self.changed.notify_all()

    def _answer(self, received: Received) -> tuple[pb.OperationResult, bytes]:
        if self.failure and received.failure_seen >= self.failure:
            self.failure = 0
        try:
            if self.failure:
                raise Fails(pb.ERROR_CODE_ABORTED_PREDECESSOR, cause_seq=self.failure)
            if received.operation.backward.abandoned:
                raise Fails(pb.ERROR_CODE_ABANDONED, received.operation.backward.abandoned)
            result, columns = self.script.answer(received)
            specs, buffers = encode(columns)
            payload = b"".join(buffers)
            result.status = pb.STATUS_SUCCEEDED
            result.tensors.extend(specs)
        except Fails as failed:
            result, payload = pb.OperationResult(status=pb.STATUS_FAILED, error=failed.error), b""
            if failed.error.code != pb.ERROR_CODE_ABORTED_PREDECESSOR:
                self.failure = received.seq
            elif received.kind == "optim_step":
                self.failure = 0
        result.seq, result.payload_bytes = received.seq, len(payload)
        return result, payload

    async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
        seq = request.from_seq
        while True:
            async with self.changed:
                while seq not in self.results:
                    await self.changed.wait()
            result, payload = self.results[seq]
            if self.script.break_results(self.results_sent):
                self.results_sent += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
            self.results_sent += 1
            yield pb.ResultFrame(header=result, chunk=payload[: 1 << 20])
            for start in range(1 << 20, len(payload), 1 << 20):
                yield pb.ResultFrame(chunk=payload[start : start + (1 << 20)])
            seq += 1

    async def AckResults(self, request: pb.AckResultsRequest, context: Any) -> pb.AckResultsResponse:
        self.script.acked_up_to = request.up_to_seq
        return pb.AckResultsResponse()

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.script.cancelled.append(request.seq)
        received = self.waiting.pop(request.seq, None)
        if received is not None:
            async with self.changed:
                self.results[request.seq] = pb.OperationResult(seq=request.seq, status=pb.STATUS_CANCELLED), b""
                self.changed.notify_all()
        return pb.CancelResponse(cancelled=received is not None)


# What no test here calls is not written; the server answers UNIMPLEMENTED to it.
ScriptedService.__abstractmethods__ = frozenset()


@contextlib.asynccontextmanager
async def scripted_server(
    script: Script, address: str = "", service: type[ScriptedService] = ScriptedService, **options: int
) -> AsyncIterator[tuple[str, ScriptedService]]:
    """Start a server in this process, at an address that it can be given again; yield the address and the server.

    Args:
        options: Those of gRPC, without ``grpc.``.
    """
    script.hold.set()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *((f"grpc.{name}", options[name]) for name in options)])
    servicer = service(script)
    add_TrainingServiceServicer_to_server(servicer, server)
    address = address or f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address, servicer
    finally:
        await server.stop(0)
        for task in servicer.tasks:
            task.cancel()
        await asyncio.gather(*servicer.tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def scripted_run(
    script: Script, **settings: Any
) -> AsyncIterator[tuple[gradwire.TrainingClient, gradwire.ServiceClient]]:
    """Open a run on a scripted server; yield it and its service."""
    async with (
        scripted_server(script) as (address, _),
        gradwire.connect(address, **{"connect_timeout": 60} | settings) as service,
    ):
        yield await service.create_run("tiny"), service


BATCH = {"input_ids": [[1, 2, 3], [4, 5]]}


def scores(received: Received) -> Answer:
    """Like :func:`plain`; a forward's logprobs are its negated ids as floats, without the first of each row."""
    result, columns = plain(received)
    if received.kind in ("kept_forward", "forward"):
        rows = [-row[1:].astype(np.float32) for row in received.columns["input_ids"].rows()]
        columns = {"logprobs": Column.from_rows(rows)}
    return result, columns


async def until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _one_by_one(requests: AsyncIterator[pb.SubmitFrame]) -> AsyncIterator[pb.SubmitFrame]:
    async for first in requests:
        yield first
        for frame in first.more:
            yield frame
