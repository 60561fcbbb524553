"""Log-probabilities of sampling and of training: equal, but for bfloat16 without our kernels, which RL corrects for."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire.rl import AlgorithmConfig, GiGPOAlgorithm, GRPOAlgorithm, PPOAlgorithm, reward_function
from support.server import Server
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

PLAIN = "bfloat16 --kernels plain"
PROMPTS = [[5, 9, 11], [12, 33], [7, 40, 41, 8]]


@reward_function(sandboxed=False)
def parity(response: str) -> float:
    return float(len(response) % 2)


@pytest.fixture(scope="module")
def opinionated(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with logits of an ordinary size: rounding then shows."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model_path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[2]])).logits
        model.model.norm.weight.mul_(2.0 / logits.std())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", PLAIN))]
)
async def served(
    request: pytest.FixtureRequest, opinionated: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, gradwire.ServiceClient]]:
    server = Server(opinionated, tmp_path_factory.mktemp("state"), "--dtype", *request.param.split()).start()
    async with gradwire.connect(server.address) as service:
        yield request.param, service
    assert server.end() == 0


async def test_how_far_apart_they_are(served: tuple[str, gradwire.ServiceClient]) -> None:
    dtype, service = served
    run = await service.create_run("tiny", lora=4)
    samples = (await run.sample(PROMPTS, n=8, max_tokens=24, ignore_eos=True)).samples
    rows = [(prompt, sample) for prompt, of_prompt in zip(PROMPTS, samples) for sample in of_prompt]
    batch = {
        "input_ids": [[*prompt, *sample.token_ids.tolist()] for prompt, sample in rows],
        "loss_mask": [[0] * len(prompt) + [1] * len(sample.token_ids) for prompt, sample in rows],
    }
    trained = np.concatenate(await run.compute_logprobs(batch))
    sampled = np.concatenate([sample.logprobs for _, sample in rows])
    difference = float(np.abs(trained - sampled).max())
    print(f"{dtype}: {difference:.2e}")
    assert difference < 1e-4 if dtype != PLAIN else 1e-3 < difference < 0.1
    # Every RL step reports it, from what the batch brings.
    old = [[0.0] * len(prompt) + sample.logprobs.tolist() for prompt, sample in rows]
    given: dict[str, Any] = batch | {"old_log_probs": old, "advantages": [1.0] * len(rows)}
    for loss_fn in ("enhanced_ppo", "conservative_ppo"):
        found = await run.forward(given, loss_fn)
        assert found["sampler_logprob_diff_max"] == pytest.approx(difference, rel=1e-3, abs=1e-6)
        mean = float((trained - sampled).mean(dtype=np.float64))
        assert found["sampler_logprob_diff"] == pytest.approx(mean, rel=1e-3, abs=1e-6)
    weighted = {"behavior_log_probs": old, "advantages": [1.0] * len(rows)} | batch
    assert (await run.forward(weighted, "importance_sampling"))["sampler_kl"] == pytest.approx(found["sampler_kl"])
    assert found["sampler_kl"] < 1e-8 if dtype != PLAIN else found["sampler_kl"] > 1e-8
    await service.delete_run(run.run_id)


@pytest.mark.parametrize("algorithm", [GRPOAlgorithm, PPOAlgorithm, GiGPOAlgorithm])
async def test_rl_corrects_for_it_where_it_matters(
    served: tuple[str, gradwire.ServiceClient], tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: Any
) -> None:
    dtype, service = served
    run = await service.create_run("tiny", lora=4, head="value" if algorithm is PPOAlgorithm else None)

    async def trained(name: str, **loss_kwargs: Any) -> list[dict[str, float]]:
        config = AlgorithmConfig(
            batch_size=2, group_size=4, max_tokens=16, loss_kwargs=loss_kwargs, checkpoint_dir=tmp_path / name
        )
        async with algorithm(service, run, ["ab", "cd"], parity, config) as training:
            found: list[dict[str, float]] = await training.train(2, progress_bar=False)
        return found

    with caplog.at_level(logging.WARNING, "gradwire.rl"):
        metrics = await trained("auto")
    told = [record for record in caplog.records if "truncated importance weights" in record.getMessage()]
    apart = [each["train/sampler_logprob_diff_max"] for each in metrics]
    if dtype != PLAIN:
        assert told == [] and max(apart[:1]) < 1e-3
        assert all(math.isnan(each["train/sampler_ratio_mean"]) for each in metrics)
    else:
        assert len(told) == 1 and max(apart) > 1e-3  # few tokens of an iteration may agree better
        ratios = [each["train/sampler_ratio_mean"] for each in metrics]
        assert all(0.9 < ratio < 1.1 for ratio in ratios if not math.isnan(ratio)) and not math.isnan(ratios[-1])
        off = await trained("off", sampler_correction=None)
        assert all(math.isnan(each["train/sampler_ratio_mean"]) for each in off)
        masked = await trained("masked", sampler_correction="token_mask", sampler_ratio_min=0.5)
        assert not any(math.isnan(each["train/sampler_ratio_mean"]) for each in masked)
    await service.delete_run(run.run_id)
