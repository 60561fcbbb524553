"""Bodies that make no sense: each gets an answer that is the caller's fault, and none costs the server anything."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from gradwire_proto.v1 import tinker_pb2 as pb
from support.front import Start
from support.tinker import forward_backward

ROUTES = (
    "client/config", "client/dynamic_config", "create_session", "session_heartbeat", "telemetry", "create_model",
    "load_weights", "get_info", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler",
    "create_sampling_session", "asample", "retrieve_future", "weights_info", "sessions/x/finish",
)  # fmt: skip
FIELDS = (
    "session_id", "model_seq_id", "base_model", "lora_config", "path", "optimizer", "model_id", "seq_id", "adam_params",
    "sampling_session_seq_id", "sampling_session_id", "num_samples", "prompt", "sampling_params", "prompt_logprobs",
    "prompt_logprobs_last_n", "request_id", "tinker_path", "ttl_seconds", "user_metadata", "tags", "kind", "overwrite",
)  # fmt: skip


def _value(rng: random.Random, depth: int = 0) -> Any:
    odd: list[Any] = [
        None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 1e308, float("nan"), float("inf"), "", "x" * 3000, "\ud800",
        "tiny",
        "tinker://a/weights/b", "tinker://a/b/../c", [], {}, "00000000-0000:train:0", "00000000:train:0:1:loss",
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        names = (*FIELDS, "rank", "seed", "chunks", "tokens", "max_tokens", "stop", "top_k", "learning_rate")
        return {rng.choice(names): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(odd)


def _known(rng: random.Random, session: str) -> dict[str, Any]:
    """Fields that lead further into the server."""
    right = {
        "session_id": session, "model_seq_id": rng.randrange(3), "base_model": "tiny", "seq_id": rng.randrange(3),
        "model_id": f"{session}:train:{rng.randrange(3)}", "sampling_session_seq_id": rng.randrange(3),
        "sampling_session_id": f"{session}:sample:{rng.randrange(3)}", "optimizer": False, "path": "a",
        "prompt": {"chunks": [{"tokens": [1, 2]}]}, "lora_config": {"rank": 2},
        "request_id": f"{session}:train:0:{rng.randrange(3)}:loss",
    }  # fmt: skip
    return {name: value for name, value in right.items() if rng.random() < 0.8}


def _protobuf(rng: random.Random, session: str) -> bytes:
    tensor = pb.InputTensor(
        dtype=rng.randrange(6), shape=[rng.choice([-1, 0, 1, 3, 2**40]) for _ in range(rng.randrange(4))]
    )
    data = rng.randbytes(rng.randrange(40))
    if rng.random() < 0.5:
        tensor.sparse.CopyFrom(pb.SparseRows(values=data, row_starts=data, columns=np.arange(3).tobytes()))
    else:
        tensor.dense = data
    row = {"tokens": [1, 2, 3], "target_tokens": tensor, rng.choice(("weights", "mask", "odd")): tensor}
    loss = rng.choice(("cross_entropy", "ppo", "stable_reinforce", "custom", ""))
    whole = forward_backward(f"{session}:train:0", rng.randrange(-1, 4), [row], loss, beta=float("nan"))
    return whole if rng.random() < 0.5 else whole[: rng.randrange(len(whole))] + data


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_odd_bodies_are_the_callers_fault(start: Start, count: int) -> None:
    rng = random.Random(5)
    async with (
        start(http="127.0.0.1:0", limits={"max_http_body_bytes": 1 << 20}) as door,
        httpx.AsyncClient(base_url=f"{door.server.http.url}/api/v1/", timeout=60) as http,
    ):
        session = (await http.post("create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        assert (await http.post("create_model", json=asked)).status_code == 200
        statuses = set()
        for number in range(count):
            route, headers = rng.choice(ROUTES), {}
            if route == "forward_backward":
                content = _protobuf(rng, session)
            else:
                given = _known(rng, session) | {rng.choice(FIELDS): _value(rng) for _ in range(rng.randrange(3))}
                content = json.dumps(given if rng.random() < 0.9 else _value(rng)).encode()
                content = content if rng.random() < 0.9 else content[: rng.randrange(len(content) + 1)]
            if rng.random() < 0.1:
                headers = {"Content-Encoding": rng.choice(("zstd", "gzip", "br"))}
                content = zstandard.compress(content * rng.choice((1, 100_000)))
            try:
                waits = 0.3 if route == "retrieve_future" else 60
                answer = await http.post(route, content=content, headers=headers, timeout=waits)
            except httpx.ReadTimeout:
                assert route == "retrieve_future", (number, route, content[:500])
                continue
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (number, route, content[:500], answer.text)
            assert answer.status_code not in (402, 409)
        assert {200, 400, 404, 422} <= statuses
        await asyncio.sleep(0)
        assert (await http.get("healthz")).json() == {"status": "ok"}
