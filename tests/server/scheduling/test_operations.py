"""Operations through a real gRPC server: order, retries, failures, writers, results."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.doors.grpc import service
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import StoredResult
from gradwire_server.scheduling import admission
from gradwire_server.scheduling.finished_operations import RECENT_BYTES
from gradwire_server.scheduling.who_is_next import SMALL_AHEAD
from support.front import Client, Door, Start
from support.keyed import error_of
from support.scripted import until


async def test_a_hundred_pipelined_operations_come_back_in_order(door: Door) -> None:
    client = await (await door.client()).begin()
    for seq in range(1, 101):
        await client.send(*client.frames(seq, bytes([seq]), forward_backward=pb.LossCall(loss_fn=str(seq))))
    results = await client.results(100)
    assert [result.seq for result, _ in results] == list(range(1, 101))
    assert [payload for _, payload in results] == [bytes([seq]) for seq in range(1, 101)]
    assert door.engine.runs[client.run_id].history == [str(seq) for seq in range(1, 101)]
    assert sorted([(await client.ack()).seq for _ in range(100)]) == list(range(1, 101))


async def test_numbers_that_arrive_out_of_order_are_carried_out_in_order(door: Door) -> None:
    client = await (await door.client()).begin()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    order = list(range(1, 41))
    random.Random(seed).shuffle(order)
    for seq in order:
        await client.send(*client.frames(seq, forward_backward=pb.LossCall(loss_fn=str(seq))))
    await client.results(40)
    assert door.engine.runs[client.run_id].history == [str(seq) for seq in range(1, 41)]


async def test_what_waits_for_a_gap_is_not_acknowledged_and_not_accepted(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.send(*client.frames(2, forward_backward=pb.LossCall(loss_fn="b")))
    with pytest.raises(asyncio.TimeoutError):
        await client.ack(0.2)


async def test_a_number_too_far_ahead_is_refused_and_can_be_sent_again(start: Start) -> None:
    async with start(limits={"max_window": 4}) as door:
        client = await (await door.client()).begin()
        ack = await client.fb(5)
        assert ack.error.code == pb.ERROR_CODE_SEQ_GAP and "1 is expected next" in ack.error.message
        for seq in range(1, 6):
            assert not (await client.fb(seq)).HasField("error")
        assert await client.statuses(5) == ["ok"] * 5


async def test_the_same_again_is_acknowledged_and_carried_out_once(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    assert not (await client.fb(1, "a", b"payload")).duplicate
    assert (await client.fb(1, "a", b"payload")).duplicate  # while it waits
    door.engine.gate.set()
    first = await client.results(1)
    assert (await client.fb(1, "a", b"payload")).duplicate  # when it is done
    assert await client.results(1) == first
    assert door.engine.runs[client.run_id].history == ["a"]


async def test_a_retried_step_steps_once(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1)
    for _ in range(3):
        await client.step(2)
    [_, (step, _)] = await client.results(2)
    assert step.optim_step.step == 1
    assert (await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))).step == 1


@pytest.mark.parametrize("finished", [False, True])
async def test_another_operation_under_a_used_number_is_refused(door: Door, finished: bool) -> None:
    client = await (await door.client()).begin()
    if not finished:
        door.engine.gate.clear()
    await client.fb(1, "a", b"one")
    if finished:
        await client.results(1)
    assert (await client.fb(1, "a", b"two")).error.code == pb.ERROR_CODE_SEQ_REUSED
    assert (await client.fb(1, "b", b"one")).error.code == pb.ERROR_CODE_SEQ_REUSED
    door.engine.gate.set()
    assert await client.statuses(1) == ["ok"]


async def test_what_is_behind_a_failure_is_aborted_through_the_next_step(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "good")
    await client.fb(2, "fail")
    await client.fb(3, "behind")
    await client.step(4)
    await client.fb(5, "next")
    await client.step(6)
    results = await client.results(6)
    expected = ["ok", "invalid_batch", "aborted_predecessor(2)", "aborted_predecessor(2)", "ok", "ok"]
    assert await client.statuses(6) == expected
    assert "99999" in results[2][0].error.message
    assert door.engine.runs[client.run_id].history == ["good", "next", "step"]


async def test_whoever_has_seen_the_failure_goes_on(door: Door) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, "fail")
    await client.fb(2, "behind")
    await client.fb(3, "after", failure_seen=1)
    await client.step(4, failure_seen=1)
    assert await client.statuses(4) == ["invalid_batch", "aborted_predecessor(1)", "ok", "ok"]


async def test_a_failure_that_is_not_seen_survives_a_restart(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "fail")
        await client.results(1)
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        await client.fb(2, "behind")
        await client.fb(3, "after", failure_seen=1)
        assert await client.statuses(3) == ["invalid_batch", "aborted_predecessor(1)", "ok"]


async def test_a_writer_whose_operations_were_trimmed_meanwhile_is_told_what_to_do(start: Start) -> None:
    async with start(checkpoint_every_steps=1) as door:
        first, second = await (await door.client()).begin(), await door.client()
        await first.fb(1)
        await second.open(first.run_id, "other", takeover=True)
        for seq in (2, 3, 4):
            await second.step(seq)
        await second.results(4)
        await second.stub.AckResults(pb.AckResultsRequest(run_id=first.run_id, up_to_seq=4, epoch=second.epoch))
        while await door.server.core.storage.journal.entries(first.run_id, 0, 1):  # until checkpoints contain it
            await second.step(seq := seq + 1)
            await second.results(1, seq)
        error = (await first.fb(1)).error
        assert error.code == pb.ERROR_CODE_STALE_EPOCH and "another writer (other)" in error.message
        assert "cannot be told any more" in error.message and "info().step" in error.message


async def test_a_second_writer_must_take_over_and_the_first_is_told(door: Door) -> None:
    first, second = await (await door.client()).begin(), await door.client()
    await first.fb(1)
    with pytest.raises(grpc.RpcError) as caught:
        await second.open(first.run_id, "other")
    assert error_of(caught.value).code == pb.ERROR_CODE_RUN_BUSY and "'me'" in error_of(caught.value).message
    await first.send(*first.frames(3, optim_step=pb.OptimStep()))  # waits for 2
    await asyncio.sleep(0.05)
    await second.open(first.run_id, "other", takeover=True)
    waiting = await first.ack()
    assert (waiting.seq, waiting.error.code) == (3, pb.ERROR_CODE_STALE_EPOCH)
    assert (await first.fb(2)).error.code == pb.ERROR_CODE_STALE_EPOCH
    assert not (await second.step(2)).HasField("error")
    assert await second.statuses(2) == ["ok", "ok"]


async def test_results_resume_from_any_number_and_survive_a_restart(start: Start) -> None:
    async with start() as door:
        client = await (await door.client()).begin()
        big = bytes(range(256)) * 10_000
        for seq in range(1, 6):
            await client.fb(seq, "x", big[: seq * 500_000])
        before = await client.results(5)
    async with start() as door:
        client = await (await door.client()).open(client.run_id)
        assert await client.results(5) == before
        assert await client.results(2, from_seq=4) == before[3:]
        assert [len(payload) for _, payload in before] == [seq * 500_000 for seq in range(1, 6)]


async def test_released_results_are_gone_and_their_numbers_stay_known(door: Door) -> None:
    client = await (await door.client()).begin()
    for seq in (1, 2, 3):
        await client.fb(seq)
    await client.results(3)
    await client.stub.AckResults(pb.AckResultsRequest(run_id=client.run_id, up_to_seq=2, epoch=client.epoch))
    with pytest.raises(grpc.RpcError) as caught:
        await client.results(1, from_seq=2)
    assert error_of(caught.value).code == pb.ERROR_CODE_RESULT_RELEASED
    assert await client.statuses(1, from_seq=0) == ["ok"]  # 0: from the first that is there
    assert (await client.fb(2)).duplicate
    assert (await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))).released_seq == 2


async def test_results_that_are_released_while_another_reads_them_are_not_called_lost(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await (await door.client()).begin()
    await client.fb(1, payload=bytes(RECENT_BYTES + 1))
    await client.results(1)
    read = Journal.results

    async def released_first(journal: Journal, *args: Any) -> list[StoredResult]:
        await client.stub.AckResults(pb.AckResultsRequest(run_id=client.run_id, up_to_seq=1, epoch=client.epoch))
        return await read(journal, *args)

    monkeypatch.setattr(Journal, "results", released_first)
    with pytest.raises(grpc.RpcError) as caught:
        await client.results(1)
    assert error_of(caught.value).code == pb.ERROR_CODE_RESULT_RELEASED


async def test_what_has_not_started_can_be_cancelled_and_what_has_cannot(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    for seq in (1, 2, 3):
        await client.fb(seq, str(seq))
    await until(lambda: door.engine.newest.operation.seq == 1)

    async def cancel(seq: int) -> bool:
        request = pb.CancelRequest(run_id=client.run_id, seq=seq, epoch=client.epoch)
        return bool((await client.stub.Cancel(request)).cancelled)

    assert [await cancel(1), await cancel(2)] == [False, True]
    with pytest.raises(grpc.RpcError) as caught:
        await cancel(9)
    assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_OPERATION
    door.engine.gate.set()
    assert await client.statuses(3) == ["ok", "cancelled", "ok"]
    assert door.engine.runs[client.run_id].history == ["1", "3"]


async def test_a_full_queue_refuses_without_using_the_number_up(start: Start) -> None:
    async with start(limits={"max_queued_operations": 3}) as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        for seq in (1, 2, 3):
            await client.fb(seq)
        refused = await client.fb(4)
        assert refused.error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and "max_queued_operations" in refused.error.message
        door.engine.gate.set()
        await client.results(3)
        await client.fb(4)
        assert await client.statuses(4) == ["ok"] * 4


async def test_two_runs_take_turns(door: Door) -> None:
    one, two = await (await door.client()).begin(), await (await door.client()).begin()
    door.engine.gate.clear()
    for seq in range(1, 81):
        await one.fb(seq)
    for seq in range(1, 4):
        await two.fb(seq)
    door.engine.gate.set()
    await two.results(3)
    order = [run_id for run_id, _ in door.engine.seen]
    assert order.index(two.run_id) <= SMALL_AHEAD + 1  # behind what the engine had
    last = len(order) - order[::-1].index(two.run_id)
    assert order[:last].count(one.run_id) <= SMALL_AHEAD + 4


async def test_an_operation_goes_on_when_the_client_that_sent_it_leaves(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    await client.fb(1)
    client._stream.cancel()
    door.engine.gate.set()
    assert await client.statuses(1) == ["ok"]


async def test_a_client_that_has_ended_its_side_still_gets_its_acknowledgements(door: Door) -> None:
    client = await (await door.client()).begin()
    stream = client.stub.Submit()
    for seq in range(1, 11):
        for frame in client.frames(seq, forward_backward=pb.LossCall(loss_fn="a")):
            await stream.write(frame)
    await stream.done_writing()
    assert sorted([ack.seq async for ack in stream]) == list(range(1, 11))


@pytest.mark.long
async def test_a_thousand_queued_operations_are_accepted_while_the_engine_is_busy(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()

    async def send() -> None:
        for seq in range(1, 1001):
            await client.send(*client.frames(seq, forward_backward=pb.LossCall(loss_fn=str(seq))))

    await client.send()
    sending = asyncio.create_task(send())
    assert not any([(await client.ack()).HasField("error") for _ in range(1000)])
    await sending
    door.engine.gate.set()
    await client.results(1000)
    assert door.engine.runs[client.run_id].history == [str(seq) for seq in range(1, 1001)]


async def test_a_deleted_run_ends_its_readers_and_is_unknown(door: Door) -> None:
    client = await (await door.client()).begin()
    reading = asyncio.create_task(client.results(1))
    await asyncio.sleep(0.05)
    await client.stub.DeleteRun(pb.DeleteRunRequest(run_id=client.run_id))
    with pytest.raises(grpc.RpcError) as caught:
        await reading
    assert error_of(caught.value).code == pb.ERROR_CODE_UNKNOWN_RUN
    assert (await client.fb(1)).error.code == pb.ERROR_CODE_UNKNOWN_RUN
    assert client.run_id not in door.engine.runs


async def test_the_pipeline_is_quick_enough_to_pipeline(door: Door) -> None:
    client: Client = await (await door.client()).begin()
    loop = asyncio.get_running_loop()
    began = loop.time()
    for seq in range(1, 201):
        await client.send(*client.frames(seq, bytes(1000), forward_backward=pb.LossCall(loss_fn="a")))
    await client.results(200)
    assert loop.time() - began < 20


async def test_an_operation_whose_acknowledgement_nobody_awaits_is_durable_with_its_result(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "TOGETHER_S", 3600.0)
    client = await (await door.client()).begin()
    store = door.server.core.storage.journal.store
    groups = list[int]()
    monkeypatch.setattr(store, "on_commit", lambda writes, seconds, committed: groups.append(writes))
    reading = asyncio.create_task(client.results(2))
    [first], [second] = (client.frames(seq, forward_backward=pb.LossCall(loss_fn=str(seq))) for seq in (1, 2))
    first.patient = True
    first.more.append(second)
    await client.send(first)
    results = await reading
    assert [(result.seq, result.epoch) for result, _ in results] == [(1, client.epoch), (2, client.epoch)]
    assert groups[0] >= 3  # both operations, and the first result
    assert {(await client.ack()).seq, (await client.ack()).seq} == {1, 2}
    last = client.frames(3, forward_backward=pb.LossCall(loss_fn="3"))
    groups.clear()
    await client.send(*last)
    await client.results(1, 3)
    assert groups == [2]


async def test_an_acknowledgement_waits_long_only_where_there_is_a_result(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ANSWERED_ACKS_WAIT_S", 3600.0)
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    [first] = client.frames(1, forward_backward=pb.LossCall(loss_fn="a"))
    first.patient = first.batched = True
    await client.send(first)
    assert (await client.ack()).seq == 1
    assert not door.server.core.has_result(client.run_id, 1)
    door.engine.gate.set()
    await client.results(1)
    assert door.server.core.has_result(client.run_id, 1)
    assert not door.server.core.has_result(client.run_id, 2)
    assert not door.server.core.has_result("no-run", 1)


async def test_a_result_stays_out_where_its_operation_cannot_be_written(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await (await door.client()).begin()
    journal = door.server.core.storage.journal

    def full() -> None:
        raise OSError(errno.ENOSPC, "full")

    [frame] = client.frames(1, forward_backward=pb.LossCall(loss_fn="lost"))
    frame.patient = True
    with monkeypatch.context() as patch:
        patch.setattr(journal.segments, "sync", full)
        await client.send(frame)
        assert (await client.ack()).error.code == pb.ERROR_CODE_STORAGE_FULL
    assert (await client.fb(1, "kept")).seq == 1
    assert await client.statuses(1) == ["ok"]
    assert door.engine.runs[client.run_id].history == ["kept"]


async def test_small_frames_go_together_both_ways(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    [first], *rest = [
        client.frames(seq, bytes([seq]) * seq, forward_backward=pb.LossCall(loss_fn=str(seq))) for seq in range(1, 41)
    ]
    first.batched = True
    for [frame] in rest:
        first.more.append(frame)
    await client.send(first)
    acknowledged: list[int] = []
    while len(acknowledged) < 40:
        ack = await client.ack()
        acknowledged += [each.seq for each in (ack, *ack.more)]
    assert sorted(acknowledged) == list(range(1, 41))
    door.engine.gate.set()
    await client.results(40)
    call = client.stub.Results(pb.ResultsRequest(run_id=client.run_id, from_seq=1, batched=True))
    frame = await call.read()
    call.cancel()
    together = [(each.header.seq, each.chunk) for each in (frame, *frame.more)]
    assert together == [(seq, bytes([seq]) * seq) for seq in range(1, 41)]
