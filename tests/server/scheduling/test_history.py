"""The record of a run: what is in it, how it is bounded, and what becomes of it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.front import Client, Start
from support.keyed import error_of


async def record(client: Client, run_id: str = "", at_most: int = 0) -> list[pb.HistoryPoint]:
    pages = client.stub.GetHistory(pb.GetHistoryRequest(run_id=run_id or client.run_id, at_most=at_most))
    return [point async for page in pages for point in page.points]


def brief(points: list[pb.HistoryPoint]) -> list[tuple[str, int, int]]:
    return [(point.operation, point.seq, point.step) for point in points]


async def steps(client: Client, count: int, from_seq: int = 1) -> None:
    """A forward_backward and an optim_step each, and their results."""
    for seq in range(from_seq, from_seq + 2 * count, 2):
        await client.fb(seq)
        await client.step(seq + 1)
    await client.results(2 * count, from_seq)


async def test_it_holds_what_succeeded_in_order_and_survives_the_results(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await client.fb(2, "fail")
        await client.step(3)
        await client.fb(4, "b", failure_seen=2)
        await client.step(5, failure_seen=2)
        await client.results(5)
        await client.stub.AckResults(pb.AckResultsRequest(run_id=client.run_id, up_to_seq=5, epoch=client.epoch))
        run_id, points = client.run_id, await record(client)
        assert brief(points) == [("forward_backward", 1, 0), ("forward_backward", 4, 0), ("optim_step", 5, 1)]
        assert [point.loss_fn for point in points] == ["a", "b", ""] and points[0].loss == 1.0
        assert not points[2].HasField("loss") and points[2].HasField("grad_norm")
        assert {point.run_id for point in points} == {run_id}
    async with start() as door:
        assert await record(await door.client(), run_id) == points


async def test_an_overview_has_every_nth_operation_of_each_kind(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.submit(1, save_checkpoint=pb.SaveCheckpoint(name="first"))
        await steps(client, 20, 2)
        whole = await record(client)
        assert await record(client, at_most=41) == whole and await record(client, at_most=1000) == whole
        few = await record(client, at_most=11)
        of_kind = {kind: [p.seq for p in few if p.operation == kind] for kind in ("forward_backward", "optim_step")}
        assert of_kind == {"forward_backward": [2, 10, 18, 26, 34, 40], "optim_step": [3, 11, 19, 27, 35, 41]}
        assert [point for point in whole if point in few] == few and few[0].operation == "save_checkpoint"


async def test_beyond_its_limit_each_kind_is_thinned_evenly(start: Start) -> None:
    async with start(limits={"max_history_points": 16}) as door:
        client = await (await door.client()).begin()
        await client.submit(1, save_checkpoint=pb.SaveCheckpoint(name="first"))
        await steps(client, 50, 2)
        points = await record(client)
        of_kind = {kind: [p.seq for p in points if p.operation == kind] for kind in ("forward_backward", "optim_step")}
        assert len(points) <= 16 and points[0].operation == "save_checkpoint"
        for kind, first in (("forward_backward", 2), ("optim_step", 3)):
            apart = {right - left for left, right in zip(of_kind[kind], of_kind[kind][1:])}
            assert len(of_kind[kind]) > 5 and len(apart) == 1 and of_kind[kind][0] == first
            assert of_kind[kind][-1] > 100 - apart.pop()


async def test_a_fork_takes_it_over_up_to_the_checkpoint_and_goes_on(start: Start) -> None:
    async with start(limits={"max_history_points": 16}) as door:
        client = await (await door.client()).begin()
        await steps(client, 5)
        await client.submit(11, save_checkpoint=pb.SaveCheckpoint(name="five"))
        await steps(client, 1, 12)
        source = await record(client)
        request = pb.ForkRunRequest(checkpoint=f"{client.run_id}/five")
        fork = await (await door.client()).open((await client.stub.ForkRun(request)).run_id)
        assert await record(fork) == source[:11]
        await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
        await steps(fork, 1)
        assert brief(await record(fork)) == [*brief(source[:11]), ("forward_backward", 1, 0), ("optim_step", 2, 1)]
        await fork.submit(3, save_checkpoint=pb.SaveCheckpoint(name="six"))
        await fork.results(1, 3)
        request = pb.ForkRunRequest(checkpoint=f"{fork.run_id}/six")
        again = await (await door.client()).open((await fork.stub.ForkRun(request)).run_id)
        assert await record(again) == await record(fork)
        await steps(again, 20)
        assert len(await record(again)) <= 16


async def test_it_goes_with_its_run(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await steps(client, 2)
        await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await record(client)
        assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_RUN
    with sqlite3.connect(tmp_path / "gradwire.db") as database:
        tables = ("history", "history_kinds")
        assert [database.execute(f"SELECT count(*) FROM {table}").fetchone() for table in tables] == [(0,), (0,)]
    database.close()


async def test_a_rewind_takes_out_what_is_void(start: Start) -> None:
    async with start(durability="checkpoint") as door:
        client = await (await door.client()).begin()
        await steps(client, 1)
        await client.submit(3, save_checkpoint=pb.SaveCheckpoint(name="one"))
        await steps(client, 2, 4)
        run_id = client.run_id
    async with start(durability="checkpoint") as door:
        client = await (await door.client()).open(run_id, takeover=True)
        assert [point.seq for point in await record(client)] == [1, 2, 3]
        await steps(client, 1, 4)
        assert [point.seq for point in await record(client)] == [1, 2, 3, 4, 5]


async def test_a_damaged_point_is_left_out(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await steps(client, 2)
        assert [point.seq for point in await record(client)] == [1, 2, 3, 4]
        await steps(client, 2, 5)
    with sqlite3.connect(tmp_path / "gradwire.db") as database:
        database.execute("UPDATE history SET point = x'ffff' WHERE seq = 2")
        database.execute("UPDATE results SET point = x'ffff' WHERE seq = 7")
    database.close()
    async with start() as door:
        points = await record(await door.client(), client.run_id)
        assert [point.seq for point in points] == [1, 3, 4, 5, 6, 8]
