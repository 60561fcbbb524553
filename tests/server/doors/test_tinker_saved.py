"""What is saved through the Tinker door: listings, expiry, publication, exported weights."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.access.key_file import KeyFile
from gradwire_server.access.keys import Caller
from gradwire_server.access.signing import rotate
from gradwire_server.doors.http.tinker.collection import TinkerCollection
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.store import ModelRecord, SavedRecord, TinkerStore
from gradwire_server.errors import ServiceError, unknown_checkpoint
from support.plain_peft import with_adapter
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, datum, forward_backward, outputs
from support.tiny import tiny_model

pytestmark = pytest.mark.timeout(300)


async def test_checkpoints_are_listed_expire_and_go(tinker: TinkerClient, tinker_server: HttpServer) -> None:
    model = await tinker.model()
    await tinker.done("forward_backward", forward_backward(model, 1, [datum()]))
    await tinker.wait(await tinker.step(model, 2))
    for seq, (route, name) in enumerate((("save_weights", "a"), ("save_weights_for_sampler", "a")), 3):
        asked = {"model_id": model, "seq_id": seq, "path": name, "ttl_seconds": 3600, "user_metadata": {"loss": "1"}}
        await tinker.done(route, asked)
    snapshot = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
    sampler = (await tinker.done("save_weights_for_sampler", snapshot))["sampling_session_id"]
    runs = f"training_runs/{model}"
    listed = (await tinker.send("GET", f"{runs}/checkpoints"))["checkpoints"]
    assert {each["checkpoint_id"] for each in listed} == {"weights/a", "sampler_weights/a"}
    sizes = {each["checkpoint_type"]: each["size_bytes"] for each in listed}
    assert 2.5 * sizes["sampler"] < sizes["training"]  # weights alone, without both moments
    assert all(each["user_metadata"] == {"loss": "1"} and each["expires_at"] > each["time"] for each in listed)
    run = await tinker.send("GET", runs)
    assert run["lora_rank"] == 4 and run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/a"
    everything = await tinker.send("GET", "training_runs?limit=1")
    assert everything["cursor"]["limit"] == 1 and everything["training_runs"][0]["training_run_id"] == model

    await tinker.send("PUT", f"{runs}/checkpoints/weights/a/ttl", json={"ttl_seconds": None})
    (kept,) = [each for each in (await tinker.send("GET", "checkpoints"))["checkpoints"]
               if each["tinker_path"] == f"tinker://{model}/weights/a"]  # fmt: skip
    assert "expires_at" not in kept
    await tinker.send("POST", f"{runs}/checkpoints/weights/a/publish")
    info = await tinker.post("weights_info", {"tinker_path": f"tinker://{model}/weights/a"})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("tiny", 4, True)
    await tinker.send("DELETE", f"{runs}/checkpoints/sampler_weights/a")
    await tinker.send("DELETE", f"{runs}/checkpoints/sampler_weights/a", 404)
    gone = {"session_id": tinker.session_id, "sampling_session_seq_id": 9}
    await tinker.post("create_sampling_session", gone | {"model_path": f"tinker://{model}/sampler_weights/a"}, 404)
    session = await tinker.send("GET", f"sessions/{tinker.session_id}")
    assert session["training_run_ids"] == [model] and session["sampler_ids"] == [sampler]
    assert tinker.session_id in (await tinker.send("GET", "sessions"))["sessions"]


def test_texts_of_the_core_are_in_the_names_of_clients(tmp_path: Path) -> None:
    store, run = TinkerStore(tmp_path), "run-" + "a2" * 8
    store.models_by_run[run] = ModelRecord(owner="", model_id="s:train:0", session_id="s", run_id=run)
    told = store.in_its_names(f"the run {run} waits for {run}/weights.a. {run}/tmp-1, run-{'b' * 16}/c and run-by")
    assert told == "the run s:train:0 waits for tinker://s:train:0/weights/a. s:train:0, another model (c) and run-by"


async def test_overwriting_replaces_what_was_said_and_a_failed_save_leaves_nothing(tinker: TinkerClient) -> None:
    model = await tinker.model()
    asked = {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 60, "user_metadata": {"loss": "2"}}

    async def listed() -> list[dict[str, Any]]:
        found = (await tinker.send("GET", f"training_runs/{model}/checkpoints"))["checkpoints"]
        return [each | {"metadata": each.get("user_metadata")} for each in found]

    await tinker.done("save_weights", asked)
    refused = await tinker.done("save_weights", asked | {"seq_id": 2, "ttl_seconds": 9, "user_metadata": {"loss": "3"}})
    assert "overwrite" in refused["error"]
    assert model in refused["error"] and "run-" not in refused["error"]
    (first,) = await listed()
    assert first["metadata"] == {"loss": "2"} and "expires_at" in first
    again = {"model_id": model, "seq_id": 3, "path": "a", "overwrite": True, "user_metadata": {"loss": "1"}}
    await tinker.done("save_weights", again)
    (second,) = await listed()
    assert second["metadata"] == {"loss": "1"} and "expires_at" not in second
    await tinker.done("save_weights", again | {"seq_id": 4, "user_metadata": None})
    (third,) = await listed()
    assert third["metadata"] is None and third["time"] > second["time"]

    await tinker.send("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl", json={"ttl_seconds": 60})
    (kept,) = await listed()
    assert "expires_at" in kept
    for seq, name in enumerate("bcd", 5):
        await tinker.done("save_weights", {"model_id": model, "seq_id": seq, "path": name})
    for name in "dcba":
        await tinker.send("DELETE", f"training_runs/{model}/checkpoints/weights/{name}")
    assert await listed() == []
    metrics, _ = outputs(await tinker.done("forward_backward", forward_backward(model, 8, [datum()])))
    assert metrics["loss:sum"] > 0


async def test_exported_weights_are_downloaded_by_signed_urls(
    tinker: TinkerClient, tinker_server: HttpServer, tmp_path: Path
) -> None:
    model = await tinker.model()
    await tinker.done("forward_backward", forward_backward(model, 1, [datum()]))
    await tinker.wait(await tinker.step(model, 2, learning_rate=1e-2))
    asked = {"model_id": model, "seq_id": 3, "path": "out", "ttl_seconds": 3600}
    saved = await tinker.done("save_weights_external", asked)
    assert saved["path"] == f"tinker://{model}/external_weights/out"
    (listed,) = (await tinker.send("GET", f"training_runs/{model}/checkpoints"))["checkpoints"]
    assert listed["checkpoint_type"] == "external" and listed["expires_at"] and listed["size_bytes"] > 1000
    exports = f"training_runs/{model}/checkpoints/external_weights"
    urls = (await tinker.send("GET", f"{exports}/out/external_weights_urls"))["urls"]
    async with httpx.AsyncClient(timeout=60) as nobody:
        for name, url in urls.items():
            got = await nobody.get(url)
            assert got.status_code == 200 and int(got.headers["content-length"]) == len(got.content)
            (tmp_path / name).write_bytes(got.content)
        url = urls["adapter_model.safetensors"]
        assert (await nobody.get(url.replace("adapter_model", "other"))).status_code == 404
        token = url.split("/")[-2]
        forged = token.rpartition(".")[0] + "." + "A" * 27
        assert (await nobody.get(url.replace(token, forged))).status_code == 403
        ids = [5, 17, 40, 8]
        plain = await asyncio.to_thread(with_adapter, tinker_server.model, tmp_path)
        with torch.no_grad():
            log_p = plain(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
        row = {"tokens": ids, "target_tokens": [17, 40, 8, 9], "weights": np.ones(4)}
        body = forward_backward(model, 4, [row], forward=True)
        _, (ours,) = outputs(await tinker.done("forward_backward", body))
        np.testing.assert_allclose(ours, log_p[np.arange(4), [17, 40, 8, 9]], atol=1e-5)

        [stored] = tinker_server.state_dir.glob("runs/*/exports/external_weights.out/adapter_model.safetensors")
        whole = stored.read_bytes()
        stored.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused = await nobody.get(url)
        assert refused.status_code == 422 and "adapter_model.safetensors has changed" in refused.json()["detail"]
        stored.write_bytes(whole)
        assert (await nobody.get(url)).content == whole

        again = await tinker.done("save_weights_external", asked | {"seq_id": 5})
        assert "delete them first" in again["error"]
        await tinker.send("DELETE", f"{exports}/out")
        assert (await nobody.get(url)).status_code == 404
        await tinker.send("GET", f"{exports}/out/external_weights_urls", 404)
        assert not (await tinker.send("GET", f"training_runs/{model}/checkpoints"))["checkpoints"]

        pyrage = pytest.importorskip("pyrage", reason="comes with gradwire[http]")
        identity = pyrage.x25519.Identity.generate()
        wrong = await tinker.done(
            "save_weights_external", asked | {"seq_id": 6, "path": "a", "age_encryption_recipients": ["age1no"]}
        )
        assert "no age recipient" in wrong["error"]
        sealed = {"seq_id": 7, "path": "sealed", "age_encryption_recipients": [str(identity.to_public())]}
        await tinker.done("save_weights_external", asked | sealed)
        urls = (await tinker.send("GET", f"{exports}/sealed/external_weights_urls"))["urls"]
        assert all(name.endswith(".age") for name in urls)
        got = await nobody.get(urls["adapter_config.json.age"])
        assert json.loads(pyrage.decrypt(got.content, [identity]))["r"] == 4
        await asyncio.to_thread(rotate, tinker_server.state_dir)
        assert (await nobody.get(urls["adapter_config.json.age"])).status_code == 403


@pytest.mark.long
async def test_a_published_checkpoint_is_open_alone_and_until_it_is_unpublished(tmp_path: Path) -> None:
    keys = [KeyFile(tmp_path / "state").create(name, prefix="tml-") for name in ("ann", "bob")]
    server = HttpServer(
        await asyncio.to_thread(tiny_model, tmp_path / "model"), tmp_path / "state", free_port(), "--threads", "1"
    )
    await asyncio.to_thread(server.start)
    try:
        async with AsyncExitStack() as stack:
            https = [
                await stack.enter_async_context(
                    httpx.AsyncClient(base_url=server.url, timeout=60, headers={"X-API-Key": key})
                )
                for key in keys
            ]
            ann, bob = [await TinkerClient(http).begin() for http in https]
            model = await ann.model()
            for seq, name in enumerate(("open", "closed"), 1):
                await ann.done("save_weights", {"model_id": model, "seq_id": seq, "path": name})
            paths = [f"tinker://{model}/weights/{name}" for name in ("open", "closed")]
            publish = f"training_runs/{model}/checkpoints/weights/open/publish"
            sampler = {"session_id": bob.session_id, "model_path": paths[0]}
            await bob.post("create_sampling_session", sampler | {"sampling_session_seq_id": 0}, 404)
            await bob.send("POST", publish, 404)
            await ann.send("POST", publish)
            listed = (await ann.send("GET", f"training_runs/{model}/checkpoints"))["checkpoints"]
            assert {each["tinker_path"]: each["public"] for each in listed} == dict(
                zip(paths, (True, False), strict=True)
            )
            opened = await bob.post("create_sampling_session", sampler | {"sampling_session_seq_id": 1})
            asked = {
                "sampling_session_id": opened["sampling_session_id"], "num_samples": 1,
                "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 2},
            }  # fmt: skip
            assert isinstance(await bob.done("asample", asked | {"seq_id": 0}), bytes)
            assert (await bob.post("weights_info", {"tinker_path": paths[0]}))["lora_rank"] == 4
            load = {"session_id": bob.session_id, "model_seq_id": 0, "optimizer": False}
            theirs = (await bob.done("load_weights", load | {"path": paths[0]}))["model_id"]
            await bob.post("weights_info", {"tinker_path": paths[1]}, 404)  # only what was published
            await bob.post("load_weights", load | {"model_seq_id": 1, "path": paths[1]}, 404)
            await bob.send("GET", f"training_runs/{model}/checkpoints", 404)
            into = {"model_id": theirs, "path": paths[0], "optimizer": False}
            assert "error" not in await bob.done("load_weights", into | {"seq_id": 1})
            await ann.send("DELETE", publish)
            assert "error" in await bob.done("asample", asked | {"seq_id": 1})
            await bob.post("create_sampling_session", sampler | {"sampling_session_seq_id": 2}, 404)
            refused = await bob.done("load_weights", into | {"seq_id": 2})
            assert "no checkpoint" in refused["error"]
            metrics, _ = outputs(await bob.done("forward_backward", forward_backward(theirs, 3, [datum()])))
            assert metrics["loss:sum"] > 0  # what was started from it goes on
    finally:
        await asyncio.to_thread(server.end)


async def test_an_expired_checkpoint_is_deleted_and_one_that_is_needed_is_tried_again(tmp_path: Path) -> None:
    store = TinkerStore(tmp_path)
    await store.open()
    names = ("kept", "due", "needed", "gone", "old", "awaited")
    paths = [f"tinker://{'0' * 8}:train:0/weights/{name}" for name in names]
    for path, expires in zip(paths, (None, *[1.0] * 5), strict=True):
        await store.put(store.saved, SavedRecord(owner="", path=path, expires_at=expires))
    asked = []

    class Saved:
        def is_outdated(self, record: SavedRecord) -> bool:
            return TinkerPath.read(record.path).name == "old"

        def is_of_what_is_there(self, record: SavedRecord) -> bool:
            return TinkerPath.read(record.path).name != "awaited"

        async def delete(self, caller: Caller, path: TinkerPath) -> None:
            asked.append(path.name)
            if path.name == "needed":
                raise ServiceError(training_pb2.ERROR_CODE_UNSUPPORTED, "a recovery could need it")
            if path.name == "gone":
                raise unknown_checkpoint(str(path))
            await store.delete(store.saved, f"{path}@0")

    class Models:
        async def release_delivered(self, before: float, most: int) -> None:
            pass

        async def forget(self, *models: object) -> None:
            assert not models

    class Samplers:
        many_made = asyncio.Event()

    for _ in range(2):
        await TinkerCollection(None, store, Saved(), Models(), Samplers()).collect()  # type: ignore[arg-type]
    assert asked == ["due", "needed", "gone", "needed"]
    assert [record.path for record in store.saved.values()] == [paths[0], paths[2], paths[5]]
    await store.close()
