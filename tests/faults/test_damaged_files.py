"""Every kind of file in the state folder, damaged while the server is down: the same results, or a refusal that says
what is damaged."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gradwire
import httpx
import pytest
from gradwire_server.access.key_file import KeyFile
from gradwire_server.access.signing import sign
from support.jobs import finished, write_data
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, datum, forward_backward, outputs

pytestmark = pytest.mark.long

BATCH = {"input_ids": [[4, 5, 6, 7], [8, 9, 10, 11]]}
PATIENCE_S = 60.0
Told = dict[str, Any]
"""What is asked of a server -> what it gives, or "refused: " and why."""


class Folder:
    """A state folder with a file of every kind, and what a server makes of it.

    Attributes:
        files: Kind of a file -> a file of it, relative to the folder.
    """

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self.root, self.state = model, root, root / "state"
        self.run_id = self.job_id = self.tinker_model = self.secret = ""
        self.files: dict[str, Path] = {}
        self.calm: Told = {}

    def server(self, state: Path) -> HttpServer:
        return HttpServer(self.model, state, free_port(), "--threads", "1")

    async def make(self) -> None:
        """Train, by every door, and list what that leaves."""
        self.secret = KeyFile(self.state).create("ada")
        server = self.server(self.state)
        await asyncio.to_thread(server.start)
        data = write_data(self.root)
        async with gradwire.connect(server.address, api_key=self.secret) as service:
            run = await service.create_run("tiny", lora=2, seed=5)
            self.run_id = run.run_id
            for _ in range(2):
                await run.forward_backward(BATCH, "causal_lm")
                await run.optim_step(learning_rate=1e-2)
            await run.save_checkpoint("c")
            await run.forward_backward(BATCH, "causal_lm")
            await run.optim_step(learning_rate=1e-2)
            await run.export(self.root / "out")
            await run.record_rollouts(1, [{"a": 1}])
            settings = {"model": "tiny", "data": str(data["talks"]), "max_steps": 2, "lora_rank": 2, "max_tokens": 64}
            job = await service.jobs.submit("sft", settings | {"held_out": 0, "save_every": 1})
            self.job_id = job.job_id
            await finished(service, job.job_id)
        async with self.http(server) as http:
            tinker = await TinkerClient(http).begin()
            self.tinker_model = await tinker.model()
            await tinker.done("forward_backward", forward_backward(self.tinker_model, 1, [datum()]))
            saved = {"model_id": self.tinker_model, "seq_id": 2, "path": "out", "ttl_seconds": 3600}
            await tinker.done("save_weights_external", saved)
        await asyncio.to_thread(server.end, signal.SIGTERM)
        sign(self.state, b"")
        for path in sorted(each for each in self.state.rglob("*") if each.is_file()):
            file = path.relative_to(self.state)
            if self.run_id in file.parts or self.kind(file) not in self.files:
                self.files[self.kind(file)] = file

    def http(self, server: HttpServer) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, headers={"X-API-Key": self.secret})

    @staticmethod
    def kind(file: Path) -> str:
        """A file's path without what tells it from others of its kind."""
        named = re.sub(r"(run|ftjob|file|export)-[a-z2-7]{10,}|[0-9a-f]{64}", "*", str(file))
        return re.sub(r"(exports|checkpoints)/[^/]+/", r"\1/*/", named)

    async def told(self, state: Path, said: Callable[[], str]) -> Told:
        """What a server on a copy of a folder gives.

        Args:
            said: What was printed since it was called last.
        """
        said()
        copy = self.root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, state, copy)
        server = self.server(copy)
        try:
            await asyncio.to_thread(server.start)
        except RuntimeError:  # it ended before it listened
            return {"start": f"refused: {said()}"}
        try:
            async with (
                gradwire.connect(server.address, api_key=self.secret, reconnect_timeout=5.0) as service,
                self.http(server) as http,
            ):
                asked = {
                    "files": lambda: _files(http), "continued": lambda: self._trained(service, ""),
                    "restored": lambda: self._trained(service, f"{self.run_id}/c"), "job": lambda: self._job(service),
                    "export": lambda: self._export(http), "tinker": lambda: self._tinker(http),
                    "rollouts": lambda: self._rollouts(service),
                }  # fmt: skip
                return {name: await _answer(work) for name, work in asked.items()}
        except gradwire.UnauthenticatedError as error:
            return {"start": f"refused: {error}"}
        finally:
            await asyncio.to_thread(server.end, signal.SIGKILL)

    async def _trained(self, service: gradwire.ServiceClient, checkpoint: str) -> Any:
        run = await service.get_training_client(self.run_id)
        if parked := (await run.info()).parked:
            return f"refused: {parked}"
        if checkpoint:
            await run.load_checkpoint(checkpoint)
        loss = (await run.forward_backward(BATCH, "causal_lm")).loss
        return [loss, (await run.optim_step(learning_rate=1e-2)).grad_norm]

    async def _job(self, service: gradwire.ServiceClient) -> Any:
        job, events = await service.jobs.get(self.job_id), await service.jobs.events(self.job_id)
        return [job.state, dict(job.settings), [event.message for event in events]]

    async def _rollouts(self, service: gradwire.ServiceClient) -> Any:
        return await (await service.get_training_client(self.run_id)).recorded_rollouts(1)

    async def _export(self, http: httpx.AsyncClient) -> Any:
        route = f"/api/v1/training_runs/{self.tinker_model}/checkpoints/external_weights/out/external_weights_urls"
        urls = (await _ok(await http.get(route))).json()["urls"]
        return {
            name: hashlib.sha256((await _ok(await http.get(url))).content).hexdigest() for name, url in urls.items()
        }

    async def _tinker(self, http: httpx.AsyncClient) -> Any:
        body = forward_backward(self.tinker_model, 3, [datum()])
        return outputs(await TinkerClient(http).done("forward_backward", body))[0]


async def _ok(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise ValueError(answer.text)
    return answer


async def _files(http: httpx.AsyncClient) -> Any:
    listed = (await _ok(await http.get("/v1/files"))).json()["data"]
    contents = {each["filename"]: await http.get(f"/v1/files/{each['id']}/content") for each in listed}
    return {name: _sha256(await _ok(each)) for name, each in contents.items()}


def _sha256(answer: httpx.Response) -> str:
    return hashlib.sha256(answer.content).hexdigest()


async def _answer(work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await work()
    except (gradwire.GradwireError, ValueError, AssertionError, TimeoutError) as error:
        return f"refused: {type(error).__name__}: {error}"


def _flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "flip": _flip,
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "swap": lambda content, rng: bytes(reversed(content)),
    "delete": lambda content, rng: None,
}
WAITS = "journal/00000001.segment", "tinker"
"""Tinker's door waits for the numbers of operations that the journal has lost with its end, and says nothing."""
SAYS = (
    "damaged",
    "checksum",
    "cannot be read",
    "missing",
    "not an Ed25519",
    "key",
    "SHA-256",
    "malformed",
    "no recording",
    "no file",
)
"""Words of the refusals."""


@pytest.mark.faults
@pytest.mark.parametrize("what", DAMAGES)
async def test_every_kind_of_file_damaged(
    tiny_model_path: Path, tmp_path: Path, rng: random.Random, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    def said() -> str:
        return capfd.readouterr().err

    folder, wrong = Folder(tiny_model_path, tmp_path), []
    await folder.make()
    calm = await folder.told(folder.state, said)
    assert not [each for each in calm.values() if str(each).startswith("refused")], calm
    for kind, file in folder.files.items():
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        await asyncio.to_thread(shutil.copytree, folder.state, damaged)
        content = (damaged / file).read_bytes()
        changed = DAMAGES[what](content, rng) if content else None
        (damaged / file).unlink()
        if changed is not None:
            (damaged / file).write_bytes(changed)
        for name, each in (await folder.told(damaged, said)).items():
            refused = str(each).startswith("refused") and any(word in str(each) for word in SAYS)
            if each != calm.get(name) and not refused and (kind, name) != WAITS:
                wrong.append(f"{kind}: {name}: {str(each)[:300]}")
    assert wrong == []


async def test_a_start_without_the_records_of_tinkers_door_is_refused(
    tiny_model_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = HttpServer(tiny_model_path, tmp_path, free_port(), "--threads", "1")

    async def begin() -> None:
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.end, signal.SIGTERM)

    await begin()
    (tmp_path / "tinker.db").unlink()
    with pytest.raises(RuntimeError):
        await begin()
    assert "tinker.db is missing, and url_secret beside it shows that there was one" in capfd.readouterr().err
    (tmp_path / "url_secret").unlink()
    await begin()
