"""The HTTP listener: keys, bodies, errors, the end; each over a real connection, on an engine without a model."""

from __future__ import annotations

import ast
import asyncio
import functools
import gzip
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import gradwire_http
import httpx
import pytest
import trustme
import zstandard
from gradwire_http import heads
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.calls import CallKind
from gradwire_server.access.key_file import KeyFile
from gradwire_server.cli.preflight import check
from gradwire_server.cli.settings_file import SettingsError
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import VERSION
from gradwire_server.doors.http.errors import HTTP_STATUS, error_response
from gradwire_server.doors.http.openai import answers, events
from gradwire_server.scheduling import who_is_next
from gradwire_server.server import Server
from support.front import Start
from support.scripted import until

CONFIG = "/api/v1/client/config"


@pytest.fixture
async def server(start: Start) -> AsyncIterator[Server]:
    async with start(http="127.0.0.1:0", limits={"max_http_body_bytes": 1 << 16}) as door:
        yield door.server


def _http(server: Server) -> httpx.AsyncClient:
    assert server.http is not None
    return httpx.AsyncClient(base_url=server.http.url, timeout=60)


def test_every_code_has_a_status_and_none_is_retried_in_vain() -> None:
    assert set(HTTP_STATUS) == set(pb.ErrorCode.values())
    assert not {402, 410} & set(HTTP_STATUS.values())
    for code, status in HTTP_STATUS.items():
        answer = error_response(pb.Error(code=code), lambda _, error: {"detail": error.message})
        assert (status == 409) == (answer.headers.get("x-should-retry") == "false"), code


async def test_both_protocols_and_health_share_a_listener(server: Server) -> None:
    async with _http(server) as http:
        assert (await http.get("/healthz")).text == (await http.get("/health")).text == "ok"
        assert (await http.get("/version")).json() == {"version": VERSION}
        assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}
        (model,) = (await http.get("/v1/models")).json()["data"]
        (served,) = (await http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
        assert model["id"] == served["model_name"] and served["trainable"]
        missing = await http.get("/elsewhere")
        assert missing.status_code == 404 and "/api/v1 (tinker)" in missing.json()["detail"]
        for path, where in (("/v1/none", ("error", "message")), ("/api/v1/none", ("detail",))):
            answer = await http.get(path)
            message = answer.json()
            for key in where:
                message = message[key]
            assert answer.status_code == 404 and f"GET {path} is not served here" in message


async def test_keys_of_both_headers_and_none(start: Start, tmp_path: Path) -> None:
    secret = KeyFile(tmp_path).create("ann")
    async with start(http="127.0.0.1:0") as door, _http(door.server) as http:
        assert (await http.get("/api/v1/healthz")).status_code == 200
        for headers in ({"X-API-Key": secret}, {"Authorization": f"Bearer {secret}"}):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, {"X-API-Key": "tml-other"}, {"Authorization": secret}):
            refused = await http.get("/v1/models", headers=headers)
            assert refused.status_code == 401 and "API key" in refused.json()["error"]["message"]


async def test_requests_under_way_are_bounded_and_more_fit_later(start: Start) -> None:
    async with start(http="127.0.0.1:0", limits={"key_streams": 1}) as door, _http(door.server) as http:
        async with door.server.core.calls.turn("", CallKind.HTTP):
            refused = await http.get("/v1/models")
            assert refused.status_code == 429 and "key_streams=N" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        assert (await http.get("/v1/models")).status_code == 200


async def test_who_waits_for_a_turn_hears_that_it_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.05)
    async with start(http="127.0.0.1:0") as door, _http(door.server) as http:
        door.engine.gate.clear()
        asked = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "stream": True}
        async with http.stream("POST", "/v1/completions", json=asked, timeout=60) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
            door.engine.gate.set()
            assert [line async for line in lines if line.startswith("data")] == ["data: [DONE]"]


@pytest.mark.parametrize("ahead", [1, who_is_next.SAMPLES_AHEAD], ids=["for an engine", "in an engine"])
async def test_who_waits_without_a_stream_is_told_to_come_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(who_is_next, "SAMPLES_AHEAD", ahead)
    async with start(http="127.0.0.1:0") as door, _http(door.server) as http:
        asked = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3}
        door.engine.gate.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=asked))
        await until(lambda: door.server.core.scheduler.placement.engines[0].fair_queue.load == 1)
        monkeypatch.setattr(answers, "TURN_S", 0.1)
        refused = await http.post("/v1/completions", json=asked)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "15"
        assert "waited 0 s for its turn behind others" in refused.json()["error"]["message"]
        assert not first.done(), "what an engine computes is not refused"
        first.cancel()


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_compressed_body_is_bounded_by_what_it_becomes(server: Server, encoding: str) -> None:
    compress = functools.partial(gzip.compress, compresslevel=1) if encoding == "gzip" else zstandard.compress
    async with _http(server) as http:
        headers = {"Content-Encoding": encoding}
        bomb = await http.post(CONFIG, content=compress(b" " * (4 << 20)), headers=headers)
        assert bomb.status_code == 413 and "max_http_body_bytes" in bomb.json()["detail"]
        broken = await http.post(CONFIG, content=b"not compressed", headers=headers)
        assert broken.status_code == 400 and f"the body is not {encoding}" in broken.json()["detail"]
        torn = await http.post(CONFIG, content=compress(bytes(range(256)) * 9)[:-9], headers=headers)
        assert torn.status_code == 400 and "ends too early" in torn.json()["detail"]


async def test_a_plain_body_is_bounded(server: Server) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1 << 12):
            yield bytes(1 << 12)

    async with _http(server) as http:
        for content in (bytes(1 << 20), endless()):
            answer = await http.post(CONFIG, content=content)
            assert answer.status_code == 413 and "65536 at most" in answer.json()["detail"]
        odd = await http.post(CONFIG, content=b"{}", headers={"Content-Encoding": "br"})
        assert odd.status_code == 400 and "gzip, zstd or neither" in odd.json()["detail"]


async def test_a_client_that_is_still_sending_reads_why_it_is_refused(server: Server) -> None:
    assert server.http is not None
    host, _, port = server.http.address.partition(":")
    head = f"POST {CONFIG} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {64 << 20}\r\n"
    for extra, size in (("", 64), ("Expect: 100-continue\r\n", 0)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}{extra}\r\n".encode())
        for _ in range(size):
            writer.write(bytes(1 << 20))
            await writer.drain()
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_json_has_a_limit_of_its_own(start: Start) -> None:
    limits = {"max_json_body_bytes": 1 << 16}
    async with start(http="127.0.0.1:0", limits=limits) as door, _http(door.server) as http:
        route, content = "/api/v1/forward_backward", bytes(1 << 17)
        refused = await http.post(route, content=content, headers={"Content-Type": "application/json"})
        assert refused.status_code == 413 and "--limit max_json_body_bytes=N" in refused.json()["detail"]
        read = await http.post(route, content=content, headers={"Content-Type": "application/x-protobuf"})
        assert read.status_code == 400 and "protobuf" in read.json()["detail"]


NOT_PROTOBUF: list[list[tuple[str, str]]] = [
    *([("Content-Type", each)] for each in (
        "application/json; x=protobuf", "application/json;application/x-protobuf", "application/protobuf+json",
        "application/x-protobuf+json", "application/x-protobuf-json", "APPLICATION/JSON; protobuf", "protobuf", "",
        'application/json; a="; application/x-protobuf"', "application/vnd.protobuf+json",
    )),
    [("Content-Type", "application/json"), ("Content-Type", "application/x-protobuf")],
    [("Content-Type", "application/x-protobuf"), ("Content-Type", "application/json")],
]  # fmt: skip


async def test_what_is_not_protobuf_is_counted_as_json(start: Start) -> None:
    """A parameter of the type switched the bounds of JSON off: 4.7 MB of gzip held all up for 16 s."""
    body = gzip.compress(b'{"a": [' + b"[]," * 40_000 + b"[]]}")
    async with start(http="127.0.0.1:0") as door, _http(door.server) as http:
        for headers in NOT_PROTOBUF:
            for path in ("/api/v1/forward_backward", "/api/v1/create_session", "/v1/completions"):
                answer = await http.post(path, content=body, headers=[*headers, ("Content-Encoding", "gzip")])
                assert answer.status_code == 400 and "max_json_containers" in answer.text, (headers, path)


PARTS = ("startswith", "endswith", "find", "rfind", "index", "count")


@pytest.mark.long
def test_no_part_of_a_header_decides() -> None:
    """Headers are compared whole; what is looked for in one is found in its parameters, and beside other values."""
    found = []
    for file in (Path(gradwire_http.__file__).parents[1]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            looked_in = ""
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                if isinstance(node.left, ast.Constant):
                    looked_in = ast.unparse(node.comparators[0])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARTS:
                looked_in = ast.unparse(node.func.value)
            if re.search(r"content_type|media_type|encoding|headers?\b.*(\.get\(|\[)", looked_in):
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1,}', "not JSON: Expecting property name enclosed in double quotes, at character 8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": "\xff"}', "not JSON in UTF-8: invalid start byte at byte 7"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "4300 digits"),
    ],
    ids=["none", "no object", "comma", "deep", "no UTF-8", "digits"],
)
async def test_a_body_that_cannot_be_read_is_explained(server: Server, content: bytes, words: str) -> None:
    async with _http(server) as http:
        for path, where in (("/api/v1/create_session", ("detail",)), ("/v1/completions", ("error", "message"))):
            limit = server.core.config.limits.max_http_body_bytes
            answer = await http.post(path, content=content[:limit], headers={"Content-Type": "application/json"})
            message = answer.json()
            for key in where:
                message = message[key]
            assert answer.status_code in (400, 422) and words in message, answer.text


async def test_a_mistake_of_the_server_is_said_in_the_protocols_form(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(server.core, "models", broken)
    monkeypatch.setattr(server.core.runs, "page", broken)
    async with _http(server) as http:
        for path, where in (("/api/v1/get_server_capabilities", ("detail",)), ("/v1/models", ("error", "message"))):
            caplog.clear()
            answer = await http.get(path)
            message = answer.json()
            for key in where:
                message = message[key]
            (logged,) = [record for record in caplog.records if record.exc_info]
            assert answer.status_code == 500 and "odd" not in answer.text
            assert answer.headers["X-Request-Id"] in message and answer.headers["X-Request-Id"] in logged.getMessage()


async def test_requests_are_counted_by_route(server: Server) -> None:
    async with _http(server) as http:
        await http.get("/v1/models")
        await http.get("/v1/anything/at/all")
    count = server.core.metrics.registry.get_sample_value
    name, door = "gradwire_http_requests_total", {"door": "openai"}
    assert count(name, door | {"route": "/models", "status": "200"}) == 1
    assert count(name, door | {"route": "other", "status": "404"}) == 1


async def test_tls_is_that_of_grpc(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    verify = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    async with start(http="127.0.0.1:0", **files) as door, httpx.AsyncClient(verify=verify, timeout=60) as http:
        url = door.server.http.url
        assert url.startswith("https://") and (await http.get(url + "/healthz")).text == "ok"


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: lo", b"GET /healthz HTTP/1.1\r\nA: b\r\n"]
)
async def test_a_head_that_does_not_come_ends_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Without a key: 800 such connections stayed for ever."""
    async with start(http="127.0.0.1:0") as door:
        host, port = door.server.http.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(heads, "HEAD_S", 0.2)
        slow, sent = await asyncio.open_connection(host, int(port))
        sent.write(begun)
        assert await asyncio.wait_for(slow.read(), 30) == b""
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")  # one that was idle since its answer goes on
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200"), 30)
        for each in (writer, sent):
            each.close()


async def test_a_head_without_end_is_refused(start: Start) -> None:
    async with start(http="127.0.0.1:0") as door:
        host, port = door.server.http.address.split(":")
        for piece in (b"a" * 1000, b"\r\nA: b"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: ")
            writer.write(piece * (300_000 // len(piece)))
            assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 431")
            writer.close()


async def test_an_address_in_use_is_said(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemExit, match=f"cannot listen on --http {address}"):
            async with start(http=address):
                pass
        with pytest.raises(SettingsError) as caught:
            await asyncio.to_thread(check, ServerConfig(models={"m": "."}, address="127.0.0.1:0", http=address))
        assert any("give another with --http HOST:PORT" in sentence for sentence in caught.value.sentences)
