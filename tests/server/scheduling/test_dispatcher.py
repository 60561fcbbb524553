"""Several operations of a run in the engine at once: what comes of them is what would come of them one at a time."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.front import Client, Door, Start, describe
from support.scripted import until

KINDS = ("a", "b", "fail", "step", "save")


async def send(client: Client, seq: int, kind: str, seen: int) -> None:
    if kind == "step":
        operation = {"optim_step": pb.OptimStep(learning_rate=0.1)}
    elif kind == "save":
        operation = {"save_checkpoint": pb.SaveCheckpoint(name="last", overwrite=True)}
    else:
        operation = {"forward_backward": pb.LossCall(loss_fn=kind)}
    await client.send(*client.frames(seq, failure_seen=seen, **operation))


async def results(door: Door, plan: list[tuple[str, int]], *, pipelined: bool) -> list[str]:
    """What became of each operation, then what the run is."""
    client = await (await door.client()).begin()
    door.engine.most_in_pipe = 0
    for seq, (kind, seen) in enumerate(plan, 1):
        await send(client, seq, kind, seen)
        if not pipelined:
            await client.results(1, seq)
    results = await client.results(len(plan))
    assert pipelined or door.engine.most_in_pipe <= 2
    return [describe(result) for result, _ in results] + door.engine.runs[client.run_id].history


@pytest.mark.long
async def test_failures_in_the_middle_change_nothing_about_the_others(start: Start) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng, most = random.Random(seed), 0
    async with start(checkpoint_every_steps=3) as door:
        for _ in range(6):
            kinds = rng.choices(KINDS, weights=(5, 5, 2, 4, 1), k=40)
            plan = [(kind, rng.randrange(seq + 1) if rng.random() < 0.3 else 0) for seq, kind in enumerate(kinds)]
            plan[:4] = [("a", 0)] * 4
            one_by_one = await results(door, plan, pipelined=False)
            assert await results(door, plan, pipelined=True) == one_by_one
            most = max(most, door.engine.most_in_pipe)
        assert most > 2


async def test_an_engine_that_dies_with_many_in_its_pipe_carries_each_out_once(door: Door) -> None:
    client = await (await door.client()).begin()
    other = await (await door.client()).begin()
    door.engine.die_after = {7, 19, 20}
    for seq in range(1, 31):
        await send(client, seq, f"{seq}", 0)
        await send(other, seq, f"o{seq}", 0)
    assert await client.statuses(30) == ["ok"] * 30
    assert await other.statuses(30) == ["ok"] * 30
    assert door.engine.most_in_pipe > 10
    assert door.engine.runs[client.run_id].history == [f"{seq}" for seq in range(1, 31)]
    assert door.engine.runs[other.run_id].history == [f"o{seq}" for seq in range(1, 31)]


async def test_only_the_operation_that_kills_is_given_up(door: Door) -> None:
    """Everything that was begun is suspected of the first death; nothing but the culprit is there at the second."""
    clients = [await (await door.client()).begin() for _ in range(3)]
    door.engine.gate.clear()
    door.engine.all_suspect = True
    for seq in range(1, 7):
        for number, client in enumerate(clients):
            await send(client, seq, "die" if (seq, number) == (3, 1) else f"{seq}", 0)
    door.engine.gate.set()
    assert await clients[0].statuses(6) == await clients[2].statuses(6) == ["ok"] * 6
    expected = ["ok", "ok", "quarantined", *["aborted_predecessor(3)"] * 3]
    assert await clients[1].statuses(6) == expected
    assert door.engine.runs[clients[0].run_id].history == [f"{seq}" for seq in range(1, 7)]


async def test_what_the_engine_made_of_operations_that_could_not_be_written_is_undone(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has an operation while it is written; with the disk full, the run is as if it had not come."""
    client = await (await door.client()).begin()
    await client.fb(1, "a")
    await client.results(1)
    journal = door.server.core.storage.journal
    meanwhile = set[int]()

    def full() -> None:
        deadline = time.monotonic() + 30.0
        while len(meanwhile) < 3 and time.monotonic() < deadline:  # none arrives after another was refused
            meanwhile.update(seq for _, seq in door.engine.seen if seq > 1)
            time.sleep(0.001)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(journal.segments, "sync", full)
        for seq in (2, 3, 4):
            await send(client, seq, "lost", 0)
        refused = [(await client.ack()).error.code for _ in range(3)]
    assert refused == [pb.ERROR_CODE_STORAGE_FULL] * 3
    assert meanwhile == {2, 3, 4}
    for seq, kind in enumerate(("b", "step", "c"), 2):
        await send(client, seq, kind, 0)
    assert await client.statuses(4) == ["ok"] * 4
    assert door.engine.runs[client.run_id].history == ["a", "b", "step", "c"]


async def test_what_is_in_the_pipe_and_not_begun_is_cancelled_at_once(door: Door) -> None:
    client = await (await door.client()).begin()
    door.engine.gate.clear()
    for seq in range(1, 6):
        await client.fb(seq, str(seq))
    await until(lambda: door.engine.most_in_pipe == 5 and door.engine.newest.operation.seq == 1)

    async def cancel(seq: int) -> bool:
        request = pb.CancelRequest(run_id=client.run_id, seq=seq, epoch=client.epoch)
        return bool((await client.stub.Cancel(request)).cancelled)

    assert [await cancel(seq) for seq in (1, 3, 4)] == [False, True, True]
    door.engine.gate.set()
    assert await client.statuses(5) == ["ok", "ok", "cancelled", "cancelled", "ok"]
    assert door.engine.runs[client.run_id].history == ["1", "2", "5"]


async def test_a_server_that_stops_takes_back_what_the_engine_has_not_begun(start: Start) -> None:
    async with start(grace=60) as door:
        client = await (await door.client()).begin()
        door.engine.gate.clear()
        for seq in range(1, 11):
            await client.fb(seq, str(seq), b"payload")
        await until(lambda: door.engine.most_in_pipe == 10 and door.engine.newest.operation.seq == 1)
        stopping = asyncio.create_task(door.server.stop())
        await until(lambda: door.server.core.scheduler.dispatcher._draining)
        door.engine.gate.set()
        await stopping
        assert door.engine.runs[client.run_id].history == ["1"]
        assert door.server.core.left == {client.run_id: 9}
    async with start() as door:
        again = await door.client()
        again.run_id = client.run_id
        assert await again.statuses(10) == ["ok"] * 10
        assert door.engine.runs[client.run_id].history == [str(seq) for seq in range(1, 11)]


async def test_a_checkpoint_of_the_servers_own_holds_what_its_number_says(start: Start, tmp_path: Path) -> None:
    async with start(checkpoint_every_steps=4) as door:
        client = await (await door.client()).begin()
        for seq in range(1, 61):
            await send(client, seq, "step" if seq % 3 == 0 else "a", 0)
        assert await client.statuses(60) == ["ok"] * 60
        history = door.engine.runs[client.run_id].history
        assert door.engine.most_in_pipe > 2
    saved = list((tmp_path / "runs" / client.run_id / "checkpoints").glob("auto-*/history"))
    assert saved
    for file in saved:
        seq, *held = file.read_text().split()
        assert held == history[: int(seq)]
