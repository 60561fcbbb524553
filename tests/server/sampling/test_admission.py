"""Who joins and who leaves a batch whose key-value cache is small: fair between keys, quick for short requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.batch import Batch
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from support.sampling import samples_of, token_bytes

MakePolicy = Callable[..., Policy]
FullLogprobs = Callable[..., torch.Tensor]


class Stage:
    """A sampler whose cache has so many pages, and the steps that its jobs had tokens in."""

    def __init__(self, policy: Policy, pages: int) -> None:
        self.policy = policy
        self.sampler = LocalSampler(cache_bytes=pages * PAGE * token_bytes(policy), speculate="off")  # a token a step
        self.steps = 0
        self.most_rows = 0

    def begin(self, prompt: Sequence[int], tokens: int, owner: str = "", **settings: Any) -> LocalJob:
        params = SamplingParams(**{"max_tokens": tokens, "seed": 7, "ignore_eos": True, "stream": True} | settings)
        return self.sampler.begin(self.policy, [prompt], params, owner=owner)

    @property
    def batch(self) -> Batch:
        (batch,) = self.sampler._batches.values()
        return batch

    def step(self) -> None:
        self.sampler.step()
        self.steps += 1
        if self.sampler._batches:
            self.most_rows = max(self.most_rows, len(self.batch._rows))

    def steps_to_first_token(self, job: LocalJob) -> int:
        before = self.steps
        while not job.new_tokens():
            self.step()
        return self.steps - before

    def finish(self) -> None:
        while self.sampler.turn():
            self.step()


def test_no_room_is_taken_before_tokens_come(policy: Policy) -> None:
    stage = Stage(policy, pages=20)
    jobs = [stage.begin([1, 5 + number], 100) for number in range(8)]  # 56 pages in the end
    stage.step()
    assert len(stage.batch._rows) == len(jobs)


def test_a_long_prompt_that_would_soon_be_computed_again_waits(policy: Policy) -> None:
    stage = Stage(policy, pages=60)
    for number in range(8):  # each has 11 pages at first and 13 in the end: 5 would fit for some tokens, 4 to the end
        stage.begin([1 + number] * 10 * PAGE, 40)
    while stage.sampler.turn():
        stage.step()
        assert not stage.sampler._batches or not stage.batch._left
    assert stage.most_rows == 4


@pytest.mark.long
def test_a_row_that_left_has_the_same_tokens_and_log_probabilities(
    policy: Policy, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    stage = Stage(policy, pages=12)
    prompts = [[1, *rng.integers(4, 60, length).tolist()] for length in (3, PAGE, 2 * PAGE + 5, 7)]
    jobs = [stage.begin(prompt, 70, n=2, seed=number) for number, prompt in enumerate(prompts)]
    left = 0
    while stage.sampler.turn():
        left = max(left, len(stage.batch._left))
        stage.step()
    assert left >= 2 and stage.most_rows >= 4
    for number, (prompt, job) in enumerate(zip(prompts, jobs, strict=True)):
        assert job.error is None
        alone = samples_of(policy, [prompt], SamplingParams(max_tokens=70, seed=number, n=2, ignore_eos=True))
        assert job.samples().token_ids.tolist() == alone.token_ids.tolist()
        for sample in job.samples().by_prompt()[0]:
            expected = full_logprobs(policy, prompt, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_streams_of_rows_that_left_say_each_token_once(policy: Policy, tokenizer: TextTokenizer) -> None:
    sampler = LocalSampler(cache_bytes=8 * PAGE * token_bytes(policy))
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True, stream=True, top_logprobs=2, stop=("qqq",))
    jobs = [sampler.begin(policy, [[1, 9 + number]], params, tokenizer) for number in range(5)]
    ids: list[list[int]] = [[] for _ in jobs]
    texts = ["" for _ in jobs]
    while sampler.turn():
        sampler.step()
        for number, job in enumerate(jobs):
            for delta in job.new_tokens():
                ids[number] += delta.token_ids
                texts[number] += "".join(delta.texts)
    for number, job in enumerate(jobs):
        samples = job.samples()
        assert ids[number] == samples.token_ids.tolist()
        assert [texts[number]] == samples.texts
        assert samples.top is not None and len(samples.top[0]) == len(ids[number])


@pytest.mark.long
def test_a_newcomer_of_another_key_joins_a_full_cache_at_once(policy: Policy) -> None:
    stage = Stage(policy, pages=40)
    streams = [stage.begin([1, 4 + number % 50, number % 7], 110, owner="ada") for number in range(64)]
    for _ in range(60):
        stage.step()
    assert stage.batch._waiting  # the cache is full
    newcomer = stage.begin([1, 33, 17], 12, owner="bob")
    assert stage.steps_to_first_token(newcomer) <= 2
    while not newcomer.done:
        stage.step()
    stage.finish()
    assert all(job.done and job.error is None for job in streams)


def test_a_short_request_of_the_same_key_passes_long_ones(policy: Policy) -> None:
    stage = Stage(policy, pages=40)
    streams = [stage.begin([1, 4 + number], 110) for number in range(16)]
    for _ in range(90):
        stage.step()
    assert stage.batch._waiting
    short = stage.begin([1, 33, 17], 4)
    assert stage.steps_to_first_token(short) <= 2
    for _ in range(4):
        stage.step()
    assert short.done and not any(job.done for job in streams)
    stage.finish()


@pytest.mark.long
def test_many_keys_share_a_cache_that_holds_few_rows(policy: Policy) -> None:
    """No key waits while another one holds more than its part, and everything ends."""
    stage = Stage(policy, pages=24)
    jobs = {owner: [stage.begin([1, ord(owner)], 90, owner=owner, n=3) for _ in range(3)] for owner in "ABCD"}
    held: dict[str, float] = dict.fromkeys(jobs, 0.0)
    for _ in range(150):
        stage.step()
        for owner in jobs:
            held[owner] += stage.batch._held().of(owner)
    assert max(held.values()) <= 1.6 * min(held.values())
    stage.finish()
    assert all(job.done and job.error is None for of_owner in jobs.values() for job in of_owner)


@pytest.mark.parametrize("owner", list("ABCD"))
def test_a_short_request_passes_long_ones_of_other_keys_that_find_no_room(policy: Policy, owner: str) -> None:
    """Whichever key holds the least, and is next with a row too long for what is free."""
    stage = Stage(policy, pages=40)
    for number in range(16):
        stage.begin([1, *range(4, 60 + number)], 50, owner="ABCD"[number % 4])
    for _ in range(20):
        stage.step()
    assert stage.batch._waiting
    assert stage.steps_to_first_token(stage.begin([1, 33], 2, owner=owner)) <= 2
    stage.finish()


def test_a_long_prompt_waits_for_no_short_ones_for_ever(policy: Policy) -> None:
    stage = Stage(policy, pages=10)
    long = stage.begin([*range(4, 60), *range(4, 50)], 10)  # seven pages
    waited, shorts = 0, [stage.begin([1, 5], 20) for _ in range(3)]
    while not long.new_tokens():
        stage.step()
        waited += 1
        if waited % 3 == 0:
            shorts.append(stage.begin([1, 5, 6], 20))
    assert waited <= 102 + 10 + 2 * (2 + 20)
    stage.finish()


def test_requests_wait_for_no_end_of_rows_that_must_begin_together(make_policy: MakePolicy) -> None:
    policy = make_policy("mistral", sliding_window=6, max_position_embeddings=2048)
    sampler = LocalSampler()
    params = SamplingParams(max_tokens=1500, seed=1, ignore_eos=True)
    long = sampler.begin(policy, [[1, 5], [1, 7, 9]], params)
    for _ in range(10):
        sampler.step()
    short = sampler.begin(policy, [[1, 33]], SamplingParams(max_tokens=4, seed=2, ignore_eos=True))
    steps = 0
    while not short.done:
        sampler.step()
        steps += 1
    assert steps <= 64 and not long.done
    alone = samples_of(policy, [[1, 33]], SamplingParams(max_tokens=4, seed=2, ignore_eos=True))
    assert short.samples().token_ids.tolist() == alone.token_ids.tolist()


@pytest.mark.parametrize("pages", [1, 5])
def test_a_cancelled_request_that_left_leaves_nothing(policy: Policy, pages: int) -> None:
    stage = Stage(policy, pages)
    jobs = [stage.begin([1, 5 + number], 60) for number in range(3)]
    for _ in range(40):
        stage.step()
    waiting = [job for job, _ in stage.batch._left] or [jobs[-1]]
    stage.sampler.cancel(waiting[0])
    assert not any(job is waiting[0] for job, _ in stage.batch._left)
    stage.finish()
    assert [job.done for job in jobs] == [job is not waiting[0] for job in jobs]
