"""Disks that fill, fail and forget: what was acknowledged is there, what was torn is not, nothing wrong is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import ServerConfig
from gradwire_server.errors import NotNow, ServiceError
from gradwire_server.journal.commit_log import bring_up_to_date
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.repair import repair
from gradwire_server.journal.rows import RunMarks
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.segments import Segments
from gradwire_server.journal.state_folder import FolderLock, unusable
from gradwire_server.journal.storage import Storage
from gradwire_server.scheduling.replay import behind
from gradwire_server.server import Server
from support.blocking import DETECTOR
from support.fake_engine import FakeEngine
from support.front import Client, Door, Start
from support.server import Server as RealServer

from tests.server.journal.test_journal import append, new_run, operation

pytestmark = pytest.mark.long

MARKS = RunMarks(step=0, failure_seq=0, failure="")
MEMORY = Path("/dev/shm")


# ------------------------------------------------------------------ torn and changed files


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of journals are opened, and none outlives a power cut."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-", dir=MEMORY) as folder:
        yield Path(folder)


async def written(folder: Path, acknowledged: int, in_file: bool = False) -> tuple[str, dict[int, bytes]]:
    """A journal as a crash leaves it: so many operations and results that were answered for, and one of each behind
    them that was not; nothing closed, nothing checkpointed into the main file.

    Args:
        in_file: Whether SQLite has committed them all.
    """
    journal = await Journal.open(folder / "live")
    run_id = await new_run(journal, folder / "live")
    payloads = {seq: os.urandom(50 + seq) for seq in range(1, acknowledged + 2)}
    for seq, payload in payloads.items():
        if seq == acknowledged + 1:
            snapshot(folder / "live", folder / "before")
        await append(journal, operation(run_id, seq, size=len(payload)), payload)
        result = pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED, loss=pb.LossResult(loss=float(seq)))
        await journal.put_result(run_id, result, [payload[::-1]], MARKS)
    if in_file:
        await journal.store.put_into_file()
    snapshot(folder / "live", folder / "after")
    await journal.close()
    return run_id, payloads


def snapshot(live: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(live, copy, ignore=shutil.ignore_patterns("*-shm"))


async def opened(folder: Path, run_id: str, payloads: dict[int, bytes]) -> tuple[int, int, int]:
    """How many operations and results a journal has; each is right or known to be damaged, and counted as such."""
    damaged = 0
    bring_up_to_date(folder / "gradwire.db", Segments(folder / "journal"))
    journal = await Journal.open(folder)
    try:
        entries = await journal.entries(run_id, 0, 1000)
        for entry in entries:
            if entry.damaged:
                damaged += 1
                continue
            assert entry.location is not None
            try:
                payload = await journal.payload(entry.location)
            except Exception:
                damaged += 1
            else:
                assert payload == payloads[entry.header.seq]
        results = await journal.results(run_id, 1, 1000, limit=1000)
        runs = RunRecords(journal.store, folder, 10)
        for record in await runs.load():
            assert record.run_id == run_id and len(entries) <= record.accepted_seq
            damaged += len(results) != record.applied_seq
            try:
                assert [entry.header.seq for entry in await behind(journal, record, 0)] == list(
                    range(1, record.accepted_seq + 1)
                )
            except ServiceError:  # rows are missing, and a recovery says so
                damaged += 1
        damaged += not runs.count
        for result in results:
            if result.header.status == pb.STATUS_SUCCEEDED:
                assert result.payload == payloads[result.header.seq][::-1]
                assert result.header.loss.loss == result.header.seq
            else:
                damaged += 1
        return len(entries), len(results), damaged
    finally:
        await journal.close()


async def cut(memory: Path, every: int, *, in_file: bool) -> None:
    """What the last, unacknowledged operation and its result appended, cut at each offset: the segment's records, which
    make it durable, or SQLite's log, which is made again from them."""
    run_id, payloads = await written(memory, 5, in_file)
    [segment] = (memory / "after" / "journal").iterdir()
    log, found = "gradwire.db-wal" if in_file else f"journal/{segment.name}", set()
    size, whole = ((memory / state / log).stat().st_size for state in ("before", "after"))
    offsets = sorted({*range(size, whole, every), *range(whole - 30, whole + 1)})
    for offset in offsets:
        snapshot(memory / "after", memory / "cut")
        os.truncate(memory / "cut" / log, offset)
        operations, results, damaged = await opened(memory / "cut", run_id, payloads)
        assert operations in (5, 6) and results in (5, 6) and results <= operations and not damaged, offset
        found.add((operations, results))
    print(f"{log} cut at {len(offsets)} offsets: the 5 acknowledged operations and results always there, found {found}")
    assert found == ({(6, 6)} if in_file else {(5, 5), (6, 5), (6, 6)})


@pytest.mark.parametrize("in_file", [False, True], ids=["segment", "sqlite"])
async def test_a_log_cut_in_its_last_records_keeps_what_was_acknowledged(memory: Path, in_file: bool) -> None:
    await cut(memory, 211 if in_file else 37, in_file=in_file)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("in_file", [False, True], ids=["segment", "sqlite"])
async def test_a_log_cut_at_every_byte_of_its_last_records_keeps_what_was_acknowledged(
    memory: Path, in_file: bool
) -> None:
    await cut(memory, 1, in_file=in_file)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.faults)])
async def test_a_segment_cut_anywhere_in_its_last_records_loads_nothing_wrong(memory: Path, step: int) -> None:
    run_id, payloads = await written(memory, 3, in_file=True)
    [segment] = (memory / "after" / "journal").iterdir()
    before = (memory / "before" / "journal" / segment.name).stat().st_size
    records = Segments(memory / "after" / "journal").records(int(segment.stem))
    referred_to = max(record.end for record in records if record.payload_bytes)
    snapshot(memory / "after", memory / "cut")
    offsets = range(segment.stat().st_size - 1, before, -step)
    for offset in offsets:
        os.truncate(memory / "cut" / "journal" / segment.name, offset)
        operations, results, damaged = await opened(memory / "cut", run_id, payloads)
        assert (operations, results) == (4, 4)  # SQLite has the rows: the fsync that they follow did not lie here
        assert damaged in ((1, 2) if offset < referred_to else (0,))
    print(f"segment cut at {len(offsets)} offsets: the records that were cut are known to be")


async def flip_bytes(memory: Path, rng: random.Random, times: int) -> None:
    run_id, payloads = await written(memory, 5)
    database = sqlite3.connect(memory / "after" / "gradwire.db")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    files = [path for path in (memory / "after").rglob("*") if path.is_file() and path.stat().st_size]
    refused = damaged_somewhere = 0
    for _ in range(times):
        snapshot(memory / "after", memory / "flipped")
        file = memory / "flipped" / rng.choice(files).relative_to(memory / "after")
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        try:
            _, _, damaged = await opened(memory / "flipped", run_id, payloads)
            damaged_somewhere += damaged > 0
        except (sqlite3.DatabaseError, UnicodeDecodeError):  # the server does not start on it
            refused += 1
    print(f"{times} flipped bits: {refused} databases refused, {damaged_somewhere} with records known to be damaged")


async def test_flipped_bits_load_nothing_wrong(memory: Path, rng: random.Random) -> None:
    await flip_bytes(memory, rng, 150)


@pytest.mark.faults
@pytest.mark.timeout(3600)
async def test_many_flipped_bits_load_nothing_wrong(memory: Path, rng: random.Random) -> None:
    await flip_bytes(memory, rng, 3000)


# ------------------------------------------------------------------ a start that must fail


async def refused(state: Path) -> SystemExit:
    """How a server does not start on a folder."""
    config = ServerConfig(address="127.0.0.1:0", state_dir=state, models={"tiny": "x"})
    async with AsyncExitStack() as closing:
        with pytest.raises(SystemExit) as caught:
            await Storage.open(config, FolderLock(state), closing)
    return caught.value


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


async def test_a_start_says_what_is_wrong_with_the_disk_and_blames_no_database(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 6) as folder:
        (folder / "ballast").write_bytes(bytes(6 << 20))
        new = await refused(folder / "state")
        (folder / "ballast").unlink()
        await written(folder, 1)
        shutil.rmtree(folder / "before")
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(1 << 12)):
                pass
        full = await refused(folder / "after")
        with pytest.raises((sqlite3.OperationalError, OSError)):
            repair(folder / "after", "", lambda sentence: None)
        assert not list((folder / "after").glob("*.new*"))
        (folder / "ballast").unlink()
        remount(folder, "ro")
        read_only = await refused(folder / "after")
        remount(folder, "rw")
        for error, what in ((new, "is full"), (full, "is full"), (read_only, "cannot be written to")):
            assert isinstance(error, NotNow) and what in str(error), error
            assert "restore" not in str(error) and "repair" not in str(error)
        await (await Journal.open(folder / "after")).close()  # which is as it was


async def test_a_start_on_a_locked_or_damaged_database_says_which_it_is(memory: Path) -> None:
    await written(memory, 1, in_file=True)
    database = memory / "after" / "gradwire.db"
    with closing(sqlite3.connect(database)) as shell, closing(sqlite3.connect(database, timeout=0)) as ours:
        shell.execute("PRAGMA locking_mode = EXCLUSIVE")
        shell.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as caught:
            ours.execute("SELECT * FROM runs")
        locked = unusable(caught.value, memory / "after")
    assert isinstance(locked, NotNow) and "locked by another program" in str(locked) and "restore" not in str(locked)
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    database.write_bytes(os.urandom(20_000))
    damaged = await refused(memory / "after")
    assert not isinstance(damaged, NotNow) and "is damaged" in str(damaged) and "gradwire repair" in str(damaged)


# ------------------------------------------------------------------ a disk that fills, and one that fails


@contextmanager
def disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of a few MiB."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a filesystem is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 4) as folder:
        yield folder


async def test_a_disk_that_fills_refuses_clearly_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    config = ServerConfig(
        address="127.0.0.1:0", state_dir=small_disk / "state", models={"tiny": "x"}, grace=2,
        checkpoint_every_steps=0,
    )  # fmt: skip
    import grpc

    engine = FakeEngine(small_disk / "state")
    async with Server(config, [engine]) as server, grpc.aio.insecure_channel(server.address) as channel:
        client = await Client(channel).begin()
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(1 << 20))
        seq, refused, payload = 0, 0, bytes(200_000)
        while refused < 2:  # one after the other: what goes meanwhile may make room for one more
            ack = await client.fb(seq + 1, f"op-{seq + 1}", payload)
            if ack.HasField("error"):
                assert ack.error.code == pb.ERROR_CODE_STORAGE_FULL and "disk is full" in ack.error.message
                refused += 1
                continue
            seq, refused = seq + 1, 0
            assert seq < 100, "the disk never filled"
        [used] = (await client.stub.GetUsage(pb.GetUsageRequest())).entries
        assert 0 < used.operations <= seq, "what is not written is counted as well"
        segments = Segments(small_disk / "state" / "journal")
        for number in segments.numbers():
            assert all(record.payload_bytes in (0, len(payload)) for record in segments.records(number))
        ballast.unlink()
        await client.fb(seq + 1, f"op-{seq + 1}", payload)
        results = await client.results(seq + 1)
        assert [result.seq for result, _ in results] == list(range(1, seq + 2))
        assert engine.runs[client.run_id].history == [f"op-{number}" for number in range(1, seq + 2)]
        [used] = (await client.stub.GetUsage(pb.GetUsageRequest())).entries
        assert used.operations == seq + 1
        print(f"full after {seq} operations of {len(payload)} bytes; refused twice; all {seq + 1} once there was room")


@pytest.fixture
def larger_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 32) as folder:
        yield folder


@pytest.mark.parametrize("full_s", [1.5, pytest.param(5.0, marks=pytest.mark.faults)])
async def test_seconds_of_a_full_disk_are_waited_out(
    larger_disk: Path, tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, full_s: float
) -> None:
    """Thirty operations are in flight when the disk fills: each ends with its result, as if there had been room."""
    row = {"input_ids": [[5, 9, 23, 7] * 16 for _ in range(16)]}
    server = RealServer(tiny_model_path, larger_disk / "state", "--checkpoint-every-steps", "0").start()
    try:
        async with gradwire.connect(server.address) as service:
            calm, run = [await service.create_run("tiny", lora=2, seed=4) for _ in range(2)]
            expected = await gradwire.gather(*submitted(calm, row))
            ballast = (larger_disk / "ballast").open("wb", buffering=0)
            with DETECTOR.excused(), pytest.raises(OSError, match="No space left"):
                while True:
                    ballast.write(bytes(4096))
            in_flight = submitted(run, row)
            saved = run.save_checkpoint("full")

            def told() -> list[str]:
                return [record.message for record in caplog.records if "disk is full" in record.message]

            while not told():  # noqa: ASYNC110  nobody else is told
                await asyncio.sleep(0.05)
            await asyncio.sleep(full_s)
            assert not all(each.done() for each in in_flight), "the disk was not full"
            ballast.truncate(0)
            ballast.close()
            results = await gradwire.gather(*in_flight)
            assert (await saved).step == 10
            assert len(told()) == 1, told()
            ballast = (larger_disk / "ballast").open("wb", buffering=0)
            with DETECTOR.excused(), pytest.raises(OSError, match="No space left"):
                while True:
                    ballast.write(bytes(4096))
            ballast.truncate((larger_disk / "ballast").stat().st_size - (16 << 10))  # for the journal, not for more
            waiting = run.save_checkpoint("after"), run.export(tmp_path / "exported")
            await asyncio.sleep(full_s)
            assert not waiting[0].done(), "the disk was not full"
            ballast.truncate(0)
            ballast.close()
            assert (await waiting[0]).step == 10 and (await waiting[1]).is_dir()
        values = [[each.loss if hasattr(each, "loss") else each.step for each in of] for of in (results, expected)]
        assert len(results) == 30 and values[0] == values[1]
    finally:
        assert server.end() == 0


def submitted(run: gradwire.TrainingClient, row: dict[str, Any]) -> list[gradwire.Future[Any]]:
    """Thirty operations: ten steps of two batches each."""
    return [
        future
        for _ in range(10)
        for future in (
            run.forward_backward(row, "causal_lm"),
            run.forward_backward(row, "causal_lm"),
            run.optim_step(learning_rate=1e-3),
        )
    ]


async def submit_until_accepted(client: Client, count: int, ahead: int) -> None:
    """So many operations, some of them on their way at once; what is refused is sent again."""
    accepted, sent = 0, 0
    while accepted < count:
        while sent < count and sent - accepted < ahead:
            sent += 1
            await client.send(*client.frames(sent, bytes([sent]) * 500, **named(sent)))
        ack = await client.ack()
        if ack.HasField("error"):
            await client.send(*client.frames(ack.seq, bytes([ack.seq]) * 500, **named(ack.seq)))
        else:
            accepted += 1


def named(seq: int) -> dict[str, Any]:
    return {"forward_backward": pb.LossCall(loss_fn=f"op-{seq}")}


@pytest.mark.parametrize("ahead", [1, 10])
@pytest.mark.parametrize("failure", ["fsync", "write"])
async def test_a_disk_that_fails_loses_nothing_that_was_acknowledged(
    start: Start, monkeypatch: pytest.MonkeyPatch, rng: random.Random, failure: str, ahead: int
) -> None:
    real, failures = getattr(os, failure), 0

    def unreliable(fd: int, *args: Any) -> Any:
        nonlocal failures
        if "journal" in os.readlink(f"/proc/self/fd/{fd}") and rng.random() < 0.3:
            failures += 1
            if failure == "write" and rng.random() < 0.5:
                real(fd, bytes(args[0])[: len(args[0]) // 2])  # half of it is on the disk
            raise OSError(5, "Input/output error (injected)")
        return real(fd, *args)

    monkeypatch.setattr("gradwire_server.scheduling.results.STORE_AGAIN_S", 0.02)
    async with start() as door:
        client = await (await door.client()).begin()
        with monkeypatch.context() as failing:
            failing.setattr(os, failure, unreliable)
            await submit_until_accepted(client, 40, ahead)
            results = await client.results(40)
        assert [result.seq for result, _ in results] == list(range(1, 41))
        assert all(payload == bytes([result.seq]) * 500 for result, payload in results)
        history = [f"op-{seq}" for seq in range(1, 41)]
        assert door.engine.runs[client.run_id].history == history
    async with start() as door:
        await recovered(door, client, history)
    print(f"{failures} failures of {failure}: 40 operations acknowledged, carried out and found again")


async def test_a_full_disk_is_logged_when_it_begins_once_a_minute_and_when_it_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire_server.scheduling.results.STORE_AGAIN_S", 0.005)
    monkeypatch.setattr("gradwire_server.scheduling.results.REMIND_S", 0.5)
    real, tried = Journal.put_result, 0

    def full(self: Journal, *args: Any, with_operation: bool = False, **kwargs: Any) -> asyncio.Future[None]:
        nonlocal tried
        tried += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(ServiceError(pb.ERROR_CODE_STORAGE_FULL, "the disk is full (injected)"))
        return future

    def told(level: str) -> list[str]:
        return [
            line.getMessage() for line in caplog.records if line.levelname == level and "stored" in line.getMessage()
        ]

    async with start() as door:
        client = await (await door.client()).begin()
        monkeypatch.setattr(Journal, "put_result", full)
        for seq in range(1, 4):
            await client.fb(seq, f"op-{seq}")
        while len(told("ERROR")) < 3:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.01)
        assert tried > 30 and not told("WARNING")
        monkeypatch.setattr(Journal, "put_result", real)
        assert [result.seq for result, _ in await client.results(3)] == [1, 2, 3]
    first, *reminders = told("ERROR")
    assert first.startswith(f"the result of operation 1 of {client.run_id} is not stored yet")
    assert {line.split(" results")[0] for line in reminders} == {"3"}
    assert told("WARNING") == ["the results that waited for the disk are stored"]


async def recovered(door: Door, client: Client, history: list[str]) -> None:
    again = await (await door.client()).open(client.run_id)
    await again.fb(len(history) + 1, "last")
    assert await again.statuses(1, len(history) + 1) == ["ok"]
    assert door.engine.runs[client.run_id].history == [*history, "last"]
