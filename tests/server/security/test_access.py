"""Every RPC with every kind of key: what is allowed, what is refused, and that a refused call changes nothing."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.access import KEYS, PLACES, SECURITY, expected, rpcs, with_tables
from support.front import Client
from support.keyed import BEGIN_UPLOAD, code_of, outcome

NAMES = dict(zip(KEYS, ("", "gw_wrong", "eve", "bob", "carl", "ada", "root"), strict=True))
DELETES = ("DeleteRun", "DeleteCheckpoint", "AckResults", "DeleteUpload")


def requests(rpc: str, run: Client, run_id: str) -> list[Any]:
    """Of a call about a run; `run` has its epoch."""
    upload_id = run.upload_id if run_id == run.run_id else "upload-nobody"
    checkpoint, config = f"{run_id}/c", pb.RunConfig(base_model="tiny")
    if rpc == "Submit":
        loss = pb.Operation(forward_backward=pb.LossCall(loss_fn="x"))
        return [
            pb.SubmitFrame(header=pb.OperationHeader(run_id=run_id, epoch=run.epoch, seq=3, operation=loss)),
        ]
    return [
        {
            "CreateRun": lambda: pb.CreateRunRequest(config=config),
            "BeginUpload": lambda: BEGIN_UPLOAD,
            "WriteUpload": lambda: pb.WriteUploadRequest(
                upload_id=upload_id, file="adapter_model.safetensors", chunk=b"weights"
            ),
            "FinishUpload": lambda: pb.FinishUploadRequest(upload_id=upload_id),
            "DeleteUpload": lambda: pb.DeleteUploadRequest(upload_id=upload_id),
            "ForkRun": lambda: pb.ForkRunRequest(checkpoint=checkpoint),
            "ShareRun": lambda: pb.ShareRunRequest(run_id=run_id, reader="carl"),
            "OpenRun": lambda: pb.OpenRunRequest(run_id=run_id, takeover=True, writer="w"),
            "Results": lambda: pb.ResultsRequest(run_id=run_id, from_seq=1),
            "AckResults": lambda: pb.AckResultsRequest(run_id=run_id, up_to_seq=1, epoch=run.epoch),
            "Cancel": lambda: pb.CancelRequest(run_id=run_id, seq=1, epoch=run.epoch),
            "DiscardPending": lambda: pb.DiscardPendingRequest(run_id=run_id, epoch=run.epoch),
            "AcceptChanges": lambda: pb.AcceptChangesRequest(run_id=run_id),
            "MoveRun": lambda: pb.MoveRunRequest(run_id=run_id),
            "Sample": lambda: pb.SampleRequest(model=checkpoint, call=pb.SampleCall(prompts=["x"], max_tokens=1)),
            "StreamSample": lambda: pb.SampleRequest(model=checkpoint, call=pb.SampleCall(prompts=["x"], max_tokens=1)),
            "DeleteCheckpoint": lambda: pb.DeleteCheckpointRequest(checkpoint=checkpoint),
            "Download": lambda: pb.DownloadRequest(checkpoint=checkpoint),
            "Encode": lambda: pb.EncodeRequest(model="tiny", texts=["x"]),
            "Decode": lambda: pb.DecodeRequest(model="tiny"),
            "GetRun": lambda: pb.GetRunRequest(run_id=run_id),
            "GetHistory": lambda: pb.GetHistoryRequest(run_id=run_id),
            "ListOperations": lambda: pb.ListOperationsRequest(run_id=run_id),
            "ListRecordings": lambda: pb.ListRecordingsRequest(run_id=run_id),
            "ReadRecording": lambda: pb.ReadRecordingRequest(run_id=run_id, kind="rollouts", number=1),
            "RecordRollouts": lambda: pb.RecordRolloutsRequest(run_id=run_id, iteration=1, rollouts_json=b"[]"),
            "DeleteRun": lambda: pb.DeleteRunRequest(run_id=run_id),
            "ListCheckpoints": lambda: pb.ListCheckpointsRequest(run_id=run_id),
        }.get(rpc, lambda: getattr(pb, f"{rpc}Request")())()
    ]


def test_every_rpc_has_its_place() -> None:
    assert set(PLACES) == set(rpcs()), "a new RPC: say in tests/support/access.py who may call it, and try it here"


def test_the_tables_in_security_md_are_these() -> None:
    text = SECURITY.read_text()
    assert text == with_tables(text), "run: python tests/support/access.py"


def test_every_threat_names_tests_that_exist() -> None:
    text = (Path(__file__).parent / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    shown = SECURITY.read_text().partition("## Threats")[2]
    assert [row for row in rows if f"| {row.split(' | ')[0][2:]} |" not in shown] == []
    assert len(rows) > 20
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rsplit("|", 2)[1])
        assert tests, row
        for path, name in tests:
            source = (SECURITY.parent / path).read_text()
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{path}::{name}"


@pytest.mark.long
async def test_every_rpc_with_every_key(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        clients = {key: await door.client(name) for key, name in NAMES.items()}
        await ada.stub.RecordRollouts(*requests("RecordRollouts", ada, ada.run_id))
        before = (await ada.stub.GetRun(pb.GetRunRequest(run_id=ada.run_id))).SerializeToString(deterministic=True)
        wrong = []
        for rpc in rpcs():
            for key in (key for key in KEYS if expected(rpc, key) != "yes"):
                answer = await outcome(clients[key].stub, rpc, *requests(rpc, ada, ada.run_id))
                code = code_of(answer)
                if code.replace("_run", "").replace("_checkpoint", "") != expected(rpc, key):
                    wrong.append((rpc, key, code))
                if key == "another's key" and isinstance(answer, pb.Error):  # nothing tells the two apart
                    nobody = await outcome(clients[key].stub, rpc, *requests(rpc, ada, "run-nobody"))
                    answer.message = answer.message.replace(ada.run_id, "run-nobody").replace(
                        ada.upload_id, "upload-nobody"
                    )
                    assert answer.request_id != nobody.request_id
                    answer.request_id = nobody.request_id
                    assert answer == nobody
        after = (await ada.stub.GetRun(pb.GetRunRequest(run_id=ada.run_id))).SerializeToString(deterministic=True)
        assert wrong == [] and before == after and len(door.engine.seen) == 2
        for rpc in sorted(rpcs(), key=lambda rpc: rpc in DELETES):
            for key in (key for key in KEYS if expected(rpc, key) == "yes"):
                run = await door.shared_run() if rpc in DELETES else ada
                if rpc in ("OpenRun", "Submit"):
                    run = await (await door.client("ada")).begin()
                    await run.fb(1)
                    await run.fb(2)
                code = code_of(await outcome(clients[key].stub, rpc, *requests(rpc, run, run.run_id)))
                if code not in ("yes", "unsupported"):  # the fake engine has no tokenizer
                    wrong.append((rpc, key, code))
        assert wrong == []


async def test_what_another_tries_on_a_pending_operation_leaves_it_pending(keyed: Any) -> None:
    async with keyed() as door:
        ada, bob = await (await door.client("ada")).begin(), await door.client("bob")
        door.engine.gate.clear()
        await ada.fb(1, "a", b"payload")
        for rpc in ("Results", "Cancel", "AckResults", "OpenRun", "DeleteRun"):
            assert code_of(await outcome(bob.stub, rpc, *requests(rpc, ada, ada.run_id))) == "unknown_run"
        door.engine.gate.set()
        [(result, payload)] = await ada.results(1)
        assert result.status == pb.STATUS_SUCCEEDED and payload == b"payload"


async def test_runs_are_listed_to_those_who_may_read_them(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()

        async def listed(name: str) -> list[str]:
            page = await (await door.client(name)).stub.ListRuns(pb.ListRunsRequest())
            return [run.run_id for run in page.runs]

        assert [await listed(name) for name in ("ada", "carl", "root", "bob")] == [[ada.run_id]] * 3 + [[]]
        await ada.stub.ShareRun(pb.ShareRunRequest(run_id=ada.run_id, reader="carl", revoke=True))
        assert await listed("carl") == []


async def test_sharing_ends_for_a_reader_of_results_too(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        reading = (await door.client("carl")).stub.Results(pb.ResultsRequest(run_id=ada.run_id, from_seq=1))
        assert [(await reading.read()).header.seq for _ in range(2)] == [1, 2]
        await ada.stub.ShareRun(pb.ShareRunRequest(run_id=ada.run_id, reader="carl", revoke=True))
        await ada.fb(3)
        with pytest.raises(Exception, match="there is no run"):
            await reading.read()


async def test_a_run_is_shared_many_times_at_once(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        shares = [pb.ShareRunRequest(run_id=ada.run_id, reader="carl", revoke=bool(place % 2)) for place in range(40)]
        answers = await asyncio.gather(*(outcome(ada.stub, "ShareRun", share) for share in shares))
        assert {code_of(answer) for answer in answers} == {"yes"}


async def test_a_run_is_shared_only_with_a_key_that_exists(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        for reader in ("nobody", "eve", "ada", ""):
            request = pb.ShareRunRequest(run_id=ada.run_id, reader=reader)
            assert code_of(await outcome(ada.stub, "ShareRun", request)) == "invalid_argument"


def naming(path: str) -> list[dict[str, Any]]:
    """Operations that read a checkpoint."""
    kwargs = json.dumps({"reference_model": path})
    escaped = kwargs.replace("r", "\\u0072")
    return [
        {"load_checkpoint": pb.LoadCheckpoint(checkpoint=path)},
        {"forward": pb.LossCall(model=path)},
        {"forward": pb.LossCall(loss_fn="dpo", loss_kwargs_json=kwargs)},
        {"forward_backward": pb.LossCall(loss_fn="dpo", loss_kwargs_json=kwargs)},
        {"forward_backward": pb.LossCall(loss_fn="dpo", loss_kwargs_json=escaped)},
    ]


async def test_an_operation_reads_only_checkpoints_that_its_runs_owner_may_read(keyed: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        bob, carl = [await (await door.client(name)).begin() for name in ("bob", "carl")]
        seen = len(door.engine.seen)
        theirs, nobodys = f"{ada.run_id}/c", "run-aaaaaaaaaaaaaaaa/c"
        messages: dict[str, list[str]] = {}
        seq = 0
        for path in (theirs, nobodys):
            for operation in naming(path):
                seq += 1
                await bob.submit(seq, failure_seen=seq - 1, **operation)
                [(result, _)] = await bob.results(1, seq)
                assert result.error.code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT, operation
                messages.setdefault(path, []).append(result.error.message.replace(path, "PATH"))
        assert messages[theirs] == messages[nobodys] and len(door.engine.seen) == seen
        for seq, operation in enumerate(naming(theirs), 1):
            await carl.submit(seq, **operation)
        assert await carl.statuses(5) == ["ok"] * 5


async def test_what_a_restart_takes_up_is_held_to_the_same(keyed: Any, start: Any) -> None:
    async with keyed() as door:
        ada = await door.shared_run()
        bob = await (await door.client("bob")).begin()
        door.engine.gate.clear()
        await bob.fb(1)
        await bob.submit(2, load_checkpoint=pb.LoadCheckpoint(checkpoint=f"{ada.run_id}/c"))
        secrets = door.secrets
    async with start() as again:
        client = await again.client()
        client.stub = type(bob.stub)(client.stub, secrets["bob"])
        client.run_id = bob.run_id
        assert await client.statuses(2) == ["ok", "unknown_checkpoint"]
