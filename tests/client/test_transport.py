"""The channel: cancelling, anyio's cancel scopes, backoff, and files that stay below their folder."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import gradwire
import grpc
import pytest
from gradwire.wire.transport import Backoff
from gradwire_proto.v1 import training_pb2 as pb
from support.scripted import Fails, Script, ScriptedService, plain, scripted_run, scripted_server, until
from support.server import Server


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class Slow(ScriptedService):
    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        await asyncio.sleep(30)
        raise AssertionError("not reached")


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()  # an earlier test's may end later: all tests share an event loop
    async with scripted_server(Script(), service=Slow) as (address, _), gradwire.connect(address) as service:
        with anyio.move_on_after(0.1) as scope:
            await service.list_models()
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(service.list_models(), 0.1)
        ours = [task for task in asyncio.all_tasks() - before if "Transport" in repr(task.get_coro())]
        assert ours == []
        assert await service.list_losses()
        async with anyio.create_task_group() as group:
            group.start_soon(service.list_models)
            await asyncio.sleep(0.05)
            group.cancel_scope.cancel()
        assert (await service.server_info()).version == "scripted"


async def test_calls_beyond_the_streams_of_a_connection_open_another() -> None:
    async with (
        scripted_server(Script(), service=Slow, max_concurrent_streams=2) as (address, _),
        gradwire.connect(address) as service,
    ):
        held = [asyncio.create_task(service.list_models()) for _ in range(6)]
        assert await asyncio.wait_for(service.list_losses(), 30)
        assert not any(call.done() for call in held)
        for call in held:
            call.cancel()
        await asyncio.wait(held)


@pytest.mark.parametrize("address", ["gpu-box", "gpu-box:", ":50051", "gpu-box:http", "127.0.0.1:99999"])
async def test_an_address_without_a_port_is_refused_at_once(address: str) -> None:
    with pytest.raises(gradwire.InvalidArgumentError, match="has no port: write HOST:PORT"):
        await gradwire.connect(address)


async def test_closing_during_a_call() -> None:
    async with scripted_server(Script(), service=Slow) as (address, _):
        service = await gradwire.connect(address)
        call = asyncio.create_task(service.list_models())
        await asyncio.sleep(0.05)
        await service.close()
        with pytest.raises(gradwire.ServiceClosedError):
            await call


async def test_a_call_from_another_event_loop_is_one_sentence() -> None:
    def elsewhere(call: Any) -> Any:
        async def wait() -> Any:
            return await call()

        return asyncio.run(wait())

    async with scripted_run(Script()) as (run, service):
        future = run.forward_backward({"input_ids": [[1, 2]]}, "row_loss")
        for call in (service.list_models, service.server_info, run.info, run.history, service.close):
            with pytest.raises(gradwire.InvalidRequestError, match="opened on another event loop: call it there"):
                await asyncio.to_thread(elsewhere, call)
        assert (await asyncio.to_thread(elsewhere, lambda: future)).loss == 1  # a future is for every loop
        assert await service.list_losses()


def test_a_service_of_an_ended_event_loop_is_one_sentence(server: Server) -> None:
    async def opened() -> Any:
        return await gradwire.connect(server.address)

    async def used(service: Any) -> None:
        await service.list_models()

    service = asyncio.run(opened())
    with pytest.raises(gradwire.InvalidRequestError, match=r"has ended: open and use it inside one asyncio\.run"):
        asyncio.run(used(service))


async def test_the_error_of_a_call_that_was_cancelled_twice_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cancellation comes while the first one waits for the call to end."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    refused = grpc.aio.AioRpcError(grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), grpc.aio.Metadata())

    class Call:
        def cancel(self) -> None:
            """Too late."""

        def __await__(self) -> Any:
            return answer.__await__()

    faults: list[dict[str, Any]] = []
    gc.collect()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_exception_handler", faults.append)
    async with scripted_server(Script()) as (address, _), gradwire.connect(address) as service:
        method: Any = lambda stub: lambda *_, **__: Call()  # noqa: E731
        call = asyncio.create_task(service._transport.unary(method, None))
        for _ in range(2):
            await asyncio.sleep(0.01)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        answer.set_exception(refused)
        await asyncio.sleep(0.01)
    del call
    gc.collect()
    assert refused not in [fault.get("exception") for fault in faults]  # others may be of an earlier test


async def test_backoff_waits_longer_gives_up_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[gradwire.GradwireError] = []
    backoff, lost = Backoff(60.0, lambda error, _: said.append(error)), gradwire.ConnectionLostError("lost")
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    clock = SimpleNamespace(time=lambda: sum(waits))
    monkeypatch.setattr("gradwire.wire.transport.asyncio", SimpleNamespace(get_running_loop=lambda: clock, sleep=sleep))
    with pytest.raises(gradwire.ConnectionLostError):
        for _ in range(100):
            await backoff.pause(lost)
    assert 60.0 <= sum(waits) <= 65.0
    assert waits[0] <= 0.05 < waits[4] and max(waits) <= 5.0
    assert said == [lost]
    backoff.progress()
    await backoff.pause(lost)
    assert waits[-1] <= 0.05


async def test_that_the_server_is_away_is_said_once_for_all_runs(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_server(Script()) as (address, _):
        service = await gradwire.connect(address)
        runs = [await service.create_run("tiny") for _ in range(4)]
    futures = [run.optim_step() for run in runs]
    await until(lambda: "trying again" in caplog.text)
    await asyncio.sleep(3)  # each run's streams fail as often
    assert caplog.text.count("trying again") == 1 and "up to 600 s" in caplog.text
    await service.close()
    for future in futures:
        with pytest.raises(gradwire.ServiceClosedError):
            await future


class Files(ScriptedService):
    files = (("a.txt", b"x" * 10), ("deep/b.bin", b"y" * 1_500_000), ("empty", b""))

    async def Download(self, request: pb.DownloadRequest, context: Any) -> Any:
        for name, content in self.files:
            yield pb.DownloadFrame(file=name, size_bytes=len(content), chunk=content[: 1 << 20])
            if len(content) > 1 << 20:
                yield pb.DownloadFrame(chunk=content[1 << 20 :])


class Escaping(Files):
    files = (("../evil", b"x"),)


class Short(Files):
    async def Download(self, request: pb.DownloadRequest, context: Any) -> Any:
        yield pb.DownloadFrame(file="a.txt", size_bytes=10, chunk=b"half")


def exporting() -> Script:
    def answer(received: Any) -> Any:
        result, columns = plain(received)
        if received.kind == "export":
            result.export.name = received.operation.export.name
        return result, columns

    return Script(answer=answer)


async def test_export_downloads_the_files(tmp_path: Path) -> None:
    async with scripted_server(exporting(), service=Files) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        folder = await run.export(tmp_path / "model", format="hf")
        found = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
    assert folder == tmp_path / "model"
    assert found == {"a.txt": 10, "deep/b.bin": 1_500_000, "empty": 0}


@pytest.mark.parametrize(
    ("kind", "error"), [(Escaping, gradwire.InternalServerError), (Short, gradwire.ConnectionLostError)]
)
async def test_a_download_that_is_not_to_be_trusted(
    tmp_path: Path, kind: type[ScriptedService], error: type[Exception]
) -> None:
    async with scripted_server(exporting(), service=kind) as (address, _), gradwire.connect(address) as service:
        run = await service.create_run("tiny")
        with pytest.raises(error):
            await run.download_checkpoint("name", tmp_path / "folder")
    assert not files_below(tmp_path)


async def test_an_export_that_fails_is_seen_when_its_own_future_raises() -> None:
    def answer(received: Any) -> Any:
        if received.kind == "export":
            raise Fails(pb.ERROR_CODE_UNSUPPORTED, "no adapter")
        return plain(received)

    script = Script(answer=answer)
    async with scripted_run(script) as (run, _):
        export = run.export("nowhere", format="peft")
        await until(lambda: export.done())
        with pytest.raises(gradwire.AbortedPredecessorError):
            await run.zero_grad()
        with pytest.raises(gradwire.UnsupportedError):
            await export
        assert (await run.optim_step()).step == 3
