"""Requests that browsers make on behalf of foreign pages, to the HTTP doors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from gradwire_http.browsers import BrowserGuard, local_path
from gradwire_server.access.key_file import KeyFile
from support.chromium import launched
from support.front import Start

PATH = "/api/v1/create_session"
ATTACK = """async address => {
    const send = (mode, type) => fetch(address, {method: "POST", mode, body: "{}", headers: {"Content-Type": type}})
        .then(answer => answer.status, () => "unread")
    const form = Object.assign(document.createElement("form"), {method: "POST", action: address, target: "shown"})
    form.enctype = "text/plain"
    form.append(Object.assign(document.createElement("input"), {name: '{"tags":[],"x":"', value: '"}'}))
    document.body.innerHTML = "<iframe name=shown></iframe>"
    document.body.append(form)
    const shown = new Promise(resolve => document.querySelector("iframe").onload = resolve)
    form.submit()
    return [await send("no-cors", "text/plain"), await send("cors", "application/json"), await shown && "shown"]
}"""


REQUESTS: list[tuple[dict[str, str], int]] = [
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
]


async def test_a_server_without_keys_serves_no_foreign_page(start: Start) -> None:
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url) as http:
        for headers, status in REQUESTS:
            sent = {"Content-Type": "application/json"} | headers
            answer = await http.post(PATH, content=b"{}", headers=sent)
            assert answer.status_code == status, (headers, answer.text)
            if status != 200:
                assert list(answer.json()) == ["detail"] and len(answer.json()["detail"]) > 40
                answer = await http.post("/v1/completions", content=b"{}", headers=sent)
                assert answer.status_code == status and list(answer.json()) == ["error"], headers


async def test_a_server_without_keys_answers_to_the_names_that_it_was_given(start: Start) -> None:
    async with (
        start(http="127.0.0.1:0", host_names=("Box.example",)) as door,
        httpx.AsyncClient(base_url=door.server.http.url) as http,
    ):
        assert (await http.post(PATH, json={}, headers={"Host": "box.example:443"})).status_code == 200
        assert (await http.post(PATH, json={}, headers={"Host": "other.example"})).status_code == 421


async def test_with_keys_a_server_has_every_name_and_serves_no_foreign_page(start: Start, tmp_path: Path) -> None:
    key = {"X-API-Key": KeyFile(tmp_path).create("ann")}
    async with start(http="127.0.0.1:0") as door, httpx.AsyncClient(base_url=door.server.http.url) as http:
        assert (await http.post(PATH, json={}, headers=key | {"Host": "gpu-box.example"})).status_code == 200
        assert (await http.post(PATH, json={}, headers=key | {"Origin": "http://evil.example"})).status_code == 403


@pytest.mark.long
@pytest.mark.browser
async def test_a_real_browser_gets_nothing_for_a_foreign_page(start: Start) -> None:
    def attack(url: str, rebound: str) -> tuple[list[object], int, int]:
        """What a foreign page's requests, its requests by a name of its own, and the server's own page get."""
        name = httpx.URL(rebound).host
        lax = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"  # newer ones help
        with launched(f"--host-resolver-rules=MAP {name} 127.0.0.1", lax) as browser:
            page = browser.new_page()
            for site in (f"http://{name}:1", rebound, url):
                page.route(site + "/page", lambda route: route.fulfill(body="<html>", content_type="text/html"))
            page.goto(f"http://{name}:1/page")
            foreign = page.evaluate(ATTACK, url + PATH)
            statuses = []
            for site in (rebound, url):
                page.goto(site + "/page")
                statuses.append(page.evaluate(ATTACK, PATH)[1])
        return foreign, statuses[0], statuses[1]

    async with start(http="127.0.0.1:0") as door:
        url = door.server.http.url
        foreign, rebound, own = await asyncio.to_thread(attack, url, url.replace("127.0.0.1", "evil.example"))
        async with httpx.AsyncClient(base_url=url) as http:
            sessions = (await http.get("/api/v1/sessions")).json()["sessions"]
    assert foreign == [0, "unread", "shown"]  # "no-cors" hides the status
    assert rebound == 421
    assert own == 200 and len(sessions) == 1, sessions


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
