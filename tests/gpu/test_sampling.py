"""The local sampler on a CUDA device: slots hold there too, and rows that join change nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.pages import replay
from gradwire_server.engine.sampling.pages.pages import paged_token_bytes
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[5, 9, 11, 30, 7], [40, 41, 42], list(range(3, 23))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
def test_logprobs_are_those_of_one_forward(model_path: Path, dtype: torch.dtype, graphs: bool) -> None:
    policy = Policy(ModelPool({"small": str(model_path)}, "cuda", dtype, fused=graphs).load("small"))
    assert paged_token_bytes(policy, Agreement())
    sampler = LocalSampler()
    params = [SamplingParams(max_tokens=tokens, seed=tokens, n=2, ignore_eos=True) for tokens in (30, 7, 12)]
    jobs = []
    for each in params:
        jobs.append(sampler.begin(policy, PROMPTS, each))
        sampler.step()
    while sampler.turn():
        sampler.step()
    assert replay._right.get(policy.split_model, False) is graphs
    atol = 1e-3 if dtype == torch.float32 else 0.1
    for job in jobs:
        for prompt, of_prompt in zip(PROMPTS, job.samples().by_prompt(), strict=True):
            for sample in of_prompt:
                ids = torch.tensor([[*prompt, *sample.token_ids]], device="cuda")
                with torch.no_grad():
                    logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
                tokens = torch.tensor(sample.token_ids, device="cuda")[:, None]
                expected = logits.log_softmax(-1).gather(1, tokens).squeeze(1).cpu()
                assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=atol)
