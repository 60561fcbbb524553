"""The journal on its own: what is on disk when, and what a torn or damaged file costs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvloop
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.errors import ServiceError
from gradwire_server.journal import database as database_module
from gradwire_server.journal import journal as journal_module
from gradwire_server.journal import state_folder
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.retention import COLLECTED_BYTES
from gradwire_server.journal.rows import RunMarks, identity
from gradwire_server.journal.run_files import RUN_FILE, read_description
from gradwire_server.journal.run_records import RunRecords
from gradwire_server.journal.run_row import new_record
from gradwire_server.journal.same_state import RunChanged
from gradwire_server.journal.schema import FREE_PAGES, GIVEN_BACK_PAGES, connect, give_back_space, newest_commit
from gradwire_server.journal.segments import CorruptRecord, Location, Segments

MARKS = RunMarks(step=0, failure_seq=0, failure="")


async def new_run(journal: Journal, folder: Path) -> str:
    runs = RunRecords(journal.store, folder, 10)
    record = new_record("", pb.RunConfig(base_model="tiny"), "", b"")
    runs.reserve(record)
    await runs.finish(record, 1, 0, {})
    return record.run_id


def operation(run_id: str, seq: int, loss_fn: str = "a", size: int = 0) -> pb.OperationHeader:
    call = pb.Operation(forward_backward=pb.LossCall(loss_fn=loss_fn))
    return pb.OperationHeader(run_id=run_id, epoch=1, seq=seq, operation=call, payload_bytes=size)


async def append(journal: Journal, header: pb.OperationHeader, payload: bytes = b"") -> Location | None:
    return await journal.append(header, 1.0, [payload] if payload else [])


async def test_what_was_appended_and_answered_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1, size=3), b"abc")
    await append(journal, operation(run_id, 2))
    result = pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED)
    await journal.put_result(run_id, result, [b"de", b"f"], MARKS)
    await journal.close()
    journal = await Journal.open(tmp_path)
    first, second = await journal.entries(run_id, 0, 10)
    assert (first.status, second.status) == (pb.STATUS_SUCCEEDED, pb.STATUS_UNSPECIFIED)
    assert first.location is not None and second.location is None
    assert await journal.payload(first.location) == b"abc"
    [stored] = await journal.results(run_id, 1, 10)
    assert (stored.header, stored.payload) == (result, b"def")
    await journal.close()


async def test_a_run_is_compared_with_the_losses_that_it_used_or_has_queued(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1, "used"))
    made = pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED, loss=pb.LossResult(loss=1.0))
    await journal.put_result(run_id, made, [], MARKS)
    await append(journal, operation(run_id, 2, "queued"))
    losses = ("used", "queued", "another", "third")
    before = {"device": "cpu"} | {f"loss {name}": "1" for name in losses}
    assert await journal.facts.check(run_id, 0, before) is None
    unrelated = before | {"loss another": "2"}
    for _ in range(2):
        assert await journal.facts.check(run_id, 0, unrelated) is None
    await append(journal, operation(run_id, 3, "another"))  # by the definition that it had then
    assert await journal.facts.check(run_id, 0, unrelated) is None
    for name in ("used", "queued", "another"):
        with pytest.raises(RunChanged, match=f"loss {name} was") as caught:
            await journal.facts.check(run_id, 0, unrelated | {f"loss {name}": "3", "loss third": "3"})
        assert "third" not in str(caught.value)
    with pytest.raises(RunChanged) as caught:
        await journal.facts.check(run_id, 0, unrelated | {f"package {number}": "x" * 300 for number in range(30)})
    assert f"gradwire runs accept {run_id}" in str(caught.value)[:300] and "; and 25 more" in str(caught.value)
    await journal.close()


async def test_an_operation_whose_predecessor_is_missing_is_not_appended(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    first, third = append(journal, operation(run_id, 1)), append(journal, operation(run_id, 3))
    results = await asyncio.gather(first, third, return_exceptions=True)
    assert results[0] is None and isinstance(results[1], LookupError)
    assert [entry.header.seq for entry in await journal.entries(run_id, 0, 10)] == [1]
    await journal.close()


async def test_a_result_is_stored_once(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1))
    for loss in (1.0, 2.0):
        result = pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED, loss=pb.LossResult(loss=loss))
        await journal.put_result(run_id, result, [], MARKS)
    [stored] = await journal.results(run_id, 1, 10)
    assert stored.header.loss.loss == 1.0
    await journal.close()


async def test_results_are_stored_in_order_and_the_marks_of_a_run_are_those_of_the_newest(
    tmp_path: Path,
) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    for seq in range(1, 5):
        await append(journal, operation(run_id, seq))
    stored = [
        (3, pb.STATUS_CANCELLED, RunMarks(0, 0, "")),
        (1, pb.STATUS_FAILED, RunMarks(0, 1, "no room")),
        (2, pb.STATUS_SUCCEEDED, RunMarks(1, 0, "")),
        (3, pb.STATUS_CANCELLED, RunMarks(0, 0, "")),
    ]
    with pytest.raises(LookupError, match="before 2 has no result"):  # storing the first one has failed
        early = pb.OperationResult(seq=2, status=pb.STATUS_SUCCEEDED)
        await journal.put_result(run_id, early, [], RunMarks(1, 0, ""))
    for seq, status, marks in stored:
        await journal.put_result(run_id, pb.OperationResult(seq=seq, status=status), [], marks)
    await journal.close()
    journal = await Journal.open(tmp_path)
    [record] = await RunRecords(journal.store, tmp_path, 10).load()
    assert (record.step, record.failure_seq, record.applied_seq) == (1, 0, 3)
    await journal.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and folders that are fsynced."""
    names, real = list[str](), os.fsync

    def fsync(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


async def test_waiting_writes_share_one_commit(tmp_path: Path, synced: list[str]) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    synced.clear()
    await asyncio.gather(*(append(journal, operation(run_id, seq, size=9), b"123456789") for seq in range(1, 201)))
    assert len(synced) < 50
    await journal.close()


def commits(folder: Path) -> int:
    return Segments(folder / "journal").last_commit()


async def test_an_operation_that_is_stored_with_its_result_is_one_write_and_one_sync(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "OPEN_S", 3600.0)
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    log, payload, written, real = tmp_path / "gradwire.db-wal", b"123456789", list[int](), os.writev

    def writev(fd: int, buffers: list[memoryview]) -> int:
        written.append(fd)
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    size, _ = log.stat().st_size, synced.clear()
    for seq in range(1, 61):
        header, result = operation(run_id, seq, size=9), pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED)
        appended = journal.append(header, 1.0, [payload], within_s=60.0)
        point = pb.HistoryPoint(run_id=run_id, seq=seq, operation="forward_backward")
        await journal.put_result(run_id, result, [], MARKS, point=point, with_operation=True)
        await appended
    assert len(written) == len(synced) == 60 and log.stat().st_size == size
    points = [point async for page in journal.history(run_id) for point in page]
    assert [point.seq for point in points] == list(range(1, 61))
    await journal.close()


async def test_results_that_may_wait_are_synced_with_the_next_that_may_not(tmp_path: Path, synced: list[str]) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    for seq in range(1, 9):
        await append(journal, operation(run_id, seq))
    synced.clear()
    results = [pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED) for seq in range(1, 9)]
    waiting = [journal.put_result(run_id, result, [], MARKS, within_s=60.0) for result in results[:-1]]
    assert not synced
    await asyncio.gather(*waiting, journal.put_result(run_id, results[-1], [], MARKS))
    assert len(synced) == 1 and [each.header for each in await journal.results(run_id, 1, 8)] == results
    await journal.close()


def test_writes_that_are_due_at_once_are_written_on_uvloop_too(tmp_path: Path) -> None:
    async def write() -> None:
        journal = await Journal.open(tmp_path)
        run_id = await new_run(journal, tmp_path)
        headers = [operation(run_id, seq) for seq in range(1, 4)]
        await asyncio.gather(*(journal.append(header, 1.0, [], within_s=1e-5) for header in headers))
        assert [entry.header for entry in await journal.entries(run_id, 0, 10)] == headers
        await journal.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write())


def crashed(folder: Path, to: Path) -> Path:
    """What a server that is killed now leaves behind."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*-shm")))


@pytest.fixture
def never_in_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's transaction ends when a reader asks for it, and not by time."""
    monkeypatch.setattr(database_module, "OPEN_S", 3600.0)


@pytest.mark.usefixtures("never_in_file")
async def test_an_operation_is_in_the_segments_once(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1, loss_fn="a_loss_of_this_name"))
    result = pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED, loss=pb.LossResult(metrics={"a_metric": 1.0}))
    await journal.put_result(run_id, result, [], MARKS)
    [segment] = (tmp_path / "journal").iterdir()
    content = segment.read_bytes()
    assert content.count(b"a_loss_of_this_name") == content.count(b"a_metric") == 1
    assert b"INSERT INTO operations" not in content
    await journal.close()


@pytest.mark.usefixtures("never_in_file")
@pytest.mark.parametrize("keep_payloads", [True, False])
async def test_a_crash_before_sqlite_has_written_loses_nothing(tmp_path: Path, keep_payloads: bool) -> None:
    live = tmp_path / "live"
    journal = await Journal.open(live, keep_payloads=keep_payloads)
    run_id, gone = await new_run(journal, live), await new_run(journal, live)
    runs = RunRecords(journal.store, live, 10)
    [record] = [each for each in await runs.load() if each.run_id == gone]  # reads, so all this is in the file
    for seq in range(1, 6):
        header = operation(run_id, seq, size=3)
        await append(journal, header, b"abc")
        done = pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED, loss=pb.LossResult(loss=seq / 3))
        marks = RunMarks(seq, 0, "é\U0001f600")
        await journal.put_result(run_id, done, [b"scores"], marks, point=pb.HistoryPoint(run_id=run_id, seq=seq))
    await journal.release(run_id, 2)
    await runs.delete(record)
    stored = [pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED) for seq in (6, 7)]
    sixth, ninth = operation(run_id, 6), operation(run_id, 9)
    one_commit = (  # what has failed is taken back, and must not come back
        journal.append(sixth, 1.0, []),
        journal.put_result(run_id, stored[0], [], RunMarks(6, 0, "")),
        journal.put_result(run_id, stored[1], [], RunMarks(99, 0, ""), with_operation=True),
        journal.append(ninth, 1.0, []),
        journal.release(run_id, 3),
    )
    outcomes = await asyncio.gather(*one_commit, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), type(None), LookupError, LookupError, type(None)]
    left = crashed(live, tmp_path / "left")
    with closing(sqlite3.connect(left / "gradwire.db")) as database:
        assert database.execute("SELECT max(accepted_seq) FROM runs").fetchall() == [(0,)]
    state_folder.check(left)
    assert [each.header for each in await journal.results(run_id, 6, 9)] == stored[:1]
    [record] = [each for each in await runs.load() if each.run_id == run_id]
    assert (record.accepted_seq, record.applied_seq, record.step) == (6, 6, 6)
    rows = "SELECT * FROM {} ORDER BY 1, 2"
    tables = ("runs", "operations", "results", "history", "history_kinds", "uses", "checkpoints")
    expected = [await journal.store.read(lambda c, t=table: c.execute(rows.format(t)).fetchall()) for table in tables]
    await journal.close()
    for _ in range(2):  # the second start finds nothing to do
        journal = await Journal.open(left)
        found = [await journal.store.read(lambda c, t=table: c.execute(rows.format(t)).fetchall()) for table in tables]
        assert found == expected
        assert await journal.store.read(newest_commit) == commits(left)
        await journal.close()


@pytest.mark.usefixtures("never_in_file")
async def test_a_database_behind_a_commit_that_is_damaged_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    live = tmp_path / "live"
    journal = await Journal.open(live)
    run_id = await new_run(journal, live)
    for seq in range(1, 6):
        await append(journal, operation(run_id, seq))
    left = crashed(live, tmp_path / "left")
    await journal.close()
    [segment] = (left / "journal").iterdir()
    ends = [record.end for record in Segments(left / "journal").records(int(segment.stem))]
    content = bytearray(segment.read_bytes())
    content[ends[4] - 1] ^= 1
    segment.write_bytes(content)
    with pytest.raises(state_folder.StateFolderError, match="gradwire repair"):
        state_folder.check(left)
    with closing(sqlite3.connect(left / "gradwire.db")) as database:
        assert database.execute("SELECT * FROM operations").fetchall() == []


async def test_what_sqlite_cannot_write_is_kept_in_the_segments(tmp_path: Path, never_in_file: None) -> None:
    live = tmp_path / "live"
    journal = await Journal.open(live)
    run_id = await new_run(journal, live)
    [(pages,)] = await journal.store.read(lambda c: c.execute("PRAGMA page_count").fetchall())

    async def limit(number: int) -> None:
        await journal.store.write(lambda connection: connection.execute(f"PRAGMA max_page_count = {number}").close())

    await limit(pages + 3)
    accepted = 0
    with pytest.raises(ServiceError, match="disk is full"):
        for seq in range(1, 999):
            header = operation(run_id, seq, loss_fn="a" * 300)
            await append(journal, header)
            accepted = seq
    assert accepted > 3
    assert [entry.header.seq for entry in await journal.entries(run_id, 0, 999)] == list(range(1, accepted + 1))
    left = crashed(live, tmp_path / "left")
    await limit(1 << 20)
    await append(journal, operation(run_id, accepted + 1))
    assert [entry.header.seq for entry in await journal.entries(run_id, 0, 999)] == list(range(1, accepted + 2))
    await journal.close()
    state_folder.check(left)
    journal = await Journal.open(left)
    assert [entry.header.seq for entry in await journal.entries(run_id, 0, 999)] == list(range(1, accepted + 1))
    await journal.close()


async def test_the_number_of_the_newest_commit_outlives_the_run_that_had_it(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    runs = RunRecords(journal.store, tmp_path, 10)
    record = new_record("", pb.RunConfig(base_model="tiny"), "", b"")
    runs.reserve(record)
    await runs.finish(record, 1, 0, {})
    for seq in range(1, 6):
        await append(journal, operation(record.run_id, seq))
    busy = journal.store.write(lambda connection: time.sleep(0.2))  # what is asked for meanwhile shares a commit
    await asyncio.sleep(0.01)
    await asyncio.gather(busy, append(journal, operation(record.run_id, 6)), runs.delete(record))
    assert await journal.store.read(newest_commit) == journal.segments.last_commit()
    await journal.close()
    state_folder.check(tmp_path)


async def test_a_run_is_created_in_one_commit_and_then_described(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    runs, facts = RunRecords(journal.store, tmp_path, 10), {"torch": "2.13"}
    record = new_record("ada", pb.RunConfig(base_model="tiny"), "key", b"request")
    runs.reserve(record)
    assert runs.owned("ada") == 1 and runs.by_key("ada", "key") is record
    before = commits(tmp_path)
    await runs.finish(record, 7, 0, facts)
    assert commits(tmp_path) == before + 1
    [(seq, _, found, note)] = await journal.facts.of(record.run_id)
    assert (seq, found, note) == (0, facts, "")
    description = read_description(tmp_path / "runs" / record.run_id)
    assert description is not None and description.num_trainable_parameters == 7
    await runs.delete(record)
    assert runs.owned("ada") == 0 and runs.by_key("ada", "key") is None
    await journal.close()


async def test_a_start_writes_the_description_that_a_crash_has_left_out(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    first, second = await new_run(journal, tmp_path), await new_run(journal, tmp_path)
    shutil.rmtree(tmp_path / "runs" / first)
    kept = (tmp_path / "runs" / second / RUN_FILE).stat().st_mtime_ns
    loaded = await RunRecords(journal.store, tmp_path, 10).load()
    assert {record.run_id for record in loaded} == {first, second}
    description = read_description(tmp_path / "runs" / first)
    assert description is not None and description.run_id == first
    assert (tmp_path / "runs" / second / RUN_FILE).stat().st_mtime_ns == kept
    await journal.close()


async def test_a_key_made_for_a_damaged_run_leaves_its_row_alone(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    runs = RunRecords(journal.store, tmp_path, 10)
    for again in (False, True):
        record = new_record("ada", pb.RunConfig(base_model="tiny"), "key", b"request")
        runs.reserve(record)
        with nullcontext() if not again else pytest.raises(sqlite3.IntegrityError):
            await runs.finish(record, 7, 0, {})
    assert len(await RunRecords(journal.store, tmp_path, 10).load()) == 1
    await journal.close()


async def test_a_release_joins_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "LATER_S", 3600.0)
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1))
    await journal.put_result(run_id, pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED), [], MARKS)
    before = commits(tmp_path)
    released, appended = journal.release(run_id, 1), append(journal, operation(run_id, 2))
    await appended
    await released
    assert commits(tmp_path) == before + 1 and await journal.results(run_id, 1, 9) == []
    last = journal.release(run_id, 2)
    await journal.close()
    await last


async def test_a_release_that_nothing_follows_is_written_all_the_same(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    before = commits(tmp_path)
    await journal.release(run_id, 1)
    assert commits(tmp_path) == before + 1
    await journal.close()


def test_a_segment_cut_anywhere_in_its_last_record_loses_that_record_only(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "whole")
    kept = segments.append([b"first"])
    last = segments.append([b"sec", b"ond"])
    segments.close()
    [file] = (tmp_path / "whole").iterdir()
    data = file.read_bytes()
    for size in range(last.offset, len(data)):
        folder = tmp_path / f"cut-{size}"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder / file.name, size)
        opened = Segments(folder)
        assert opened.read(kept) == b"first"
        with pytest.raises(CorruptRecord):
            opened.read(last)
        again = opened.append([b"third"])
        opened.sync()
        assert opened.read(again) == b"third" and opened.read(kept) == b"first"
        opened.close()


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    where = segments.append([b"the bytes of a payload"])
    segments.close()
    [file] = tmp_path.iterdir()
    data = file.read_bytes()
    for position in range(len(data)):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CorruptRecord):
            segments.read(where)


async def test_a_crash_between_payload_and_row_leaves_nothing_half_written(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1, size=3), b"abc")
    await journal.close()
    [file] = (tmp_path / "journal").iterdir()
    with file.open("ab") as torn:
        torn.write(b"gwr1" + bytes(10))
    journal = await Journal.open(tmp_path)
    [entry] = await journal.entries(run_id, 0, 10)
    assert entry.location is not None and await journal.payload(entry.location) == b"abc"
    await append(journal, operation(run_id, 2, size=3), b"def")
    entry = (await journal.entries(run_id, 1, 10))[0]
    assert entry.location is not None and await journal.payload(entry.location) == b"def"
    await journal.close()


async def test_a_damaged_result_is_said_to_be_damaged(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    await append(journal, operation(run_id, 1))
    await journal.put_result(run_id, pb.OperationResult(seq=1, status=pb.STATUS_SUCCEEDED), [b"scores"], MARKS)
    [file] = (tmp_path / "journal").iterdir()
    file.write_bytes(file.read_bytes().replace(b"scores", b"scored"))
    [stored] = await journal.results(run_id, 1, 1)
    assert (stored.header.status, stored.header.error.code) == (pb.STATUS_FAILED, pb.ERROR_CODE_PAYLOAD_CORRUPT)
    await journal.close()


async def test_a_full_disk_refuses_and_service_resumes_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)
    with monkeypatch.context() as full:

        def no_space(fd: int) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(os, "fsync", no_space)
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                await append(journal, operation(run_id, 1, size=3), b"abc")
            assert caught.value.code == pb.ERROR_CODE_STORAGE_FULL
    [said] = [line.getMessage() for line in caplog.records if "is full" in line.getMessage()]
    assert str(tmp_path) in said, "the operator is told, once a minute"
    assert await journal.entries(run_id, 0, 10) == []
    await append(journal, operation(run_id, 1, size=3), b"abc")
    [entry] = await journal.entries(run_id, 0, 10)
    assert entry.location is not None and await journal.payload(entry.location) == b"abc"
    await journal.close()


async def test_what_a_run_measured_can_be_read_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await Journal.open(tmp_path)
    run_id = await new_run(journal, tmp_path)

    async def measure(seq: int) -> None:
        await append(journal, operation(run_id, seq))
        point = pb.HistoryPoint(run_id=run_id, seq=seq, operation="forward_backward")
        await journal.put_result(
            run_id, pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED), [], MARKS, point=point
        )

    async def measured() -> list[int]:
        return [point.seq async for page in journal.history(run_id) for point in page]

    await measure(1)
    assert await measured() == [1]
    await measure(2)
    real = journal.store.write

    def full(work: Any, **options: Any) -> asyncio.Future[Any]:
        def no_room(connection: sqlite3.Connection) -> None:
            work(connection)
            raise sqlite3.OperationalError("database or disk is full")

        return real(no_room, **options)

    with monkeypatch.context() as disk:
        disk.setattr(journal.store, "write", full)
        assert await measured() == [1, 2]
    assert await measured() == [1, 2]
    await journal.close()


async def test_segments_that_nothing_refers_to_are_deleted_and_no_others(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    sizes = random.Random(seed)
    journal = await Journal.open(tmp_path, segment_bytes=1000)
    run_id = await new_run(journal, tmp_path)
    payloads = {seq: bytes([seq]) * sizes.randrange(1, 600) for seq in range(1, 31)}
    for seq, payload in payloads.items():
        await append(journal, operation(run_id, seq, size=len(payload)), payload)
        await journal.put_result(run_id, pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED), [], MARKS)
    before = len(journal.segments.numbers())
    await journal.retention.trim(run_id, 20)
    await journal.retention.collect()
    assert len(journal.segments.numbers()) < before
    entries = await journal.entries(run_id, 0, 30)
    assert [entry.location is None for entry in entries] == [seq <= 20 for seq in range(1, 31)]
    for entry in entries[20:]:
        assert entry.location is not None
        assert await journal.payload(entry.location) == payloads[entry.header.seq]
    await journal.release(run_id, 10)
    await journal.retention.trim(run_id, 20)
    assert [entry.header.seq for entry in await journal.entries(run_id, 0, 30)] == list(range(11, 31))
    assert await journal.identity_of(run_id, 10) is None and await journal.identity_of(run_id, 11) is not None
    await journal.close()


async def test_short_operations_that_are_trimmed_do_not_pile_up_in_a_segment(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path / "state")
    run_id = await new_run(journal, tmp_path)
    payloads = [bytes([seq]) * (COLLECTED_BYTES // 4) for seq in range(17)]
    for seq in range(1, 17):
        await append(journal, operation(run_id, seq, size=len(payloads[seq])), payloads[seq])
        await journal.put_result(run_id, pb.OperationResult(seq=seq, status=pb.STATUS_SUCCEEDED), [], MARKS)
        await journal.retention.trim(run_id, seq - 2)
        await journal.retention.collect()
    assert sum(path.stat().st_size for path in (tmp_path / "state" / "journal").iterdir()) < 3 * COLLECTED_BYTES
    for entry in await journal.entries(run_id, 14, 16):
        assert entry.location is not None and await journal.payload(entry.location) == payloads[entry.header.seq]
    await journal.close()


def test_a_database_gives_back_what_deletions_left(tmp_path: Path) -> None:
    """Each time no more than so many pages, all of them in the end."""
    file = tmp_path / "a.db"
    with closing(connect(file)) as database:
        database.execute("CREATE TABLE a (content BLOB)")
        database.execute("INSERT INTO a VALUES (zeroblob(?))", [(2 * GIVEN_BACK_PAGES + FREE_PAGES) << 12])
        database.execute("DELETE FROM a")
        for left in (GIVEN_BACK_PAGES, 0, 0):
            database.execute("BEGIN")
            give_back_space(database)
            database.execute("COMMIT")
            assert file.stat().st_size <= (left + FREE_PAGES + 16) << 12


def test_the_identity_is_of_the_content_and_not_of_the_submission() -> None:
    one, two = operation("run-a", 1, size=3), operation("run-a", 1, size=3)
    two.failure_seen, two.epoch = 7, 9
    assert identity(one) == identity(two)
    for change in ({"payload_digest": b"x"}, {"tensors": [pb.TensorSpec(name="x")]}, {"payload_bytes": 4}):
        other = operation("run-a", 1, size=3)
        other.MergeFrom(pb.OperationHeader(**change))  # type: ignore[arg-type]
        assert identity(other) != identity(one)
    assert identity(operation("run-a", 1, "b", size=3)) != identity(one)


async def test_the_database_survives_the_loss_of_a_power_that_was_not_told(tmp_path: Path) -> None:
    """synchronous=FULL is a setting of each connection: the one that writes must have it."""
    journal = await Journal.open(tmp_path)

    def mode(connection: sqlite3.Connection) -> tuple[str, int]:
        return (
            connection.execute("PRAGMA journal_mode").fetchone()[0],
            connection.execute("PRAGMA synchronous").fetchone()[0],
        )

    assert await journal.store.write(mode) == ("wal", 2)
    await journal.close()
