"""Checkpoints that the server takes by itself: when, what they make superfluous, what may not be deleted then."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import Caller
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import uses
from gradwire_server.observability.metrics import Present
from gradwire_server.scheduling import executor
from gradwire_server.server import Server
from support.fake_engine import FakeEngine
from support.front import Client, Door, Start
from support.keyed import error_of
from support.scripted import until


async def checkpoints(client: Client) -> list[str]:
    found = await client.stub.ListCheckpoints(pb.ListCheckpointsRequest(run_id=client.run_id))
    return [one.name for one in found.checkpoints]


async def saved(client: Client, *names: str) -> None:
    """Waits until the run has just these checkpoints."""
    for _ in range(1500):
        if (found := await checkpoints(client)) == list(names):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{found} instead of {names}")


async def journal_of(server: Server, run_id: str) -> list[tuple[int, bool]]:
    """(number, whether its payload is kept) of every operation that is still known."""
    journal = server.core.storage.journal
    return [(entry.header.seq, entry.location is not None) for entry in await journal.entries(run_id, 0, 10**6)]


async def trained(client: Client, steps: int, first: int = 1) -> int:
    """A gradient and a step, so many times; the next number."""
    for seq in range(first, first + 2 * steps, 2):
        await client.fb(seq, f"g{seq}", b"payload")
        await client.step(seq + 1)
    await client.results(2 * steps, first)
    return first + 2 * steps


async def test_the_server_saves_every_few_steps_and_collects_what_lies_before_the_last_but_one(start: Start) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 2)
        await saved(client, "auto-4")
        assert [seq for seq, kept in await journal_of(door.server, client.run_id) if kept] == [1, 3]
        await trained(client, 4, first=5)
        await saved(client, "auto-8", "auto-12")
        assert [seq for seq, kept in await journal_of(door.server, client.run_id) if kept] == [9, 11]
        await client.stub.AckResults(pb.AckResultsRequest(run_id=client.run_id, up_to_seq=12, epoch=client.epoch))
        await trained(client, 2, first=13)
        await saved(client, "auto-12", "auto-16")
        assert [seq for seq, _ in await journal_of(door.server, client.run_id)] == [13, 14, 15, 16]
        history = door.engine.runs[client.run_id].history
        door.engine.die()
        door.engine.seen.clear()
        await client.fb(17, "last")
        await client.results(1, 17)
        assert door.engine.seen == [(client.run_id, 17)]
        assert door.engine.runs[client.run_id].history == [*history, "last"]


async def test_payloads_make_a_checkpoint_due_too(start: Start) -> None:
    async with start(checkpoint_every_mib=0.01, checkpoint_every_steps=0) as door:
        client = await (await door.client()).begin()
        for seq in range(1, 8):
            await client.fb(seq, "g", bytes(3000))
        await client.results(7)
        await saved(client, "auto-4")


async def recovery_s(client: Client) -> float:
    """What the server says that bringing the run back would cost, to tenths of a second."""
    run = await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))
    return float(round(run.recovery_s, 1))


def slow(engine: FakeEngine) -> None:
    engine.seconds = {"slow": 25.0, "optim_step": 1.0, "sample": 1000.0, "forward": 1000.0, "fail": 1000.0}


async def test_the_time_that_a_recovery_would_take_makes_a_checkpoint_due(start: Start) -> None:
    async with start(prepare=slow) as door:
        client = await (await door.client()).begin()
        await client.fb(1, "slow")
        await client.submit(2, sample=pb.SampleCall(max_tokens=1000))
        await client.submit(3, forward=pb.LossCall())
        await client.step(4)
        await client.fb(5, "slow")
        await client.results(5)
        assert await recovery_s(client) == 51.0
        await client.fb(6, "fail")
        await client.fb(7, "slow", failure_seen=6)
        await client.results(7)
        await saved(client, "auto-7")
        assert await recovery_s(client) == 0.0
        await client.fb(8, "slow")
        await client.results(8)
        assert await recovery_s(client) == 25.0
    async with start(prepare=slow) as door:  # known before the run is brought back
        client = await (await door.client()).open(client.run_id)
        assert await recovery_s(client) == 25.0 and not door.engine.runs
        await client.step(9)
        await client.results(9)
        assert await recovery_s(client) == 26.0
        scrape = {metric.name: metric.samples for metric in Present(
            door.server.core.scheduler.backlog, tuple).collect()}  # fmt: skip
        assert round(scrape["gradwire_recovery_seconds"][0].value, 1) == 26.0


async def test_a_checkpoint_that_fails_or_is_deleted_leaves_the_cost_of_a_recovery_as_it_is(
    start: Start,
) -> None:
    async with start(prepare=slow) as door:
        client = await (await door.client()).begin()
        door.engine.disk_full = True
        for seq in (1, 2, 3):
            await client.fb(seq, "slow")
        await client.results(3)
        await until(lambda: door.engine.overwrites)
        assert await recovery_s(client) == 75.0
        door.engine.disk_full = False
        await client.fb(4, "slow")
        await client.submit(5, save_checkpoint=pb.SaveCheckpoint(name="mine"))
        await client.results(5)
        assert await recovery_s(client) == 0.0
        await client.fb(6, "slow")
        await client.results(6)
        await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/mine"))
        assert await recovery_s(client) == 125.0


@pytest.mark.parametrize("ends", ["with room", "cancelled", "deadline", "patience"])
async def test_a_save_waits_for_room_on_the_disk(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(executor, "FULL_PAUSE_S", 0.05)
    async with start() as door:
        client, other = await (await door.client()).begin(), await (await door.client()).begin()
        door.engine.disk_full = True
        save = pb.Operation(save_checkpoint=pb.SaveCheckpoint(name="mine"))
        header = client.frames(1, save_checkpoint=save.save_checkpoint)[0]
        header.header.timeout_s = 3.0 if ends == "deadline" else 0.0
        await client.send(header)
        await client.ack()
        await client.fb(2, "behind")
        await until(lambda: len(door.engine.overwrites) >= 3)
        run = await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))
        assert run.waits_for == "room on the server's disk: it is full, and save_checkpoint 1 cannot be written"
        await other.fb(1, "meanwhile")
        assert await other.statuses(1) == ["ok"]
        expected = {"with room": ["ok", "ok"], "cancelled": ["cancelled", "ok"],
                    "deadline": ["deadline_exceeded", "aborted_predecessor(1)"],
                    "patience": ["storage_full", "aborted_predecessor(1)"]}[ends]  # fmt: skip
        request = pb.CancelRequest(run_id=client.run_id, seq=1, epoch=client.epoch, if_expired=ends == "deadline")
        if ends == "patience":
            monkeypatch.setattr(executor, "FULL_PATIENCE_S", 0.0)
        elif ends in ("cancelled", "deadline"):
            while not (await client.stub.Cancel(request)).cancelled:  # noqa: ASYNC110  nobody is told
                await asyncio.sleep(0.05)
        elif ends == "with room":
            door.engine.disk_full = False
        assert await client.statuses(2) == expected
        assert await checkpoints(client) == (["mine"] if ends == "with room" else [])
    said = [record for record in caplog.records if "waits for room on the disk" in record.getMessage()]
    assert len(said) == 1


async def test_checkpoints_that_take_long_to_save_are_taken_less_often_which_is_said(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(prepare=slow) as door:
        door.engine.seconds["save_checkpoint"] = 9.0  # of the engine, whose turn it may have awaited for longer
        client = await (await door.client()).begin()
        for seq in range(1, 4):
            await client.fb(seq, "slow")
        await client.results(3)
        await saved(client, "auto-3")
        for seq in range(4, 8):
            await client.fb(seq, "slow")
        await client.results(7)
        await saved(client, "auto-3", "auto-7")  # 9 seconds are a tenth of 90
    [said] = [record.getMessage() for record in caplog.records if "--max-recovery-seconds" in record.getMessage()]
    assert client.run_id in said and "takes 9 s" in said and "every 90 s of work, not every 60 s" in said


async def test_waiting_for_room_is_no_cost_of_a_checkpoint(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves that waited for room on the disk, and one that found none, leave the time between two as it was."""
    monkeypatch.setattr(executor, "FULL_PAUSE_S", 0.05)
    async with start(prepare=slow) as door:
        door.engine.seconds["save_checkpoint"] = 1.0
        client = await (await door.client()).begin()
        door.engine.disk_full = True
        for seq in range(1, 4):
            await client.fb(seq, "slow")
        await client.results(3)
        await until(lambda: len(door.engine.overwrites) >= 1)  # the automatic one
        await client.submit(4, save_checkpoint=pb.SaveCheckpoint(name="mine"))
        await until(lambda: len(door.engine.overwrites) >= 8)
        door.engine.disk_full = False
        assert (await client.statuses(1, 4)) == ["ok"]
        for seq in range(5, 8):
            await client.fb(seq, "slow")
        await client.results(3, 5)
        await saved(client, "mine", "auto-7")
    assert not [record for record in caplog.records if "--max-recovery-seconds" in record.getMessage()]


@pytest.mark.parametrize("damage", ["newest", "both"])
async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    start: Start, tmp_path: Path, damage: str
) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 5)
        await saved(client, "auto-4", "auto-8")
        history = list(door.engine.runs[client.run_id].history)
    folder = tmp_path / "runs" / client.run_id / "checkpoints"
    for name in ["auto-8"] if damage == "newest" else ["auto-4", "auto-8"]:
        (folder / name / "history").unlink()
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).open(client.run_id)
        await client.fb(11, "last")
        if damage == "newest":
            assert await client.statuses(1, 11) == ["ok"]
            assert door.engine.runs[client.run_id].history == [*history, "last"]
        else:  # better no state than another one
            await until(lambda: door.server.core.scheduler.num_parked)
            run = await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))
            assert run.parked.code == pb.ERROR_CODE_CHECKPOINT_CORRUPT
            assert (run.accepted_seq, run.applied_seq) == (11, 10)


async def test_one_that_cannot_be_read_back_makes_nothing_superfluous(start: Start) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 4)
        await saved(client, "auto-4", "auto-8")
        door.engine.unreadable = True
        await trained(client, 2, first=9)
        await saved(client, "auto-4", "auto-8", "auto-12")
        assert [seq for seq, kept in await journal_of(door.server, client.run_id) if kept] == [5, 7, 9, 11]


async def test_one_that_cannot_be_read_back_is_none_of_the_two_to_restore_from(start: Start, tmp_path: Path) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 4)
        await saved(client, "auto-4", "auto-8")
        door.engine.unreadable = True
        await trained(client, 2, first=9)
        await saved(client, "auto-4", "auto-8", "auto-12")
        (tmp_path / "runs" / client.run_id / "checkpoints" / "auto-12" / "history").unlink()
        door.engine.unreadable = False
        await trained(client, 2, first=13)
        await saved(client, "auto-8", "auto-12", "auto-16")
        assert [seq for seq, kept in await journal_of(door.server, client.run_id) if kept] == [9, 11, 13, 15]


@pytest.mark.parametrize("event", ["none", "deleted", "deleted with its run", "replaced", "being replaced"])
async def test_one_that_is_gone_before_it_is_read_back_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture, event: str
) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 2)
        await saved(client, "auto-4")
        storage, scheduler = door.server.core.storage, door.server.core.scheduler
        record = storage.records.get(client.run_id, Caller("", "admin"))
        checkpoint = pb.Checkpoint(name="x", path=f"{client.run_id}/x", seq=3)
        await storage.checkpoints.add(record, checkpoint)
        door.engine.unreadable = event != "being replaced"
        if event == "deleted":
            await storage.checkpoints.delete(record, "x")
        elif event == "deleted with its run":
            await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
        elif event != "none":
            await client.submit(5, save_checkpoint=pb.SaveCheckpoint(name="x", overwrite=True))
            await client.results(1, 5)
        if event == "being replaced":  # its folder, and its row not yet
            record.checkpoints["x"] = checkpoint
        caplog.clear()
        await scheduler._auto_checkpoint.saved(record, checkpoint)
        assert ("x cannot be read back" in caplog.text) == (event == "none")
        assert event != "being replaced" or record.read_back.get("x") != checkpoint


async def test_what_a_crash_kept_from_being_entered_is_removed(start: Start, tmp_path: Path) -> None:
    async with start(checkpoint_every_steps=2) as door:
        client = await (await door.client()).begin()
        await trained(client, 2)
        await saved(client, "auto-4")
    folder = tmp_path / "runs" / client.run_id / "checkpoints"
    shutil.copytree(folder / "auto-4", folder / "auto-99")
    async with start():
        assert [path.name for path in folder.iterdir()] == ["auto-4"]


async def refused(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    error = error_of(caught.value)
    assert error.code == pb.ERROR_CODE_UNSUPPORTED
    return error.message


async def test_a_checkpoint_that_a_recovery_would_repeat_with_is_not_deleted(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1)
        await client.submit(2, save_checkpoint=pb.SaveCheckpoint(name="best"))
        await client.submit(3, load_checkpoint=pb.LoadCheckpoint(checkpoint="best"))
        await client.results(3)
        path = f"{client.run_id}/best"
        delete = pb.DeleteCheckpointRequest(checkpoint=path)
        message = await refused(client.stub.DeleteCheckpoint(delete))
        assert path in message and "operation 3" in message
        for seq, name in ((4, "two"), (5, "three")):
            await client.submit(seq, save_checkpoint=pb.SaveCheckpoint(name=name))
        await client.results(2, 4)
        await saved(client, "best", "two", "three")
        async with asyncio.timeout(60):
            while await door.server.core.storage.checkpoints.user_of(client.run_id, "best") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.stub.DeleteCheckpoint(delete)
        await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/two"))
        for name in ("four", "five"):
            await client.submit(6 + (name == "five"), save_checkpoint=pb.SaveCheckpoint(name=name))
        await client.results(2)
        await saved(client, "three", "four", "five")
        record = door.server.core.storage.records.find(client.run_id)
        assert record is not None
        async with asyncio.timeout(60):
            while record.trimmed_seq < record.checkpoints["four"].seq:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for name in ("five", "four", "three"):  # an older one is there until the end, but its journal is gone
            await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/{name}"))
        (kept,) = record.checkpoints.values()
        assert kept.name == f"auto-{kept.seq}" and kept.seq >= record.trimmed_seq
        last = pb.DeleteCheckpointRequest(checkpoint=kept.path)
        assert "the only checkpoint" in await refused(client.stub.DeleteCheckpoint(last))


async def test_a_run_whose_checkpoint_is_another_ones_reference_is_neither_deleted_nor_written_over(
    start: Start,
) -> None:
    async with start() as door:
        one, two = await (await door.client()).begin(), await (await door.client()).begin()
        await one.submit(1, save_checkpoint=pb.SaveCheckpoint(name="ref"))
        await one.results(1)
        kwargs = json.dumps({"reference_model": f"{one.run_id}/ref"})
        await two.submit(1, forward_backward=pb.LossCall(loss_fn="a", loss_kwargs_json=kwargs))
        await two.results(1)
        assert two.run_id in await refused(one.stub.DeleteRun(pb.DeleteRunRequest(run_id=one.run_id)))
        await one.submit(2, save_checkpoint=pb.SaveCheckpoint(name="ref", overwrite=True))
        assert await one.statuses(1, 2) == ["unsupported"]
        await two.stub.DeleteRun(pb.DeleteRunRequest(run_id=two.run_id))
        await one.stub.DeleteRun(pb.DeleteRunRequest(run_id=one.run_id))


def test_what_an_operation_is_repeated_with() -> None:
    def loss(**kwargs: Any) -> pb.Operation:
        return pb.Operation(forward_backward=pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps(kwargs)))

    assert uses(pb.Operation(load_checkpoint=pb.LoadCheckpoint(checkpoint="run-a/b"))) == ["run-a/b"]
    assert uses(loss(reference_model="run-a/b", beta=0.1)) == ["run-a/b"]
    assert uses(loss(reference_model="base")) == []
    assert uses(pb.Operation(forward_backward=pb.LossCall(loss_kwargs_json="no json /"))) == []


async def test_the_servers_own_names_are_not_for_users(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.submit(1, save_checkpoint=pb.SaveCheckpoint(name="auto-7"))
    [(result, _)] = await client.results(1)
    assert (result.error.code, result.error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "name")


async def test_a_checkpoint_is_written_once_what_it_contains_has_results_on_disk(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the server dies between the two, and repeats on top of the checkpoint what the checkpoint contains."""
    client = await (await door.client()).begin()
    real, held = Journal.put_result, asyncio.Event()

    def late(journal: Journal, run_id: str, result: pb.OperationResult, *rest: Any, **named: Any) -> Any:
        async def put() -> None:
            await held.wait()
            await real(journal, run_id, result, *rest, **named)

        return asyncio.ensure_future(put()) if result.seq == 1 else real(journal, run_id, result, *rest, **named)

    monkeypatch.setattr(Journal, "put_result", late)
    await client.fb(1)
    await client.submit(2, save_checkpoint=pb.SaveCheckpoint(name="one", overwrite=True))
    await until(lambda: bool(door.engine.seen))
    await asyncio.sleep(0.2)
    assert door.engine.seen == [(client.run_id, 1)]
    held.set()
    assert await client.statuses(2) == ["ok", "ok"]


async def test_results_that_nobody_fetches_are_forgotten_after_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire_server.scheduling.scheduler.COLLECT_EVERY_S", 0.1)
    later = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later, perf_counter=time.perf_counter)
    monkeypatch.setattr("gradwire_server.journal.database.time", clock)
    async with start(keep_results_hours=1000 / 3600) as door:
        client = await (await door.client()).begin()
        await client.fb(1)
        await client.results(1)
        record = door.server.core.storage.records.get(client.run_id, Caller("", "admin"))
        later = 2000.0
        await until(lambda: record.released_seq == 1)
        later = 0.0
        await client.fb(2)
        assert await client.statuses(1, 2) == ["ok"]
        with pytest.raises(grpc.RpcError) as caught:
            await client.results(1)
        assert error_of(caught.value).code == pb.ERROR_CODE_RESULT_RELEASED


async def test_a_shutdown_says_what_it_left(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        for seq in (1, 2, 3):
            await client.fb(seq)
    assert door.server.core.left == {client.run_id: 3}


async def test_what_no_recovery_repeats_takes_no_room(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", b"payload")
        await client.submit(2, b"payload", forward=pb.LossCall())
        await client.fb(3, "fail", b"payload")
        await client.results(3)
        assert await journal_of(door.server, client.run_id) == [(1, True), (2, False), (3, False)]
