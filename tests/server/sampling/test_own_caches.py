"""Samples of models that keep recurrent states, or no cache at all, against transformers alone, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_configs import CONFIGURATIONS, SIZES
from gradwire_proto.v1.training_pb2 import LoraSettings
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from transformers import AutoConfig, AutoModelForCausalLM

PROMPTS = [[5, 9, 44, 21, 8], [7, 30], [50, 12, 13, 14, 15, 33, 34, 35, 36, 37, 38], [5, 9, 44, 21, 9]]
STOPS = (11, 19, 27, 35, 43, 51)
RECURRENT = ("Qwen3.5", "LFM2", "Jamba", "Mamba 2", "Zamba")
WITHOUT_CACHE = ("GPT",)


def saved(name: str, folder: Path) -> Path:
    kind, settings = CONFIGURATIONS[name]
    sizes = {key: value for key, value in (dict(SIZES) | dict(settings)).items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    return folder


def finish(sampler: LocalSampler, *jobs: LocalJob) -> None:
    while not all(job.done for job in jobs):
        sampler.step()


def assert_scored_alone(model: Any, prompts: Sequence[Sequence[int]], job: LocalJob) -> list[int]:
    """Compare all samples with forwards of their tokens; return their lengths."""
    lengths = []
    for prompt, samples in zip(prompts, job.samples().by_prompt(), strict=True):
        for sample in samples:
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *sample.token_ids]])
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=3e-5, rtol=0)
            lengths.append(len(sample.token_ids))
    return lengths


@pytest.mark.long
@pytest.mark.parametrize("name", [*RECURRENT, *WITHOUT_CACHE])
def test_several_samples_of_prompts_that_end_apart_are_scored_as_a_forward_scores_them(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path)
    policy = Policy(ModelPool({"m": str(folder)}).get("m"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sampler = LocalSampler()
    params = SamplingParams(max_tokens=16, seed=3, n=4, stop_token_ids=STOPS, ignore_eos=True)
    job, cancelled = (sampler.begin(policy, PROMPTS, params) for _ in range(2))
    sampler.step()
    sampler.step()
    sampler.cancel(cancelled)
    finish(sampler, job)
    assert len(set(assert_scored_alone(model, PROMPTS, job))) > 3
    assert sampler._keeps_cache(policy) is (name in RECURRENT)


def test_samples_of_several_adapters_on_one_hybrid_model_are_scored_with_their_own(tmp_path: Path) -> None:
    folder = saved("Qwen3.5", tmp_path)
    split_model = ModelPool({"m": str(folder)}).get("m")
    policies = [LoraPolicy(split_model, f"run-{seed}", LoraSettings(rank=2), seed=seed) for seed in (1, 2)]
    sampler, jobs = LocalSampler(), []
    for seed, policy in enumerate(policies):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy.load_state_tensors(
                {name: 0.2 * torch.randn_like(each) for name, each in policy.state_tensors().items()}
            )
        params = SamplingParams(max_tokens=8, seed=seed, n=2, ignore_eos=True)
        jobs.append(sampler.begin(policy, PROMPTS, params, mixed=True))
    finish(sampler, *jobs)
    for policy, job in zip(policies, jobs, strict=True):
        policy.activate()
        assert_scored_alone(split_model.model, PROMPTS, job)
