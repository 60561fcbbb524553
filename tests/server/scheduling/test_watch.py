"""One stream of changes for all runs: what it says, and where it goes on after a cut."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile
from gradwire_server.scheduling import results
from support.front import Start
from support.job_stubs import NO_WORKERS, create, stub_of
from support.watch import watching


async def test_a_stream_says_what_changes_and_goes_on_from_its_cursor(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        async with watching(client) as watch:
            await watch.until(lambda: watch.wholes)
            assert list(watch.runs) == [client.run_id] and watch.points == []
            await client.fb(1)
            await client.step(2)
            await watch.until(lambda: watch.runs[client.run_id].step == 1 and watch.points == [1, 2])
        await client.fb(3)
        await client.results(3)
        other = await (await door.client()).begin()
        async with watching(client, watch.cursor) as again:
            await again.until(lambda: other.run_id in again.runs and again.points)
            assert again.points == [3] and again.wholes == 0, "no list of all, and nothing twice"
            await other.stub.DeleteRun(pb.DeleteRunRequest(run_id=other.run_id))
            await again.until(lambda: other.run_id in again.gone)
    async with start() as door:
        client = await door.client()
        async with watching(client, again.cursor) as restarted:
            await restarted.until(lambda: restarted.cursor)
            assert restarted.wholes == 1 and len(restarted.runs) == 1, "from before a start of the server: all again"


async def test_a_reader_that_is_too_far_behind_begins_again(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(results, "KEPT_POINTS", 4)
    async with start() as door:
        client = await (await door.client()).begin()
        async with watching(client) as watch:
            await watch.until(lambda: watch.cursor)
        for seq in range(1, 9):
            await client.fb(seq)
        await client.results(8)
        async with watching(client, watch.cursor) as late:
            await late.until(lambda: late.cursor)
            assert late.wholes == 1 and late.runs[client.run_id].applied_seq == 8


async def test_a_stream_says_when_jobs_of_its_key_change(start: Start, tmp_path: Path) -> None:
    secrets = [
        KeyFile(tmp_path).create(name, role) for name, role in (("ada", "user"), ("bob", "user"), ("v", "viewer"))
    ]
    async with start(**NO_WORKERS) as door:
        client = await door.client()
        async with AsyncExitStack() as stack:
            ada, bob, viewer = [await stack.enter_async_context(watching(client, secret=each)) for each in secrets]
            for watch in (ada, bob, viewer):
                await watch.until(lambda watch=watch: watch.cursor)
            await create(await stub_of(door, secrets[0]))
            await ada.until(lambda: ada.jobs)
            await viewer.until(lambda: viewer.jobs)
            await create(await stub_of(door, secrets[1]))
            await bob.until(lambda: bob.jobs)
            assert (ada.jobs, bob.jobs) == (1, 1)
