"""Beginnings of prompts that are computed once, and drafts: by which doors, for whom, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gradwire
import httpx
import pytest
from gradwire_server.access.key_file import KeyFile
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

pytestmark = pytest.mark.long

PAGE = 16
TEXTS = ["the cat sat on the mat; naïve café says the cat", "assistant: user: "]
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """
ASKED = "the cat sat on the mat; naïve café says the cat " * 8


class Asking:
    """Requests with a key."""

    def __init__(self, server: HttpServer, secret: str) -> None:
        self.server, self.secret = server, secret
        self.http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {secret}"}, timeout=60)

    def cached(self, door: str, text: str, **more: Any) -> tuple[int, int]:
        """Tokens of the prompt that were known, and all of them."""
        said = [{"role": "user", "content": text}]
        path, body = {
            "chat": ("chat/completions", {"messages": said, "max_tokens": 4}),
            "completions": ("completions", {"prompt": text, "max_tokens": 4}),
            "responses": ("responses", {"input": text, "max_output_tokens": 16, "store": False}),
            "messages": ("messages", {"messages": said, "max_tokens": 4}),
        }[door]
        answer = self.http.post(f"/v1/{path}", json={"model": "tiny", **body, **more})
        assert answer.status_code == 200, answer.text
        if more.get("stream"):
            lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            usage = [line["usage"] for line in lines if line.get("usage")][-1]
        else:
            usage = answer.json()["usage"]
        if door == "messages":
            known = usage["cache_read_input_tokens"]
            return known, known + usage["input_tokens"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return details["cached_tokens"], usage.get("prompt_tokens") or usage["input_tokens"]


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Asking, Asking, str]]:
    """Two keys of one server, and the URL of its metrics."""
    folder = tmp_path_factory.mktemp("known")
    model = tiny_model(folder / "model", texts=TEXTS, vocab_size=340, context_length=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    keys = KeyFile(folder / "state")
    secrets = [keys.create(name) for name in ("ann", "ben")]
    metrics = f"127.0.0.1:{free_port()}"
    server = HttpServer(model, folder / "state", free_port(), "--threads", "1", "--metrics-address", metrics)
    server.start()
    yield Asking(server, secrets[0]), Asking(server, secrets[1]), f"http://{metrics}/metrics"
    server.end()


def _known(tokens: int) -> int:
    """Known tokens of a prompt that was asked before: full pages, without the last token."""
    return (tokens - 1) // PAGE * PAGE


def test_a_prompt_is_known_to_every_door_of_one_key(asking: tuple[Asking, Asking, str]) -> None:
    ann, ben, metrics = asking
    first, tokens = ann.cached("chat", ASKED)
    assert first == 0 and tokens > 4 * PAGE
    for door in ("chat", "responses", "messages"):
        assert ann.cached(door, ASKED) == (_known(tokens), tokens)
    assert ann.cached("messages", ASKED, stream=True) == (_known(tokens), tokens)
    assert ann.cached("chat", ASKED, stream=True, stream_options={"include_usage": True}) == (_known(tokens), tokens)
    more, longer = ann.cached("chat", ASKED + "the mat")
    assert 4 * PAGE < more < longer
    assert ben.cached("chat", ASKED) == (0, tokens)  # another key learns nothing
    assert ben.cached("chat", ASKED) == (_known(tokens), tokens)
    told = httpx.get(metrics).text
    assert 'gradwire_tokens_total{use="cached"}' in told


async def test_sessions_and_runs_know_what_their_weights_have_computed(asking: tuple[Asking, Asking, str]) -> None:
    ann, _, _ = asking
    async with gradwire.connect(ann.server.address, api_key=ann.secret) as service:
        sessions = [await service.rollout_session("tiny") for _ in range(2)]
        said = [{"role": "user", "content": "of sessions: " + ASKED}]
        counts = []
        for session in sessions:
            body = {"model": "any", "messages": said, "max_tokens": 4}
            headers = {"x-api-key": session.key}
            async with httpx.AsyncClient(base_url=session.url, headers=headers, timeout=60) as http:
                usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
            counts.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert counts[0] < 2 * PAGE and counts[1] == _known(usage["prompt_tokens"])
        run = await service.create_run("tiny", lora=4, seed=1)
        sampling, ids = service.sampling_client(run.run_id), [[1, *range(5, 60)]]
        drawn = [await sampling.sample(ids, max_tokens=8, seed=3) for _ in range(2)]
        assert [each.num_cached_tokens for each in drawn] == [0, 48]
        await run.forward_backward({"input_ids": [[1, 40, 41, 42]] * 2}, "causal_lm")
        await run.optim_step(learning_rate=0.5)
        changed = await sampling.sample(ids, max_tokens=8, seed=3)
        assert changed.num_cached_tokens == 0
        alone = [await sampling.sample(ids, max_tokens=8, seed=3, deterministic=True) for _ in range(2)]
        assert [each.num_cached_tokens for each in alone] == [0, 0]
        assert alone[0].samples[0][0].token_ids.tolist() == changed.samples[0][0].token_ids.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.2},
        {"temperature": 1.0, "top_p": 0.7, "n": 4},
        {"json_schema": {"enum": ["the cat", "the mat"]}},
    ],
    ids=str,
)
async def test_samples_are_the_same_with_and_without_known_beginnings(
    asking: tuple[Asking, Asking, str], options: dict[str, Any]
) -> None:
    ann, _, _ = asking
    async with gradwire.connect(ann.server.address, api_key=ann.secret) as service:
        sampling, ids = service.sampling_client("tiny"), [[1, *range(7, 200), 8], [1, *range(7, 150)]]
        asked: dict[str, Any] = {"max_tokens": 12, "seed": 5, **options}
        whole = await sampling.sample(ids, deterministic=True, **asked)
        for _ in range(2):
            found = await sampling.sample(ids, **asked)
            for of_whole, of_found in zip(whole.samples, found.samples, strict=True):
                for one, other in zip(of_whole, of_found, strict=True):
                    assert one.token_ids.tolist() == other.token_ids.tolist()
                    assert other.logprobs == pytest.approx(one.logprobs, abs=2e-5)
        assert found.num_cached_tokens >= _known(195)


def test_a_long_prompt_lets_a_stream_go_on(asking: tuple[Asking, Asking, str]) -> None:
    """Its tokens come between the parts of the prompt, which is computed as it is without a stream."""
    ann, ben, _ = asking
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 400, "stream": True, "ignore_eos": True}
    long = [1, *(5 + number * 7 % 280 for number in range(900))]
    with ann.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        for _ in range(20):
            next(lines)
        asked = {"model": "tiny", "prompt": long, "max_tokens": 4, "temperature": 0, "logprobs": 1}
        answer = ben.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        beside = answer.json()
        assert sum(1 for _ in lines) > 20
    again = ann.http.post("/v1/completions", json=asked).json()
    assert again["choices"][0]["text"] == beside["choices"][0]["text"]
    assert beside["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        again["choices"][0]["logprobs"]["token_logprobs"], abs=2e-5
    )


async def test_sessions_record_what_was_drafted_and_metrics_count_it(asking: tuple[Asking, Asking, str]) -> None:
    ann, _, metrics = asking

    def counted(use: str) -> float:
        line = f'gradwire_tokens_total{{use="{use}"}} '
        return sum(float(each.removeprefix(line)) for each in httpx.get(metrics).text.splitlines() if line in each)

    before = counted("drafted"), counted("accepted")
    async with gradwire.connect(ann.server.address, api_key=ann.secret) as service:
        session = await service.rollout_session("tiny")
        said = [{"role": "user", "content": "the cat sat on the mat"}]
        bias = {str(token): 30 for token in range(5, 9)}  # with which a random model repeats itself
        body = {"model": "any", "messages": said, "max_tokens": 60, "temperature": 0.3, "logit_bias": bias}
        headers = {"x-api-key": session.key}
        async with httpx.AsyncClient(base_url=session.url, headers=headers, timeout=60) as http:
            answer = (await http.post("/v1/chat/completions", json=body | {"return_token_ids": True})).json()
        (turn,) = (await session.rollout()).turns
    assert turn.response_ids.tolist() == answer["choices"][0]["token_ids"]
    assert len(turn.response_ids) == len(turn.logprobs) == 60 and set(turn.response_ids) <= set(range(5, 9))
    drafted, accepted = counted("drafted") - before[0], counted("accepted") - before[1]
    assert 3 < accepted <= drafted
