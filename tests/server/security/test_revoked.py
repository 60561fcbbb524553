"""Keys that are revoked while their calls are under way: no door has a word more for them, however long they would
wait. The doors are those of the route tables and descriptors, so that a new one is tried without being named here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile, Role
from gradwire_server.access.keys import LOOK_AGAIN_S
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.doors.grpc.interceptors import Guard
from gradwire_server.doors.http.tinker.futures import HOLD_S
from support import costly_bodies, routes
from support.served import Served
from support.tinker import TinkerClient

MESSAGES = [{"role": "user", "content": "a"}]
LONG: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"prompt": "a", "max_tokens": 4000, "ignore_eos": True},
    "POST /v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True},
    "POST /v1/responses": {"input": "a", "max_output_tokens": 4000, "ignore_eos": True},
    "POST /v1/messages": {"messages": MESSAGES, "max_tokens": 4000, "temperature": 0},
}
"""For each route that streams, a request that takes many seconds."""
DOWNLOADS = {
    "GET /v1/files/{file_id}/content",
    "GET /api/v1/session_traces/{token}",
    "GET /api/v1/external_weights/{token}/{file}",
}
"""Routes whose answers come in parts, too."""
METHODS = {f"{service.full_name}/{rpc.name}": rpc for service in costly_bodies.services() for rpc in service.methods}


def test_the_routes_that_stream_are_those_that_are_tried(tmp_path: Path) -> None:
    found = routes.endpoints(tmp_path)
    streams = re.compile(r"event_stream\(|return await answer\(")  # the latter calls the former
    assert {route for route, source in found.items() if streams.search(source)} == set(LONG)
    assert {route for route, source in found.items() if re.search("(Streaming|File)Response\\(", source)} == DOWNLOADS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", list(LONG))
async def test_what_generates_ends_with_its_key(served: Served, route: str, stream: bool) -> None:
    served.renew("streaming")
    before = await _sampled(served)
    body = {"model": "tiny", "stream": stream} | LONG[route]
    async with served.http("streaming") as http:
        asking = asyncio.create_task(_lines(http, route.split()[1], body, served if stream else None))
        if not stream:
            await asyncio.sleep(0.3)  # wherever the request is by now
            served.file.revoke("streaming")
        status, lines = await asking
    assert status == (200 if stream else 401) and "valid API key" in lines[-1] and "[DONE]" not in lines[-1]
    served.renew("streaming")
    sampled = 0
    for _ in range(600 if stream else 1):  # what was computed is counted soon after its caller has gone
        if sampled := await _sampled(served) - before:
            break
        await asyncio.sleep(0.1)
    assert stream <= sampled < 4000, "its work has ended with it"


async def _sampled(served: Served) -> int:
    """The tokens that were ever sampled in the name, also for callers who are gone."""
    async with served.grpc("streaming") as (_, stub):
        return sum(entry.sampled_tokens for entry in (await stub.GetUsage(pb.GetUsageRequest(by=["owner"]))).entries)


async def _lines(http: httpx.AsyncClient, path: str, body: Any, revoking: Served | None) -> tuple[int, list[str]]:
    """The status and lines of an answer; the key is revoked at its first event."""
    found = []
    async with http.stream("POST", path, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and revoking is not None:
                revoking.file.revoke("streaming")
                revoking = None
            found += [line] * bool(line)
        return answer.status_code, found


async def test_a_download_ends_with_its_key(served: Served) -> None:
    served.renew("reading")
    content = b'{"text": "' + b"a" * (4 << 20) + b'"}\n'
    async with served.http("reading") as http:
        form = {"files": {"file": ("a.jsonl", content * 12)}, "data": {"purpose": "script"}}
        file = (await http.post("/v1/files", **form)).json()
        assert file["bytes"] == len(content) * 12
        read, path = 0, f"/v1/files/{file['id']}/content"
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("GET", path) as answer:
                async for part in answer.aiter_bytes():
                    if not read:
                        served.file.revoke("reading")
                        await asyncio.sleep(2 * LOOK_AGAIN_S)
                    read += len(part)
    assert 0 < read < file["bytes"]


async def test_a_poll_ends_with_its_key_when_nobody_else_calls(served: Served) -> None:
    served.renew("alone")
    async with served.http("alone") as http:
        model = await (await TinkerClient(http).begin()).model()
        polled = asyncio.create_task(http.post("/api/v1/retrieve_future", json={"request_id": f"{model}:7:step"}))
        await asyncio.sleep(0.1)  # the poll is under way
        served.file.revoke("alone")
        async with asyncio.timeout(HOLD_S / 2):
            assert (await polled).status_code == 401


async def test_a_poll_and_an_upload_end_with_their_key(served: Served) -> None:
    served.renew("polling")
    async with served.http("polling") as http:
        tinker = await TinkerClient(http).begin()
        model = await tinker.model()
        asked = {"base_model": "tiny", "lora_config": {"rank": 2}}
        signed = (await tinker.post("external_weights_upload_start", asked))["urls"]["adapter_config.json"]
        trace = (await tinker.send("GET", f"sessions/{tinker.session_id}/trace_export"))["url"]
        async with httpx.AsyncClient() as keyless:
            assert (await keyless.put(signed, content=b"{}")).status_code == 200
        polled = asyncio.create_task(http.post("/api/v1/retrieve_future", json={"request_id": f"{model}:7:step"}))

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"session_id"'
            await asyncio.sleep(0.1)  # the poll is under way
            served.file.revoke("polling")
            await asyncio.sleep(0.1)  # longer than a key is believed
            yield b': "a"}'

        headers = {"Content-Type": "application/json"}
        answer = await http.post("/api/v1/session_heartbeat", content=slowly(), headers=headers)
        assert answer.status_code == 401 and "valid API key" in answer.text
        async with asyncio.timeout(HOLD_S / 2):
            assert (await polled).status_code == 401
        async with httpx.AsyncClient() as keyless:
            for answer in (await keyless.put(signed, content=b"{}"), await keyless.get(trace)):
                assert answer.status_code == 401 and "the key that asked for this URL" in answer.text


@asynccontextmanager
async def guarded(folder: Path, handlers: Mapping[str, Any]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a real gRPC server with handlers for some RPCs of :data:`METHODS`, behind the guard."""
    core = Core(ServerConfig(address="127.0.0.1:0", state_dir=folder, models={"tiny": "none"}))
    server = grpc.aio.server(interceptors=[Guard(core)])
    for name, handler in handlers.items():
        service, _, rpc = name.partition("/")
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {rpc: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def _handler(rpc: MethodDescriptor, answer: Callable[..., Any]) -> Any:
    kind = f"{'stream' if rpc.client_streaming else 'unary'}_{'stream' if rpc.server_streaming else 'unary'}"
    return getattr(grpc, f"{kind}_rpc_method_handler")(answer, lambda body: body, lambda body: body)


@pytest.mark.long
async def test_every_rpc_ends_with_its_key(tmp_path: Path) -> None:
    """Each is under way, behind a part of its answer if it has several, and its handler waits for ever."""
    file, left = KeyFile(tmp_path), set[str]()
    keys = {
        name: await asyncio.to_thread(file.create, f"key{number}", _role(rpc))
        for number, (name, rpc) in enumerate(METHODS.items())
    }

    def waiting(name: str) -> Callable[..., Any]:
        async def one(_request: Any, _context: Any) -> bytes:
            try:
                await asyncio.Event().wait()
            finally:
                left.add(name)
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield b""
            yield await one(request, context)

        return many if METHODS[name].server_streaming else one

    async with guarded(tmp_path, {name: _handler(rpc, waiting(name)) for name, rpc in METHODS.items()}) as channel:
        calls = {}
        for name, rpc in METHODS.items():
            metadata = (("authorization", f"Bearer {keys[name]}"),)
            call = calls[name] = channel.stream_stream(f"/{name}", bytes, bytes)(metadata=metadata)
            await call.write(b"")
            if rpc.server_streaming:
                assert await call.read() == b""
        for number in range(len(METHODS)):
            await asyncio.to_thread(file.revoke, f"key{number}")
        for name, call in calls.items():
            with pytest.raises(grpc.aio.AioRpcError, match="valid API key"):
                while await call.read() == b"":  # of a call without stream, which is empty
                    pass
            assert name in left


def _role(rpc: MethodDescriptor) -> Role:
    return "engine" if rpc.containing_service.name == "EngineService" else "user"


async def test_a_key_whose_reader_takes_nothing_is_let_go(tmp_path: Path) -> None:
    """The write that waits for the reader is ended as well."""
    file, left, name = KeyFile(tmp_path), asyncio.Event(), "gradwire.v1.TrainingService/Results"
    metadata = (("authorization", f"Bearer {file.create('ada')}"),)

    async def much(_request: Any, _context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            left.set()

    async with guarded(tmp_path, {name: _handler(METHODS[name], much)}) as channel:
        call = channel.unary_stream(f"/{name}")(b"", metadata=metadata)
        assert len(await call.read()) == 1 << 20
        await asyncio.sleep(0.2)  # the server has filled what is between them
        file.revoke("ada")
        await left.wait()
        call.cancel()
