"""Samples of a policy, drawn by a separate sampler until they end."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams


def samples_of(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokenizer: TextTokenizer | None = None,
    *,
    sampler: LocalSampler | None = None,
) -> Samples:
    sampler = sampler or LocalSampler()
    job = sampler.begin(policy, prompts, params, tokenizer, alone=True)
    while not job.done:
        sampler.step()
    return job.samples()
