"""Requests that browsers make on behalf of foreign pages, to the HTTP doors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from gradwire_http.browsers import BrowserGuard, local_path
from gradwire_server.access.keys import KeyFile
from support.front import Start

PATH = "/api/v1/create_session"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost.evil.example:8000"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1", "Host": "127.0.0.1:2"}, 403),
        ({"Origin": "http://127.0.0.1:2", "Host": "127.0.0.1:2"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_a_server_without_keys_serves_no_foreign_page(start: Start, headers: dict[str, str], status: int) -> None:
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url) as http:
        answer = await http.post(PATH, content=b"{}", headers={"Content-Type": "application/json"} | headers)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert len(answer.json()["detail"]) > 40 and answer.json()["error"]["message"] == answer.json()["detail"]


async def test_with_keys_a_server_has_every_name_and_serves_no_foreign_page(start: Start, tmp_path: Path) -> None:
    key = {"X-API-Key": KeyFile(tmp_path).create("ann")}
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url) as http:
        assert (await http.post(PATH, json={}, headers=key | {"Host": "gpu-box.example"})).status_code == 200
        assert (await http.post(PATH, json={}, headers=key | {"Origin": "http://evil.example"})).status_code == 403


def test_people_may_follow_links_to_pages() -> None:
    guard = BrowserGuard(names=(), pages=True)
    link = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert guard.refusal("GET", link) is None
    assert guard.refusal("POST", link) is not None
    assert guard.refusal("GET", link | {"sec-fetch-mode": "no-cors"}) is not None


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "/\t/evil.example", "https://evil.example", "/\n/e"]
)
def test_a_browser_is_sent_nowhere_else(path: str) -> None:
    assert local_path(path, "/docs") == "/docs"
    assert local_path("/rate/router?a=b", "/docs") == "/rate/router?a=b"
