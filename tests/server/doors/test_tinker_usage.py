"""What the Tinker door tells of what was done: usage, audit log, traces, searches of checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from support.tinker import HttpServer, TinkerClient, datum, forward_backward, outputs

pytestmark = pytest.mark.timeout(600)


async def test_what_was_done_is_told(tinker: TinkerClient, tinker_server: HttpServer) -> None:
    model = await tinker.model()
    await tinker.done("forward_backward", forward_backward(model, 1, [datum(), datum(1)]))
    await tinker.wait(await tinker.step(model, 2))
    for seq, name in ((3, "a"), (4, "b")):
        save = {"model_id": model, "seq_id": seq, "path": name, "user_metadata": {"run": tinker.session_id}}
        await tinker.done("save_weights", save)
    sampler = {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampling = (await tinker.post("create_sampling_session", sampler))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    asked = {"sampling_session_id": sampling, "seq_id": 0, "num_samples": 2, "prompt": prompt}
    await tinker.done("asample", asked | {"sampling_params": {"max_tokens": 4, "stop": []}})

    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {
        "starting_on": (now - timedelta(hours=1)).isoformat(),
        "ending_before": (now + timedelta(hours=2)).isoformat(),
    }
    usage = await tinker.send("GET", "billing/usage/events", params=window)
    own = [each for each in usage["data"] if each["session_id"] == tinker.session_id]
    infos: dict[str, list[dict[str, Any]]] = {}
    for event in own:
        infos.setdefault(event["event_info"]["type"], []).append(event["event_info"])
    assert sum(info["token_count"] for info in infos["training"]) == 16
    assert sum(info["engine_seconds"] for info in infos["training"]) > 0
    assert {info["training_run_id"] for info in infos["training"]} == {model}
    assert sum(info["count"] for info in infos["checkpoint"]) == 2
    assert sum(info["token_count"] for info in infos["sampling_prefill"]) == 3
    assert sum(info["token_count"] for info in infos["sampling_sample"]) == 8
    assert tinker.session_id in usage["sessions"] and {each["base_model"] for each in own} == {"tiny"}
    refused = await tinker.send(
        "GET", "billing/usage/events", 400, params=window | {"starting_on": "2026-01-01T00:00:00Z"}
    )
    assert "14 days" in refused["detail"]
    stored = next(  # of this door's other tests there may be projects
        each
        for each in (await tinker.send("GET", "billing/usage/checkpoints/current"))["data"]
        if each["project_id"] is None
    )
    assert stored["checkpoint_count"] >= 2 and stored["size_bytes"] > 0

    search = {"user_metadata": {"run": tinker.session_id}, "limit": 1}
    first = await tinker.post("checkpoints/search", search)
    second = await tinker.post("checkpoints/search", search | {"cursor": first["next_cursor"]})
    paths = [each["tinker_path"] for page in (first, second) for each in page["checkpoints"]]
    assert paths == [f"tinker://{model}/weights/b", f"tinker://{model}/weights/a"] and second["next_cursor"] is None
    assert not (await tinker.post("checkpoints/search", search | {"base_models": []}))["checkpoints"]
    assert not (await tinker.post("checkpoints/search", search | {"checkpoint_type": "sampler"}))["checkpoints"]

    await tinker.send("DELETE", f"training_runs/{model}/checkpoints/weights/a")
    entries = (await tinker.send("GET", "audit?event_type=checkpoints"))["entries"]
    events = [
        each["event"] for each in entries if each["event_details"]["tinker_path"].startswith(f"tinker://{model}/")
    ]
    assert events == ["checkpoint_save", "checkpoint_save", "checkpoint_delete"]
    assert not (await tinker.send("GET", "audit?day=2026-01-01"))["entries"]

    exported = await tinker.send("GET", f"sessions/{tinker.session_id}/trace_export")
    assert exported["status"] == "ready"
    async with httpx.AsyncClient(timeout=60) as keyless:
        trace = (await keyless.get(exported["url"])).json()["traceEvents"]
        assert (await keyless.get(exported["url"][:-3] + "abc")).status_code == 403
    slices = [each for each in trace if each["ph"] == "X"]
    assert [each["name"] for each in slices][:2] == ["forward_backward", "optim_step"]
    assert slices[0]["args"]["tokens"] == 16 and all(each["dur"] >= 0 < each["ts"] for each in slices)


async def test_an_adapter_is_uploaded(tinker: TinkerClient) -> None:
    model = await tinker.model(rank=2)
    await tinker.done("forward_backward", forward_backward(model, 1, [datum()]))
    await tinker.wait(await tinker.step(model, 2, learning_rate=0.1))
    await tinker.done("save_weights_external", {"model_id": model, "seq_id": 3, "path": "out"})
    route = f"training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    exported = (await tinker.send("GET", route))["urls"]
    asked = {"base_model": "tiny", "lora_config": {"rank": 2}, "destination_project_id": "moved"}
    begun = await tinker.post("external_weights_upload_start", asked)
    assert set(begun["urls"]) == {"adapter_config.json", "adapter_model.safetensors"} <= set(exported)
    finish = {"upload_id": begun["upload_id"]}
    lacking = await tinker.post("external_weights_upload_finish", finish, 400)
    assert "adapter_config.json and adapter_model.safetensors did not arrive" in lacking["detail"]
    async with httpx.AsyncClient(timeout=60) as keyless:
        files = {name: (await keyless.get(exported[name])).content for name in begun["urls"]}
        weights = begun["urls"]["adapter_model.safetensors"]
        for url, body, status, told in (
            (weights.replace("adapter_model.safetensors", "adapter_model.bin"), b"a", 400, "is no file of an upload"),
            (weights.replace("adapter_model.safetensors", "..%2Fadapter_config.json"), b"a", 404, ""),
            (weights[:-40], b"a", 404, ""),
            (begun["urls"]["adapter_config.json"], b" " * (1 << 20) + b" ", 400, "max_upload_bytes"),
        ):
            refused = await keyless.put(url, content=body)
            assert refused.status_code == status and told in refused.text, refused.text
        for name, url in begun["urls"].items():
            answer = await keyless.put(url, content=files[name])
            assert answer.status_code == 200, answer.text
    path = (await tinker.post("external_weights_upload_finish", finish))["tinker_path"]
    assert (await tinker.post("external_weights_upload_finish", finish))["tinker_path"] == path
    info = await tinker.post("weights_info", {"tinker_path": path})
    assert info["base_model"] == "tiny" and info["lora_rank"] == 2
    found = await tinker.post("checkpoints/search", {"project_ids": ["moved"]})
    assert [each["tinker_path"] for each in found["checkpoints"]] == [path]
    load = {"session_id": tinker.session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    loaded = (await tinker.done("load_weights", load))["model_id"]
    told = [
        outputs(await tinker.done("forward_backward", forward_backward(each, seq, [datum(5)], forward=True)))[1][0]
        for each, seq in ((model, 4), (loaded, 1))
    ]
    np.testing.assert_allclose(told[0], told[1], atol=1e-5)
    await tinker.post("external_weights_upload_finish", {"upload_id": "f" * 32}, 404)
