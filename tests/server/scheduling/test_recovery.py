"""What a run looks like after its engine, its server or its checkpoint died."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import Caller
from gradwire_server.errors import ServiceError
from gradwire_server.journal.database import Database
from gradwire_server.journal.same_state import divergence, is_comparable
from support.front import Client, Door, Start
from support.keyed import error_of
from support.scripted import until


async def save(client: Client, seq: int, name: str = "") -> pb.SubmitAck:
    return await client.submit(seq, save_checkpoint=pb.SaveCheckpoint(name=name))


async def run_info(client: Client) -> pb.Run:
    return await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))


async def test_an_engine_that_died_is_given_the_run_again(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "a", b"one")
    await client.fb(2, "fail")
    await client.submit(3, forward=pb.LossCall(), failure_seen=2)
    await client.step(4, failure_seen=2)
    await client.results(4)
    door.engine.die()
    await client.fb(5, "b", failure_seen=2)
    assert (await client.results(1, 5))[0][0].loss.loss == 3
    assert door.engine.runs[client.run_id].history == ["a", "step", "b"]
    assert [seq for _, seq in door.engine.seen] == [1, 2, 3, 4, 1, 4, 5]  # failures and reads are not repeated


async def test_what_is_repeated_is_executed_within_the_limits_of_the_first_time(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "a")
    await client.fb(2, "b")
    await client.results(2)
    door.engine.die()
    await client.fb(3, "c")
    await client.results(3, 1)
    assert door.engine.limits == {1: [0, 101], 2: [0, 102], 3: [0]}  # 0: the engine decides


def test_what_becomes_of_activations_is_compared_and_is_no_difference() -> None:
    def outcome(**fields: Any) -> journal_pb2.Outcome:
        loss = pb.LossResult(loss=1.0, num_microbatches=2, **fields)
        return journal_pb2.Outcome(result=pb.OperationResult(loss=loss))

    kept = outcome(activations={"keep": 2})
    recomputed = outcome(activations={"recompute": 2}, limits={"kept_tokens": 4})
    earlier = outcome()  # of a version that did not say
    assert is_comparable(kept, kept) and not is_comparable(kept, recomputed) and is_comparable(earlier, recomputed)
    assert divergence(earlier, recomputed, exact=True) == divergence(kept, recomputed, exact=True) == ""


async def test_an_engine_that_dies_between_two_operations_of_a_replay_is_given_the_run_again(door: Door) -> None:
    client = await (await door.client()).begin()
    for seq, loss_fn in enumerate("abc", 1):
        await client.fb(seq, loss_fn)
    await client.results(3)
    door.engine.die()
    door.engine.dies_behind = {2}
    await client.fb(4, "d")
    assert await client.statuses(1, 4) == ["ok"]
    assert door.engine.runs[client.run_id].history == ["a", "b", "c", "d"]


async def test_an_operation_whose_engine_died_once_is_tried_again(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.die_after = {2}
    for seq, loss_fn in enumerate("abc", 1):
        await client.fb(seq, loss_fn, loss_fn.encode())
    assert await client.statuses(3) == ["ok", "ok", "ok"]
    assert door.engine.runs[client.run_id].history == ["a", "b", "c"]


async def test_an_operation_that_killed_the_engine_twice_is_quarantined_and_the_run_goes_on(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "a")
    await client.fb(2, "die")
    await client.step(3)
    await client.fb(4, "b")
    assert await client.statuses(4) == ["ok", "quarantined", "aborted_predecessor(2)", "ok"]
    assert door.engine.runs[client.run_id].history == ["a", "b"]


async def test_a_run_starts_from_its_newest_checkpoint_and_repeats_what_is_behind_it(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await client.step(2)
        await save(client, 3)
        await client.fb(4, "b")
        await client.results(4)
        assert (await run_info(client)).latest_checkpoint == f"{client.run_id}/step-1"
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        assert (await run_info(client)).accepted_seq == 4
        await client.fb(5, "c")
        await client.results(1, 5)
        assert door.engine.runs[client.run_id].history == ["a", "step", "b", "c"]
        assert [seq for _, seq in door.engine.seen] == [4, 5]


async def test_a_damaged_checkpoint_is_passed_over(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await save(client, 2, "one")
        await client.fb(3, "b")
        await save(client, 4, "two")
        await client.results(4)
    shutil.rmtree(tmp_path / "runs" / client.run_id / "checkpoints" / "two")
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        await client.fb(5, "c")
        assert await client.statuses(1, 5) == ["ok"]
        assert door.engine.runs[client.run_id].history == ["a", "b", "c"]
        assert [seq for _, seq in door.engine.seen] == [3, 5]


async def test_what_was_queued_when_the_server_stopped_is_carried_out_at_its_next_start(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await client.results(1)
        door.engine.gate.clear()
        for seq, loss_fn in ((2, "b"), (3, "c")):
            assert not (await client.fb(seq, loss_fn, b"payload")).HasField("error")
    async with start() as door:
        again = await door.client()
        again.run_id = client.run_id
        results = await again.results(3)
        assert [result.seq for result, _ in results] == [1, 2, 3]
        assert [payload for _, payload in results[1:]] == [b"payload", b"payload"]
        assert door.engine.runs[client.run_id].history == ["a", "b", "c"]
        again.epoch = client.epoch  # the writer was not fenced: the same server, the same journal
        assert not (await again.fb(4, "d")).HasField("error")


async def test_a_save_that_was_cut_off_by_a_crash_is_repeated_over_what_it_left(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1)
        await client.results(1)
        door.engine.gate.clear()
        await save(client, 2, "here")
    async with start() as door:
        again = await door.client()
        again.run_id = client.run_id
        [(result, _)] = await again.results(1, 2)
        assert result.checkpoint.name == "here"
        assert door.engine.overwrites == [True]


async def test_a_checkpoint_saved_over_another_holds_what_its_folder_says(start: Start, tmp_path: Path) -> None:
    """The engine renames the folder, then the row is written; a crash between the two repeats nothing twice."""
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await save(client, 2, "last")
        await client.fb(3, "b")
        await client.results(3)
    (tmp_path / "runs" / client.run_id / "checkpoints" / "last" / "history").write_text("4 a b")
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        await client.submit(4, save_checkpoint=pb.SaveCheckpoint(name="last", overwrite=True))
        await client.fb(5, "c")
        assert await client.statuses(2, 4) == ["ok", "ok"]
        assert door.engine.runs[client.run_id].history == ["a", "b", "c"]


async def test_a_fork_outlives_the_run_it_came_from(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin(seed=3)
        await client.fb(1, "a")
        await client.step(2)
        await save(client, 3, "base")
        await client.results(3)
        request = pb.ForkRunRequest(checkpoint=f"{client.run_id}/base", name="child", idempotency_key="k")
        fork, again = await asyncio.gather(client.stub.ForkRun(request), client.stub.ForkRun(request))
        folders = {path.name for path in (tmp_path / "runs").iterdir()}
        assert again.run_id == fork.run_id and folders == {client.run_id, fork.run_id}
        assert (fork.forked_from, fork.config.base_model, fork.step) == (f"{client.run_id}/base", "tiny", 0)
        await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
    async with start() as door:
        child = await (await door.client()).open(fork.run_id)
        await child.fb(1, "c")
        await child.results(1)
        assert door.engine.runs[fork.run_id].history == ["a", "step", "c"]
        assert not (await child.stub.ListCheckpoints(pb.ListCheckpointsRequest(run_id=fork.run_id))).checkpoints


async def test_deleting_a_checkpoint_lets_the_journal_be_repeated_from_the_one_before(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a")
        await save(client, 2, "one")
        await client.fb(3, "b")
        await save(client, 4, "two")
        await client.results(4)
        await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/two"))
        with pytest.raises(grpc.RpcError) as caught:
            await client.stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint=f"{client.run_id}/two"))
        assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        await client.fb(5, "c")
        await client.results(1, 5)
        assert door.engine.runs[client.run_id].history == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["engine", "server"])
async def test_without_payloads_a_run_goes_back_to_its_checkpoint_and_says_so(start: Start, how: str) -> None:
    settings: dict[str, Any] = {"durability": "checkpoint"}
    async with start(**settings) as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", b"payload")
        await save(client, 2)
        await client.fb(3, "lost", b"payload")
        await client.results(3)
        if how == "engine":
            door.engine.die()
            await client.fb(4, "void")
            record = door.server.core.storage.records.get(client.run_id, Caller("", "admin"))
            await until(lambda: record.epoch > client.epoch)
            await went_back(door, client)
    if how == "server":
        async with start(**settings) as door:
            again = await door.client()
            again.run_id, again.epoch = client.run_id, client.epoch
            await went_back(door, again)


async def went_back(door: Door, client: Client) -> None:
    run = await run_info(client)
    assert (run.accepted_seq, run.rewound_to_seq) == (2, 2)
    assert (await client.fb(4, "more")).error.code == pb.ERROR_CODE_REWOUND
    await client.open(client.run_id)
    await client.fb(3, "c")
    assert await client.statuses(3) == ["ok"] * 3
    assert door.engine.runs[client.run_id].history == ["a", "c"]


async def test_a_state_folder_has_one_server(start: Start) -> None:
    async with start():
        with pytest.raises(SystemExit, match="is in use by process"):
            async with start():
                pass


async def test_a_creation_that_the_engine_refuses_leaves_nothing(door: Door) -> None:
    client = await door.client()
    with pytest.raises(grpc.RpcError) as caught:
        await client.begin(lora=pb.LoraSettings(rank=101))
    assert (error_of(caught.value).code, error_of(caught.value).field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "lora.rank")
    assert not (await client.stub.ListRuns(pb.ListRunsRequest())).runs


async def test_a_run_that_cannot_be_restored_is_parked_and_says_why(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", b"payload")
        await client.results(1)
    [segment] = (tmp_path / "journal").iterdir()
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"payload", b"paylord", 1))
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        await client.fb(2, "b")
        await until(lambda: door.server.core.scheduler.num_parked)
        parked = (await run_info(client)).parked
        assert parked.code == pb.ERROR_CODE_PAYLOAD_CORRUPT and "operation 1" in parked.message
        with pytest.raises(grpc.RpcError) as caught:
            await client.results(1, 2)
        error = error_of(caught.value)
        assert error.code == pb.ERROR_CODE_RUN_PARKED and parked.message in error.message


def test_an_error_keeps_what_it_was_given() -> None:
    error = pb.Error(code=pb.ERROR_CODE_SEQ_GAP, message="far", field="seq", row=0, rule="r", cause_seq=3)
    assert ServiceError.of(error).error == error


async def test_a_database_that_cannot_be_read_is_said_in_a_sentence(start: Start, tmp_path: Path) -> None:
    (tmp_path / "gradwire.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(SystemExit, match="is damaged"):
        async with start():
            pass


@pytest.mark.parametrize("behind", ["fb", "save"])
@pytest.mark.parametrize("durability", ["journal", "checkpoint"])
async def test_an_engine_that_dies_before_a_slow_disk_has_stored_its_result(
    start: Start, durability: str, behind: str
) -> None:
    async with start(durability=durability) as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        await client.fb(1, "a")
        await (client.fb(2, "b") if behind == "fb" else save(client, 2))
        disk = threading.Event()
        held = door.server.core.storage.records._store.write(lambda connection: disk.wait(client.patience_s))
        door.engine.dies_behind = {1}
        door.engine.gate.set()
        await until(lambda: not door.engine.dies_behind)
        await asyncio.sleep(0.1)
        disk.set()
        await held
        if durability == "checkpoint":
            record = door.server.core.storage.records.get(client.run_id, Caller("", "admin"))
            await until(lambda: record.epoch > client.epoch)
            assert (record.accepted_seq, record.rewound_to_seq) == (0, 0)
            return
        assert await client.statuses(2) == ["ok", "ok"]
        await client.fb(3, "c")
        await client.results(1, 3)
        assert door.engine.runs[client.run_id].history == (["a", "b", "c"] if behind == "fb" else ["a", "c"])


async def test_an_engine_that_dies_while_a_save_waits_for_a_slow_disk(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    await client.fb(1, "a")
    await save(client, 2, "one")
    disk = threading.Event()
    held = door.server.core.storage.records._store.write(lambda connection: disk.wait(client.patience_s))
    door.engine.gate.set()
    await until(lambda: bool(door.engine.seen))
    await asyncio.sleep(0.1)
    door.engine.die()
    disk.set()
    await held
    assert await client.statuses(2) == ["ok", "ok"]
    assert door.engine.runs[client.run_id].history == ["a"]


async def test_a_start_reads_as_often_with_many_runs_as_with_few(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, at_start, real = list[object](), list[int](), Database.read

    async def counted(store: Database, query: Any) -> Any:
        reads.append(query)
        return await real(store, query)

    monkeypatch.setattr(Database, "read", counted)
    for more in (2, 10, 0):
        reads.clear()
        async with start() as door:
            at_start.append(len(reads))
            for _ in range(more):
                client = await (await door.client()).begin()
                await client.fb(1)
                await client.results(1)
    assert at_start[1] == at_start[2]
    async with start() as door:
        assert not door.engine.runs  # each is restored when its next operation comes
        client = await (await door.client()).open(client.run_id, takeover=True)
        await client.fb(2)
        assert await client.statuses(1, 2) == ["ok"]
        assert list(door.engine.runs) == [client.run_id]
