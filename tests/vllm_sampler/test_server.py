"""Weights of a run in a real vLLM server: run in an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, reward_function
from gradwire.rl.algorithms.weights import asleep
from gradwire.rl.inference import Generation, OpenAIInference, RunInference, SamplingParams
from support.vllm import GREEDY, Endpoint, Exported, check_equal, endpoint, flat, follow, model_for_vllm, trained

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
    one = ("--max-loras", "1", "--max-cpu-loras", "1")  # an adapter evicts the one before it
    with endpoint(tied, log, "--enable-lora", "--max-lora-rank", "16", *one) as served:
        yield served


@pytest.fixture(scope="module")
def of_whole_models(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with endpoint(untied, tmp_path_factory.mktemp("log") / "server.log") as served:
        yield served


def told(url: str) -> Any:
    """What the server answers."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def names(served: Endpoint) -> set[str]:
    """What the server can be asked for."""
    return {each["id"] for each in told(f"{served.url}/models")["data"]}


def flat_ids(generations: list[Generation]) -> list[int]:
    return [token for each in generations for token in each.token_ids.tolist()]


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


async def test_an_adapter_that_was_evicted_or_unloaded(with_adapters: Endpoint, tied: Path) -> None:
    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        runs = [await service.create_run("tiny", lora={"rank": 8}, seed=seed) for seed in (1, 2)]
        owns = [await RunInference.of(service, run) for run in runs]
        samplers = [OpenAIInference(with_adapters.url, "policy", own.codec, weights="adapter") for own in owns]
        for run, sampler in zip(runs, samplers):
            await trained(run)
            await sampler.update_weights(run, 1)
        said = [await check_equal(sampler, own, 1) for sampler, own in zip(samplers * 2, owns * 2)]
        assert said[:2] == said[2:] and said[0] != said[1]
        await samplers[0]._command(f"{with_adapters.url}/unload_lora_adapter", {"lora_name": samplers[0].model})
        assert samplers[0].model not in names(with_adapters)
        assert await check_equal(samplers[0], owns[0], 1) == said[0]


async def test_it_sleeps(with_adapters: Endpoint, tied: Path) -> None:
    """The routes; on a CPU vLLM frees nothing."""

    def sleeping() -> bool:
        return bool(told(f"{with_adapters.root}/is_sleeping")["is_sleeping"])

    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        own = await RunInference.of(service, run)
        inference = OpenAIInference(with_adapters.url, "policy", own.codec, weights="adapter", sleeps=True)
        for version in (1, 2):
            await inference.update_weights(run, version)
            async with asleep(inference):
                assert sleeping()
                waiting = asyncio.ensure_future(inference.generate([[1, 20, 21]], GREEDY))
                await trained(run)
            assert not sleeping()
            ((generation,), (again,)) = [await waiting, await inference.generate([[1, 20, 21]], GREEDY)]
            assert generation.version == version and generation.token_ids.tolist() == again.token_ids.tolist()


async def test_requests_of_others_end_with_the_weights_that_they_began_with(
    of_whole_models: Endpoint, untied: Path
) -> None:
    async with gradwire.connect(models=[f"tiny={untied}"]) as service:
        run = await service.create_run("tiny")
        own = await RunInference.of(service, run)
        inference = OpenAIInference(of_whole_models.url, "policy", own.codec, weights="model")
        other = OpenAIInference(of_whole_models.url, "policy", own.codec)
        await inference.update_weights(run, 0)
        long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        expected, found = [], []
        for version in range(1, 4):
            expected.append(flat_ids(await own.generate([[1, 20, 21]], long)))
            await trained(run)
            asked = [asyncio.ensure_future(other.generate([[1, 20, 21]], long)) for _ in range(8)]
            await inference.update_weights(run, version)
            found += [flat_ids(await each) for each in asked]
            assert told(f"{of_whole_models.root}/weight_info") == {"weight_version": str(version)}
        expected.append(flat_ids(await own.generate([[1, 20, 21]], long)))
        assert len({*map(tuple, expected)}) == 4 and all(ids in expected for ids in found)


async def test_all_weights(of_whole_models: Endpoint, untied: Path, tmp_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={untied}"]) as service:
        run = await service.create_run("tiny")
        own = await RunInference.of(service, run)
        inference = OpenAIInference(of_whole_models.url, "policy", own.codec, weights="model")
        await inference.update_weights(run, 0)  # other tests' weights may be there
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


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 5}], ids=str)
async def test_log_probabilities_of_kept_tokens(
    with_adapters: Endpoint, tied: Path, cut: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's are of the kept tokens only; what is trained on has the trainer's: no token is weighted by the mass."""
    seen: list[tuple[Any, Any]] = []

    class Watched(GRPOAlgorithm):
        async def training_batch(self, trajectories: Any) -> Any:
            for step in (step for each in trajectories for step in each.steps):
                row = np.append(step.prompt_ids, step.response_ids)
                (scored,) = await own.get_logprobs([row])
                seen.append((step.logprobs, scored[len(step.prompt_ids) - 1 :]))
            return await super().training_batch(trajectories)

    async with gradwire.connect(models=[f"tiny={tied}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        own = await RunInference.of(service, run)
        inference = OpenAIInference(with_adapters.url, "policy", own.codec, weights="adapter")
        await inference.update_weights(run, 0)
        (drawn,) = await inference.generate(
            [[1, 20, 21]], SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **cut)
        )
        (whole,) = await own.get_logprobs([[1, 20, 21, *drawn.token_ids]])
        mass = np.exp(whole[2:] - drawn.logprobs)  # of the kept tokens
        assert (mass < 0.95).all() and (mass > (0.6 - 1e-3 if "top_p" in cut else 0)).all()
        config = AlgorithmConfig(batch_size=2, group_size=4, max_tokens=8, checkpoint_dir=tmp_path, **cut)
        async with Watched(service, run, ["ab", "cd"], letters, config, inference=inference) as training:
            found = await training.train(2, progress_bar=False)
    for ours, theirs in seen:
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert max(each["train/sampler_logprob_diff_max"] for each in found) < 1e-3
    assert "the trainer scores the samples" in caplog.text and "correct" not in caplog.text
