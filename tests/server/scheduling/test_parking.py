"""Runs that cannot go on for now: nothing of them is lost, judged again or executed, until the cause is gone."""

from __future__ import annotations

import logging

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.errors import ServiceError
from gradwire_server.scheduling import dispatcher
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.fake_engine import FakeEngine
from support.front import Client, Door, Start
from support.keyed import error_of
from support.scripted import until

SHORT = ServiceError(pb.ERROR_CODE_OUT_OF_MEMORY, "the model does not fit")


def short_of_memory(engine: FakeEngine) -> None:
    engine.restore_error = SHORT


async def run_of(client: Client) -> pb.Run:
    return await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))


async def discard(client: Client) -> int:
    request = pb.DiscardPendingRequest(run_id=client.run_id, epoch=client.epoch)
    return int((await client.stub.DiscardPending(request)).num_discarded)


async def queued(start: Start, *kinds: str) -> Client:
    """A run with one result, and operations behind it that were acknowledged and not executed."""
    async with start() as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", b"first")
        await client.results(1)
        door.engine.gate.clear()
        for seq, kind in enumerate(kinds, 2):
            await (client.step(seq) if kind == "step" else client.fb(seq, kind, b"payload"))
    return client


async def reopened(door: Door, client: Client) -> Client:
    again = await door.client()
    again.run_id, again.epoch = client.run_id, client.epoch
    return again


async def test_a_run_that_cannot_be_restored_waits_and_goes_on_by_itself(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher, "PAUSES_S", (0.05,))
    client = await queued(start, "b", "step", "c")
    caplog.set_level(logging.WARNING)
    async with start(prepare=short_of_memory) as door:
        again = await reopened(door, client)
        scheduler = door.server.core.scheduler
        await until(lambda: scheduler.num_parked)
        health = health_pb2_grpc.HealthStub(again.channel)
        names = ("gradwire.v1.Runs", "gradwire.v1.TrainingService")
        found = [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names]
        assert found == [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
        assert scheduler.backlog().parked == 1
        run = await run_of(again)
        assert (run.accepted_seq, run.applied_seq, run.parked.message) == (4, 1, "the model does not fit")
        refused = await again.fb(5, "d")
        assert refused.error.code == pb.ERROR_CODE_RUN_PARKED and "the model does not fit" in refused.error.message
        assert (await run_of(again)).accepted_seq == 4
        assert (await client_again_acknowledged(again)).duplicate
        await until(lambda: scheduler.queue(door.server.core.storage.records._records[run.run_id]).parked.attempts > 3)
        door.engine.restore_error = None
        await until(lambda: not scheduler.num_parked)
        assert await again.statuses(4) == ["ok"] * 4
        assert door.engine.runs[client.run_id].history == ["a", "b", "step", "c"]
        assert not (await run_of(again)).HasField("parked")
        assert not (await again.fb(5, "d")).HasField("error")
    warnings = [record.message for record in caplog.records if "parked" in record.message]
    assert len(warnings) == 1 and "operations waiting: 3" in warnings[0]


async def client_again_acknowledged(client: Client) -> pb.SubmitAck:
    """An accepted operation of a parked run that is sent again is acknowledged again."""
    return await client.fb(2, "b", b"payload")


async def test_what_waits_in_a_parked_run_can_be_discarded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await queued(start, "b", "step", "c")
    async with start(prepare=short_of_memory) as door:
        again = await reopened(door, client)
        await until(lambda: door.server.core.scheduler.num_parked)
        assert await discard(again) == 3
        results = await again.results(4)
        assert [result.status for result, _ in results[1:]] == [pb.STATUS_CANCELLED] * 3
        assert "discarded by the run's owner" in results[1][0].error.message
        with pytest.raises(grpc.RpcError) as caught:
            await discard(again)
        assert error_of(caught.value).code == pb.ERROR_CODE_UNSUPPORTED
        door.engine.restore_error = None
        await again.fb(5, "d")
        assert await again.statuses(1, 5) == ["ok"]
        assert door.engine.runs[client.run_id].history == ["a", "d"]


async def test_limits_that_were_lowered_do_not_judge_what_was_accepted(start: Start) -> None:
    client = await queued(start, "b", "c")
    async with start(limits={"max_payload_bytes": 3}) as door:
        again = await reopened(door, client)
        assert await again.statuses(3) == ["ok"] * 3
        await again.fb(4, "d", b"payload")
        assert await again.statuses(1, 4) == ["limit_exceeded"]


async def test_what_was_accepted_to_fail_fails_whatever_the_limits_are_later(start: Start) -> None:
    async with start(limits={"max_payload_bytes": 8}) as door:
        client = await (await door.client()).begin()
        await client.fb(1, "a", b"first")
        await client.results(1)
        door.engine.gate.clear()
        await client.fb(2, "b", b"payload")
        assert not (await client.fb(3, "c", b"far too long")).HasField("error")
    async with start() as door:
        again = await reopened(door, client)
        assert await again.statuses(3) == ["ok", "ok", "limit_exceeded"]


async def test_an_operation_whose_loss_this_start_lacks_waits_for_one_that_has_it(start: Start) -> None:
    client = await queued(start, "mine", "b")
    async with start(prepare=lambda engine: engine.unknown_losses.add("mine")) as door:
        again = await reopened(door, client)
        await until(lambda: door.server.core.scheduler.num_parked)
        run = await run_of(again)
        assert run.parked.code == pb.ERROR_CODE_UNKNOWN_LOSS and run.applied_seq == 1
    async with start() as door:
        again = await reopened(door, client)
        assert await again.statuses(3) == ["ok"] * 3
        assert door.engine.runs[client.run_id].history == ["a", "mine", "b"]


async def test_a_run_that_others_park_drops_what_the_engine_has_of_it_and_repeats_it(door: Door) -> None:
    client = await (await door.client()).begin()
    other = await (await door.client()).begin()
    door.engine.gate.clear()
    for seq in range(1, 5):
        await client.fb(seq, f"{seq}")
    await other.fb(1, "other")
    scheduler = door.server.core.scheduler
    queue = scheduler.queue(door.server.core.storage.records._records[client.run_id])
    await until(lambda: len(queue.sent) == 4)
    reason = pb.Error(code=pb.ERROR_CODE_UNSUPPORTED, message="other versions")
    scheduler.dispatcher.parking.park(queue, reason, again=False)
    door.engine.gate.set()
    assert await other.statuses(1) == ["ok"]
    await until(lambda: not queue.sent)
    assert (await run_of(client)).applied_seq == 0
    scheduler.dispatcher.parking.release(queue)
    assert await client.statuses(4) == ["ok"] * 4
    assert door.engine.runs[client.run_id].history == ["1", "2", "3", "4"]
