"""Requests that join and leave: whatever goes on beside it, a sample is what it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.drawing.draw import Uniforms
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.pages import Pages, paged_token_bytes
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams
from support.sampling import samples_of, token_bytes

MakePolicy = Callable[..., Policy]

REQUESTS: list[tuple[list[list[int]], dict[str, Any]]] = [
    ([[1, 40, 41, 42], [1, 5]], {"max_tokens": 20, "seed": 1, "n": 3}),
    ([[1, 33, 17]], {"max_tokens": 4, "seed": 2, "temperature": 0.0}),
    ([[1, 9, 8, 7, 6, 5, 4, 3, 22, 21]], {"max_tokens": 30, "seed": 3, "temperature": 1.4, "top_k": 7, "n": 2}),
    ([[1, 5], [1, 5], [1, 2, 3]], {"max_tokens": 11, "seed": 4, "top_p": 0.8, "ignore_eos": True}),
    ([[1, 60]], {"max_tokens": 90, "seed": 5, "ignore_eos": True}),
]


def run(sampler: LocalSampler, policy: Policy, gap: int = 3) -> list[Samples]:
    """All requests, each begun so many steps after the one before."""
    jobs: list[LocalJob] = []
    for prompts, settings in REQUESTS:
        jobs.append(sampler.begin(policy, prompts, SamplingParams(**settings)))
        for _ in range(gap):
            sampler.step()
    while sampler.turn():
        sampler.step()
    assert all(job.done for job in jobs)
    return [job.samples() for job in jobs]


def check_alone(policy: Policy, found: list[Samples]) -> None:
    for (prompts, settings), samples in zip(REQUESTS, found, strict=True):
        alone = samples_of(policy, prompts, SamplingParams(**settings))
        assert samples.token_ids.tolist() == alone.token_ids.tolist()
        assert samples.lengths.tolist() == alone.lengths.tolist()
        assert samples.stop_reasons == alone.stop_reasons
        assert np.allclose(samples.logprobs, alone.logprobs, atol=1e-4)


def test_requests_of_different_kinds_join_one_batch(policy: Policy) -> None:
    sampler = LocalSampler()
    for prompts, settings in REQUESTS:
        sampler.begin(policy, prompts, SamplingParams(**settings))
    assert len(sampler.turn()) == len(REQUESTS)
    check_alone(policy, run(LocalSampler(), policy))


@pytest.mark.long
@pytest.mark.parametrize("cache_tokens", [1, 64, 160])
def test_those_without_room_wait(policy: Policy, cache_tokens: int) -> None:
    check_alone(policy, run(LocalSampler(cache_bytes=cache_tokens * token_bytes(policy)), policy))


def test_a_small_request_does_not_wait_for_all_of_a_large_one(policy: Policy) -> None:
    sampler = LocalSampler(cache_bytes=3 * PAGE * token_bytes(policy))  # room for two rows
    large = sampler.begin(policy, [[1, 40]], SamplingParams(max_tokens=6, seed=1, n=40, ignore_eos=True))
    sampler.step()
    small = sampler.begin(policy, [[1, 5]], SamplingParams(max_tokens=6, seed=2, n=2, ignore_eos=True))
    steps = 0
    while not small.done:
        sampler.step()
        steps += 1
    assert steps < 40 and not large.done
    while not large.done:
        sampler.step()
    assert len(large.samples().lengths) == 40


@pytest.mark.long
def test_models_with_windows_take_one_batch_after_another(make_policy: MakePolicy) -> None:
    policy = make_policy("mistral", sliding_window=6)
    assert not paged_token_bytes(policy, Agreement())
    check_alone(policy, run(LocalSampler(), policy))


def test_pages_are_for_models_that_attend_to_everything(make_policy: MakePolicy) -> None:
    assert paged_token_bytes(make_policy("qwen3"), Agreement())
    assert not paged_token_bytes(make_policy("gemma2", sliding_window=6, query_pre_attn_scalar=8), Agreement())


@pytest.mark.long
def test_memory_that_runs_out_makes_batches_smaller(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode, widest = Pages.decode, []

    def small(self: Pages, policy: Policy, tokens: Any, positions: Any, of: Any = None) -> torch.Tensor:
        if len(tokens) > 4:
            raise MemoryError
        widest.append(len(tokens))
        return decode(self, policy, tokens, positions, of)

    monkeypatch.setattr(Pages, "decode", small)
    found = run(LocalSampler(), policy)
    monkeypatch.undo()
    assert max(widest) <= 4 and "out of memory" in caplog.text
    check_alone(policy, found)


def test_a_sample_that_never_fits_fails_its_request(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Pages, *args: Any) -> torch.Tensor:
        raise MemoryError

    sampler = LocalSampler()
    samples_of(policy, [[1, 2]], SamplingParams(max_tokens=3, seed=0), sampler=sampler)
    monkeypatch.setattr(Pages, "prefill", never)
    with pytest.raises(MemoryError):
        samples_of(policy, [[1, 2], [3, 4]], SamplingParams(max_tokens=3, seed=0), sampler=sampler)


def test_a_cancelled_request_leaves_the_others(policy: Policy) -> None:
    sampler = LocalSampler()
    params = SamplingParams(max_tokens=12, seed=1, n=4, ignore_eos=True)
    first, second = (sampler.begin(policy, prompts, params) for prompts in ([[1, 7]], [[1, 8, 9]]))
    sampler.step()
    sampler.cancel(first)
    while sampler.turn():
        sampler.step()
    assert not first.done and not sampler.uses(policy)
    alone = samples_of(policy, [[1, 8, 9]], params)
    assert second.samples().token_ids.tolist() == alone.token_ids.tolist()


def test_a_request_alone_shares_no_step(policy: Policy) -> None:
    sampler = LocalSampler()
    params = SamplingParams(max_tokens=6, seed=1)
    jobs = [sampler.begin(policy, [[1, 7]], params, alone=alone) for alone in (True, False, False)]
    turns = []
    while sampler.turn():
        turns.append(sorted(jobs.index(job) for job in sampler.turn()))
        sampler.step()
    assert turns[:4] == [[0], [1, 2], [0], [1, 2]]


def test_adapters_of_one_base_take_turns(tiny_model_path: Path) -> None:
    split_model = ModelPool({"tiny": str(tiny_model_path)}).get("tiny")
    policies = [LoraPolicy(split_model, f"run-{i}", training_pb2.LoraSettings(rank=4), seed=i) for i in range(2)]
    with torch.no_grad():
        for number, policy in enumerate(policies):
            for master in policy.masters().values():
                master.normal_(std=0.5, generator=torch.Generator().manual_seed(number))
    params = SamplingParams(max_tokens=10, seed=1)
    everyone: list[Policy] = [*policies, Policy(split_model)]
    alone = [samples_of(policy, [[1, 2, 3]], params).token_ids.tolist() for policy in everyone]
    sampler = LocalSampler()
    jobs = [sampler.begin(policy, [[1, 2, 3]], params) for policy in everyone]
    while sampler.turn():
        sampler.step()
        split_model.activate(None, training=True)  # what another run leaves behind
    assert [job.samples().token_ids.tolist() for job in jobs] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


MIXED: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 2, "alpha": 3.0},
    {"rank": 3, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 4, "target_modules": ["all-linear", "lm_head"]},
]


@pytest.fixture
def several(tiny_model_path: Path) -> list[Policy]:
    """Adapters of several ranks, alphas and targets on one base, and the base itself."""
    split_model = ModelPool({"tiny": str(tiny_model_path)}).get("tiny")
    made = [
        LoraPolicy(split_model, f"run-{i}", training_pb2.LoraSettings(**each), seed=i) for i, each in enumerate(MIXED)
    ]
    with torch.no_grad():
        for number, policy in enumerate(made):
            for master in policy.masters().values():
                master.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
    return [*made, Policy(split_model)]


def of_each(policies: list[Policy], sampler: LocalSampler, prompts: list[list[int]]) -> list[list[list[int]]]:
    """The samples of each policy, each begun two steps after the one before, in one batch."""
    jobs = []
    for number, policy in enumerate([*policies, *policies]):
        params = SamplingParams(max_tokens=9 + number % 3, seed=number, n=1 + number % 2, ignore_eos=True)
        jobs.append(sampler.begin(policy, prompts, params, mixed=True))
        assert len(sampler.turn()) == sum(not job.done for job in jobs)
        for _ in range(2):
            sampler.step()
    while sampler.turn():
        sampler.step()
        policies[0].split_model.activate(None, training=True)  # what another run leaves behind
    return [[sample.token_ids for sample in own] for job in jobs for own in job.samples().by_prompt()]


def expected_of_each(policies: list[Policy], prompts: list[list[int]]) -> list[list[list[int]]]:
    found = []
    for number, policy in enumerate([*policies, *policies]):
        params = SamplingParams(max_tokens=9 + number % 3, seed=number, n=1 + number % 2, ignore_eos=True)
        found += [[sample.token_ids for sample in own] for own in samples_of(policy, prompts, params).by_prompt()]
    return found


@pytest.mark.long
def test_adapters_of_one_base_share_a_batch(several: list[Policy]) -> None:
    prompts = [[1, 2, 3], [*range(3, 40)]]  # the second fills two pages, which must not be shared
    sampler = LocalSampler()
    expected = expected_of_each(several, prompts)
    assert of_each(several, sampler, prompts) == expected
    assert len({str(tokens) for tokens in expected}) > len(several)
    assert of_each(several, sampler, prompts) == expected  # with the pages that were kept
    with torch.no_grad():
        for master in several[1].masters().values():
            master.mul_(0.5)
    changed = expected_of_each(several, prompts)
    assert changed != expected
    assert of_each(several, sampler, prompts) == changed


def test_what_does_not_compute_in_spans_has_a_batch_of_its_own(several: list[Policy]) -> None:
    settings = training_pb2.LoraSettings(rank=2, target_modules=["embed_tokens"])
    embeddings = LoraPolicy(several[0].split_model, "run-embeddings", settings, seed=7)
    sampler, params = LocalSampler(), SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    everyone = [several[0], embeddings, several[1]]
    jobs = [sampler.begin(policy, [[1, 2, 3]], params, mixed=True) for policy in everyone]
    assert len(sampler.turn()) == 2
    while sampler.turn():
        sampler.step()
    alone = [samples_of(policy, [[1, 2, 3]], params).token_ids.tolist() for policy in everyone]
    assert [job.samples().token_ids.tolist() for job in jobs] == alone


def test_stop_strings_are_each_requests_own(policy: Policy, tokenizer: TextTokenizer) -> None:
    params = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)
    (text,) = samples_of(policy, [[1, 40]], params, tokenizer).texts or ()
    stopping = SamplingParams(max_tokens=40, seed=4, ignore_eos=True, stop=(text[8:11],))
    sampler = LocalSampler()
    jobs = [sampler.begin(policy, [[1, 40]], each, tokenizer) for each in (params, stopping)]
    while sampler.turn():
        sampler.step()
    free, stopped = (job.samples() for job in jobs)
    assert (free.texts, free.stop_reasons) == ([text], ["length"])
    assert (stopped.texts, stopped.stop_reasons) == ([text[: text.index(text[8:11])]], ["stop"])


def test_a_bad_request_leaves_nothing_behind(policy: Policy) -> None:
    sampler = LocalSampler()
    with pytest.raises(OperationError):
        sampler.begin(policy, [[1], []], SamplingParams(max_tokens=3, seed=0))
    assert not sampler.turn() and not sampler.uses(policy)


def test_each_sample_has_a_philox_stream_of_its_own() -> None:
    seeds, places = np.array([5, 2**64 - 1], np.uint64), np.array([7, 3 << 32 | 9], np.uint64)
    found = np.concatenate([Uniforms().numbers(seeds, places, start, 64) for start in (0, 64)], axis=1)
    for row in range(2):
        key = np.array([seeds[row], places[row]], np.uint64)
        expected = np.random.Generator(np.random.Philox(key=key)).random(128)
        assert found[row].tolist() == expected.tolist()
