"""Uploads on the server: chunks in any order of retries, limits, what is kept over a restart and what is collected."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.journal.upload_folders import UploadFolders
from support.front import Door, Start, start
from support.keyed import BEGIN_UPLOAD, FILES, error_of, uploaded

__all__ = ["start"]

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
async def door(start: Start) -> Any:
    async with start() as door:
        yield door


def part(upload_id: str, offset: int, chunk: bytes, file: str = WEIGHTS) -> pb.WriteUploadRequest:
    return pb.WriteUploadRequest(upload_id=upload_id, file=file, offset=offset, chunk=chunk)


async def refused(call: Any) -> pb.Error:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_of(caught.value)


async def test_chunks_that_are_repeated_add_nothing_and_gaps_are_refused(door: Door) -> None:
    stub = (await door.client()).stub
    upload = await stub.BeginUpload(BEGIN_UPLOAD)
    written = [(0, b"wei"), (0, b"wei"), (2, b"igh"), (5, b"ts"), (5, b"ts")]
    sizes = [(await stub.WriteUpload(part(upload.upload_id, *each))).received_bytes for each in written]
    assert sizes == [3, 3, 5, 7, 7]
    await stub.WriteUpload(part(upload.upload_id, 0, FILES["adapter_config.json"][:9], "adapter_config.json"))
    again = await stub.BeginUpload(BEGIN_UPLOAD)
    assert again.upload_id == upload.upload_id and [file.received_bytes for file in again.files] == [9, 7]
    for wrong, message in [
        (part(upload.upload_id, 10, b"x", "adapter_config.json"), "leaves a gap: 9 bytes"),
        (part(upload.upload_id, 6, b"xx"), "does not fit"),
        (part(upload.upload_id, 0, b"x", "../../keys.json"), "has no file '../../keys.json'"),
    ]:
        assert message in (await refused(stub.WriteUpload(wrong))).message
    finish = pb.FinishUploadRequest(upload_id=upload.upload_id)
    assert "adapter_config.json has not arrived" in (await refused(stub.FinishUpload(finish))).message
    rest = part(upload.upload_id, 9, FILES["adapter_config.json"][9:], "adapter_config.json")
    await stub.WriteUpload(rest)
    finished = await asyncio.gather(*(stub.FinishUpload(finish) for _ in range(3)))
    assert all(each.ready for each in finished)
    assert (await stub.WriteUpload(rest)).received_bytes == len(FILES["adapter_config.json"])


async def test_a_damaged_file_is_sent_again(door: Door) -> None:
    stub = (await door.client()).stub
    upload = await stub.BeginUpload(BEGIN_UPLOAD)
    await stub.WriteUpload(part(upload.upload_id, 0, FILES["adapter_config.json"], "adapter_config.json"))
    await stub.WriteUpload(part(upload.upload_id, 0, b"weighty"))
    finish = pb.FinishUploadRequest(upload_id=upload.upload_id)
    assert (await refused(stub.FinishUpload(finish))).code == pb.ERROR_CODE_PAYLOAD_CORRUPT
    received = {file.name: file.received_bytes for file in (await stub.BeginUpload(BEGIN_UPLOAD)).files}
    assert received[WEIGHTS] == 0 and received["adapter_config.json"] > 0
    await stub.WriteUpload(part(upload.upload_id, 0, FILES[WEIGHTS]))
    assert (await stub.FinishUpload(finish)).ready


async def test_who_begins_the_same_upload_meanwhile_can_write_at_once(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = (await door.client()).stub
    create = UploadFolders.create

    def slow(folders: UploadFolders, described: Any) -> None:
        time.sleep(0.3)
        create(folders, described)

    monkeypatch.setattr(UploadFolders, "create", slow)

    async def begin_and_write() -> int:
        upload = await stub.BeginUpload(BEGIN_UPLOAD)
        return int((await stub.WriteUpload(part(upload.upload_id, 0, b"wei"))).received_bytes)

    assert await asyncio.gather(*(begin_and_write() for _ in range(3))) == [3, 3, 3]


async def test_a_chunk_beside_the_end_of_its_upload_adds_nothing(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = (await door.client()).stub
    upload = await stub.BeginUpload(BEGIN_UPLOAD)
    for name, content in FILES.items():
        await stub.WriteUpload(part(upload.upload_id, 0, content, name))
    finishing, check = asyncio.Event(), UploadFolders.check
    loop = asyncio.get_running_loop()

    def slow(folders: UploadFolders, upload: pb.Upload) -> None:
        loop.call_soon_threadsafe(finishing.set)
        time.sleep(0.3)
        check(folders, upload)

    monkeypatch.setattr(UploadFolders, "check", slow)
    end = asyncio.ensure_future(stub.FinishUpload(pb.FinishUploadRequest(upload_id=upload.upload_id)))
    await finishing.wait()
    assert (await stub.WriteUpload(part(upload.upload_id, 0, b"wei"))).received_bytes == len(FILES[WEIGHTS])
    assert (await end).ready


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda asked: asked.files.pop(), "the folder lacks adapter_model.safetensors"),
        (lambda asked: setattr(asked, "kind", "merge"), "kind is 'merge'"),
        (lambda asked: setattr(asked.files[1], "name", "../evil.json"), "cannot be uploaded"),
        (lambda asked: setattr(asked.files[1], "name", "weights.bin"), "cannot be uploaded"),
        (lambda asked: setattr(asked.files[1], "digest", b"short"), "BLAKE2b-256"),
        (lambda asked: asked.files.append(asked.files[0]), "each once"),
        (lambda asked: setattr(asked.files[0], "head", b"[1]"), "holds no JSON object"),
        (lambda asked: setattr(asked.files[1], "size_bytes", 1 << 50), "max_upload_bytes"),
        (lambda asked: setattr(asked.files[1], "size_bytes", 200), "its quota is 100"),
    ],
)
async def test_what_may_be_uploaded(start: Start, change: Any, message: str) -> None:
    asked = pb.BeginUploadRequest()
    asked.CopyFrom(BEGIN_UPLOAD)
    change(asked)
    async with start(limits={"max_upload_bytes": 1000, "key_upload_bytes": 100}) as door:
        stub = (await door.client()).stub
        assert message in (await refused(stub.BeginUpload(asked))).message
        assert not (await stub.ListUploads(pb.ListUploadsRequest())).uploads


async def test_abandoned_uploads_are_collected_and_finished_ones_stay(start: Start, tmp_path: Path) -> None:
    async with start() as door:
        stub = (await door.client()).stub
        done = await uploaded(stub)
        await stub.FinishUpload(pb.FinishUploadRequest(upload_id=done))
        other = pb.BeginUploadRequest()
        other.CopyFrom(BEGIN_UPLOAD)
        other.files[0].head = b'{"base_model_name_or_path": "org/tiny"}'
        left = (await stub.BeginUpload(other)).upload_id
    folder = tmp_path / "uploads" / left
    assert not (folder.parent / done / "files").exists()
    async with start() as door:
        stub = (await door.client()).stub
        assert {each.upload_id for each in (await stub.ListUploads(pb.ListUploadsRequest())).uploads} == {done, left}
    for upload in (left, done):
        os.utime(folder.parent / upload / "upload.json", times=(time.time() - 90_000,) * 2)
    (folder.parent / "upload-torn").mkdir()
    (folder.parent / "upload-torn" / "upload.json").write_text("{")
    async with start() as door:
        stub = (await door.client()).stub
        assert [each.upload_id for each in (await stub.ListUploads(pb.ListUploadsRequest())).uploads] == [done]
        assert {each.name for each in folder.parent.iterdir()} == {done}
        await stub.DeleteUpload(pb.DeleteUploadRequest(upload_id=done))
        assert list(folder.parent.iterdir()) == []
