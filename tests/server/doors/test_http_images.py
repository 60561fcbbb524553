"""Images through the HTTP doors: chunks of Tinker's protocol, and parts of OpenAI's conversations."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import gradwire
import httpx
import numpy as np
import pytest
import torch
from gradwire_proto.codec import IMAGE_BYTES, IMAGES
from gradwire_proto.v1 import tinker_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.doors.http.tinker.datums import loss_batch
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits
from support.server import free_port
from support.tinker import HttpServer, TinkerClient, outputs, tensor
from support.tiny import tiny_model
from support.vision import picture, plain_processor, png, tokenizer, vision_model
from transformers import AutoModelForImageTextToText

CAT = png(picture(1, 16, 24))
CAT_TOKENS = 6
NUMBERS = {"n_epochs": 3, "batch_size": 6, "learning_rate_multiplier": 5}
WORDS = tokenizer()
IMAGE, START, END = WORDS.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
BEFORE, AFTER = [1, 40, 41, START], [END, 50, 51, 52]
IDS = [*BEFORE, *[IMAGE] * CAT_TOKENS, *AFTER]
TARGETS = [*IDS[1:], 53]
WEIGHTS = [0.0] * (len(BEFORE) + CAT_TOKENS) + [1.0] * len(AFTER)


def asked(model_id: str = "m", expected: int = CAT_TOKENS, **config: Any) -> tinker_pb2.ForwardBackwardRequest:
    """A request with one row: text, an image, text."""
    request = tinker_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy", **config)
    row = request.data.add()
    row.model_input.add().encoded_text.tokens = np.array(BEFORE, np.int32).tobytes()
    row.model_input.add().image.CopyFrom(tinker_pb2.Image(data=CAT, expected_tokens=expected))
    row.model_input.add().encoded_text.tokens = np.array(AFTER, np.int32).tobytes()
    row.loss_fn_inputs["target_tokens"].CopyFrom(tensor(TARGETS))
    row.loss_fn_inputs["weights"].CopyFrom(tensor(WEIGHTS))
    return request


def test_a_chunk_becomes_the_tokens_of_its_image() -> None:
    qwen = pb.ModelInfo(name="qwen", takes_images=True, image_token_id=IMAGE, context_length=256)
    tiles = pb.ModelInfo(name="smolvlm", takes_images=True, context_length=256)
    text = pb.ModelInfo(name="text", context_length=256)
    request = asked()
    request.data.append(request.data[0])
    columns = loss_batch(request, qwen, Limits()).columns
    assert [row.tolist() for row in columns["input_ids"].rows()] == [IDS, IDS]
    assert [row.tolist() for row in columns[IMAGES].rows()] == [[0], [0]]
    assert [row.tobytes() for row in columns[IMAGE_BYTES].rows()] == [CAT]
    for model, expected, message in (
        (qwen, 0, "datum 0 has an image without expected_tokens"),
        (qwen, 300, "is to be 300 tokens; the model's context has 256"),
        (tiles, 6, "several tiles with tokens between them"),
        (text, 6, "datum 0 has an image, and the model 'text' .* takes no images"),
    ):
        with pytest.raises(ServiceError, match=message) as caught:
            loss_batch(asked(expected=expected), model, Limits())
        assert caught.value.error.row == 0 and caught.value.error.field == "model_input"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("images")
    others = ("--model", f"smolvlm={vision_model(folder / 'smolvlm', 'smolvlm')}")
    others += ("--model", f"text={tiny_model(folder / 'text')}")
    qwen = vision_model(folder / "qwen", "qwen2_vl")
    running = HttpServer(qwen, folder / "state", free_port(), "--threads", "1", *others, name="qwen").start()
    yield running
    assert running.end() == 0


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        yield client


def plain_logprobs(folder: Path) -> np.ndarray:
    """Log-probabilities of the row's targets, by transformers."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    text = WORDS.decode(BEFORE[1:-1]) + "<|vision_start|><|image_pad|><|vision_end|>" + WORDS.decode(AFTER[1:])
    inputs = plain_processor(folder, "qwen2_vl")(text=text, images=picture(1, 16, 24), return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == IDS
    with torch.no_grad():
        log_p = model(**inputs).logits[0].log_softmax(-1)
    return log_p.gather(1, torch.tensor(TARGETS)[:, None])[:, 0].numpy()


@pytest.mark.slow
async def test_tinkers_chunks_train_and_sample_as_gradwires_own_rows(
    server: HttpServer, http: httpx.AsyncClient
) -> None:
    client = await TinkerClient(http).begin()
    lora = {"rank": 4, "seed": 1}
    create = {"session_id": client.session_id, "model_seq_id": 0, "base_model": "qwen", "lora_config": lora}
    model = (await client.done("create_model", create))["model_id"]
    metrics, (logprobs,) = outputs(await client.done("forward_backward", asked(model).SerializeToString()))
    np.testing.assert_allclose(logprobs, plain_logprobs(server.model), atol=1e-5)
    await client.wait(await client.step(model, 2, learning_rate=1e-2, eps=1e-8))
    again = asked(model)
    again.seq_id = 3
    after, _ = outputs(await client.done("forward_backward", again.SerializeToString()))
    async with gradwire.connect(server.address) as service:
        settings = {"rank": 4, "alpha": 32, "target_modules": ["all-linear", "lm_head"]}
        run = await service.create_run("qwen", lora=settings, seed=1)
        row = {"input_ids": IDS, "target_tokens": TARGETS, "weights": WEIGHTS, "images": [CAT]}
        losses = []
        for _ in range(2):
            losses.append((await run.forward_backward([row], "cross_entropy")).loss)
            await run.optim_step(learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8)
        assert [metrics["loss:sum"], after["loss:sum"]] == pytest.approx(losses, rel=1e-5)
        assert losses[1] < losses[0]
        sampling = {"sampling_session_seq_id": 0, "session_id": client.session_id, "base_model": "qwen"}
        sampler = (await client.post("create_sampling_session", sampling))["sampling_session_id"]
        own = service.sampling_client("qwen")
        drawn = await own.sample([IDS], images=[[CAT]], max_tokens=8, temperature=0.0, ignore_eos=True)
        shown = {"type": "image", "data": base64.b64encode(CAT).decode(), "format": "png"}
        text = [{"type": "encoded_text", "tokens": tokens} for tokens in (BEFORE, AFTER)]
        for number, count in enumerate((CAT_TOKENS, None)):
            prompt = {"chunks": [text[0], shown | {"expected_tokens": count}, text[1]]}
            request = {
                "sampling_session_id": sampler, "seq_id": number, "prompt": prompt,
                "sampling_params": {"max_tokens": 8, "temperature": 0.0, "stop": []},
            }  # fmt: skip
            found = tinker_pb2.SampleResponse.FromString(await client.done("asample", request))
            assert np.frombuffer(found.sequences[0].tokens, np.int32).tolist() == list(drawn.samples[0][0].token_ids)
        (told,) = await own.compute_logprobs([IDS], images=[[CAT]])
        np.testing.assert_allclose(told, plain_logprobs(server.model)[:-1], atol=1e-5)  # its last target is not sent
        shorter = np.delete(told, np.s_[len(BEFORE) - 1 : len(BEFORE) + CAT_TOKENS - 2])
        for number, (count, expected) in enumerate(((CAT_TOKENS, told), (None, shorter))):
            prompt = {"chunks": [text[0], shown | {"expected_tokens": count}, text[1]]}
            scored = request | {"seq_id": 2 + number, "prompt": prompt, "prompt_logprobs": True}
            found = tinker_pb2.SampleResponse.FromString(await client.done("asample", scored))
            np.testing.assert_allclose(np.frombuffer(found.prompt_logprobs, np.float32)[1:], expected, rtol=1e-6)
        wrong = {"chunks": [text[0], shown | {"expected_tokens": CAT_TOKENS - 1}, text[1]]}
        refused = await client.done("asample", request | {"seq_id": 8, "prompt": wrong})
        assert f"1 images and {CAT_TOKENS - 1} image tokens" in refused["error"] and refused["category"] == "user"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen", "smolvlm"])
async def test_parts_of_a_conversation_are_seen(server: HttpServer, http: httpx.AsyncClient, model: str) -> None:
    def body(url: str, model: str = model) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        return {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}

    url = "data:image/png;base64," + base64.b64encode(CAT).decode()
    answer = (await http.post("/v1/chat/completions", json=body(url))).json()
    async with gradwire.connect(server.address) as service:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
        row = await service.render(messages, train_on=None, add_generation_prompt=True, model=model)
        own = service.sampling_client(model)
        drawn = await own.sample([row["input_ids"].tolist()], images=[[CAT]], max_tokens=8, temperature=0.0)
    assert answer["choices"][0]["message"]["content"] == drawn.samples[0][0].text
    assert answer["usage"]["prompt_tokens"] == drawn.num_prompt_tokens > len(row["input_ids"])
    saved = BytesIO()
    np.save(saved, np.zeros((4, 4), np.uint8))
    negative = saved.getvalue().replace(b"(4, 4), }  ", b"(-4, -4), }")
    for wrong, message in (
        (body("https://example.com/cat.png"), "message 0 has the URL of an image"),
        (body("data:image/png;base64,%%"), "message 0 has an image that cannot be read"),
        (body("data:image/png,abc"), "does not begin with data:TYPE;base64,"),
        (body("data:image/png;base64,AAAA"), "no PNG, JPEG, WEBP file"),
        (body(f"data:image/png;base64,{base64.b64encode(negative).decode()}"), "[-4, -4]"),
        (body(url, "text"), "the model text takes none"),
    ):
        refused = await http.post("/v1/chat/completions", json=wrong)
        error = refused.json()["error"]
        assert refused.status_code == 400 and message in error["message"] and error["param"] == "messages", error


@pytest.mark.long
async def test_a_fine_tuning_job_learns_from_images(http: httpx.AsyncClient) -> None:
    def row(n: int, url: str = "") -> dict[str, Any]:
        image = {
            "type": "image_url",
            "image_url": {"url": url or f"data:image/png;base64,{base64.b64encode(CAT).decode()}"},
        }
        asked = [{"type": "text", "text": f"{n}: what?"}, image] if n % 3 else f"{n}: what?"
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "a cat"}]}

    async def upload(rows: list[dict[str, Any]]) -> dict[str, Any]:
        form = {"file": ("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())}
        return dict((await http.post("/v1/files", files=form, data={"purpose": "fine-tune"})).json())

    async def ended(model: str, file: str) -> dict[str, Any]:
        body = {"model": model, "training_file": file, "seed": 1, "hyperparameters": NUMBERS}
        job = (await http.post("/v1/fine_tuning/jobs", json=body)).json()
        while job["status"] not in ("succeeded", "failed"):
            await asyncio.sleep(0.2)
            job = (await http.get(f"/v1/fine_tuning/jobs/{job['id']}")).json()
        return dict(job)

    file = (await upload([row(n) for n in range(12)]))["id"]
    job = await ended("qwen", file)
    assert job["status"] == "succeeded", job
    events = (await http.get(f"/v1/fine_tuning/jobs/{job['id']}/events")).json()["data"]
    losses = [event["data"]["train_loss"] for event in events if event["type"] == "metrics"]  # newest first
    assert len(losses) == 6 and losses[0] < 0.7 * losses[-1], losses
    answer = await http.post(
        "/v1/chat/completions",
        json={"model": job["fine_tuned_model"], "messages": row(1)["messages"][:1], "max_tokens": 5, "temperature": 0},
    )
    assert answer.status_code == 200, answer.text
    job = await ended("text", file)
    assert (job["status"], job["error"]["code"]) == ("failed", "invalid_training_file")
    assert job["error"]["message"].endswith(": there are images, and text takes none"), job
    elsewhere = await upload([*(row(n) for n in range(12)), row(13, "https://example.org/cat.png")])
    assert "line 13: message 0 of messages has an image 'https://example.org/cat.png'" in elsewhere["status_details"]


@pytest.mark.slow
async def test_images_in_results_of_tools_are_seen_at_every_door(http: httpx.AsyncClient) -> None:
    data, call = base64.b64encode(CAT).decode(), {"name": "look", "arguments": "{}"}
    url, asked = f"data:image/png;base64,{data}", {"role": "user", "content": "look"}
    turn = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url}]}
    counts = []
    for path, limit, body in (
        ("chat/completions", "max_tokens", {"messages": [asked, turn, result]}),
        ("chat/completions", "max_tokens", {"messages": [asked, turn, result | {"content": ""}]}),
        (
            "messages",
            "max_tokens",
            {"messages": [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]},
        ),
        (
            "responses",
            "max_output_tokens",
            {"input": [asked, {"type": "function_call", "call_id": "c", **call}, output]},
        ),
    ):
        answer = await http.post(f"/v1/{path}", json={"model": "qwen", limit: 1, **body})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        known = usage.get("cache_read_input_tokens", 0)
        counts.append(usage["prompt_tokens"] if "prompt_tokens" in usage else known + usage["input_tokens"])
    assert counts[0] == counts[2] == counts[3] == counts[1] + CAT_TOKENS + 2
