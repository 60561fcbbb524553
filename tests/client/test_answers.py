"""What an answer of the server ends: an operation, writing, everything, or, for most, nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import gradwire
import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.doors.grpc.interceptors import GRPC_STATUS
from support.scripted import Received, Script, ScriptedService, scripted_run, scripted_server, until

Code = pb.ErrorCode.ValueType

PASSING: Sequence[Code] = (
    pb.ERROR_CODE_INTERNAL,
    pb.ERROR_CODE_ENGINE_UNAVAILABLE,
    pb.ERROR_CODE_STORAGE_FULL,
    pb.ERROR_CODE_SHUTTING_DOWN,
    pb.ERROR_CODE_PAYLOAD_CORRUPT,
    pb.ERROR_CODE_LIMIT_EXCEEDED,
)


async def refuse(context: Any, code: Code) -> None:
    error = pb.Error(code=code, message="as the script says")
    context.set_trailing_metadata((("gradwire-error-bin", error.SerializeToString()),))
    await context.abort(GRPC_STATUS[code], error.message)


@pytest.mark.long
async def test_no_answer_to_an_acknowledgement_of_results_ends_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.wire.link.ACK_INTERVAL_S", 0.001)
    refused: list[Code] = []

    class Refusing(ScriptedService):
        async def AckResults(self, request: pb.AckResultsRequest, context: Any) -> pb.AckResultsResponse:
            assert request.epoch == self.epoch
            if len(refused) < len(codes):
                refused.append(codes[len(refused)])
                await refuse(context, refused[-1])
            return await super().AckResults(request, context)

    codes = pb.ErrorCode.values()
    async with scripted_server(Script(), service=Refusing) as (address, server), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        last = 0
        while len(refused) < len(codes):
            last = (await run.optim_step()).step
        await until(lambda: server.script.acked_up_to == last)
        assert (await run.optim_step()).step == last + 1
    assert refused == codes


async def test_a_run_is_created_once_a_full_disk_has_room(caplog: pytest.LogCaptureFixture) -> None:
    keys: list[str] = []

    class Full(ScriptedService):
        async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.Run:
            keys.append(request.idempotency_key)
            if len(keys) < 3:
                await refuse(context, pb.ERROR_CODE_STORAGE_FULL)
            return await super().CreateRun(request, context)

    async with scripted_server(Script(), service=Full) as (address, _):
        async with gradwire.connect(address) as service:
            assert (await service.create_run("tiny")).run_id == "run-a"
            assert len(keys) == 3 and len({*keys}) == 1
        keys.clear()
        async with gradwire.connect(address, reconnect_timeout=0.01) as service:
            with pytest.raises(gradwire.StorageFullError):
                await service.create_run("tiny")


async def test_what_keeps_a_run_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gradwire.wire.link.PATIENCE_S", 0.01)
    answers = ["", "room", "room", "", "engine 0", "engine 0"]
    asked = 0

    class Kept(ScriptedService):
        async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
            nonlocal asked
            asked += 1
            if asked == 1:
                await refuse(context, pb.ERROR_CODE_SHUTTING_DOWN)
            run = await super().GetRun(request, context)
            run.waits_for = answers[min(asked - 2, len(answers) - 1)]
            return run

    async with scripted_server(Script(), service=Kept) as (address, server), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        server.script.hold.clear()
        step = run.optim_step()
        await until(lambda: asked > len(answers) + 3)
        server.script.hold.set()
        assert (await step).step == 1
    said = [record.getMessage() for record in caplog.records]
    assert [each for each in said if "waits for" in each] == [
        f"{run.run_id} waits for room",
        f"{run.run_id} waits for engine 0",
    ]


async def test_a_stream_of_results_that_fails_for_a_while_ends_nothing() -> None:
    left = list(PASSING)

    class Refusing(ScriptedService):
        async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
            if left:
                await refuse(context, left.pop())
            async for frame in super().Results(request, context):
                yield frame

    async with scripted_server(Script(), service=Refusing) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        assert [each.step for each in await gradwire.gather(*(run.optim_step() for _ in range(3)))] == [1, 2, 3]
    assert not left


@pytest.mark.parametrize("code", [*PASSING, pb.ERROR_CODE_SEQ_GAP], ids=pb.ErrorCode.Name)
async def test_an_operation_that_is_refused_for_a_while_is_sent_again(code: Code) -> None:
    left = 2

    def refusal(received: Received) -> pb.Error | None:
        nonlocal left
        left -= received.seq == 2
        return pb.Error(code=code, message="not now") if received.seq == 2 and left >= 0 else None

    async with scripted_run(Script(refuse=refusal)) as (run, _):
        assert [each.step for each in await gradwire.gather(*(run.optim_step() for _ in range(3)))] == [1, 2, 3]
    assert left < 0


async def test_a_full_disk_is_waited_for_when_a_run_is_opened() -> None:
    left = [pb.ERROR_CODE_STORAGE_FULL] * 2

    class Full(ScriptedService):
        async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
            if left:
                await refuse(context, left.pop())
            return await super().OpenRun(request, context)

    async with scripted_server(Script(), service=Full) as (address, _), gradwire.connect(address) as service:
        assert (await (await service.create_run("tiny")).optim_step()).step == 1


async def test_a_run_that_a_repeated_call_does_not_find_is_deleted() -> None:
    runs = {"run-1"}

    class Killed(ScriptedService):
        async def DeleteRun(self, request: pb.DeleteRunRequest, context: Any) -> pb.DeleteRunResponse:
            if request.run_id not in runs:
                await refuse(context, pb.ERROR_CODE_UNKNOWN_RUN)
            runs.remove(request.run_id)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed before it could answer")
            raise AssertionError

    async with scripted_server(Script(), service=Killed) as (address, _), gradwire.connect(address) as service:
        await service.delete_run("run-1")
        with pytest.raises(gradwire.UnknownRunError):
            await service.delete_run("run-1")
    assert not runs


async def test_one_that_was_accepted_long_ago_is_not_refused_when_it_comes_again() -> None:
    class Collected(ScriptedService):
        async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
            return pb.Run(run_id=request.run_id, accepted_seq=1, released_seq=1)

        async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
            if request.from_seq <= 1:
                await refuse(context, pb.ERROR_CODE_RESULT_RELEASED)
            async for frame in super().Results(request, context):
                yield frame

        async def Submit(self, requests: AsyncIterator[pb.SubmitFrame], context: Any) -> AsyncIterator[pb.SubmitAck]:
            async for ack in super().Submit(requests, context):
                if ack.seq == 1:
                    ack.error.CopyFrom(pb.Error(code=pb.ERROR_CODE_RESULT_RELEASED, message="carried out"))
                yield ack

    async with scripted_server(Script(), service=Collected) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        first, second = run.optim_step(), run.optim_step()
        with pytest.raises(gradwire.ResultReleasedError, match="operation 1 of run-a was executed"):
            await first
        assert (await second).step == 2


async def test_a_result_of_ones_own_epoch_acknowledges_and_one_of_another_does_not() -> None:
    class Silent(ScriptedService):
        """Acknowledges nothing before it is told to."""

        told = asyncio.Event()
        own = True

        def _answer(self, received: Received) -> tuple[pb.OperationResult, bytes]:
            result, payload = super()._answer(received)
            result.epoch = received.epoch if self.own else received.epoch + 1
            return result, payload

        async def Submit(self, requests: AsyncIterator[pb.SubmitFrame], context: Any) -> AsyncIterator[pb.SubmitAck]:
            async for ack in super().Submit(requests, context):
                await self.told.wait()
                yield ack

    script = Script()
    async with (
        scripted_server(script, service=Silent) as (address, server),
        gradwire.connect(address) as service,
    ):
        run = await service.create_run("tiny")
        assert (await run.optim_step()).step == 1
        assert isinstance(server, Silent)
        server.told.set()
        await run.optim_step()
        server.told.clear()
        server.own = False
        others = run.optim_step()
        await until(lambda: len(server.results) == 3)
        await asyncio.sleep(0.1)
        assert not others.done()
        server.told.set()
        assert (await others).step == 3


async def test_a_fenced_writer_still_hears_that_what_it_sent_before_was_accepted() -> None:
    class Late(ScriptedService):
        """Acknowledges the first operation once the client has ended its side."""

        async def Submit(self, requests: AsyncIterator[pb.SubmitFrame], context: Any) -> AsyncIterator[pb.SubmitAck]:
            first: pb.SubmitAck | None = None
            async for ack in super().Submit(requests, context):
                if ack.seq == 1:
                    first, self.epoch = ack, self.epoch + 1  # another writer
                else:
                    yield ack
            assert first is not None
            yield first

    script = Script()
    async with scripted_server(script, service=Late) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        script.hold.clear()
        accepted = run.optim_step()
        await until(lambda: script.kinds() == [(1, "optim_step")])
        with pytest.raises(gradwire.StaleEpochError):
            await run.optim_step()
        assert not accepted.done()
        script.hold.set()
        assert (await accepted).step == 1


@pytest.mark.parametrize(
    "code", [pb.ERROR_CODE_UNKNOWN_RUN, pb.ERROR_CODE_REWOUND, pb.ERROR_CODE_UNAUTHENTICATED], ids=pb.ErrorCode.Name
)
async def test_a_run_or_a_key_that_is_gone_fails_everything(code: Code) -> None:
    gone = False

    class Gone(ScriptedService):
        async def Results(self, request: pb.ResultsRequest, context: Any) -> AsyncIterator[pb.ResultFrame]:
            await until(lambda: gone)
            await refuse(context, code)
            yield pb.ResultFrame()

    async with scripted_server(Script(), service=Gone) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        futures = [run.optim_step() for _ in range(2)]
        gone = True
        for future in (*futures, run.optim_step()):
            with pytest.raises(gradwire.GradwireError, match="as the script says"):
                await future
