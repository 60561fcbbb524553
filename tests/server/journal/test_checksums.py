"""Small files of the state folder say so when they are damaged; those of earlier versions have no checksum."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile
from gradwire_server.access.signing import URL_SECRET, UrlSecret
from gradwire_server.checkpoint_files import SUMS, DamagedCheckpoint, check_files, write_sums
from gradwire_server.doors.http.tinker.store import FILE, SessionRecord, TinkerStore
from gradwire_server.errors import ServiceError
from gradwire_server.journal.recorded_files import RecordedFiles


def damaged(content: bytes) -> Iterator[bytes]:
    """A content with a bit of each byte flipped in turn, and without its end."""
    yield from (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(len(content)))
    yield from (content[: len(content) // 2], content[:-1], b"")


def refused(file: Path, read: Callable[[], object], error: type[BaseException]) -> None:
    whole = file.read_bytes()
    for content in damaged(whole):
        file.write_bytes(content)
        with pytest.raises(error, match=r"damaged|has changed|bytes"):
            read()
    file.write_bytes(whole)
    read()


def test_a_damaged_file_of_keys_opens_nothing(tmp_path: Path) -> None:
    KeyFile(tmp_path).create("ada")
    file = tmp_path / "keys.json"
    file.write_bytes(file.read_bytes().replace(b"\n ", b""))  # white space is no part of what is summed
    whole = KeyFile(tmp_path).read()
    for content in damaged(file.read_bytes()):
        kept = file.read_bytes()
        file.write_bytes(content)
        with contextlib.suppress(ValueError):
            assert KeyFile(tmp_path).read() == whole
        file.write_bytes(kept)


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    files = RecordedFiles(tmp_path, 1 << 20)
    files.write("run-a", pb.Recording(kind="batch", number=3, time=1.5), [b"hello"])
    [file] = (tmp_path / "recorded" / "run-a").iterdir()
    refused(file, lambda: files.read("run-a", "batch", 3), ServiceError)
    file.write_bytes(file.read_bytes()[:-16])  # of an earlier version
    assert files.read("run-a", "batch", 3)[1] == b"hello"


def test_a_damaged_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    check_files(tmp_path, "exports")  # of an earlier version
    write_sums(tmp_path)
    refused(tmp_path / "weights", lambda: check_files(tmp_path, "exports"), DamagedCheckpoint)
    (tmp_path / SUMS).write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        check_files(tmp_path, "exports")


def test_a_damaged_secret_of_urls_is_made_anew(tmp_path: Path) -> None:
    secret = UrlSecret(tmp_path)
    first = secret.value
    for content in (first[:40], "", first + "0"):
        (tmp_path / URL_SECRET).write_text(content)
        assert len(secret.value) == 64 and secret.value != first


async def test_a_damaged_record_of_tinkers_ends_the_start(tmp_path: Path) -> None:
    async def opened() -> list[str]:
        store = TinkerStore(tmp_path)
        try:
            await store.open()
            return list(store.sessions)
        finally:
            await store.close()

    def change(sql: str) -> None:
        with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
            database.execute(sql)

    store = TinkerStore(tmp_path)
    await store.open()
    await store.put(store.sessions, SessionRecord(owner="ada", session_id="s", tags=["}"]))
    await store.close()
    assert await opened() == ["s"]
    change("UPDATE records SET record = replace(record, 'ada', 'bob')")
    with pytest.raises(SystemExit, match=r"tinker\.db is damaged"):
        await opened()
    change("UPDATE records SET record = replace(substr(record, 1, length(record) - 32), 'bob', 'ada')")
    assert await opened() == ["s"]  # of an earlier version
    (tmp_path / FILE).write_bytes(b"no database, but as long as one" * 300)
    with pytest.raises(SystemExit, match=r"tinker\.db is damaged"):
        await opened()
