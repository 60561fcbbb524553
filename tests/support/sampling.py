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


def token_bytes(policy: Policy) -> int:
    """Bytes of a token's keys and values in float32, by the model's configuration."""
    config = policy.model.config
    head_size = config.hidden_size // config.num_attention_heads
    return int(2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_size)
