"""Engines that agents lend, as the front takes them: here a test is the agent, and there is no engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_proto.v1.training_pb2_grpc import TrainingServiceStub
from gradwire_server.access.key_file import KeyFile
from gradwire_server.agent.front import Front, Lending
from gradwire_server.config import EngineSettings
from gradwire_server.engine_client.client import EngineDied
from gradwire_server.engine_client.process import EngineProcess
from gradwire_server.engine_link.code import code_version
from gradwire_server.errors import ServiceError
from gradwire_server.stores.folders import FolderStore
from gradwire_server.stores.store import Place, Superseded
from support.front import Door, Start
from support.scripted import until

HELLO = engine_pb2.EngineHello(device="far", models=[pb.ModelInfo(name="tiny", vocab_size=64)])


def offer(machine: str = "far", code: str = "", **settings: Any) -> engine_pb2.EngineOffer:
    return engine_pb2.EngineOffer(machine=machine, code=code or code_version(), settings=json.dumps(settings))


@contextlib.asynccontextmanager
async def lending(door: Door, offered: engine_pb2.EngineOffer, key: str = "") -> AsyncIterator[Lending]:
    front = Front(f"http://{door.server.address}", key)
    channel = front.channel()
    call = Lending(channel, front, offered, bool)
    try:
        yield call
    finally:
        await call.cancel()
        await channel.close()


async def refusal(door: Door, offered: engine_pb2.EngineOffer, key: str = "") -> ServiceError:
    async with lending(door, offered, key) as call:
        with pytest.raises(ServiceError) as refused:
            await call.read()
    return refused.value


async def ordered(call: Lending) -> engine_pb2.EngineOrder:
    first = await call.read()
    assert first is not None and first.HasField("order")
    return first.order


async def test_an_engine_that_does_not_fit_is_refused_with_a_sentence(door: Door) -> None:
    other = await refusal(door, offer(code="0.0.1 (abc)"))
    assert other.code == pb.ERROR_CODE_UNSUPPORTED and "0.0.1 (abc)" in str(other) and code_version() in str(other)
    assert (await refusal(door, offer(models={"none": ""}))).code == pb.ERROR_CODE_UNKNOWN_MODEL
    assert "dtype is the server's to set" in str(await refusal(door, offer(dtype="float64")))
    assert (await refusal(door, offer(threads=-1))).code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert len(door.server.core.engines.engines) == 1


async def test_an_engines_key_lends_engines_and_does_nothing_else(start: Start, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    engine, user = keys.create("far", "engine"), keys.create("ann")
    async with start() as door:
        assert (await refusal(door, offer(), user)).code == pb.ERROR_CODE_PERMISSION_DENIED
        assert (await refusal(door, offer(), "gw_none")).code == pb.ERROR_CODE_UNAUTHENTICATED
        async with grpc.aio.insecure_channel(door.server.address) as channel:
            stub: Any = TrainingServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {engine}"),))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with lending(door, offer(), engine) as call:
            await ordered(call)
            keys.revoke("far")
            call.link.send_first(engine_pb2.EngineChunk(lease=1))
            with pytest.raises(ServiceError, match="API key"):
                while (chunk := await call.read()) is not None:
                    call.link.send_first(engine_pb2.EngineChunk(lease=chunk.lease + 1))


async def test_the_agent_says_what_the_engine_had_begun_and_a_lost_link_blames_nobody(door: Door) -> None:
    for reports in (True, False):
        async with lending(door, offer()) as call:
            order = await ordered(call)
            settings = EngineSettings.model_validate_json(order.settings)
            assert settings.state_dir == door.server.config.state_dir and dict(settings.models)
            call.link.send(engine_pb2.EngineReply(hello=HELLO))
            await until(lambda: door.server.core.engines.engines[-1].is_ready)
            engine = door.server.core.engines.engines[1]
            assert engine.machine == "far" and isinstance(engine, EngineProcess)
            asked = [engine.request(engine_pb2.EngineRequest(drop_run={"run_id": str(each)})) for each in range(3)]
            numbers = [(await call.link.receive(engine_pb2.EngineRequest))[0].id for _ in asked]
            withdrawing = asyncio.create_task(engine.withdraw(asked[2]))
            withdraw, _ = await call.link.receive(engine_pb2.EngineRequest)
            assert withdraw.withdraw.request == numbers[2]
            call.link.send(engine_pb2.EngineReply(id=numbers[2], withdrawn={"done": True}))
            assert await withdrawing and (await asked[2])[0].HasField("not_started")
            writing = FolderStore(settings.state_dir, staging=Path(order.staging)).replacing(Place("runs/r", "x"))
            with pytest.raises(Superseded), writing as folder:
                (folder / "weights").write_text("late")
                if reports:
                    call.link.send(engine_pb2.EngineReply(ended={"suspects": numbers[1:2], "reason": "it died"}))
                    call.link.end()
                else:
                    await call.cancel()
                died = await asyncio.gather(*asked[:2], return_exceptions=True)
            assert [each.suspect for each in died if isinstance(each, EngineDied)] == [False, reports]
            assert not (settings.state_dir / "runs/r/x").exists()
            assert not engine.is_ready and not await engine.withdraw(asked[0])
    assert len(door.server.core.engines.engines) == 2, "it keeps its number"


async def test_an_engine_is_given_up_after_its_lease_and_its_name_is_free_then(start: Start) -> None:
    async with start(engine_lease=0.5) as door, lending(door, offer()) as silent:
        await ordered(silent)
        silent.link.send(engine_pb2.EngineReply(hello=HELLO))
        assert "--name" in str(await refusal(door, offer()))
        assert await silent.read() is None
        await until(lambda: not list((door.server.config.state_dir / "engines").iterdir()))
        async with lending(door, offer()) as next_one:
            await ordered(next_one)


async def test_an_engine_that_computes_other_bits_is_refused(door: Door) -> None:
    door.engine.hello.computed_with["threads"] = "2"
    async with lending(door, offer()) as call:
        await ordered(call)
        other = engine_pb2.EngineHello(device="far", models=HELLO.models, computed_with={"threads": "8"})
        call.link.send(engine_pb2.EngineReply(hello=other))
        with pytest.raises(ServiceError, match="--threads 2"):
            while await call.read() is not None:
                pass


async def test_a_server_without_engines_says_so_until_the_first_agent_comes(start: Start) -> None:
    async with start(engines=0) as door:
        client = await door.client()
        assert not (await client.stub.GetServerInfo(pb.GetServerInfoRequest())).engine_ready
        for call, request in (
            (client.stub.ListModels, pb.ListModelsRequest()),
            (client.stub.CreateRun, pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"))),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="gradwire engine --front"):
                await call(request)
        for machine in ("far", "farther"):
            async with lending(door, offer(machine)) as call:
                await ordered(call)
                call.link.send(engine_pb2.EngineReply(hello=HELLO))
                await until(lambda: door.server.core.engines.is_ready)
                assert [model.name for model in (await client.stub.ListModels(pb.ListModelsRequest())).models]
        assert [engine.machine for engine in door.server.core.engines.engines] == ["far", "farther"]
        assert (await client.stub.ListModels(pb.ListModelsRequest())).models, "known while the agents are away"


async def test_a_run_says_that_the_machine_of_its_engine_is_away_and_goes_on_with_any_that_comes(start: Start) -> None:
    async with start(engines=0) as door:
        run = await door.client()
        async with lending(door, offer()) as call:
            await ordered(call)
            call.link.send(engine_pb2.EngineReply(hello=HELLO))
            await until(lambda: door.server.core.engines.is_ready)
            creating = asyncio.create_task(run.begin())
            asked, _ = await call.link.receive(engine_pb2.EngineRequest)
            call.link.send(engine_pb2.EngineReply(id=asked.id, run_created={}))
            await creating
        await until(lambda: door.server.core.engines.engines[0].is_away)
        about = pb.GetRunRequest(run_id=run.run_id)
        assert (await run.stub.GetRun(about)).waits_for == "", "it has nothing to do"
        await run.fb(1, "a")
        said = (await run.stub.GetRun(about)).waits_for
        assert said.startswith("engine 0, whose machine far is not connected: start `gradwire engine` on far again")
        async with lending(door, offer()) as call:
            await ordered(call)
            assert (await run.stub.GetRun(about)).waits_for == "engine 0, which is starting"
        async with lending(door, offer("farther")) as call:
            await ordered(call)
            call.link.send(engine_pb2.EngineReply(hello=HELLO))
            asked, _ = await call.link.receive(engine_pb2.EngineRequest)
            assert asked.create_run.run_id == run.run_id, "it goes on there"
            assert (await run.stub.GetRun(about)).waits_for == ""
    async with start(engines=0) as door:
        again = await door.client()
        waits_for = (await again.stub.GetRun(about)).waits_for
        assert waits_for.endswith("start `gradwire engine --front` on a machine"), "no agent has come to this server"


async def test_with_a_store_an_engine_works_in_a_folder_of_its_own(start: Start, tmp_path: Path) -> None:
    """What it writes too late is then refused by the store, and the state folder need not be there."""
    async with start(engines=0, store=(tmp_path / "shared").as_uri()) as door:
        offered = offer()
        offered.folder = "/far/cache"
        async with lending(door, offered) as call:
            order = await ordered(call)
            assert EngineSettings.model_validate_json(order.settings).state_dir == Path("/far/cache")
            assert not order.staging and not (door.server.config.state_dir / "engines").exists()
