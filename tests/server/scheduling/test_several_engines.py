"""Several engines behind one front: moves, deaths, drains, and a fair queue for each."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine_client.client import EngineDied
from gradwire_server.errors import ServiceError
from support.fake_engine import FakeEngine
from support.front import Client, Door, Start
from support.scripted import until


def place(door: Door, client: Client) -> int:
    """The engine that a run is on."""
    return door.server.core.scheduler.placement.of(client.run_id).engine.number


def history(door: Door, client: Client) -> list[str]:
    return door.engines[place(door, client)].runs[client.run_id].history


async def move(door: Door, client: Client, engine: int | None = None) -> int:
    scheduler = door.server.core.scheduler
    record = door.server.core.storage.records.find(client.run_id)
    assert record is not None
    return await scheduler.move(record, engine)


async def clients(door: Door, count: int) -> list[Client]:
    return [await (await door.client()).begin() for _ in range(count)]


async def test_runs_are_spread_and_each_engine_has_a_queue_of_its_own(start: Start) -> None:
    async with start(engines=2) as door:
        runs = await clients(door, 4)
        assert sorted(place(door, run) for run in runs) == [0, 0, 1, 1]
        door.engines[0].gate.clear()
        for run in runs:
            await run.fb(1)
        elsewhere = [run for run in runs if place(door, run) == 1]
        assert [await run.statuses(1) for run in elsewhere] == [["ok"]] * 2, "engine 1 does not wait for engine 0"
        door.engines[0].gate.set()
        assert [await run.statuses(1) for run in runs] == [["ok"]] * 4


async def test_a_move_in_the_middle_of_a_pipeline_changes_nothing(start: Start) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with start(engines=3, checkpoint_every_steps=2) as door:
        runs = await clients(door, 4)

        async def train(run: Client) -> None:
            for seq in range(1, 61):
                await (run.step(seq) if seq % 5 == 0 else run.fb(seq, f"{seq}"))

        training = [asyncio.create_task(train(run)) for run in runs]
        moved = 0
        while not all(task.done() for task in training):
            await asyncio.sleep(rng.random() * 0.02)
            moved += place(door, run := rng.choice(runs)) != await move(door, run)
        for run in runs:
            assert await run.statuses(60) == ["ok"] * 60
            await run.fb(61, "61")
            assert await run.statuses(1, 61) == ["ok"]
            expected = ["step" if seq % 5 == 0 else f"{seq}" for seq in range(1, 62)]
            assert history(door, run) == expected
            held = [engine.number for engine in door.engines if run.run_id in engine.runs]
            assert held == [place(door, run)], "and no other engine keeps it"
    assert moved > 5


async def test_a_move_waits_for_what_has_begun_and_takes_back_what_has_not(start: Start) -> None:
    async with start(engines=2) as door:
        (run,) = await clients(door, 1)
        here = door.engines[place(door, run)]
        here.gate.clear()
        for seq in range(1, 5):
            await run.fb(seq, f"{seq}")
        await until(lambda: here.newest.operation.seq == 1)
        moving = asyncio.create_task(move(door, run))
        await asyncio.sleep(0.05)
        assert not moving.done()
        here.gate.set()
        assert await moving == 1 - here.number
        assert await run.statuses(4) == ["ok"] * 4
        assert [seq for _, seq in here.seen] == [1], "the others were begun on the other engine only"
        assert history(door, run) == ["1", "2", "3", "4"]


async def test_a_move_waits_for_an_automatic_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(engines=2, checkpoint_every_steps=1) as door:
        (run,) = await clients(door, 1)
        here = door.engines[place(door, run)]
        work, saves, saved = here.work, asyncio.Event(), asyncio.Event()

        async def slow(request: engine_pb2.EngineRequest) -> None:
            if request.operation.operation.HasField("save_checkpoint"):
                saves.set()
                await saved.wait()
            await work(request)

        monkeypatch.setattr(here, "work", slow)
        await run.fb(1, "a")
        await run.step(2)
        await saves.wait()
        await run.fb(3, "b")
        moving = asyncio.create_task(move(door, run))
        await asyncio.sleep(0.05)
        assert not moving.done()
        saved.set()
        assert await moving == 1 - here.number
        assert await run.statuses(3) == ["ok"] * 3
        assert history(door, run) == ["a", "step", "b"]
        there = door.engines[place(door, run)]
        assert [seq for _, seq in there.seen] == [3], "the checkpoint holds the others"


async def test_an_engine_dies_and_the_other_one_takes_its_runs(start: Start) -> None:
    async with start(engines=2) as door:
        runs = await clients(door, 6)
        for run in runs:
            await run.fb(1, "a")
            assert await run.statuses(1) == ["ok"]
        door.engines[0].end()  # and is not started again
        for run in runs:
            await run.fb(2, "b")
        assert [await run.statuses(2) for run in runs] == [["ok", "ok"]] * 6
        assert {place(door, run) for run in runs} == {1}
        assert all(history(door, run) == ["a", "b"] for run in runs)
        assert door.server.core.info().engine_ready
        door.engines[0].begin()
        (new,) = await clients(door, 1)
        assert place(door, new) == 0, "the engine that holds least"


async def test_what_waits_for_an_engine_that_dies_goes_on_elsewhere(start: Start) -> None:
    async with start(engines=2) as door:
        runs = [run for run in await clients(door, 8) if place(door, run) == 0]
        door.engines[0].gate.clear()
        for run in runs:
            for seq in range(1, 21):
                await run.fb(seq, f"{seq}")
        await until(lambda: door.engines[0].newest.operation.seq == 1)
        door.engines[0].end()
        door.engines[0].gate.set()
        for run in runs:
            assert await run.statuses(20) == ["ok"] * 20
            assert history(door, run) == [f"{seq}" for seq in range(1, 21)]


async def test_an_operation_that_kills_its_engine_kills_no_other_one(start: Start) -> None:
    async with start(engines=2) as door:
        bad, good = await clients(door, 2)
        others = door.engines[place(door, good)]
        holder = others.holder
        assert place(door, bad) != others.number
        await bad.fb(1, "die")
        await good.fb(1, "a")
        assert await bad.statuses(1) == ["quarantined"]
        assert await good.statuses(1) == ["ok"] and others.holder is holder


async def test_a_drained_engine_holds_nothing_and_gets_nothing(start: Start) -> None:
    async with start(engines=2) as door:
        scheduler = door.server.core.scheduler
        runs = await clients(door, 5)
        for run in runs:
            await run.fb(1, "a")
            assert await run.statuses(1) == ["ok"]
        assert await scheduler.drain_engine(0) in (2, 3)
        for run in [*runs, *await clients(door, 2)]:
            assert place(door, run) == 1
        with pytest.raises(ServiceError, match="no other engine"):
            await scheduler.drain_engine(1)
        with pytest.raises(ServiceError, match=r"engine 0 drains and takes no runs: .*--undo-drain 0"):
            await move(door, runs[0], 0)
        await scheduler.drain_engine(0, undo=True)
        assert place(door, (await clients(door, 1))[0]) == 0
        with pytest.raises(ServiceError, match="there is no engine 2: this server's are 0 to 1"):
            await scheduler.drain_engine(2)


async def test_a_sample_of_a_run_that_moves_finds_it_where_it_is(start: Start) -> None:
    async with start(engines=2) as door:
        (run,) = await clients(door, 1)
        await run.fb(1, "a")
        request = pb.SampleRequest(
            model=run.run_id, prompt_ids=[pb.TokenIds(ids=[1])], call=pb.SampleCall(max_tokens=1)
        )

        async def sample() -> Any:
            return [frame async for frame in run.stub.Sample(request)]

        here = door.engines[place(door, run)]
        here.gate.clear()
        sampling = asyncio.create_task(sample())
        await until(lambda: here.newest.HasField("sample"))
        moving = asyncio.create_task(move(door, run))
        later = asyncio.create_task(sample())
        await asyncio.sleep(0.05)
        assert not moving.done(), "the run stays while it is read"
        here.gate.set()
        await asyncio.gather(sampling, moving, later)
        there = door.engines[1 - here.number]
        assert there.newest.sampled_run == run.run_id and run.run_id in there.runs and run.run_id not in here.runs


async def sample_of_model(client: Client) -> Any:
    """Samples outside any run's queue; the frames of the answer."""
    prompt = [pb.TokenIds(ids=[1])]
    request = pb.SampleRequest(model="tiny", prompt_ids=prompt, call=pb.SampleCall(max_tokens=1))
    return [frame async for frame in client.stub.Sample(request)]


async def test_a_sample_whose_engine_dies_is_generated_by_another_one(start: Start) -> None:
    async with start(engines=2) as door:
        client = await door.client()
        for engine in door.engines:
            engine.gate.clear()
        sampling = asyncio.create_task(sample_of_model(client))
        await until(lambda: any(engine.newest.HasField("sample") for engine in door.engines))
        first, other = sorted(door.engines, key=lambda engine: not engine.newest.HasField("sample"))
        first.end()
        first.gate.set()
        await until(lambda: other.newest.HasField("sample"))
        other.end()
        other.gate.set()
        await asyncio.sleep(0.05)
        assert not sampling.done(), "it waits for an engine that starts"
        first.begin()
        assert len(await sampling) == 1
        for engine in door.engines:
            engine.end()
            engine.fails_to_start = True
        with pytest.raises(grpc.aio.AioRpcError, match="could not be replaced"):
            await sample_of_model(client)


async def test_a_run_says_that_it_waits_for_an_engine_that_starts(start: Start) -> None:
    async with start(engines=2) as door:
        [run] = await clients(door, 1)
        for engine in door.engines:
            engine.end()
        about = pb.GetRunRequest(run_id=run.run_id)
        assert (await run.stub.GetRun(about)).waits_for == "", "it has nothing to do"
        await run.fb(1, "a")
        assert (await run.stub.GetRun(about)).waits_for == f"engine {place(door, run)}, which is starting"
        door.engines[0].begin()
        assert await run.statuses(1) == ["ok"]
        assert (await run.stub.GetRun(about)).waits_for == ""


async def test_a_sample_that_kills_its_engine_kills_two_at_most(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    async with start(engines=3) as door:
        for engine in door.engines:

            async def kill(request: engine_pb2.EngineRequest, engine: FakeEngine = engine) -> None:
                if request.HasField("sample"):
                    killed.append(engine.number)
                    engine.end()
                    raise EngineDied(suspect=True)

            monkeypatch.setattr(engine, "work", kill)
        with pytest.raises(grpc.aio.AioRpcError, match="could not be replaced"):
            await sample_of_model(await door.client())
        assert len(killed) == 2 == len(set(killed))


async def test_an_engine_with_too_much_to_do_for_long_gives_a_run_away(start: Start) -> None:
    async with start(engines=2) as door:
        moves = door.server.core.scheduler._moves
        runs = await clients(door, 6)
        busy = [run for run in runs if place(door, run) == 0]
        door.engines[0].gate.clear()
        for run in busy:
            await run.fb(1, "a")
            await run.fb(2, "b")
        queues = door.server.core.scheduler._queues.values()
        await moves.look(queues)
        assert all(place(door, run) == 0 for run in busy), "once may be chance"
        looking = asyncio.create_task(moves.look(queues))
        await asyncio.sleep(0)
        door.engines[0].gate.set()
        await looking
        assert [place(door, run) for run in busy].count(1) == 1
        assert [await run.statuses(2) for run in busy] == [["ok", "ok"]] * 3
        assert all(history(door, run) == ["a", "b"] for run in busy)


async def test_a_run_is_saved_before_it_moves_where_repeating_would_take_long(start: Start) -> None:
    async with start(engines=2) as door:
        (run,) = await clients(door, 1)
        here = door.engines[place(door, run)]
        here.seconds = {"slow": 3.0}
        await run.fb(1, "slow")
        await run.fb(2, "quick")
        assert await run.statuses(2) == ["ok", "ok"]
        await move(door, run)
        await run.fb(3, "last")
        assert await run.statuses(1, 3) == ["ok"]
        there = door.engines[place(door, run)]
        assert there is not here and [seq for _, seq in there.seen] == [3], "nothing was repeated"
        assert history(door, run) == ["slow", "quick", "last"]
