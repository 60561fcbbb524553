"""Pushing a run to the Hugging Face hub, against a stand-in of the hub's HTTP API on loopback; export onto a file."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.errors import AccessError, ConnectionLostError, InvalidArgumentError
from support.server import free_port
from support.web import Quiet, serving

ROWS = [{"input_ids": [4, 5, 6, 7]}]


class StandIn:
    """The calls that creating a repository and committing a folder make.

    Attributes:
        files: What was committed, by path in the repository.
        created: The bodies of the calls that create repositories.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[Any] = []
        self.messages: list[str] = []
        stand_in = self

        class Handler(Quiet):
            def do_GET(self) -> None:
                if self.headers.get("Authorization") != "Bearer hf_right":
                    self._answer({"error": "no"}, 401)
                    return
                self._answer({"id": "me/tiny", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != "Bearer hf_right":
                    self._answer({"error": "no"}, 401)
                elif self.path == "/api/repos/create":
                    stand_in.created.append(json.loads(body))
                    self._answer({"url": f"{stand_in.url}/me/tiny", "name": "me/tiny"})
                elif "/preupload/" in self.path:
                    asked = json.loads(body)["files"]
                    self._answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                                            for f in asked]})  # fmt: skip
                elif "/commit/" in self.path:
                    for line in map(json.loads, body.splitlines()):
                        value = line["value"]
                        if line["key"] == "header":
                            stand_in.messages.append(value["summary"])
                        elif line["key"] == "file":
                            stand_in.files[value["path"]] = base64.b64decode(value["content"])
                    url = f"{stand_in.url}/me/tiny/commit/{'1' * 40}"
                    self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})
                else:
                    self._answer({"error": self.path}, 404)

            def _answer(self, body: Any, status: int = 200) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.handler, self.url = Handler, ""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the suite's own setting
    standing = StandIn()
    with serving(standing.handler) as address:
        standing.url = f"http://{address}"
        yield standing


async def test_a_run_is_pushed(service: gradwire.ServiceClient, hub: StandIn, tmp_path: Path) -> None:
    run = await service.create_run("tiny", lora=2)
    run.forward_backward(ROWS, "causal_lm")
    run.optim_step(1e-2)
    address = await run.push_to_hub("tiny", private=True, token="hf_right", endpoint=hub.url)
    assert address == f"{hub.url}/me/tiny/commit/{'1' * 40}"
    assert hub.created[0]["name"] == "tiny" and hub.created[0]["visibility"] == "private"
    assert hub.messages == [f"gradwire run {run.run_id}, step 1"]
    exported = await run.export(tmp_path / "export")
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= hub.files.keys()
    for name, content in hub.files.items():
        assert content == (exported / name).read_bytes()
    with pytest.raises(AccessError, match="the hub refuses to write tiny: log in with `hf auth login`"):
        await run.push_to_hub("tiny", token="hf_wrong", endpoint=hub.url)
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionLostError, match=f"the hub at {nowhere} did not take tiny: .*refused"):
        await run.push_to_hub("tiny", token="hf_right", endpoint=nowhere)


async def test_a_file_in_the_way_is_named(service: gradwire.ServiceClient, tmp_path: Path) -> None:
    run = await service.create_run("tiny", lora=2)
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(InvalidArgumentError, match=r"export: .*taken is a file, and the files go to a folder"):
            await run.export(path)
    with pytest.raises(InvalidArgumentError, match=r"download_checkpoint: .*taken is a file"):
        await run.download_checkpoint(await run.save_checkpoint("here"), tmp_path / "taken")
    saved = await run.save_checkpoint("there")
    for fetched in (run.export("/proc/nowhere"), run.download_checkpoint(saved, "/proc/nowhere/below")):
        with pytest.raises(InvalidArgumentError, match=r"cannot be written to /proc/nowhere.*: No such file") as caught:
            await fetched
        assert caught.value.field == "path"
    assert (await run.forward(ROWS, "causal_lm")).loss is not None  # the run goes on
