"""Bodies that are dear to read, on a whole server."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from gradwire_http.json_bounds import JsonBounds, UnboundedJsonError
from support import costly_bodies, hostile, routes
from support.costly_bodies import Costly, drawn_body
from support.scripted import until
from support.served import Served
from support.tinker import TinkerClient, datum, forward_backward, outputs

Documents = list[tuple[str, Mapping[str, Any]]]
MOST_CPU_S = 2.0
"""Processor seconds of the front for one body: ten times what the dearest takes on a quiet machine."""
GROWTH_BYTES = 200 << 20
MINUTES = float(os.environ.get("GRADWIRE_MINUTES", "10"))
"""Of the long form: GRADWIRE_MINUTES=60 GRADWIRE_SEED=random pytest -m slow -s -k body_costs."""
FOUND: tuple[int, ...] = (1000203, 1000313, 1467057283007448, 1467057283017179)
"""Numbers of draws that once cost too much."""
QUICK_S = 0.05
"""A 99th percentile of another key's call that is always accepted; else three times that without the bodies."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """Prefix and OpenAPI document of every protocol of the HTTP door."""
    found = routes.documents(tmp_path_factory.mktemp("documents")).values()
    return [(each["servers"][0]["url"].rstrip("/"), each) for each in found]


async def _known(http: httpx.AsyncClient) -> dict[str, Any]:
    """Valid values of fields, about a model of the caller's."""
    tinker = await TinkerClient(http).begin()
    model = await tinker.model()
    sampler = {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    await tinker.post("create_sampling_session", sampler)
    return sampler | {
        "model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1,
        "model_id": model, "seq_id": 5, "model_seq_id": 0, "lora_config": {"rank": 2}, "path": "a", "optimizer": True,
        "sampling_session_id": f"{tinker.session_id}:sample:0", "request_id": "x", "num_samples": 1,
    }  # fmt: skip


def _bodies(known: dict[str, Any], documents: Documents, seed: int) -> Iterator[Costly]:
    """One of every route first, and what was found; then the generator's others and new draws in turn, without end."""
    found = [*costly_bodies.batch_bodies(known["model_id"]), *costly_bodies.messages()]
    fields = dict[str, Mapping[str, Any]]()
    for prefix, document in documents:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]} if prefix == "/api/v1" else "a"
        found += costly_bodies.http_bodies(prefix, document, known | {"prompt": prompt})
        fields |= costly_bodies.json_fields(prefix, document)
    first, others = costly_bodies.drawn(random.Random(seed), found)
    yield from first
    for number in FOUND:
        yield drawn_body(number, fields, known)
    for number in itertools.count(seed * 10**6):
        yield drawn_body(number, fields, known)
        yield from itertools.islice(others, 1)


async def _send(body: Costly, http: httpx.AsyncClient, channel: grpc.aio.Channel, secret: str) -> str:
    """What a body is answered with; every refusal explains itself."""
    content = await asyncio.to_thread(body.content)
    if body.target:
        method = body.route.partition(" ")[0]
        answer = await http.request(method, body.target, content=content, headers=body.headers)
        assert answer.status_code < 500, (body.name, answer.text[:500])
        return f"{answer.status_code} {answer.text[:100]}"
    call = channel.stream_stream(body.route, bytes, bytes)(metadata=(("authorization", f"Bearer {secret}"),))
    try:
        await call.write(content)
        await call.done_writing()
        return f"{len(await call.read() or b'')} bytes"
    except grpc.aio.AioRpcError as error:
        assert "made a mistake" not in (error.details() or ""), (body.name, error.details())
        return str(error.details())[:100]
    finally:
        call.cancel()


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 1200)
@pytest.mark.parametrize("minutes", [0, pytest.param(MINUTES, marks=pytest.mark.slow)])
@pytest.mark.holds_loop("it draws the bodies, before it measures")
async def test_no_body_costs_another_key_much(
    served: Served, documents: Documents, minutes: float, seed: int, tmp_path: Path
) -> None:
    """Every route with one body at least; the long form draws further bodies for so many minutes."""

    async def ended(calls: Callable[[], list[float]]) -> list[float]:
        """Those of the other key's calls that began before now."""
        times, last = calls(), list[float]()
        await until(lambda: bool(last.extend(calls()) or last))
        return times + last

    async with served.http("hostile") as http, served.grpc("hostile") as (channel, _), AsyncExitStack() as stack:
        named = {route for document in documents for route in costly_bodies.routes_of(*document)}
        named |= {f"/{each.full_name}/{rpc.name}" for each in costly_bodies.services() for rpc in each.methods}
        bodies = _bodies(await _known(http), documents, seed)
        calls = stack.enter_context(served.steady_calls("other", tmp_path / "times"))
        deadline = time.monotonic() + 60 * minutes
        calls()
        began = served.front_cpu_s()
        await asyncio.sleep(1)
        quiet, during = await ended(calls) + await ended(calls), list[float]()
        of_call = (served.front_cpu_s() - began) / len(quiet)
        before = served.server.memory("VmRSS")
        costs, sizes, wrong, tried = dict[str, float](), dict[str, int](), list[str](), set[str]()
        for number, body in enumerate(bodies):
            if number >= len(named) + len(FOUND) and time.monotonic() > deadline:
                break
            served.forget_most()
            calls()
            began = served.front_cpu_s()
            try:
                await _send(body, http, channel, served.secrets["hostile"])
            except AssertionError as error:
                wrong.append(f"{body.name}: {error}")
                continue
            times = await ended(calls)
            during += times
            tried.add(body.route)
            costs[body.name] = served.front_cpu_s() - began - of_call * len(times)
            sizes[body.name] = served.server.memory("VmHWM") - before
            if costs[body.name] > MOST_CPU_S or sizes[body.name] > GROWTH_BYTES:
                wrong.append(f"{body.name}: {costs[body.name]:.1f} s, {sizes[body.name] >> 20} MiB")
    dearest, largest = (max(found, key=lambda name: found[name]) for found in (costs, sizes))
    p99, p99_quiet = (statistics.quantiles(times, n=100)[-1] for times in (during, quiet))
    print(f"{len(costs)} bodies: another key's p99 {p99 * 1e3:.0f} ms, {p99_quiet * 1e3:.0f} without;")
    print(f"the front grew by {sizes[largest] >> 20} MiB at most: {largest};")
    print(f"the dearest took {costs[dearest]:.2f} s of processor: {dearest}")
    assert not wrong, "\n".join(["put the numbers of draws into FOUND:", *wrong])
    assert tried == named
    assert not minutes or p99 < max(QUICK_S, 3 * p99_quiet)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", b'{"model":"tiny","prompt":[%s]}' % b",".join([b'{"a":0}'] * 800_000)),
        ("/v1/chat/completions", b'{"model":"tiny","messages":[%s]}' % b",".join([b"0"] * 4_000_000)),
        ("/v1/completions", b'{%s}' % b",".join(b'"x%d":0' % number for number in range(600_000))),
        ("/api/v1/create_session", b'{"user_metadata":%s1%s}' % (b'{"a":' * 900, b"}" * 900)),
    ],
)  # fmt: skip
async def test_what_was_found_is_refused_in_a_sentence(served: Served, route: str, body: bytes) -> None:
    async with served.http("hostile") as http:
        began = served.front_cpu_s()
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = await http.post(route, content=await asyncio.to_thread(gzip.compress, body), headers=headers)
        assert served.front_cpu_s() - began < MOST_CPU_S
    assert (answer.status_code == 400 and "max_json" in answer.text) or "64 levels" in answer.text


async def test_long_prompts_are_refused_by_their_length_before_they_are_lists_of_ids(served: Served) -> None:
    """Found by the generator: 16 s of the front's processor for 7.5 MB of text that no context holds."""
    async with served.http("hostile") as http:
        began = served.front_cpu_s()
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": ["word " * 50_000] * 5})
        assert served.front_cpu_s() - began < MOST_CPU_S
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def _nested(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice([1, 'a,"[{\\', "\\", '"', "x" * rng.randrange(30), None, "\u2222,[", True, "\\\\\\"])
    if kind < 0.7:
        return [_nested(rng, depth + 1) for _ in range(rng.randrange(6))]
    start = rng.choice(["a,", "[:", "\\"])
    return {f"{start}{key}": _nested(rng, depth + 1) for key in range(rng.randrange(6))}


def _counts(value: Any) -> tuple[int, int]:
    """Values and containers, as they are counted."""
    if not isinstance(value, list | dict):
        return 0, 0
    inside = [_counts(each) for each in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + max(len(value) - 1, 0) + sum(v for v, _ in inside), 1 + keys + sum(c for _, c in inside)


@pytest.mark.slow
def test_values_are_counted_exactly_whatever_the_texts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    for _ in range(120):
        monkeypatch.setattr("gradwire_http.json_bounds.SLICE_BYTES", rng.choice([1, 2, 3, 7, 50, 1 << 16]))
        value = [_nested(rng, 0) for _ in range(3)]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        values, containers = _counts(value)
        for bounds in (JsonBounds(values, 1 << 30), JsonBounds(1 << 30, containers)):
            assert list(bounds.counted(text)) is not None
        for bounds in (JsonBounds(values - 1, 1 << 30), JsonBounds(1 << 30, containers - 1)):
            with pytest.raises(UnboundedJsonError):
                list(bounds.counted(text))


async def test_a_large_batch_gives_what_its_parts_give(served: Served) -> None:
    """Large batches are converted in a process of their own."""
    rows = [datum(seed, 64) for seed in range(64)]
    async with served.http("other") as http:
        tinker = await TinkerClient(http).begin()
        model = await tinker.model()
        assert len(forward_backward(model, 1, rows)) > 1 << 16
        whole = await tinker.done("forward_backward", forward_backward(model, 1, rows, forward=True))
        parts = [
            await tinker.done(
                "forward_backward", forward_backward(model, 2 + place, rows[start : start + 6], forward=True)
            )
            for place, start in enumerate(range(0, len(rows), 6))
        ]
    assert b"".join(_logprobs(whole)) == b"".join(row for part in parts for row in _logprobs(part))


def _logprobs(body: bytes) -> Sequence[bytes]:

    return [row.tobytes() for row in outputs(body)[1]]


def test_what_is_no_request_costs_nothing(served: Served) -> None:
    host, _, port = served.server.url.removeprefix("http://").partition(":")
    before = served.server.memory("VmRSS")
    for sent in hostile.raw_requests(host, "/v1/completions").values():
        hostile.answer_to((host, int(port)), sent)
    assert served.server.memory("VmRSS") - before < GROWTH_BYTES
