"""What bounds each call: every RPC has a kind, a key's calls wait for their turn, and no key waits for another's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from gradwire_proto.v1 import jobs_pb2, sessions_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.calls import RPCS, CallKind, Calls
from gradwire_server.access.turns import Turns
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits
from support.access import rpcs
from support.front import Start
from support.keyed import error_of
from support.scripted import until


def test_every_rpc_has_a_bound() -> None:
    jobs = [method.name for method in jobs_pb2.DESCRIPTOR.services_by_name["JobService"].methods]
    sessions = [method.name for method in sessions_pb2.DESCRIPTOR.services_by_name["SessionService"].methods]
    assert list(RPCS) == rpcs() + jobs + sessions, (
        "a new RPC: say in gradwire_server.access.calls what bounds it, in the service's order"
    )


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_turns_go_to_the_key_that_was_served_least_recently() -> None:
    turns, order = Turns(of_key=1, total=1), list[str]()

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")))
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (turns._held, turns._waiting, turns._served, turns._count) == ({}, {}, {}, 0)


async def test_a_key_never_waits_for_anothers_turn_where_there_is_no_total() -> None:
    turns = Turns(of_key=2)
    await turns.take("a")
    await turns.take("a")
    third = asyncio.ensure_future(turns.take("a"))
    await settled()
    assert turns.waiting("a") == 1 and not third.done()
    await asyncio.wait_for(turns.take("b"), 60)
    turns.give_back("a")
    await asyncio.wait_for(third, 60)


async def test_who_leaves_while_it_waits_or_as_it_is_served_keeps_no_turn() -> None:
    turns = Turns(of_key=1)
    await turns.take("a")
    waiting, served = [asyncio.ensure_future(turns.take("a")) for _ in range(2)]
    await settled()
    waiting.cancel()
    await settled()
    turns.give_back("a")
    served.cancel()  # it has its turn already, and has not run since
    await asyncio.gather(waiting, served, return_exceptions=True)
    await asyncio.wait_for(turns.take("a"), 60)


async def test_who_left_a_moment_ago_is_passed_over() -> None:
    turns, calls = Turns(of_key=1), Calls(Limits(key_call_bytes=1))
    await turns.take("a")
    await calls._bytes.take("a", 1)
    left, stays = [asyncio.ensure_future(turns.take("a")) for _ in range(2)]
    bytes_left, bytes_stay = [asyncio.ensure_future(calls._bytes.take("a", 1)) for _ in range(2)]
    await settled()
    left.cancel()
    bytes_left.cancel()
    turns.give_back("a")  # before the cancelled tasks have run
    calls._bytes.give_back("a", 1)
    await asyncio.wait_for(asyncio.gather(stays, bytes_stay), 60)
    assert left.cancelled() and bytes_left.cancelled()
    turns.give_back("a")
    calls._bytes.give_back("a", 1)
    assert (turns._held, turns._waiting, calls._bytes._held, calls._bytes._waiting) == ({}, {}, {}, {})


async def test_who_leaves_lets_those_pass_that_ask_for_less() -> None:
    turns = Turns(of_key=10)
    await turns.take("a", 6)
    large, small = (asyncio.ensure_future(turns.take("a", places)) for places in (8, 4))
    await settled()
    assert not small.done(), "turns of a key are in order"
    large.cancel()
    await asyncio.wait_for(small, 60)
    turns.give_back("a", 6)
    turns.give_back("a", 4)
    await asyncio.wait_for(turns.take("a", 99), 60)  # more than there are, as nothing else is held
    turns.give_back("a", 99)
    assert (turns._held, turns._waiting, turns._served, turns._count) == ({}, {}, {}, 0)


async def test_a_key_writes_less_at_a_time_while_another_is_active() -> None:
    calls, ended = Calls(Limits()), asyncio.Event()

    async def write() -> None:
        async with calls.turn("a", CallKind.WRITE):
            await ended.wait()

    def executed() -> int:
        return calls._turns[CallKind.WRITE]._held["a"]

    alone = [asyncio.ensure_future(write()) for _ in range(20)]
    await settled()
    assert executed() == CallKind.WRITE.of_key == 16
    ended.set()
    await asyncio.gather(*alone)
    ended.clear()
    async with calls.turn("b", CallKind.READ):
        pass
    beside = [asyncio.ensure_future(write()) for _ in range(20)]
    await settled()
    assert executed() == CallKind.WRITE.beside_others == 4
    ended.set()
    await asyncio.wait_for(asyncio.gather(*beside), 60)


async def test_bodies_wait_until_the_key_holds_few_bytes() -> None:
    calls = Calls(Limits(key_call_bytes=100))

    async def receive() -> bytes:
        return bytes(60)

    async with calls.body("a", receive):
        async with asyncio.timeout(60), calls.body("b", receive):
            pass
        second = calls.body("a", receive)
        entering = asyncio.ensure_future(second.__aenter__())
        third = asyncio.ensure_future(calls.body("a", receive).__aenter__())
        await settled()
        assert not entering.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
    assert await asyncio.wait_for(entering, 60) == bytes(60)
    await second.__aexit__(None, None, None)
    assert (calls._bytes._held, calls._bytes._waiting, calls._bodies._held) == ({}, {}, {})


async def test_calls_that_wait_and_open_streams_are_bounded_by_name() -> None:
    calls = Calls(Limits(key_waiting_calls=1, key_streams=1))
    async with calls.turn("a", CallKind.READ), calls.turn("a", CallKind.READ):
        waiting = asyncio.ensure_future(calls.turn("a", CallKind.READ).__aenter__())
        await settled()
        with pytest.raises(ServiceError, match="key_waiting_calls=N") as caught:
            await calls.turn("a", CallKind.READ).__aenter__()
        assert caught.value.error.rule == "key_waiting_calls = 1"
        async with calls.turn("b", CallKind.READ), calls.turn("a", CallKind.SUBMIT):
            with pytest.raises(ServiceError, match="key_streams=N"):
                await calls.turn("a", CallKind.RESULTS).__aenter__()
        async with calls.turn("a", CallKind.RESULTS):
            pass
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_call_that_waits_is_not_read(keyed: Any) -> None:
    async with keyed() as door:
        core, ada, bob = door.door.server.core, await door.client("ada"), await door.client("bob")
        held = [core.calls.turn("ada", CallKind.READ) for _ in range(2)]
        for each in held:
            await each.__aenter__()
        waiting = [asyncio.ensure_future(ada.stub.ListRuns(pb.ListRunsRequest())) for _ in range(3)]
        await until(lambda: core.calls._turns[CallKind.READ].waiting("ada") == 3)
        assert not core.calls._bytes._held and not core.calls._bodies._held
        assert not (await bob.stub.ListRuns(pb.ListRunsRequest())).runs
        run = await ada.begin()  # of another kind
        waiting[0].cancel()
        for each in held:
            await each.__aexit__(None, None, None)
        answers = await asyncio.gather(*waiting[1:])
        assert [[each.run_id for each in answer.runs] for answer in answers] == [[run.run_id]] * 2
        await until(lambda: not core.calls._turns[CallKind.READ]._held)


async def test_a_call_without_a_request_is_refused(start: Start) -> None:
    async with start() as door:
        client = await door.client()
        call = client.channel.stream_unary("/gradwire.v1.TrainingService/GetRun")
        with pytest.raises(Exception, match="has no request") as caught:
            await call(iter(()))
        assert error_of(caught.value).code == pb.ERROR_CODE_INVALID_ARGUMENT


async def test_a_share_that_its_caller_leaves_is_written_before_the_next(
    keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed() as door:
        ada = await (await door.client("ada")).begin()
        records, entered, gate, at_once = (
            door.door.server.core.storage.records,
            threading.Event(),
            threading.Event(),
            [],
        )
        write, writing = records._describe, threading.Lock()

        def slow(record: Any) -> None:
            at_once.append(not writing.acquire(blocking=False))
            entered.set()
            gate.wait(60)
            write(record)
            writing.release()

        monkeypatch.setattr(records, "_describe", slow)
        record = records.find(ada.run_id)
        left = asyncio.ensure_future(records.share(record, "bob", False))
        await until(entered.is_set)
        left.cancel()
        following = asyncio.ensure_future(records.share(record, "bob", True))
        await until(lambda: "bob" not in record.readers)  # the next one's row is written
        await settled()
        gate.set()
        await asyncio.gather(left, following, return_exceptions=True)
        assert following.exception() is None and left.cancelled()
        assert at_once == [False, False]
