"""Backends: the run's sampler by a stand-in, an OpenAI-compatible endpoint, a local Hugging Face model."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm
from gradwire.rl.algorithms.weights import asleep
from gradwire.rl.environments import ToolEnvironment
from gradwire.rl.inference import (
    InferenceModule,
    LocalInference,
    OpenAIInference,
    RunInference,
    SamplingParams,
    ServiceCodec,
    VLLMInference,
)
from gradwire.rl.prompts import TokenHistory
from support.server import Server
from support.web import Quiet, serving


class StandInRun:
    """Gives the last prompt token plus one."""

    async def sample(self, prompts: Any, **options: Any) -> Any:
        self.options = options
        samples = [
            [
                SimpleNamespace(
                    token_ids=np.array([prompt[-1] + 1]), logprobs=np.array([-1.0]), text=None, stop_reason="eos"
                )
            ]
            for prompt in prompts
        ]
        return SimpleNamespace(samples=samples, step=1)


class StandInService:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def encode(self, model: str, texts: Any, add_special_tokens: bool = True) -> Any:
        self.asked += texts
        return [[1] * add_special_tokens + [ord(c) for c in text] for text in texts]

    async def decode(self, model: str, rows: Any) -> Any:
        return ["".join(map(chr, row)) for row in rows]


def test_one_stop_string_is_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tool is a function or a Tool, got 'calculator'"):
        ToolEnvironment(["calculator"])  # type: ignore[list-item]


async def test_the_runs_own_sampler() -> None:
    run = StandInRun()
    service = StandInService()
    inference = RunInference(run, ServiceCodec(service, "tiny"))
    assert isinstance(inference, InferenceModule)
    assert inference.can_update(run) and not inference.can_update(StandInRun())
    await inference.update_weights(run, 1)
    (prompt,) = await inference.codec.encode(["A"])
    (generation,) = await inference.generate([prompt], SamplingParams(max_tokens=3, seed=5))
    assert (generation.text, generation.version, run.options["seed"]) == ("B", 1, 5)
    await inference.codec.encode(["A", "B", "B"])
    assert service.asked == ["A", "B"]


class Gate:
    """While it is closed, the endpoint's completions do not end.

    Attributes:
        reached: A completion has arrived at it.
    """

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened.set()

    def close(self) -> None:
        self.opened.clear()
        self.reached.clear()

    def pass_through(self) -> None:
        self.reached.set()
        self.opened.wait(60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def endpoint(gate: Gate) -> Iterator[tuple[str, list[Any], list[int]]]:
    pytest.importorskip("openai", reason="needs gradwire[openai]")
    requests: list[Any] = []
    failures: list[int] = []
    gone: set[str] = set()

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"vllm_config": {"device_config": {"device": "cpu"}}}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            if "lora_name" in body:
                (gone.discard if "/load_" in self.path else gone.add)(body["lora_name"])
            if self.path.endswith("/completions"):
                gate.pass_through()
            if failures or body.get("model") in gone:
                self.send_response(failures.pop() if failures else 404)
                self.send_header("Retry-After-Ms", "1")  # the package waits half a second otherwise
                self.end_headers()
                self.wfile.write(b"try again")
                return
            logprobs: dict[str, Any] = {"token_logprobs": [-0.1, -0.2], "top_logprobs": [{"o": -0.5, "k": -1.5}]}
            if body.get("echo"):
                logprobs["token_logprobs"] = [None, *[-0.25] * len(body["prompt"])]
            choice = {"text": "ok", "token_ids": [11, 7], "logprobs": logprobs, "finish_reason": "stop"}
            if "messages" in body:
                said = {"role": "assistant", "content": "well"}
                scored = {"content": [{"token": "well", "logprob": -0.5}]} if "logprobs" in body else None
                choice = {"message": said, "logprobs": scored, "finish_reason": "length"}
            self.send_response(200)
            page = "html" in self.path
            self.send_header("Content-Type", "text/html" if page else "application/json")
            self.end_headers()
            self.wfile.write(b"<p>hello" if page else json.dumps({"choices": [choice]}).encode())

    with serving(Handler) as address:
        yield f"http://{address}/v1", requests, failures


async def test_an_openai_compatible_endpoint(endpoint: Any, rule_inference: Callable[..., Any]) -> None:
    url, requests, _ = endpoint
    codec = rule_inference(lambda t, n: "").codec
    inference = OpenAIInference(url, "m", codec, api_key="k")
    assert isinstance(inference, InferenceModule)
    (generation,) = await inference.generate([[72, 105]], SamplingParams(stop=("x",), seed=3))
    assert (generation.text, generation.token_ids.tolist(), generation.stop_reason) == ("ok", [11, 7], "eos")
    np.testing.assert_allclose(generation.logprobs, [-0.1, -0.2])
    assert requests[0]["prompt"] == [72, 105] and requests[0]["stop"] == ["x"] and requests[0]["seed"] == 3
    (scores,) = await inference.get_logprobs([[72, 105, 106]])
    np.testing.assert_allclose(scores, [-0.25, -0.25])
    (top,) = await inference.get_logits([[72]], top_k=2)
    assert (top.tokens, top.token_ids.tolist()) == (("o", "k"), [111, 107])
    assert {each["key"] for each in requests} == {"Bearer k"}
    with pytest.raises(ValueError, match="must start with http"):
        OpenAIInference("localhost:80", "m", codec)


async def test_refusals_of_an_endpoint(endpoint: Any, rule_inference: Callable[..., Any]) -> None:
    """A busy endpoint is asked three times in all; a refusal is final."""
    url, requests, failures = endpoint
    codec = rule_inference(lambda t, n: "").codec
    inference = OpenAIInference(url, "m", codec)
    failures += [503, 429]
    assert (await inference.generate([[72]], SamplingParams()))[0].text == "ok"
    failures += [503] * 3
    with pytest.raises(ConnectionError, match="/v1/completions answered 503: try again"):
        await inference.generate([[72]], SamplingParams())
    assert len(requests) == 6
    failures.append(400)
    with pytest.raises(ValueError, match="/v1/completions answered 400"):
        await inference.generate([[72]], SamplingParams())
    with pytest.raises(ValueError, match="answered without a completion: <p>hello"):
        await OpenAIInference(f"{url}/html", "m", codec).generate([[72]], SamplingParams())
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(ConnectionError, match=f"{closed}/completions: "):
            await OpenAIInference(closed, "m", codec).generate([[72]], SamplingParams())


async def test_conversations_with_an_endpoint(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no tokenizer; nothing but OpenAI's own parameters are sent without ``send_ids``."""
    url, requests, _ = endpoint
    monkeypatch.setenv("OPENAI_API_KEY", "of another endpoint")
    asked: list[Any] = [[{"role": "user", "content": "How are you?"}], [{"role": "user", "content": "And now?"}]]
    judge = OpenAIInference(url, "m", send_ids=False)
    answers = await judge.chat(asked, SamplingParams(max_tokens=9, temperature=0, seed=4))
    assert [(each.text, each.stop_reason, len(each.token_ids)) for each in answers] == [("well", "length", 0)] * 2
    sent = sorted(requests, key=lambda each: each["seed"])
    assert sent[1] == {
        "path": "/v1/chat/completions", "key": "Bearer none", "model": "m", "messages": asked[1],
        "max_completion_tokens": 9, "temperature": 0, "top_p": 1.0, "seed": 5,
    }  # fmt: skip
    (answer,) = await OpenAIInference(url, "m").chat(asked[:1], SamplingParams(top_k=2, stop=("x",)))
    np.testing.assert_allclose(answer.logprobs, [-0.5])
    assert (requests[-1]["top_k"], requests[-1]["stop"], requests[-1]["return_token_ids"]) == (2, ["x"], True)
    with pytest.raises(ValueError, match="created without a codec"):
        await judge.generate([[72]], SamplingParams())


class ExportingRun:
    """Exports a folder that holds the marker of an adapter, or of a whole model."""

    def __init__(self, file: str, tied: bool = False) -> None:
        self.file, self.tied = file, tied

    async def export(self, path: Path) -> Path:
        (path / self.file).write_text("weights")
        (path / "config.json").write_text(json.dumps({"tie_word_embeddings": self.tied}))
        return path


async def test_an_endpoint_is_given_new_weights(endpoint: Any, rule_inference: Callable[..., Any]) -> None:
    url, requests, failures = endpoint
    codec = rule_inference(lambda t, n: "").codec
    run = ExportingRun("adapter_model.safetensors")
    assert not OpenAIInference(url, "m", codec).can_update(run)
    inference = OpenAIInference(url, "m", codec, weights="adapter")
    assert inference.can_update(run)
    for version in (3, 4, 5):
        await inference.update_weights(run, version)
    (generation,) = await inference.generate([[72]], SamplingParams())
    loads = [each for each in requests if each["path"] == "/v1/load_lora_adapter"]
    assert [each["lora_name"].split("-")[1] for each in loads] == ["3", "4", "5"]
    # Two versions stay, for requests under way; older ones leave the endpoint and the disk.
    assert [each["lora_name"] for each in requests if "unload" in each["path"]] == [loads[0]["lora_name"]]
    kept = {path.name for path in inference._kept}
    assert [each["lora_name"] in kept for each in loads] == [False, True, True]
    assert requests[-1]["model"] == loads[2]["lora_name"] and generation.version == 5
    failures.append(400)
    with pytest.raises(ValueError, match="load_lora_adapter answered 400"):
        await inference.update_weights(run, 6)
    assert inference.version == 5
    with pytest.raises(ValueError, match=r'trains all weights, but OpenAIInference was created with weights="adapter"'):
        await inference.update_weights(ExportingRun("model.safetensors"), 6)
    whole = OpenAIInference(url, "m", codec, weights="model")
    await whole.update_weights(ExportingRun("model.safetensors"), 7)
    paths = ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert [each["path"] for each in requests[-5:]] == paths and requests[-2]["new_version"] == "7"
    assert whole.model == "m" and whole.version == 7
    failures += [400, 200]
    with pytest.raises(ValueError, match="collective_rpc answered 400"):
        await whole.update_weights(ExportingRun("model.safetensors"), 8)
    assert [each["path"] for each in requests[-3:]] == [*paths[:2], "/resume"] and whole.version == 7
    with pytest.raises(gradwire.UnsupportedError, match="keeps the old output head"):
        await whole.update_weights(ExportingRun("model.safetensors", tied=True), 8)
    assert requests[-1]["path"] == "/resume" and whole.version == 7


async def test_an_adapter_that_the_endpoint_has_lost_is_loaded_again(
    endpoint: Any, rule_inference: Callable[..., Any]
) -> None:
    """As after a restart, or by somebody else's unloading; the two requests that miss it load it once."""
    url, requests, _ = endpoint
    codec = rule_inference(lambda t, n: "").codec
    inference = OpenAIInference(url, "m", codec, weights="adapter")
    await inference.update_weights(ExportingRun("adapter_model.safetensors"), 1)
    for times in (1, 2):
        await inference._command(f"{url}/unload_lora_adapter", {"lora_name": inference.model})
        generations = await inference.generate([[72], [73]], SamplingParams())
        assert [(each.text, each.version) for each in generations] == [("ok", 1)] * 2
        loads = [each for each in requests if each["path"] == "/v1/load_lora_adapter"]
        assert len(loads) == 1 + times and loads[0] == loads[-1]
    unknown = OpenAIInference(url, inference.model, codec)
    await inference._command(f"{url}/unload_lora_adapter", {"lora_name": inference.model})
    with pytest.raises(ValueError, match="/v1/completions answered 404"):  # an adapter of somebody else
        await unknown.generate([[72]], SamplingParams())


async def test_a_sampler_on_the_trainers_gpu_sleeps_while_the_policy_trains(
    endpoint: Any, server: Server, tmp_path: Path
) -> None:
    """The routes and their order are vLLM's: no sample while it sleeps, and new weights only when it is awake."""
    url, requests, failures = endpoint

    def short(response: str) -> float:
        return float(len(response))

    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora={"rank": 2})
        codec = (await RunInference.of(service, run)).codec
        inference = OpenAIInference(url, "m", codec, weights="adapter", sleeps=True)
        config = AlgorithmConfig(batch_size=1, group_size=2, max_tokens=2, max_staleness=1, checkpoint_dir=tmp_path)
        async with GRPOAlgorithm(service, run, ["ab", "cd"], short, config, inference=inference) as training:
            await training.train(2, progress_bar=False)
            paths = [each["path"].removeprefix("/v1").split("?")[0].lstrip("/") for each in requests]
            assert [path for path in paths if path in ("sleep", "wake_up")] == ["sleep", "wake_up"] * 2
            for at in [at for at, path in enumerate(paths) if path == "sleep"]:
                assert paths[at + 1] == "wake_up"
            assert paths[:2] == ["load_lora_adapter", "completions"] and paths.count("load_lora_adapter") == 3
            assert requests[paths.index("sleep")]["path"] == "/sleep?level=1&mode=wait"
            for status, error, words in (
                (500, ValueError, "/sleep.*answered 500"),
                (404, gradwire.UnsupportedError, "no vLLM of 0.32 or newer with VLLM_SERVER_DEV_MODE=1"),
            ):
                failures.append(status)  # of the next command: sleep
                with pytest.raises(error, match=words):
                    async with asleep(inference):
                        pass
            with pytest.raises(RuntimeError, match="of the training"):
                async with asleep(inference):
                    raise RuntimeError("of the training")
        assert requests[-1]["path"] == "/wake_up"
        (generation,) = await inference.generate([[72]], SamplingParams())  # its turn comes again
    assert generation.version == 2


@pytest.mark.parametrize("weights", ["adapter", "model"])
async def test_a_sample_has_the_version_of_the_weights_that_wrote_it(
    endpoint: Any, gate: Gate, rule_inference: Callable[..., Any], weights: Any
) -> None:
    """New weights arrive while one request is in flight, and others wait for their turn."""
    url, requests, _ = endpoint
    codec = rule_inference(lambda t, n: "").codec
    inference = OpenAIInference(url, "m", codec, weights=weights, concurrency=1)
    run = ExportingRun("adapter_model.safetensors" if weights == "adapter" else "model.safetensors")

    def arrived(path: str) -> list[int]:
        return [at for at, each in enumerate(requests) if each["path"].endswith(path)]

    gate.close()
    before = asyncio.ensure_future(inference.generate([[1], [2]], SamplingParams()))
    assert await asyncio.to_thread(gate.reached.wait, 60)
    update = asyncio.ensure_future(inference.update_weights(run, 5))
    if weights == "adapter":
        await update
    after = asyncio.ensure_future(inference.generate([[3]], SamplingParams()))
    gate.opened.set()
    versions = [each.version for each in [*await before, *await after]]
    await update
    if weights == "adapter":
        # The second prompt waited: it was sent to the new adapter.
        assert versions == [0, 5, 5]
        named = [requests[at]["model"] for at in arrived("/completions")]
        assert named[0] == "m" and named[1] == named[2] == inference.model
    else:
        # The weights change between two requests, after those that asked before.
        (reload,) = arrived("/collective_rpc")
        assert versions == [0 if at < reload else 5 for at in arrived("/completions")] and inference.version == 5


@pytest.fixture
def local(tiny_model_path: Path) -> LocalInference:
    return LocalInference.from_pretrained(str(tiny_model_path))


async def test_a_local_model_scores_what_it_sampled(local: LocalInference) -> None:
    inference = local
    assert isinstance(inference, InferenceModule)
    prompts = await inference.codec.encode(["ab", "abcdef"])
    params = SamplingParams(max_tokens=5, temperature=0.7, seed=1, ignore_eos=True)
    generations = await inference.generate(prompts, params)
    assert [len(g.token_ids) for g in generations] == [5, 5]
    rows = [np.concatenate([p, g.token_ids]) for p, g in zip(prompts, generations)]
    scores = await inference.get_logprobs(rows, temperature=0.7)
    for prompt, generation, score in zip(prompts, generations, scores):
        np.testing.assert_allclose(score[len(prompt) - 1 :], generation.logprobs, atol=1e-4)
    greedy = await inference.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    top = await inference.get_logits(prompts, top_k=3)
    assert [t.token_ids[0] for t in top] == [g.token_ids[0] for g in greedy]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "adapter"])
async def test_a_local_model_follows_the_run(server: Server, local: LocalInference, lora: Any) -> None:
    """Its samples and scores are the run's own after each push, and say of which version they are."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora=lora)
        own = await RunInference.of(service, run)
        prompts = await local.codec.encode(["ab", "abcdef"])
        before = await local.get_logprobs(prompts)
        for version in (1, 2):
            run.forward_backward({"input_ids": [[1, 5, 6, 7], [1, 9, 9]]}, "causal_lm")
            run.optim_step(0.03)
            await local.update_weights(run, version)
            ours, theirs = await local.generate(prompts, params), await own.generate(prompts, params)
            assert [each.token_ids.tolist() for each in ours] == [each.token_ids.tolist() for each in theirs]
            assert {each.version for each in ours} == {version}
            for a, b in zip(await local.get_logprobs(prompts), await own.get_logprobs(prompts)):
                np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs((await local.get_logprobs(prompts))[1] - before[1]).max() > 0.1
        if lora is not None:
            other = await service.create_run("tiny", lora={"rank": 8})
            with pytest.raises(ValueError, match="must be the run's base model"):
                await local.update_weights(other, 3)
            assert local.version == 2


async def test_the_likeliest_tokens_of_a_run(server: Server, local: LocalInference) -> None:
    """Found through the server's sampler: those of the model itself, and no more than there are."""
    prompts = await local.codec.encode(["ab", "abcdef"])
    async with gradwire.connect(server.address) as service:
        inference = await RunInference.of(service, await service.create_run("tiny"))
        for top_k in (1, 7, 10_000):
            ours = await inference.get_logits(prompts, top_k=top_k)
            theirs = await local.get_logits(prompts, top_k=top_k)
            for a, b in zip(ours, theirs):
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_allclose(a.logits, b.logits, atol=1e-4)


class StandInVllm:
    """As much of ``vllm`` as is used: writes 7 8, the likeliest next tokens are 7, 9 and 8."""

    def __init__(self, model: str, **options: Any) -> None:
        assert (model, options) == (
            "m", {"logprobs_mode": "processed_logprobs", "enable_lora": True, "max_lora_rank": 64}
        )  # fmt: skip
        config = SimpleNamespace(lora_config=None)
        self.llm_engine = SimpleNamespace(
            add_lora=lambda lora: None, remove_lora=lambda number: None, vllm_config=config
        )
        self.called: list[Any] = []

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        self.called.append((method, sorted(kwargs)))

    def apply_model(self, function: Any) -> None:
        self.called.append(function.__name__)

    def reset_prefix_cache(self) -> None:
        self.called.append("reset_prefix_cache")

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text, **_: [ord(c) for c in text], decode=str, eos_token="</s>")

    def generate(self, prompts: Any, params: Any, use_tqdm: bool, lora_request: Any) -> Any:
        self.lora_request = lora_request
        likely = {token: SimpleNamespace(logprob=score) for token, score in ((8, -3.0), (7, -0.5), (9, -1.5))}
        completion = SimpleNamespace(
            text="ab", token_ids=[7, 8], logprobs=[likely, likely], finish_reason="stop", stop_reason=None
        )
        scored = [
            [None] + [{token: SimpleNamespace(logprob=-float(token))} for token in prompt["prompt_token_ids"][1:]]
            for prompt in prompts
        ]
        return [SimpleNamespace(outputs=[completion], prompt_logprobs=scores) for scores in scored]


async def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=StandInVllm, SamplingParams=dict))  # type: ignore[misc]
    platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))  # type: ignore[misc]
    inference = VLLMInference("m")
    assert isinstance(inference, InferenceModule)
    (generation,) = await inference.generate([[1, 2]], SamplingParams(temperature=0.5))
    assert (generation.text, generation.token_ids.tolist(), generation.stop_reason) == ("ab", [7, 8], "eos")
    np.testing.assert_allclose(generation.logprobs, [-0.5, -3.0])
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lambda *given: given))
    await inference.update_weights(ExportingRun("adapter_model.safetensors"), 4)
    (later,) = await inference.generate([[1, 2]], SamplingParams())
    name, number, _ = inference._llm.lora_request
    assert (generation.version, later.version, name) == (0, 4, f"v{number}")
    # Another module on the same engine: vLLM would keep an adapter whose number it knows.
    other = VLLMInference(inference._llm)
    await other.update_weights(ExportingRun("adapter_model.safetensors"), 1)
    await other.generate([[1, 2]], SamplingParams())
    assert inference._llm.lora_request[1] > number
    (scores,) = await inference.get_logprobs([[1, 2, 3]])
    np.testing.assert_allclose(scores, [-2, -3])
    (top,) = await inference.get_logits([[1, 2]], top_k=2)
    assert (top.token_ids.tolist(), top.logits.tolist()) == ([7, 9], [-0.5, -1.5])
    with pytest.raises(ValueError, match="temperature 1 only"):
        await inference.get_logprobs([[1, 2]], temperature=0.5)
    inference._llm.llm_engine.vllm_config.lora_config = object()
    with pytest.raises(gradwire.UnsupportedError, match="cannot score prompts with LoRA enabled"):
        await inference.get_logprobs([[1, 2]])
    with pytest.raises(ValueError, match="use one engine for each"):
        await inference.update_weights(ExportingRun("model.safetensors"), 5)
    assert inference.version == 4
    whole = VLLMInference("m")
    await whole.update_weights(ExportingRun("model.safetensors", tied=True), 6)
    await whole.update_weights(ExportingRun("model.safetensors"), 7)
    reload, reset = ("reload_weights", ["weights_path"]), "reset_prefix_cache"
    assert whole._llm.called == [reload, "_pack_output_heads", reset, reload, reset] and whole.version == 7


async def test_generation_with_tools(rule_inference: Callable[..., Any]) -> None:
    def double(x: int) -> int:
        """Twice the number."""
        return 2 * x

    inference = rule_inference(
        lambda text, n: "14" if "tool: 14" in text else '<tool_call>{"name": "double", "arguments": {"x": 7}}'
    )
    conversations = await RunInference.batch_generate_with_tools(inference, ["twice 7?"] * 2, available_tools=[double])
    assert [c.response for c in conversations] == ["14", "14"]
    assert conversations[0].steps[0].tool_results[0].content == "14"


async def test_the_tokenizers_own_chat_template() -> None:
    from gradwire.rl.inference import TokenizerCodec

    tokenizer = SimpleNamespace(
        eos_token="</s>",
        all_special_ids=[],
        all_special_tokens=[],
        chat_template="jinja",
        encode=lambda text, add_special_tokens: [ord(character) for character in text],
        apply_chat_template=lambda messages, **kw: f"{len(messages)} {sorted(kw)}",
    )
    ids = await TokenHistory(TokenizerCodec(tokenizer, thinking=True)).prompt_ids([{"role": "user", "content": "hi"}])
    assert "".join(map(chr, ids)) == "1 ['add_generation_prompt', 'thinking', 'tokenize']"
