"""Uploads whose headers and names lie: refused in a sentence, and no file is anywhere but in its own place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support import routes
from support.served import Served
from support.tinker import TinkerClient

CONFIG = "adapter_config.json"


def files(served: Served) -> dict[str, bytes]:
    """What the state folder holds, but for what servers write by themselves."""
    state = served.server.state_dir
    own = ("journal", "gradwire.db", "tinker.db", "usage")
    found = [
        path for path in state.rglob("*") if path.is_file() and not path.relative_to(state).parts[0].startswith(own)
    ]
    return {str(path.relative_to(state)): path.read_bytes() for path in found}


async def sent(url: str, head: str, body: bytes, *, leaves: bool = False) -> str:
    """The head of the answer to bytes on a connection; of one that is left after them, nothing."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"PUT {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\n{head}\r\n".encode() + body)
    answer = b"" if leaves else await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer.decode(errors="replace")


async def test_a_signed_upload_whose_headers_lie_leaves_nothing(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    async with served.http("other") as http, httpx.AsyncClient() as keyless:
        tinker = await TinkerClient(http).begin()
        before = files(served)
        started = await tinker.post("external_weights_upload_start", {"base_model": "tiny", "lora_config": {"rank": 2}})
        url = started["urls"][CONFIG]

        async def parts() -> AsyncIterator[bytes]:
            yield b"{}"

        for answer in (
            await keyless.put(url, content=parts()),
            await keyless.put(url, content=b"{}", headers={"Content-Encoding": "gzip"}),
        ):
            assert answer.status_code == 400 and "Content-Length" in answer.text
        for name in (
            "..%2f..%2fkeys.json",
            "%2e%2e",
            "adapter_config.json%00",
            "adapter_config.json.part",
            "%2fetc%2fx",
        ):
            answer = await keyless.put(url.replace(CONFIG, name), content=b"{}")
            assert answer.status_code in (400, 404), (name, answer.text)
        for length in ("-1", "+2", "0x2", "2, 2", "9" * 30, ""):
            said = await sent(url, f"Content-Length: {length}\r\n", b"{}")
            assert said.startswith("HTTP/1.1 400"), (length, said)
        said = await sent(url, "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n")
        assert said.startswith("HTTP/1.1 400"), said
        await sent(url, "Content-Length: 20\r\n", b"{}", leaves=True)
        finish = {"upload_id": started["upload_id"]}
        answer = await tinker.post("external_weights_upload_finish", finish, status=400)
        assert "adapter_config.json and adapter_model.safetensors did not arrive" in str(answer)
        assert "200 OK" in await sent(url, "Content-Length: 2\r\n", b"{}PUT / HTTP/1.1\r\n\r\n")
        [(arrived, content)] = files(served).items() - before.items()
        assert arrived.endswith(f"/{CONFIG}") and content == b"{}", "what follows is no part of it"
    assert "ERROR" not in capfd.readouterr().err, "a client that leaves is no mistake of the server"


@pytest.mark.parametrize(
    "filename", ["../../keys.json", "/etc/passwd", "..", "a\\..\\b", "a%00b", 'a"; filename="b', "\u202egpj"]
)
async def test_a_files_name_is_no_path(served: Served, filename: str) -> None:
    keys = (served.server.state_dir / "keys.json").read_bytes()
    content = f"print({filename!r})".encode()  # what is there already is stored once
    async with served.http("other") as http:
        form = {"files": {"file": (filename, content)}, "data": {"purpose": "script"}}
        before = files(served)
        answer = await http.post("/v1/files", **form)
        assert answer.status_code in (200, 400), answer.text
        new = [Path(name) for name in files(served).keys() - before.keys()]
        assert len(new) == (answer.status_code == 200) and all(path.parts[0] == "files" for path in new)
        if new:
            assert (await http.get(f"/v1/files/{answer.json()['id']}/content")).content == content
    assert (served.server.state_dir / "keys.json").read_bytes() == keys


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 300,
        "multipart/form-data; boundary=c", "multipart/mixed; boundary=b", "multipart/form-data; boundary=\"b",
        "text/plain",
    ],
)  # fmt: skip
async def test_a_form_that_is_not_what_its_type_says_is_refused(served: Served, content_type: str) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="'
    body = head + b'purpose"\r\n\r\nscript\r\n' + head + b'file"; filename="a"\r\n\r\nprint(1)\r\n--b--\r\n'
    async with served.http("other") as http:
        before = files(served)
        answer = await http.post("/v1/files", content=body, headers={"Content-Type": content_type})
        assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], answer.text
        assert files(served) == before


@pytest.mark.long
async def test_nothing_that_a_client_sends_becomes_a_header_of_the_answer(served: Served, tmp_path: Path) -> None:
    """Ends of lines in every path, query and header, encoded and raw, on every route."""
    end = "%0d%0aInjected:%20yes%0d%0a"
    async with served.http("other") as http:
        documents = await asyncio.to_thread(routes.documents, tmp_path)  # schemas take a while
        for document in documents.values():
            prefix = document["servers"][0]["url"].rstrip("/")
            for path, methods in document["paths"].items():
                for method in methods:
                    target = re.sub(r"\{\w+\}", f"a{end}", prefix + path) + f"?a={end}&limit={end}"
                    sent = {"X-Request-Id": "a\tInjected: yes", "traceparent": "00-\x85Injected: yes", "Origin": ""}
                    headers = [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value]
                    answer = await http.request(method, target, headers=headers)
                    assert "injected" not in answer.headers and answer.status_code != 500, (method, target, answer.text)
                    assert not any("njected" in value for value in answer.headers.values()), answer.headers
