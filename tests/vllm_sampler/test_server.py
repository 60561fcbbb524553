"""Weights of a run in a real vLLM server: run in an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, reward_function
from gradwire.rl.inference import OpenAIInference, RunInference
from support.vllm import GREEDY, Endpoint, Exported, endpoint, flat, follow, model_for_vllm

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: see docs/rl.md")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.holds_loop("openai's client reads certificates when it is made"),
]

PUSHES = 1000


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_vllm(tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_vllm(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="module")
def with_adapters(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with endpoint(tied, log, "--enable-lora", "--max-lora-rank", "16") as served:
        yield served


@pytest.fixture(scope="module")
def of_whole_models(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with endpoint(untied, tmp_path_factory.mktemp("log") / "server.log") as served:
        yield served


def names(served: Endpoint) -> set[str]:
    """What the server can be asked for."""
    with urllib.request.urlopen(f"{served.url}/models", timeout=60) as response:
        return {each["id"] for each in json.load(response)["data"]}


async def pushed_often(inference: OpenAIInference, served: Endpoint, run: Exported, pushes: int) -> list[float]:
    """Resident MiB of the server at each tenth of the pushes."""
    memory = []
    for number in range(pushes):
        await inference.update_weights(run, number)
        if number % (pushes // 10) == 0:
            (generation,) = await inference.generate([[1, 20, 21]], GREEDY)
            assert generation.version == number
            memory.append(served.resident_mib())
    assert len(list(inference._kept[0].parent.iterdir())) == 2
    return memory


async def test_an_adapter(with_adapters: Endpoint, tied: Path, tmp_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        own = await RunInference.of(service, run)
        inference = OpenAIInference(with_adapters.url, "policy", own.codec, weights="adapter")
        await follow(inference, run, own)
        await run.export(tmp_path / "adapter")
        pushed = Exported(tmp_path / "adapter")
        memory = await pushed_often(inference, with_adapters, pushed, PUSHES)
    assert flat(memory, 20)
    assert names(with_adapters) == {"policy", *inference._adapters} and len(inference._adapters) == 2


async def test_all_weights(of_whole_models: Endpoint, untied: Path, tmp_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={untied}"]) as service:
        run = await service.create_run("tiny")
        own = await RunInference.of(service, run)
        inference = OpenAIInference(of_whole_models.url, "policy", own.codec, weights="model")
        await follow(inference, run, own)
        (scored,), (expected,) = [await each.get_logprobs([[1, 20, 21, 22]]) for each in (inference, own)]
        np.testing.assert_allclose(scored, expected, atol=1e-5)
        await run.export(tmp_path / "model")
        memory = await pushed_often(inference, of_whole_models, Exported(tmp_path / "model"), PUSHES)
    assert flat(memory, 20)


async def test_weights_that_would_not_arrive_are_refused(
    with_adapters: Endpoint, of_whole_models: Endpoint, tied: Path
) -> None:
    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        run = await service.create_run("tiny")
        codec = (await RunInference.of(service, run)).codec
        with pytest.raises(gradwire.UnsupportedError, match=r"keeps the old output head.*lora"):
            await OpenAIInference(with_adapters.url, "policy", codec, weights="model").update_weights(run, 1)
        wide = await service.create_run("tiny", lora={"rank": 32})
        with pytest.raises(ValueError, match=r"load_lora_adapter answered 500.*LoRA rank 32"):
            await OpenAIInference(with_adapters.url, "policy", codec, weights="adapter").update_weights(wide, 1)
        with pytest.raises(ValueError, match=r"load_lora_adapter answered 500.*LoRA is not enabled"):
            await OpenAIInference(of_whole_models.url, "policy", codec, weights="adapter").update_weights(wide, 1)


@reward_function(sandboxed=False)
def letters(response: str) -> float:
    return sum(each.isalpha() for each in response) / max(1, len(response))


@pytest.mark.parametrize("weights", ["adapter", None])
async def test_staleness_of_a_training(with_adapters: Endpoint, tied: Path, weights: Any, tmp_path: Path) -> None:
    """One optimizer step an iteration: an endpoint without weights falls behind, and training says so."""
    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        codec = (await RunInference.of(service, run)).codec
        inference = OpenAIInference(with_adapters.url, "policy", codec, weights=weights)
        config = AlgorithmConfig(batch_size=2, group_size=4, max_tokens=8, learning_rate=1e-2, checkpoint_dir=tmp_path)
        if weights is None:
            with pytest.raises(ValueError, match="cannot receive the weights of this run"):
                GRPOAlgorithm(service, run, ["ab", "cd"], letters, config, inference=inference)
        async with GRPOAlgorithm(
            service, run, ["ab", "cd"], letters, config, inference=inference, allow_stale=weights is None
        ) as training:
            found = await training.train(4, progress_bar=False)
    ages = [each["train/staleness"] for each in found]
    apart = [each["train/sampler_logprob_diff_max"] for each in found]
    if weights is None:
        assert ages == [0.0, 1.0, 2.0, 3.0] and apart[3] > 1e-3
    else:
        assert ages == [0.0, 0.0, 0.0, 0.0] and max(apart) < 1e-4
