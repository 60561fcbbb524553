"""Known beginnings of prompts and long prompts beside a stream, on the local sampler.

``python -m benchmarks.prefixes MODEL_FOLDER``: the first token of a prompt of ``--context`` known and ``--new`` unknown
tokens, against the same without the cache, by turns; and the longest time between two tokens of a stream while a prompt
of ``--long`` others is computed, in steps without it. Times are CPU seconds, which hold beside other work.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams


def first_token_s(sampler: LocalSampler, policy: Policy, prompt: list[int]) -> float:
    """CPU seconds until the first token."""
    began = time.process_time()
    job = sampler.begin(policy, [prompt], SamplingParams(max_tokens=1, seed=0, ignore_eos=True))
    while not job.done:
        sampler.step()
    return time.process_time() - began


def gaps(sampler: LocalSampler, policy: Policy, prompt: list[int]) -> tuple[float, list[float]]:
    """CPU seconds of a stream's token without others, and of each while a prompt is computed beside it."""
    asked = SamplingParams(max_tokens=1 << 20, seed=0, ignore_eos=True, stream=True)
    stream = sampler.begin(policy, [prompt[:64]], asked)

    def step() -> float:
        began = time.process_time()
        sampler.step()
        return time.process_time() - began

    alone = statistics.median([step() for _ in range(24)][8:])
    other = sampler.begin(policy, [prompt], SamplingParams(max_tokens=1, seed=0, ignore_eos=True), owner="other")
    beside = []
    while not other.done:
        beside.append(step())
    sampler.cancel(stream)
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--long", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    policy, rng = Policy(ModelPool({"model": asked.model}, fused=True).load("model")), np.random.default_rng(0)
    room = policy.facts.context_length
    context, long = min(asked.context, room - asked.new - 8), min(asked.long, room - 8)

    def prompt(tokens: int) -> list[int]:
        return [int(token) for token in rng.integers(10, policy.facts.vocab_size - 10, tokens)]

    for _ in range(asked.turns):
        head = prompt(context)
        cached, plain = LocalSampler(cache_bytes=4 << 30), LocalSampler(cache_bytes=4 << 30, keeps=False)
        first_token_s(cached, policy, head)
        known = first_token_s(cached, policy, head + prompt(asked.new))
        whole = first_token_s(plain, policy, head + prompt(asked.new))
        print(f"{context} + {asked.new}: {known:.2f} s known, {whole:.2f} s computed, {known / whole:.3f}", flush=True)
    alone, beside = gaps(LocalSampler(cache_bytes=4 << 30), policy, prompt(long))
    in_steps = np.sort(beside) / alone
    print(
        f"beside {long}: a step {1000 * alone:.0f} ms; gaps of {np.median(in_steps):.2f} steps, 99 % up to"
        f" {in_steps[int(0.99 * len(in_steps))]:.2f}, the longest {in_steps[-1]:.2f}; {len(beside)} steps,"
        f" {sum(beside):.0f} s"
    )


if __name__ == "__main__":
    main()
