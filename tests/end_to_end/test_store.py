"""A server whose checkpoints and uploads are in an object store: a real S3 server, over HTTP, that also fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.batches import VOCAB, causal_lm
from support.blocking import DETECTOR
from support.object_store import BUCKET, Objects, s3_server, unavailable
from support.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STORE = f"s3://{BUCKET}/gradwire"
SETTINGS: dict[str, Any] = {"seed": 7, "lora": {"rank": 4, "dropout": 0.1}}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def served(tiny_model_path: Path, tmp_path: Path, s3: Objects) -> Iterator[Server]:
    """A server with a store, not started."""
    flags = ("--store", STORE, "--store-patience", "3", "--checkpoint-every-steps", "2")
    server = Server(tiny_model_path, tmp_path / "state", *flags)
    yield server
    if server.address and server.process.poll() is None:
        server.end()


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    with DETECTOR.excused():
        words = [sys.executable, "-m", "gradwire_server.cli", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300)


async def steps(run: gradwire.TrainingClient, batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    pairs = [(run.forward_backward(b, "causal_lm"), run.optim_step(learning_rate=1e-3)) for b in batches]
    return [((await fb).metrics["loss"], (await step).grad_norm) for fb, step in pairs]


async def logprobs(run: gradwire.TrainingClient) -> list[list[float]]:
    return [row.tolist() for row in await run.compute_logprobs([[5, 9, 11, 30, 7], list(range(3, 40))])]


async def test_a_training_outlives_its_server_its_machine_and_its_store(
    served: Server, s3: Objects, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it uploads, with an empty cache afterwards, and while the store is away: the results are those of an
    undisturbed training."""
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(8)]
    crash = tmp_path / "crash"
    monkeypatch.setenv("GRADWIRE_CRASH_FILE", str(crash))
    served.start()
    async with gradwire.connect(served.address) as service:
        calm = await service.create_run("tiny", **SETTINGS)
        expected = (await steps(calm, batches), await logprobs(calm))
        run = await service.create_run("tiny", **SETTINGS)
        run_id = run.run_id
        seen = await steps(run, batches[:3])
        await run.save_checkpoint("three")
        await run.export(tmp_path / "plain")
        assert (tmp_path / "plain" / "adapter_model.safetensors").exists()
        crash.write_text("store.between_objects")
        seen += await steps(run, batches[3:5])  # the engine dies in one of its automatic checkpoints, and comes back
        await run.save_checkpoint("five")
        assert not crash.exists()
    assert not list((served.state_dir / "runs").rglob("*.safetensors"))
    served.end(signal.SIGKILL)
    (served.state_dir / "store-cache").rename(tmp_path / "lost")
    served.start()
    async with gradwire.connect(served.address) as service:
        run = service.get_training_client(run_id)
        seen += await steps(run, batches[5:6])
        s3.faults.plan(unavailable, "PUT", run_id, -1)
        with pytest.raises(gradwire.GradwireError, match=rf"{STORE} did not write runs/{run_id}.* Nothing was lost"):
            await run.save_checkpoint("six")
        seen += await steps(run, batches[6:7])  # also past automatic checkpoints that cannot be written
        s3.faults.mend()
        await run.save_checkpoint("seven")
        s3.faults.plan(unavailable, "GET", run_id, -1)
        (served.state_dir / "store-cache").rename(tmp_path / "lost too")  # at once, as the server writes there
        os.kill(served.engine_pid, signal.SIGKILL)
        rest = asyncio.create_task(steps(run, batches[7:]))  # the run waits, parked
        while not (await run.info()).parked:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.1)
        s3.faults.mend()
        seen += await rest
        assert (seen, await logprobs(run)) == expected
        fork = await service.fork_run(f"{run_id}/three")
        await service.delete_run(calm.run_id)
        assert len(await steps(fork, batches[:1])) == 1
    assert served.end() == 0
    repaired = command("repair", "--state-dir", served.state_dir, "--tidy")
    assert repaired.returncode == 0 and "is superfluous" in repaired.stderr, repaired.stderr  # of the engine's death
    assert "missing" not in repaired.stderr and "torn" not in repaired.stderr
    again = command("repair", "--state-dir", served.state_dir)
    assert "superfluous" not in again.stderr
    served.start()
    async with gradwire.connect(served.address) as service:
        run = service.get_training_client(run_id)
        assert await logprobs(run) == expected[1]
    served.end()


async def test_backups_moves_and_mistakes_with_a_store(
    tiny_model_path: Path, served: Server, s3: Objects, rng: np.random.Generator, tmp_path: Path
) -> None:
    """A folder that had its checkpoints in itself moves them; from then on, it is not used without its store."""
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(2)]
    before = Server(tiny_model_path, served.state_dir).start()
    async with gradwire.connect(before.address) as service:
        run = await service.create_run("tiny", **SETTINGS)
        await steps(run, batches)
        await run.save_checkpoint("two")
        await run.export(tmp_path / "plain")
        expected, run_id = await logprobs(run), run.run_id
    assert before.end() == 0
    served.start()
    assert not list((served.state_dir / "runs").rglob("*.safetensors"))
    async with gradwire.connect(served.address) as service:
        run = service.get_training_client(run_id)
        await run.load_checkpoint("two")
        assert await logprobs(run) == expected
        upload = await service.upload_adapter(tmp_path / "plain", base_model="tiny")
        begun = await service.create_run("tiny", from_adapter=upload)
        assert await logprobs(begun) == expected
        await service.delete_upload(upload)
    backed_up = command("backup", tmp_path / "copy", "--state-dir", served.state_dir)
    assert backed_up.returncode == 0 and f"the checkpoints stay in {STORE}" in backed_up.stderr, backed_up.stderr
    assert not list((tmp_path / "copy").rglob("*.safetensors"))
    assert served.end() == 0
    serve = ("serve", "--model", f"tiny={tiny_model_path}", "--address", "127.0.0.1:0")
    alone = command(*serve, "--state-dir", served.state_dir)
    assert alone.returncode == 2 and f"give --store {STORE}" in alone.stderr
    stranger = command(*serve, "--state-dir", tmp_path / "other", "--store", STORE)
    assert stranger.returncode == 2 and "belongs to another server" in stranger.stderr
    restored = command("restore", tmp_path / "copy", "--state-dir", tmp_path / "restored")
    assert restored.returncode == 0 and "is not in" not in restored.stderr, restored.stderr
    for key in s3.objects(f"gradwire/runs/{run_id}/"):
        if not key.endswith("/manifest.json"):
            s3.remove(key)
    torn = command("restore", tmp_path / "copy", "--state-dir", tmp_path / "torn")
    assert torn.returncode == 0 and f"checkpoint {run_id}/two is not in {STORE} as it was saved" in torn.stderr
