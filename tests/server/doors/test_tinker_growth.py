"""A long RL run through the Tinker door: a snapshot, samples from it and a step, over and over, in bounded space."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from gradwire_proto.v1 import tinker_pb2 as pb
from gradwire_server.access.keys import ANYONE
from gradwire_server.doors.http.tinker.collection import SESSION_KEPT_S, SNAPSHOTS_KEPT
from gradwire_server.doors.http.tinker.samplers import MANY_SNAPSHOTS
from gradwire_server.journal.retention import COLLECTED_BYTES
from gradwire_server.journal.schema import FREE_PAGES, GIVEN_BACK_PAGES, WAL_BYTES
from support.front import Start
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, forward_backward
from support.tiny import tiny_model

pytestmark = pytest.mark.long

STEPS, PARTS = 10_000, 10
"""Steps of the long run, and how often it is measured."""
POINTS = 3_000
"""Points of its record, which is full and thinned after a tenth of the run; by default they are 100,000."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    limits = ("--threads", "1", "--limit", f"max_history_points={POINTS}")
    served = HttpServer(tiny_model(tmp_path / "model"), tmp_path / "state", free_port(), *limits, real=True)
    served.start()
    yield served
    served.end()


class Space:
    """What a server holds at one time: files and bytes of its folder, rows of its databases, memory of its front."""

    def __init__(self, server: HttpServer, folder: Path) -> None:
        sizes = list(_sizes(folder))
        self.files, self.snapshots, self.bytes = len(sizes), 0, sum(size for _, size in sizes)
        self.rows: dict[str, int] = {}
        self.kinds: Counter[str] = Counter()
        for name, size in sizes:
            self.kinds[name.rpartition(".")[2] if "." in name else "other"] += size
        for path in folder.glob("*.db"):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                for (table,) in tables:
                    (count,) = database.execute(f'SELECT count(*) FROM "{table}"').fetchone()
                    self.rows[f"{path.stem}.{table}"] = count
                if path.stem == "tinker":
                    query = "SELECT count(*) FROM records WHERE kind = 'sampler'"
                    (self.snapshots,) = database.execute(query).fetchone()
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        self.front = int(status.split("VmRSS:")[1].split()[0]) << 10

    def __str__(self) -> str:
        rows = ", ".join(f"{name} {count}" for name, count in self.rows.items() if count)
        kinds = ", ".join(f"{size / 2**20:.1f} of {name}" for name, size in self.kinds.most_common(4))
        return (
            f"{self.files} files, {self.bytes / 2**20:.1f} MiB ({kinds}), {self.snapshots} snapshots, front "
            f"{self.front / 2**20:.0f} MiB; {rows}"
        )


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """The files below a folder, some of which may go meanwhile."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield name, os.stat(os.path.join(root, name)).st_size


async def _step(client: TinkerClient, model: str, number: int) -> str:
    """Save a snapshot and take a step; the snapshot's sampler."""
    row = {"tokens": [1, 2, 3], "target_tokens": [2, 3, 4], "weights": np.ones(3)}
    seq = 3 * number + 1
    asked = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
    promises = [
        await client.post("save_weights_for_sampler", asked),
        await client.post("forward_backward", forward_backward(model, seq + 1, [row])),
        await client.step(model, seq + 2),
    ]
    saved, _, step = [await client.wait(promise) for promise in promises]
    assert step["metrics"]["step:max"] == number + 1
    return str(saved["sampling_session_id"])


@pytest.mark.slow
async def test_old_snapshots_go_while_new_ones_come(start: Start, tmp_path: Path) -> None:
    steps = 3 * MANY_SNAPSHOTS + 8
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url, timeout=300) as http:
        client = await TinkerClient(http).begin()
        model = await client.model()
        for number in range(steps):
            asked = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
            await client.done("save_weights_for_sampler", asked)
        names = await asyncio.to_thread(_at_most, SNAPSHOTS_KEPT + 8, tmp_path)
        assert len(names) >= SNAPSHOTS_KEPT
        numbers = {int(name.rpartition(".")[2]) for name in names}
        assert steps - 1 in numbers and 0 not in numbers
        session = await client.send("GET", f"sessions/{client.session_id}")
        assert len(session["sampler_ids"]) <= len(names) + 1


async def test_a_run_that_another_writer_took_over_keeps_no_other_results(start: Start) -> None:
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url, timeout=300) as http:
        client = await TinkerClient(http).begin()
        runs = []
        tinker, core = door.server.http._tinker, door.server.core
        for number in range(2):
            model = await client.model(number)
            await client.done("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
            runs.append(tinker.store.models[model].run_id)
        await core.open_run(ANYONE, runs[0], "of another door", takeover=True)
        await tinker.models.release_delivered(time.time() + 1, 0)
        assert [core.runs.get(ANYONE, run).released_seq for run in runs] == [0, 1]


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("sessions", "runs"), [(200, 10), pytest.param(100_000, 10_000, marks=pytest.mark.slow)], ids=str
)
async def test_sessions_and_runs_that_are_gone_leave_nothing(
    start: Start, tmp_path: Path, sessions: int, runs: int
) -> None:
    """All are made and deleted in rounds; the files are as large after the last as after the second."""
    rounds, seen = 4, []
    said = {"tags": ["x" * 200] * 32, "user_metadata": {"notes": "y" * 10_000}}
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url, timeout=300) as http:
        tinker, core = door.server.http._tinker, door.server.core
        for _ in range(rounds):
            for _ in range(sessions // rounds):
                made = await TinkerClient(http).post("create_session", said)
                await TinkerClient(http).post(f"sessions/{made['session_id']}/finish", {})
            client = await TinkerClient(http).begin()
            for number in range(runs // rounds):
                model = await client.model(number)
                await core.runs.delete(ANYONE, tinker.store.models[model].run_id)
            failed = {"session_id": client.session_id, "model_seq_id": 10**9, "base_model": "none of ours"}
            await client.post("create_model", failed | {"lora_config": {"rank": 4}}, status=404)
            await client.post(f"sessions/{client.session_id}/finish", {})
            await tinker.collection.collect()
            assert not (tinker.store.sessions or tinker.store.models or tinker.store.samplers)
            await core.storage.journal.retention.collect()
            for _ in range(_free_pages(tmp_path / "tinker.db") // GIVEN_BACK_PAGES + 1):
                await tinker.store.give_back_space()
            assert _free_pages(tmp_path / "tinker.db") <= FREE_PAGES
            seen.append({name: size for name, size in _sizes(tmp_path) if name.endswith((".db", "-wal"))})
            everything = sum(size for _, size in _sizes(tmp_path))
            print(f"at {time.strftime('%X')}: {everything / 2**20:.1f} MiB in all, of them {seen[-1]}", flush=True)
    for name in ("tinker.db", "gradwire.db"):
        sizes = [each[name] for each in seen]
        assert max(sizes[2:]) <= sizes[1] + (512 << 10), (name, sizes)
        assert max(each.get(name + "-wal", 0) for each in seen) <= 4 * WAL_BYTES


def _free_pages(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return int(database.execute("PRAGMA freelist_count").fetchone()[0])


async def test_a_key_has_so_many_sessions_and_each_is_small(start: Start) -> None:
    async with (
        start(http="127.0.0.1:0", limits={"key_records": 2}) as door,
        httpx.AsyncClient(base_url=door.server.http.url, timeout=300) as http,
    ):
        client, tinker = TinkerClient(http), door.server.http._tinker
        for said in ({"tags": ["x" * 201]}, {"sdk_version": "x" * 201}, {"user_metadata": {"a": "x" * 20_000}}):
            await client.post("create_session", said, status=422)
        first = await client.begin()
        await first.model()
        refused = await client.post("create_session", {}, status=400)
        assert "key_records" in refused["detail"]
        await client.post(f"sessions/{first.session_id}/finish", {})
        await tinker.collection.collect()
        await client.post("create_session", {}, status=400)  # the model belongs to its session
        (model,) = tinker.store.models.values()
        await door.server.core.runs.delete(ANYONE, model.run_id)
        await tinker.collection.collect()
        await client.post("create_session", {})


async def test_a_session_without_its_client_ends(start: Start) -> None:
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url, timeout=300) as http:
        left, kept = await TinkerClient(http).begin(), await TinkerClient(http).begin()
        tinker = door.server.http._tinker
        for client in (left, kept):
            asked = {"session_id": client.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
            await client.post("create_sampling_session", asked)
            tinker.store.session_used_at[client.session_id] = time.time() - SESSION_KEPT_S - 1
        await kept.post("session_heartbeat", {"session_id": kept.session_id})
        await tinker.collection.collect()
        await left.post("session_heartbeat", {"session_id": left.session_id}, status=404)
        assert [each.session_id for each in tinker.store.samplers.values()] == [kept.session_id]


def _at_most(count: int, folder: Path) -> list[str]:
    """Wait until there are at most so many checkpoints; their names."""
    while len(names := [path.name for path in folder.glob("runs/*/checkpoints/*")]) > count:
        time.sleep(0.05)
    return names


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
async def test_ten_thousand_steps_leave_a_bounded_folder(server: HttpServer, tmp_path: Path) -> None:
    seen = []
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        client = await TinkerClient(http).begin()
        model = await client.model()
        prompt = {"chunks": [{"tokens": [1, 2]}]}
        for number in range(STEPS):
            sampler = await _step(client, model, number)
            asked = {
                "sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}
            }  # fmt: skip
            assert len(pb.SampleResponse.FromString(await client.done("asample", asked)).sequences) == 1
            if (number + 1) % (STEPS // PARTS) == 0:
                seen.append(Space(server, tmp_path / "state"))
                print(f"after {number + 1} steps at {time.strftime('%X')}: {seen[-1]}", flush=True)
    half, end = seen[PARTS // 2 - 1], seen[-1]
    assert max(space.snapshots for space in seen) <= 3 * SNAPSHOTS_KEPT
    assert end.files <= half.files + 4 * SNAPSHOTS_KEPT
    assert end.front <= half.front + (64 << 20)
    assert max(space.kinds["segment"] for space in seen) <= 2 * COLLECTED_BYTES + (1 << 20)
    assert end.kinds["db"] <= half.kinds["db"] + (1 << 20)
    assert end.rows["gradwire.history"] <= POINTS
    for name in ("gradwire.operations", "gradwire.results", "tinker.records"):
        assert end.rows[name] <= 2 * half.rows[name] + 1000
