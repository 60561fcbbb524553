"""Requests that make no sense, to both HTTP doors: each is refused as the caller's fault, in a sentence, and costs the
server and its other users nothing."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from gradwire_proto.v1 import tinker_pb2 as pb
from gradwire_server.access.key_file import KeyFile
from support import hostile
from support.openapi import survived
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, forward_backward
from support.tiny import tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

BODY_LIMIT = 1 << 20
AT_ONCE = 8
GROWTH_BYTES = 64 << 20
"""What the front may grow by after its first third of the bodies: an allocator's slack."""
WEIGHTS = (1.0, 1.0, 0.0, -1.0, 1e38, float("nan"), float("inf"))
"""Weights that the tokens of a row may have."""
Drawn = tuple[str, bytes, dict[str, str]]
"""Route, body and headers of a request."""
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}: {{
message.content }}
{% endfor %}assistant: """
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Keys:
    """The server of these tests, and the keys of its two users."""

    def __init__(self, server: HttpServer, hostile_key: str, other_key: str) -> None:
        self.server, self.hostile_key, self.other_key = server, hostile_key, other_key

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, headers={"X-API-Key": key}, timeout=300)

    def front_bytes(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "state").mkdir()
    secrets = [KeyFile(folder / "state").create(name) for name in ("hostile", "other")]
    limits = ("--limit", f"max_http_body_bytes={BODY_LIMIT}")
    server = HttpServer(model, folder / "state", free_port(), "--threads", "1", *limits, real=True)
    server.start()
    yield Keys(server, *secrets)
    assert server.end() == 0


# ---- what is drawn ----


def _tinker(session: str) -> Callable[[random.Random], Drawn]:
    """Requests of Tinker's protocol, near to valid ones about this session's model."""
    model, sampler = f"{session}:train:0", f"{session}:sample:0"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    metadata = {"user_metadata": {"a": "b"}}
    bodies: dict[str, Any] = {
        "client/config": {"sdk_version": "0.38.0"},
        "create_session": {"tags": ["a"], "sdk_version": "0.38.0"} | metadata,
        "session_heartbeat": {"session_id": session},
        "telemetry": {"events": [{"event": "x"}]},
        "create_model": {
            "session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1},
        } | metadata,
        "load_weights": {
            "session_id": session, "model_seq_id": 1, "path": f"tinker://{model}/weights/a", "optimizer": True,
        },
        "get_info": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 9, "adam_params": {"learning_rate": 1e-3, "eps": 1e-8}},
        "save_weights": {"model_id": model, "seq_id": 10, "path": "a", "ttl_seconds": 60, "overwrite": True} | metadata,
        "save_weights_for_sampler": {"model_id": model, "seq_id": 11, "sampling_session_seq_id": 5, "kind": "snapshot"},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        "asample": {
            "sampling_session_id": sampler, "seq_id": 3, "num_samples": 2, "prompt": prompt, "prompt_logprobs": True,
            "sampling_params": {"max_tokens": 2, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 5},
        },
        "retrieve_future": {"request_id": f"{model}:0:create"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        f"sessions/{session[:8]}/finish": {"reason": {"type": "success"}},
    }  # fmt: skip
    routes = [*bodies, *["forward_backward"] * 4]

    def draw(rng: random.Random) -> Drawn:
        route = rng.choice(routes)
        if route == "forward_backward":
            return "/api/v1/" + route, *hostile.encoded(rng, _protobuf(rng, model), "application/x-protobuf")
        body = hostile.mutated(rng, bodies[route])
        if isinstance(body, dict) and "seq_id" in body and rng.random() < 0.5:
            body["seq_id"] = rng.randrange(200)
        return "/api/v1/" + route, *hostile.encoded(rng, hostile.as_json(rng, body), "application/json")

    return draw


def _protobuf(rng: random.Random, model: str) -> bytes:
    """A loss on a row with tensors that fit badly; half of them are cut off, or have other bytes at the end."""
    tensor = pb.InputTensor(
        dtype=rng.randrange(6), shape=[rng.choice([-1, 0, 1, 3, 2**40]) for _ in range(rng.randrange(4))]
    )
    data = rng.randbytes(rng.randrange(40))
    if rng.random() < 0.5:
        tensor.sparse.CopyFrom(pb.SparseRows(values=data, row_starts=data, columns=np.arange(3).tobytes()))
    else:
        tensor.dense = data
    right = np.arange(3)
    row = {
        "tokens": [1, 2, 3],
        "target_tokens": rng.choice((tensor, right)),
        "weights": np.full(3, rng.choice(WEIGHTS)),
    }
    if rng.random() < 0.5:
        row[rng.choice(("mask", "odd", "weights"))] = tensor
    loss = rng.choice(("cross_entropy", "cross_entropy", "ppo", "stable_reinforce", "custom", "", "\u0000"))
    whole = forward_backward(model, rng.randrange(-1, 200), [row] * rng.choice((0, 1, 1, 50)), loss, beta=float("nan"))
    return whole if rng.random() < 0.5 else whole[: rng.randrange(len(whole))] + data


def _openai(rng: random.Random) -> Drawn:
    """Requests of OpenAI's protocol, near to valid ones."""
    call = {"id": "1", "function": {"name": "add", "arguments": "{}"}}
    bodies: dict[str, Any] = {
        "completions": {
            "model": "tiny", "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "echo": True, "stop": ["x"],
            "logit_bias": {"4": 1}, "n": 1, "stream": False, "seed": 3, "stream_options": {},
        },
        "chat/completions": {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [ADD], "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "response_format": {"type": "text"},
            "stream": True, "chat_template_kwargs": {"a": 1}, "temperature": 0.5,
        },
    }  # fmt: skip
    route = rng.choice(tuple(bodies))
    body = hostile.mutated(rng, bodies[route])
    if isinstance(body, dict):
        body.setdefault("max_tokens", 2)
    return "/v1/" + route, *hostile.encoded(rng, hostile.as_json(rng, body), "application/json")


def _fine_tuning(file_id: str) -> Callable[[random.Random], Drawn]:
    """Requests of OpenAI's fine-tuning, near to valid ones on this file."""
    check = {"type": "string_check", "name": "a", "input": "{{ sample.output_text }}", "reference": "{{ item.a }}",
             "operation": "eq"}  # fmt: skip
    multi = {"type": "multi", "graders": {"a": check}, "calculate_output": "a * 2"}
    job = {
        "model": "tiny", "training_file": file_id, "validation_file": file_id, "suffix": "a", "seed": 1,
        "metadata": {"a": "b"}, "integrations": [{"type": "wandb", "wandb": {"project": "a", "tags": ["b"]}}],
        "gradwire": {"lora_rank": 2, "max_steps": 1},
    }  # fmt: skip

    def method(kind: str, **more: Any) -> dict[str, Any]:
        numbers = {"n_epochs": 1, "batch_size": "auto", "learning_rate_multiplier": 1.5, **more}
        return {"type": kind, kind: {"hyperparameters": numbers} | ({"grader": multi} if kind[0] == "r" else {})}

    uploaded = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": 9, "mime_type": "text/jsonl",
                "expires_after": {"anchor": "created_at", "seconds": 3600}}  # fmt: skip
    bodies: list[tuple[str, Any]] = [
        ("fine_tuning/jobs", {**job, "hyperparameters": {"n_epochs": 1}}),
        ("fine_tuning/jobs", {**job, "integrations": None, "method": method("supervised")}),
        ("fine_tuning/jobs", {**job, "integrations": [], "method": method("dpo", beta=0.1)}),
        ("fine_tuning/jobs", {**job, "integrations": [], "method": method("reinforcement", eval_samples=3)}),
        ("fine_tuning/alpha/graders/validate", {"grader": multi}),
        ("fine_tuning/alpha/graders/run", {"grader": check, "model_sample": "a", "item": {"a": "a"}}),
        ("fine_tuning/checkpoints/ft:a:b::c/permissions", {"project_ids": ["other"]}),
        ("uploads", uploaded),
        ("uploads/upload_a/complete", {"part_ids": ["part_a"], "md5": "0"}),
    ]

    def draw(rng: random.Random) -> Drawn:
        route, body = rng.choice(bodies)
        return "/v1/" + route, *hostile.encoded(
            rng, hostile.as_json(rng, hostile.mutated(rng, body)), "application/json"
        )

    return draw


# ---- the tests ----


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("door", ["tinker", "openai", pytest.param("fine_tuning", marks=pytest.mark.slow)])
async def test_hostile_bodies_are_refused_and_cost_nothing(keys: Keys, door: str, count: int) -> None:
    rng = random.Random(7)
    async with keys.client(keys.hostile_key) as http, _neighbour(keys, count >= 10_000) as latencies:
        draw = _openai
        if door == "tinker":
            client = await TinkerClient(http).begin()
            await client.model()
            await client.post(
                "create_sampling_session",
                {"session_id": client.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"},
            )
            draw = _tinker(client.session_id)
        if door == "fine_tuning":  # of too few rows, so that no job begins
            row = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
            form = {"file": ("a.jsonl", row)}
            file = (await http.post("/v1/files", files=form, data={"purpose": "fine-tune"})).json()
            draw = _fine_tuning(file["id"])
        first = count // 3
        statuses = await _send(http, [draw(rng) for _ in range(first)])
        before = keys.front_bytes()
        statuses |= await _send(http, [draw(rng) for _ in range(count - first)])
        grown = keys.front_bytes() - before
    assert {200, 400, 413} <= statuses
    assert grown < GROWTH_BYTES, f"the front grew by {grown >> 20} MiB"
    if latencies:
        quiet, during = (statistics.median(latencies[phase]) for phase in ("quiet", "during"))
        longest = max(latencies["during"])
        print(f"{door}: {count} bodies; the front grew by {grown / 2**20:.1f} MiB; another user's step took", end=" ")
        print(f"{during * 1e3:.0f} ms, and {quiet * 1e3:.0f} ms without them; the longest took {longest:.2f} s")
        assert during < 10 * quiet + 1


async def _send(http: httpx.AsyncClient, requests: list[Drawn]) -> set[int]:
    """The statuses of the answers, each of which must explain itself if it is a refusal."""
    statuses: set[int] = set()
    waiting = iter(requests)

    async def sender() -> None:
        for route, content, headers in waiting:
            said = (route, headers, content[:500])
            # What is not there yet is waited for by the server, and its client may leave.
            patience = 0.3 if route.endswith("retrieve_future") else 300
            try:
                answer = await http.post(route, content=content, headers=headers, timeout=patience)
            except httpx.ReadTimeout:
                assert route.endswith("retrieve_future"), said
                continue
            statuses.add(answer.status_code)
            assert answer.status_code < 500 and answer.status_code not in (402, 409), (said, answer.text)
            assert '"server_error"' not in answer.text, (said, answer.text)
            if answer.status_code >= 400 and answer.status_code != 408:
                error = answer.json()
                message = error["detail"] if "detail" in error else error["error"]["message"]
                assert ("detail" in error) == route.startswith("/api/"), (said, error)
                assert isinstance(message, str) and len(message) > 10, (said, error)

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    return statuses


@asynccontextmanager
async def _neighbour(keys: Keys, wanted: bool) -> AsyncIterator[dict[str, list[float]]]:
    """Another user who trains meanwhile: seconds of each step, ``quiet`` before the body and ``during`` it."""
    if not wanted:
        yield {}
        return
    latencies: dict[str, list[float]] = {"quiet": [], "during": []}
    async with keys.client(keys.other_key) as http:
        client = await TinkerClient(http).begin()
        model, seq = await client.model(), 0

        async def step(phase: str) -> None:
            nonlocal seq
            row = {"tokens": [1, 2, 3], "target_tokens": [2, 3, 4], "weights": np.ones(3)}
            began = time.perf_counter()
            await client.done("forward_backward", forward_backward(model, seq + 1, [row]))
            await client.wait(await client.step(model, seq + 2))
            latencies[phase].append(time.perf_counter() - began)
            seq += 2

        for _ in range(20):
            await step("quiet")
        ended = asyncio.Event()

        async def on() -> None:
            while not ended.is_set():
                await step("during")

        training = asyncio.create_task(on())
        try:
            yield latencies
        finally:
            ended.set()
            await training


@pytest.mark.parametrize("prefix", ["/api/v1/client/config", "/v1/completions"])
def test_what_is_no_request_is_refused_and_the_next_one_served(keys: Keys, prefix: str) -> None:
    host, _, port = keys.server.url.removeprefix("http://").partition(":")
    for wrong, sent in hostile.raw_requests(host, prefix).items():
        answer = hostile.answer_to((host, int(port)), sent)
        status = int(answer.split()[1]) if answer else 400
        assert 400 <= status < 500, (wrong, answer[:500])
        healthy = httpx.get(f"{keys.server.url}/healthz", timeout=60)
        assert healthy.text == "ok", wrong


@pytest.mark.parametrize("examples", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("prefix", "operations"), [("/api/v1", 29), ("/v1", 18)])
def test_generated_requests_are_answered_as_the_document_says(
    keys: Keys, prefix: str, operations: int, examples: int
) -> None:
    headers = {"X-API-Key": keys.hostile_key}
    schema = schemathesis.openapi.from_url(f"{keys.server.url}{prefix}/openapi.json", headers=headers)
    tried = [survived(found.ok(), examples, headers=headers, timeout=300) for found in schema.get_all_operations()]
    assert len(tried) >= operations and min(tried) >= 1
