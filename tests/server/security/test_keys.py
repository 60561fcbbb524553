"""API keys: made, shown once, revoked at once; and how much each may ask for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import httpx
import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile, Quota
from gradwire_server.access.keys import LOOK_AGAIN_S, Keys
from gradwire_server.access.turns import SHARED_S
from gradwire_server.cli.app import app
from gradwire_server.config import ServerConfig
from gradwire_server.doors.http.tinker import audit
from gradwire_server.engine_link.crash_marks import SLOTS
from gradwire_server.errors import ServiceError
from gradwire_server.scheduling import who_is_next
from gradwire_server.scheduling.operation import Load
from gradwire_server.scheduling.who_is_next import (
    AHEAD,
    KEY_SAMPLES_AHEAD,
    LEAST_TOKENS,
    PIPE_TOKENS,
    SAMPLES_AHEAD,
    SHARED_TOKENS,
    SMALL_AHEAD,
    FairQueue,
)
from gradwire_server.server import Server
from support.fake_engine import FakeEngine
from support.front import Client, Start
from support.keyed import Keyed, code_of, outcome
from support.scripted import until
from typer.testing import CliRunner

LIST = pb.ListRunsRequest()


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["keys", *words])


def test_keys_are_made_listed_and_revoked_from_the_command_line(tmp_path: Path) -> None:
    place = ("--state-dir", str(tmp_path / "state"))
    made = command("create", "ada", "--admin", "--runs", "3", *place)
    secret = made.stdout.strip()
    assert made.exit_code == 0 and re.fullmatch(r"gw_[\w-]{43}", secret)
    assert command("create", "ada", *place).exit_code == 2
    assert command("create", "../ada", *place).exit_code == 2
    listed = command("list", *place).stdout
    assert "ada" in listed and "admin" in listed and "runs=3" in listed and secret not in listed
    for file in (tmp_path / "state").iterdir():
        assert secret not in file.read_text() and file.stat().st_mode & 0o077 == 0
    other = command("create", "ada", "--replace", *place).stdout.strip()
    assert other != secret
    assert command("revoke", "ada", *place).exit_code == 0
    assert "revoked" in command("list", *place).stdout
    assert command("revoke", "ada", *place).exit_code == 2


@pytest.mark.long
def test_a_file_that_holds_no_keys_costs_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = {"name": "ada", "role": "user", "prefix": "gw_", "sha256": "0", "created_at": 1.0}
    wrong: tuple[Any, ...] = (
        [], {"key": []}, {"keys": 3}, {"keys": [3]}, {"keys": [key | {"role": "king"}]}, {"keys": [key | {"more": 1}]},
        {"keys": [key | {"created_at": "now"}]}, {"keys": [key | {"sha256": None}]}, {"keys": [{"name": "ada"}]},
        {"keys": [key | {"quota": {"runs": -1}}]}, {"keys": [key | {"quota": {"runs": True}}]},
        {"keys": [key | {"quota": {"rums": 1}}]}, {"keys": [key | {"quota": {"memory_percent": 101}}]},
    )  # fmt: skip
    for text in ("{", "", "\udcff", *map(json.dumps, wrong)):
        file.write_bytes(text.encode(errors="surrogateescape"))
        for words in (["list"], ["create", "bob"], ["revoke", "ada"]):
            refused = command(*words, "--state-dir", str(tmp_path))
            assert refused.exit_code == 2 and refused.stderr.startswith("gradwire: "), (text, refused.output)
            assert refused.stderr.count("\n") == 1 and file.read_bytes() == text.encode(errors="surrogateescape")
        assert Keys(tmp_path, open_door=True).any is False, "nobody is let in"
    file.write_text(json.dumps({"keys": [key | {"revoked_at": None, "quota": {"runs": 3, "queued_bytes": None}}]}))
    assert "runs=3" in command("list", "--state-dir", str(tmp_path)).stdout
    assert command("list", "--state-dir", str(file)).exit_code == 2
    assert command("create", "bob", "--runs", "-1", "--state-dir", str(tmp_path)).stderr == (
        "gradwire: the quota runs is -1; it must be a whole number, at least 0\n"
    )
    assert command("list", "--state-dir", str(tmp_path / "none")).stdout == f"no keys in {tmp_path / 'none'}\n"


async def test_a_revoked_key_is_refused_at_once_and_its_open_streams_with_it(keyed: Any) -> None:
    async with keyed() as door:
        ada = await (await door.client("ada")).begin()
        await ada.fb(1)
        reading = ada.stub.Results(pb.ResultsRequest(run_id=ada.run_id, from_seq=1))
        assert (await reading.read()).header.seq == 1
        root = await door.client("root")
        root.run_id, root.epoch = ada.run_id, ada.epoch
        door.file.revoke("ada")
        assert code_of(await outcome(ada.stub, "ListRuns", LIST)) == "unauthenticated"
        with pytest.raises(Exception, match="valid API key"):
            await ada.fb(2)
        await root.fb(2)
        with pytest.raises(Exception, match="valid API key"):
            await reading.read()
        door.secrets["ada"] = door.file.create("ada")
        again = await door.client("ada")
        assert [run.run_id for run in (await again.stub.ListRuns(LIST)).runs] == [ada.run_id]


async def test_the_sdk_says_that_its_key_was_revoked(keyed: Any) -> None:
    async with keyed() as door, gradwire.connect(door.door.server.address, api_key=door.secrets["ada"]) as service:
        run = await service.create_run("tiny")
        assert await run.zero_grad() is None
        assert (await run.share("carl")).readers == ("carl",) and (await run.unshare("carl")).readers == ()
        door.file.revoke("ada")
        await asyncio.sleep(LOOK_AGAIN_S)
        with pytest.raises(gradwire.UnauthenticatedError, match="valid API key"):
            await run.zero_grad()
        with pytest.raises(gradwire.UnauthenticatedError):
            await service.list_runs()


async def test_the_first_key_closes_an_open_door_and_a_lost_file_does_not_open_it(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    async with start() as door:
        before = await (await door.client()).begin()
        secret = KeyFile(tmp_path).create("root", "admin")
        stub = (await door.client()).stub
        assert code_of(await outcome(stub, "ListRuns", LIST)) == "unauthenticated"
        assert code_of(await outcome(before.stub, "GetRun", pb.GetRunRequest(run_id=before.run_id))) != "yes"
        assert [run.run_id for run in (await Keyed(stub, secret).ListRuns(LIST)).runs] == [before.run_id]
        for content in ("{", '{"keys": [{"name": "x"}]}', ""):
            file.write_text(content)
            assert code_of(await outcome(Keyed(stub, secret), "ListRuns", LIST)) == "unauthenticated"
        file.unlink()
        assert code_of(await outcome(stub, "ListRuns", LIST)) == "unauthenticated"
    async with start() as door:  # again
        assert code_of(await outcome((await door.client()).stub, "ListRuns", LIST)) == "unauthenticated"
    refused = command("create", "eve", "--state-dir", str(tmp_path))
    assert refused.exit_code == 2 and "is missing, and there were keys" in refused.stderr
    (tmp_path / "keys.lock").unlink()
    async with start() as door:
        assert code_of(await outcome((await door.client()).stub, "ListRuns", LIST)) == "yes"


async def test_with_a_key_the_server_listens_beyond_loopback(tmp_path: Path) -> None:
    config = ServerConfig(address="0.0.0.0:0", state_dir=tmp_path, models={"tiny": "x"})
    with pytest.raises(SystemExit, match="gradwire keys create"):
        async with Server(config, [FakeEngine(tmp_path)]):
            pass
    KeyFile(tmp_path).create("ada")
    async with Server(config, [FakeEngine(tmp_path)]) as server:
        assert server.core.keys.required


async def test_odd_headers_are_no_key(keyed: Any) -> None:
    async with keyed() as door:
        stub = (await door.door.client()).stub
        for value in ("", "Bearer", "Bearer ", "bearer x", door.secrets["ada"][:-1], "Basic " + door.secrets["ada"]):
            with pytest.raises(Exception, match="valid API key"):
                await stub.ListRuns(LIST, metadata=(("authorization", value),))


# ---- quotas


async def test_a_keys_runs_are_bounded(keyed: Any) -> None:
    async with keyed(limits={"key_runs": 2}, quotas={"bob": Quota(runs=1)}) as door:
        for name, most in (("ada", 2), ("bob", 1)):
            client = await door.client(name)
            for _ in range(most):
                await client.begin()
            request = pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"))
            error = await outcome(client.stub, "CreateRun", request)
            assert code_of(error) == "limit_exceeded" and error.rule == f"runs = {most}"
            assert "--runs" in error.message


def test_a_key_that_is_alone_may_take_all_memory(tmp_path: Path) -> None:
    file, keys = KeyFile(tmp_path), Keys(tmp_path, open_door=True)
    assert keys.quota("").memory_percent == 100
    file.create("ada")
    keys.caller(file.create("ada", replace=True))
    assert keys.quota("ada").memory_percent == 100 and keys.quota("bob").memory_percent == 100
    keys.caller(file.create("bob", quota=Quota(memory_percent=70)))
    assert keys.quota("ada").memory_percent is None and keys.quota("bob").memory_percent == 70
    file.revoke("ada")
    with pytest.raises(ServiceError):
        keys.caller("")
    assert keys.quota("bob").memory_percent == 70


async def test_a_keys_queue_is_bounded_over_all_its_runs_and_empties(keyed: Any) -> None:
    async with keyed(quotas={"bob": Quota(queued_operations=3, queued_bytes=1000)}) as door:
        runs = [await (await door.client("bob")).begin() for _ in range(2)]
        ada = await (await door.client("ada")).begin()
        door.engine.gate.clear()
        await runs[0].fb(1)
        assert not (await runs[1].fb(1, "a", bytes(900))).HasField("error")
        error = (await runs[0].fb(2, "a", bytes(101))).error
        assert error.rule == "queued_bytes = 1000" and "--queued-bytes" in error.message
        await runs[0].fb(2)
        error = (await runs[1].fb(2)).error
        assert error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and error.rule == "queued_operations = 3"
        assert not (await ada.fb(1)).HasField("error")
        door.engine.gate.set()
        assert await runs[0].statuses(2) == ["ok", "ok"] and await runs[1].statuses(1) == ["ok"]
        assert not (await runs[1].fb(2, "a", bytes(2000))).HasField("error")  # alone it passes any quota
        await runs[0].stub.DeleteRun(pb.DeleteRunRequest(run_id=runs[0].run_id))
        assert await runs[1].statuses(2) == ["ok", "ok"]
        usage = door.door.server.core.scheduler.usage("bob")
        assert (usage.operations, usage.bytes, usage.incoming_bytes) == (0, 0, 0)


async def test_the_sdk_waits_for_its_quota_and_goes_on(keyed: Any) -> None:
    async with (
        keyed(quotas={"bob": Quota(queued_operations=2)}) as door,
        gradwire.connect(door.door.server.address, api_key=door.secrets["bob"]) as service,
    ):
        run = await service.create_run("tiny")
        await asyncio.wait_for(gradwire.gather(*(run.zero_grad() for _ in range(12))), 60)
        assert (await run.info()).applied_seq == 12 and len(door.engine.seen) == 12


async def test_a_keys_tokens_run_over_time(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("gradwire_server.access.quotas.time", SimpleNamespace(monotonic=lambda: now))
    async with keyed(quotas={"bob": Quota(tokens_per_minute=100)}) as door:
        bob = await (await door.client("bob")).begin()
        ids = [pb.TensorSpec(name="input_ids", dtype=pb.DTYPE_UINT8, shape=[60], level_sizes=[1])]
        payload = (60).to_bytes(4, "little") + bytes(60)
        assert not (await bob.fb(1, "a", payload, tensors=ids)).HasField("error")
        error = (await bob.fb(2, "a", payload, tensors=ids)).error
        assert error.rule == "tokens_per_minute = 100" and "fits in 12 s" in error.message
        call = pb.SampleCall(prompts=["x"], n=10, max_tokens=10)
        assert code_of(await outcome(bob.stub, "Sample", pb.SampleRequest(model="tiny", call=call))) == "limit_exceeded"
        now += 30
        assert not (await bob.fb(2, "a", payload, tensors=ids)).HasField("error")


async def test_payloads_on_their_way_are_bounded(keyed: Any) -> None:
    async with keyed(limits={"max_incoming_bytes": 1000}) as door:
        first, second = [await (await door.client("ada")).begin() for _ in range(2)]
        half = first.frames(1, bytes(900), forward_backward=pb.LossCall(loss_fn="a"))[0]
        half.chunk = half.chunk[:10]
        await first.send(half)
        usage = door.door.server.core.scheduler.usage("ada")
        await until(lambda: usage.incoming_bytes)
        error = (await second.fb(1, "a", bytes(101))).error
        assert error.rule == "max_incoming_bytes = 1000" and "--limit" in error.message
        first._stream.cancel()
        await until(lambda: not usage.incoming_bytes)
        assert not (await second.fb(1, "a", bytes(101))).HasField("error")


# ---- fair turns


def test_owners_take_turns_and_each_owners_runs_do() -> None:
    fair_queue = FairQueue[str](lambda item: Load(1))
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        fair_queue.put(owner, item)
    assert [fair_queue.pop() for _ in range(len(fair_queue))] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def given(fair_queue: FairQueue[str], load: Load) -> list[str]:
    """What goes to the engine before it has answered anything; the owner is the first letter."""
    sent = []
    while (item := fair_queue.pop()) is not None:
        fair_queue.enter(item[0], load)
        sent.append(item)
    return sent


def queue_of(items: Iterable[str], load: Load, clock: Callable[[], float] = time.monotonic) -> FairQueue[str]:
    fair_queue = FairQueue[str](lambda item: load, clock)
    for item in items:
        fair_queue.put(item[0], item)
    return fair_queue


def test_no_large_request_is_sent_ahead_while_keys_share_the_server() -> None:
    now = 0.0
    large = Load(SHARED_TOKENS)
    fair_queue = queue_of(["a1", "a2", "b1", "b2"], large, lambda: now)
    assert given(fair_queue, large) == ["a1", "b1"]
    fair_queue.leave("a", large)
    assert given(fair_queue, large) == ["a2"]
    now = SHARED_S + 1
    fair_queue.put("b", "b3")
    assert given(fair_queue, large) == ["b2", "b3"]


def test_few_small_requests_are_sent_ahead_while_keys_share_the_server() -> None:
    small = Load(1)
    fair_queue = queue_of([*(f"a{number}" for number in range(40)), "b1"], small)
    sent = given(fair_queue, small)
    assert sent[:2] == ["a0", "b1"] and len(sent) == 1 + SHARED_TOKENS // LEAST_TOKENS
    large = Load(SHARED_TOKENS)
    assert given(queue_of(["b1"], large), large) == ["b1"]  # however large, one goes


def test_a_small_request_does_not_wait_for_large_ones_of_other_keys() -> None:
    sizes = {"a": PIPE_TOKENS, "b": PIPE_TOKENS, "c": LEAST_TOKENS, "d": SHARED_TOKENS + 1}
    fair_queue = FairQueue[str](lambda item: Load(sizes[item[0]]))
    for item in ("a1", "b1", "d1", "c1", "c2"):
        fair_queue.put(item[0], item)
    sent = []
    while (item := fair_queue.pop()) is not None:
        fair_queue.enter(item[0], Load(sizes[item[0]]))
        sent.append(item)
    assert sent == ["a1", "b1", "c1", "c2"]


def test_one_small_request_goes_beside_the_large_ones_of_its_own_key() -> None:
    sizes = {"l": PIPE_TOKENS, "s": SHARED_TOKENS}
    fair_queue = FairQueue[str](lambda item: Load(sizes[item[0]]))
    for item in ("l1", "l2", "s1", "s2"):
        fair_queue.put("a", item)
    sent = []
    while (item := fair_queue.pop()) is not None:
        fair_queue.enter("a", Load(sizes[item[0]]))
        sent.append(item)
    assert sent == ["l1", "l2", "s1"]


def test_samples_run_beside_each_other_and_leave_room_for_newcomers() -> None:
    samples = Load(1000, samples=True)
    fair_queue = queue_of((f"a{number}" for number in range(300)), samples)
    assert len(given(fair_queue, samples)) == SAMPLES_AHEAD
    fair_queue.put("b", "b1")
    fair_queue.put("b", "b2")
    assert given(fair_queue, samples) == ["b1"]
    for _ in range(SAMPLES_AHEAD - KEY_SAMPLES_AHEAD + 1):
        assert given(fair_queue, samples) in ([], ["b2"])
        fair_queue.leave("a", samples)
    assert len(given(fair_queue, samples)) == 1  # one key's part while keys share the server
    fair_queue = queue_of((f"{chr(300 + number)}" for number in range(2 * SLOTS)), samples)
    assert len(given(fair_queue, samples)) < SLOTS - SMALL_AHEAD


def test_samples_take_no_room_of_other_requests() -> None:
    loads = {"a1": Load(1, samples=True), "a2": Load(PIPE_TOKENS), "b1": Load(PIPE_TOKENS)}
    fair_queue = FairQueue[str](loads.__getitem__)
    for item in loads:
        fair_queue.put(item[0], item)
    sent = []
    while (item := fair_queue.pop()) is not None:
        fair_queue.enter(item[0], loads[item])
        sent.append(item)
    assert sent == ["a1", "b1", "a2"]


@pytest.mark.parametrize(("tokens", "count"), [(PIPE_TOKENS, AHEAD), (PIPE_TOKENS // 8, 8), (1, SMALL_AHEAD)])
def test_what_is_sent_ahead_is_bounded_by_its_tokens(tokens: int, count: int) -> None:
    load = Load(tokens)
    fair_queue = queue_of((f"a{number}" for number in range(40)), load)
    assert len(given(fair_queue, load)) == count
    fair_queue.leave("a", load)
    assert len(given(fair_queue, load)) == 1


def test_a_suspect_goes_alone() -> None:
    fair_queue = FairQueue[str](lambda item: Load(1, alone=item == "a2"))
    for item in ("a1", "a2", "a3"):
        fair_queue.put("a", item)
    assert given(fair_queue, Load(1)) == ["a1"]
    fair_queue.leave("a", Load(1))
    assert fair_queue.pop() == "a2"
    fair_queue.enter("a", Load(1, alone=True))
    assert given(fair_queue, Load(1)) == []
    fair_queue.leave("a", Load(1, alone=True))
    assert given(fair_queue, Load(1)) == ["a3"]


async def test_a_flood_from_one_key_costs_another_few_operations_at_most(keyed: Any) -> None:
    """Latency counted in operations of equal length, small ones."""
    async with keyed() as door:
        flood = [await (await door.client("ada")).begin() for _ in range(4)]
        bob: Client = await (await door.client("bob")).begin()
        await bob.fb(1)
        await bob.results(1)
        engine, between = door.engine, []
        engine.gate.clear()
        for run in flood:
            for seq in range(1, 11):
                await run.fb(seq)
        sampling = [
            asyncio.ensure_future(flood[0].stub.Sample(pb.SampleRequest(model="tiny")).read()) for _ in range(20)
        ]
        for seq in range(2, 12):
            await bob.fb(seq)  # the engine has begun one of ada's, and waits for the gate
            began = len(engine.seen)
            engine.gate.set()
            await bob.results(1, seq)
            engine.gate.clear()
            mine = engine.seen.index((bob.run_id, seq))
            between.append(mine - began)
        engine.gate.set()
        assert max(between) <= SHARED_TOKENS // LEAST_TOKENS, between
        assert len([seq for run_id, seq in engine.seen if run_id != bob.run_id]) >= len(between) - 1
        for run in flood:
            await run.results(10)
        await asyncio.gather(*sampling)


async def test_many_deleted_runs_cost_another_key_one_removal_at_most(
    keyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions answer at once, and the engine removes the runs when it is their owner's turn."""
    async with keyed() as door:
        runs = [await (await door.client("ada")).begin() for _ in range(6)]
        bob: Client = await (await door.client("bob")).begin()
        engine, executed = door.engine, list[str]()

        async def work(request: engine_pb2.EngineRequest) -> None:
            executed.append(request.operation.run_id or request.WhichOneof("kind") or "")
            await engine.gate.wait()

        monkeypatch.setattr(engine, "work", work)
        engine.gate.clear()
        for run in runs:
            await run.stub.DeleteRun(pb.DeleteRunRequest(run_id=run.run_id))
        await until(lambda: executed == ["drop_run"])
        await bob.fb(1)
        engine.gate.set()
        await bob.results(1)
        assert executed.index(bob.run_id) == 1, executed
        await until(lambda: set(engine.runs) == {bob.run_id})
        assert executed.count("drop_run") == len(runs)


async def test_who_waits_for_a_turn_is_told_that_the_server_stops(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who_is_next, "SAMPLES_AHEAD", 6)
    async with keyed(grace=60) as door:
        bob = await door.client("bob")
        door.engine.gate.clear()
        asked = pb.SampleRequest(model="tiny")
        sampling = [asyncio.ensure_future(outcome(bob.stub, "Sample", asked)) for _ in range(6 + 2)]
        fair_queue = door.door.server.core.scheduler.placement.engines[0].fair_queue
        await until(lambda: len(fair_queue) == 2)
        create = pb.CreateRunRequest(config=pb.RunConfig(base_model="tiny"))
        creating = asyncio.ensure_future(outcome(bob.stub, "CreateRun", create))
        await until(lambda: len(fair_queue) == 3)
        stopping = asyncio.ensure_future(door.door.server.stop())
        assert code_of(await creating) == "shutting_down"
        await until(lambda: sum(task.done() for task in sampling) == 2)
        door.engine.gate.set()
        assert sorted(map(code_of, await asyncio.gather(*sampling))) == ["shutting_down"] * 2 + ["yes"] * 6
        await stopping
        assert door.door.server.core.storage.records.count == 0


async def test_the_old_writer_is_told_who_took_its_run_over(keyed: Any) -> None:
    async with keyed() as door:
        ada = await (await door.client("ada")).begin()
        await ada.fb(1)
        root = await (await door.client("root")).open(ada.run_id, writer="root@desk", takeover=True)
        error = (await ada.fb(2)).error
        assert error.code == pb.ERROR_CODE_STALE_EPOCH and "root@desk" in error.message
        assert not (await root.fb(2)).HasField("error")
        busy = await outcome(ada.stub, "OpenRun", pb.OpenRunRequest(run_id=ada.run_id, writer="me"))
        assert code_of(busy) == "run_busy" and "root@desk" in busy.message


async def test_a_signed_url_of_a_revoked_key_is_no_mistake_of_the_server(
    keyed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer had begun when the key was looked at again, which was an error with a traceback in the log."""
    async with keyed(http="127.0.0.1:0") as door, httpx.AsyncClient(timeout=60) as keyless:
        headers = {"X-API-Key": door.secrets["bob"]}
        async with httpx.AsyncClient(base_url=door.door.server.http.url, headers=headers, timeout=60) as http:
            asked = {"tags": [], "sdk_version": "0.38.0"}
            session = (await http.post("/api/v1/create_session", json=asked)).json()["session_id"]
            trace = (await http.get(f"/api/v1/sessions/{session}/trace_export")).json()["url"]
        assert (await keyless.get(trace)).status_code == 200
        door.file.revoke("bob")
        assert (await keyless.get(trace)).status_code == 401
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_flood_does_not_push_others_out_of_the_audit_log(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST", 10)
    async with keyed(http="127.0.0.1:0") as door:
        store, keys = door.door.server.http._tinker.store, door.door.server.core.keys
        ada, bob = keys.caller(door.secrets["ada"]), keys.caller(door.secrets["bob"])
        for caller, count in ((ada, 3), (bob, 20), (ada, 1)):
            for number in range(count):
                await audit.note(store, caller, "checkpoint_delete", f"tinker://x/weights/{number}")
        headers = {"X-API-Key": door.secrets["root"]}
        async with httpx.AsyncClient(base_url=door.door.server.http.url, headers=headers, timeout=60) as http:
            entries = (await http.get("/api/v1/audit")).json()["entries"]
            assert (await http.get("/api/v1/audit?day=9999-12-31")).json() == {"entries": []}
    users = [entry["event_details"]["user"] for entry in entries]
    assert users == ["ada"] * 3 + ["bob"] * 6 + ["ada"]
