"""Keys and values in pages: what is shared, what is found again, and what they take of memory."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.model.attention import paged
from gradwire_server.engine.model.attention.paged import MAPPED, PAGE, PageLists, PageStore
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling import batch as batching
from gradwire_server.engine.sampling.drawing import draw as drawing
from gradwire_server.engine.sampling.drawing.draw import BLOCK, CHUNK_ELEMENTS, draw
from gradwire_server.engine.sampling.pages import pages as paging
from gradwire_server.engine.sampling.pages.page_cache import PageCache
from gradwire_server.engine.sampling.pages.page_lists import shared_lists
from gradwire_server.engine.sampling.pages.page_table import PageTable, page_digests
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams
from gradwire_server.engine.scoring.token_scores import token_logits
from support.sampling import samples_of, token_bytes

MakePolicy = Callable[..., Policy]
FullLogprobs = Callable[..., torch.Tensor]


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(4, 60, length)]


def sampled(sampler: LocalSampler, policy: Policy, prompts: Sequence[Sequence[int]], **settings: Any) -> Samples:
    """Samples of one request beside which nothing is in progress, not computed alone."""
    job = sampler.begin(policy, prompts, SamplingParams(**{"seed": 0, "ignore_eos": True} | settings))
    while not job.done:
        sampler.step()
    return job.samples()


def cache_of(sampler: LocalSampler, policy: Policy) -> PageCache:
    return sampler._caches[policy.split_model]


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 3])
def test_samples_of_any_prompt_are_scored_as_a_fresh_forward_scores_them(
    policy: Policy, full_logprobs: FullLogprobs, rng: np.random.Generator, length: int
) -> None:
    prompts = [prompt_of(rng, length), prompt_of(rng, 2 * PAGE), prompt_of(rng, 7)]
    samples = samples_of(policy, prompts, SamplingParams(max_tokens=2 * PAGE + 5, seed=3, n=5, ignore_eos=True))
    for prompt, of_prompt in zip(prompts, samples.by_prompt(), strict=True):
        for sample in of_prompt:
            expected = full_logprobs(policy, prompt, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_many_rows_that_join_and_leave_are_scored_as_a_fresh_forward_scores_them(
    policy: Policy, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    sampler, jobs = LocalSampler(), []
    for number, tokens in enumerate([2 * PAGE, 3 * PAGE + 5, PAGE // 2]):
        prompts = [prompt_of(rng, length) for length in (5 + number, PAGE, 2 * PAGE + 3)]
        params = SamplingParams(max_tokens=tokens, seed=number, n=8, ignore_eos=True)
        jobs.append((prompts, sampler.begin(policy, prompts, params)))
        for _ in range(5):
            sampler.step()
    while sampler.turn():
        sampler.step()
    for prompts, job in jobs:
        for prompt, of_prompt in zip(prompts, job.samples().by_prompt(), strict=True):
            for sample in of_prompt:
                expected = full_logprobs(policy, prompt, sample.token_ids)
                torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_under_load_are_those_of_a_plain_forward(
    policy: Policy, tokenizer: TextTokenizer, rng: np.random.Generator, temperature: float
) -> None:
    """Rows of several requests join, leave for want of room, go on and end at stop strings."""
    sampler, jobs, left = LocalSampler(cache_bytes=12 * PAGE * token_bytes(policy)), [], 0
    params = SamplingParams(seed=0, max_tokens=40, temperature=temperature, n=3, ignore_eos=True, stop=("b", "7", "Q"))
    for number in range(4):
        prompts = [prompt_of(rng, length) for length in (5 + number, PAGE, 2 * PAGE + 3)]
        job = sampler.begin(policy, prompts, dataclasses.replace(params, seed=number), tokenizer, owner=str(number % 2))
        jobs.append((prompts, job))
        for _ in range(5):
            sampler.step()
            left = max(left, sum(len(batch._left) for batch in sampler._batches.values()))
    while sampler.turn():
        sampler.step()
        left = max(left, sum(len(batch._left) for batch in sampler._batches.values()))
    assert left > 0
    policy.activate()
    reasons = set()
    for prompts, job in jobs:
        for prompt, of_prompt in zip(prompts, job.samples().by_prompt(), strict=True):
            for sample in of_prompt:
                reasons.add(sample.stop_reason)
                ids = torch.tensor([[*prompt, *sample.token_ids]])
                with torch.no_grad():
                    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                found = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sample.logprobs), found, atol=1e-5, rtol=0)
                (text,) = tokenizer.decode([sample.token_ids])
                ends = [at for stop in params.stop if (at := text.find(stop)) >= 0]
                assert sample.text == (text[: min(ends)] if ends else text)
                assert bool(ends) == (sample.stop_reason == "stop")
                if temperature == 0:
                    assert bool((found >= logits.log_softmax(-1).amax(-1) - 1e-4).all())
    assert reasons == {"stop", "length"} or temperature == 0


def test_a_group_takes_the_memory_of_one_prompt_and_its_answers(policy: Policy, rng: np.random.Generator) -> None:
    prompt, answer, count = prompt_of(rng, 160), 40, 16
    sampler = LocalSampler()
    job = sampler.begin(policy, [prompt], SamplingParams(max_tokens=answer, seed=0, n=count, ignore_eos=True))
    most = 0
    while not job.done:
        sampler.step()
        most = max(most, cache_of(sampler, policy).nbytes)
    own_pages = count * PAGE  # up to a page of each sample is not full
    of_token = token_bytes(policy)
    assert most <= 1.2 * of_token * (len(prompt) + count * answer) + of_token * own_pages
    assert most <= 0.4 * of_token * count * (len(prompt) + answer)  # what a copy for each sample would take


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(
    policy: Policy, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    sampler, prompt = LocalSampler(), prompt_of(rng, 70)
    (answer,) = sampled(sampler, policy, [prompt], max_tokens=30).by_prompt()[0]
    for seed in range(1, 4):
        known = len(prompt) + len(answer.token_ids) - 1
        prompt = [*prompt, *answer.token_ids, *prompt_of(rng, 9)]
        before = sampler.prompt_tokens.computed
        (answer,) = sampled(sampler, policy, [prompt], max_tokens=12, seed=seed).by_prompt()[0]
        assert sampler.prompt_tokens.computed - before == len(prompt) - known // PAGE * PAGE
        expected = full_logprobs(policy, prompt, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
        params = SamplingParams(max_tokens=12, seed=seed, ignore_eos=True)
        (fresh,) = samples_of(policy, [prompt], params).by_prompt()[0]
        assert answer.token_ids == fresh.token_ids
    cache = cache_of(sampler, policy)
    moves = cache.store.moves
    cache.shrink()
    assert cache.store.moves == moves  # as most of its pages are kept


@pytest.mark.long
@pytest.mark.parametrize("by_kernels", [False, True])
def test_numbers_that_are_not_finite_stay_in_no_page(
    policy: Policy, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, by_kernels: bool
) -> None:
    """A mask multiplies what it leaves out by zero: a run that diverged would spoil the samples of others."""
    monkeypatch.setattr(policy.split_model, "by_kernels", by_kernels)
    sampler, prompt = LocalSampler(), prompt_of(rng, PAGE + 4)
    expected = sampled(sampler, policy, [prompt], max_tokens=4, n=3)
    norm = next(weight for name, weight in policy.split_model.model.named_parameters() if "layernorm" in name)
    before = norm.detach().clone()
    norm.data.fill_(torch.nan)
    job = sampler.begin(policy, [prompt_of(rng, 2 * PAGE - 1)] * 4, SamplingParams(seed=0, max_tokens=4))
    while not job.done and job.error is None:
        sampler.step()
    assert job.error is not None and "after prompt 0 are not finite" in str(job.error)
    norm.data.copy_(before)
    store = cache_of(sampler, policy).store
    assert all(each.isfinite().all() for pair in store._layers.values() for each in pair)
    found = sampled(sampler, policy, [prompt], max_tokens=4, n=3)
    assert [each.token_ids for each in found.by_prompt()[0]] == [each.token_ids for each in expected.by_prompt()[0]]


def test_what_is_kept_is_bounded_and_nothing_is_kept_alone(
    policy: Policy, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "KEPT", 0)
    room = 24 * PAGE * token_bytes(policy)
    sampler = LocalSampler(cache_bytes=room)
    for _ in range(4):
        sampled(sampler, policy, [prompt_of(rng, 100)], max_tokens=20, n=3)
    cache = cache_of(sampler, policy)
    scratch = cache.nbytes // cache.store.used
    assert 20 < cache.table.held <= 25 and cache.nbytes - scratch <= room
    other = LocalSampler()
    samples_of(policy, [prompt_of(rng, 100)], SamplingParams(max_tokens=4, seed=0), sampler=other)
    assert not other._caches


def test_what_was_used_least_recently_is_forgotten_from_its_end(policy: Policy, rng: np.random.Generator) -> None:
    sampler = LocalSampler(cache_bytes=24 * PAGE * token_bytes(policy))
    head, first, second = (prompt_of(rng, length) for length in (4 * PAGE, 4 * PAGE, 4 * PAGE))
    sampled(sampler, policy, [head + first], max_tokens=1)
    sampled(sampler, policy, [head + second], max_tokens=1)
    sampled(sampler, policy, [prompt_of(rng, 10 * PAGE)], max_tokens=1)  # 22 of 24
    found = []
    for prompt in (head + second, prompt_of(rng, 6 * PAGE - 1), head + second, head + first):
        before = sampler.prompt_tokens.found
        sampled(sampler, policy, [prompt], max_tokens=1)
        found.append((sampler.prompt_tokens.found - before) // PAGE)
    assert found == [7, 0, 7, 4]  # the last page is always computed


def test_changed_weights_find_nothing_and_take_no_room(tiny_model_path: Path, rng: np.random.Generator) -> None:
    split_model = ModelPool({"tiny": str(tiny_model_path)}).get("tiny")
    policy = LoraPolicy(split_model, "run", training_pb2.LoraSettings(rank=4), seed=0)
    other = LoraPolicy(split_model, "other", training_pb2.LoraSettings(rank=4), seed=1)
    sampler, prompt = LocalSampler(), prompt_of(rng, 50)
    sampled(sampler, policy, [prompt], max_tokens=3)
    with torch.no_grad():
        for master in policy.masters().values():
            master.add_(0.5 * torch.randn(master.shape, generator=torch.Generator().manual_seed(1)))
    policy.sync()
    again = sampled(sampler, policy, [prompt], max_tokens=10)
    assert sampler.prompt_tokens.found == 0
    fresh = samples_of(policy, [prompt], SamplingParams(max_tokens=10, seed=0, ignore_eos=True))
    assert again.token_ids.tolist() == fresh.token_ids.tolist()
    table = cache_of(sampler, policy).table
    assert len(table._trees) == 1  # that of the new weights
    sampled(sampler, other, [prompt], max_tokens=3)
    sampled(sampler, policy, [prompt], max_tokens=3)
    assert sampler.prompt_tokens.found == 3 * PAGE and len(table._trees) == 2
    policy.close()
    del policy, master
    gc.collect()
    sampled(sampler, other, [prompt], max_tokens=3)
    assert len(table._trees) == 1 and sampler.prompt_tokens.found == 6 * PAGE


def test_a_model_that_is_gone_keeps_nothing(tiny_model_path: Path, rng: np.random.Generator) -> None:
    policy = Policy(ModelPool({"tiny": str(tiny_model_path)}).get("tiny"))
    sampler = LocalSampler()
    sampled(sampler, policy, [prompt_of(rng, 50)], max_tokens=3)
    assert len(sampler._caches) == 1
    del policy
    assert not len(sampler._caches)


def test_nobody_finds_what_others_asked(policy: Policy, rng: np.random.Generator) -> None:
    sampler, prompt = LocalSampler(), prompt_of(rng, 50)

    def found(**asked: Any) -> int:
        job = sampler.begin(policy, [prompt], SamplingParams(max_tokens=2, seed=0), **asked)
        while not job.done:
            sampler.step()
        return job.num_cached_tokens

    assert [found(owner=owner) for owner in ("a", "b", "a", "b")] == [0, 0, 48, 48]
    assert [found(owner=owner, salt="") for owner in ("a", "b")] == [0, 48]
    together = [sampler.begin(policy, [prompt], SamplingParams(max_tokens=2, seed=0), owner=name) for name in "xy"]
    while sampler.turn():
        sampler.step()
    assert [job.num_cached_tokens for job in together] == [0, 0]
    assert len(cache_of(sampler, policy).table._trees) == 5


def test_prompts_with_a_long_head_in_common_compute_it_once(
    policy: Policy, full_logprobs: FullLogprobs, rng: np.random.Generator
) -> None:
    sampler, head = LocalSampler(), prompt_of(rng, 17 * PAGE)[: 17 * PAGE - 40]
    prompts = [head[:230] + prompt_of(rng, 9) for _ in range(3)]
    del head
    samples = sampled(sampler, policy, prompts, max_tokens=5)
    for prompt, of_prompt in zip(prompts, samples.by_prompt(), strict=True):
        expected = full_logprobs(policy, prompt, of_prompt[0].token_ids)
        torch.testing.assert_close(torch.tensor(of_prompt[0].logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("alone", [True, False])
def test_a_long_prompt_is_computed_in_parts_between_the_tokens_of_others(
    policy: Policy,
    full_logprobs: FullLogprobs,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    alone: bool,
) -> None:
    monkeypatch.setattr(batching, "CHUNK_TOKENS", 40)
    sampler, long, short = LocalSampler(), prompt_of(rng, 190), prompt_of(rng, 5)
    running = sampler.begin(policy, [short], SamplingParams(max_tokens=30, seed=0, ignore_eos=True))
    sampler.step()
    job = sampler.begin(policy, [long], SamplingParams(max_tokens=6, seed=1, n=2, ignore_eos=True), alone=alone)
    tokens = []
    while not job.done:
        sampler.step()
        batch = next((each for each in sampler._batches.values() if running in each.jobs), None)
        tokens.append(int(batch._rows.count[0]) if batch is not None and not running.done else 0)
    assert len({*tokens}) >= 4  # the short one went on meanwhile
    for sample in job.samples().by_prompt()[0]:
        expected = full_logprobs(policy, long, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_page_table_frees_what_nobody_uses() -> None:
    table, tokens = PageTable(), list(range(3 * PAGE))
    digests = page_digests(tokens)
    pages = [table.new() for _ in digests]
    table.know(b"a", pages, digests)
    assert table.known(b"a", digests) == pages
    assert table.known(b"a", page_digests(tokens[1:])) == table.known(b"b", digests) == []
    table.release(reversed(pages))
    assert table.known(b"a", digests) == []
    assert sorted(table.new() for _ in digests) == sorted(pages)


@pytest.mark.parametrize("limit", [0, 6, 100])
def test_page_table_keeps_the_counts_through_any_use(rng: np.random.Generator, limit: int) -> None:
    table, held = PageTable(limit), []
    for _ in range(400):
        if held and rng.random() < 0.5:
            table.release(reversed(held.pop(int(rng.integers(len(held))))))
        else:
            digests, tree = page_digests([int(rng.integers(2)) for _ in range(3)] * PAGE), bytes([rng.integers(2)])
            found = table.known(tree, digests)
            table.use(found)
            new = [table.new() for _ in range(len(digests) - len(found))]
            table.know(tree, [*found, *new], digests)
            held.append([*found, *new])
        if rng.random() < 0.05:
            number = {page: place for place, page in enumerate(table.compact())}
            held = [[number[page] for page in pages] for pages in held]
        if rng.random() < 0.02:
            table.forget_weights(bytes([rng.integers(2)]))
        used = {page for pages in held for page in pages}
        assert table.pages >= len(used) + 1 and 0 not in used and table.used == len(used)
        assert len(used) < table.held <= max(len(used), limit) + 1
    for pages in held:
        table.release(reversed(pages))
    assert len(table.compact()) <= limit + 1


def test_digests_go_on_from_those_before() -> None:
    tokens = list(range(5 * PAGE + 3))
    whole = page_digests(tokens)
    assert whole == [*page_digests(tokens[: 2 * PAGE]), *page_digests(tokens[2 * PAGE :], whole[1])]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_draws_what_a_full_sort_draws(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(128, 5000, generator=generator) * torch.linspace(0.1, 6, 128)[:, None]
    uniform = torch.rand(128, dtype=torch.float64, generator=generator)
    tokens, _ = draw(logits, uniform, SamplingParams(max_tokens=1, seed=0, top_p=top_p))
    p, order = logits.double().softmax(-1).sort(-1, descending=True)
    p[p.cumsum(-1) - p >= top_p] = 0
    cumulative = p.cumsum(-1)
    expected = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    differ = tokens != order.gather(1, expected)[:, 0]
    assert differ.sum() <= 1  # where rounding decides


def test_a_store_doubles_once_its_blocks_are_mapped_and_stays_if_most_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store, layer = PageStore(), torch.nn.Identity()
    pages = MAPPED // (4 * PAGE * 2 * 64) // 2
    store.reserve(pages)
    places = torch.arange(pages * PAGE)
    written = torch.randn(2, len(places), 2, 64)
    store.write(layer, places, *written)
    store.reserve(pages + 1)
    assert store.pages == 2 * pages
    assert not store.shrinks(0)  # as little stays
    monkeypatch.setattr(paged, "KEPT", 0)
    assert not store.shrinks(pages // 2 + 2) and store.shrinks(pages // 2)
    for whole, part in zip(store.write(layer, places[:0], *written[:, :0]), written, strict=True):
        assert whole.data_ptr() % 64 == 0  # as torch's own tensors begin
        of_tokens = whole.transpose(0, 1)
        assert torch.equal(of_tokens[: len(part)], part) and not of_tokens[len(part) :].any()
    store.select(torch.tensor([0, 3]))
    keys, _ = store.write(layer, places[:0], *written[:, :0])
    assert store.pages == 2 and torch.equal(keys[:, PAGE:].transpose(0, 1), written[0, 3 * PAGE : 4 * PAGE])


def test_a_store_whose_blocks_are_mapped_has_room_for_all_at_once() -> None:
    """Its memory is taken when it is written, so that room costs nothing and growing no copies."""
    page_bytes = 4 * PAGE * 2 * 64
    most = MAPPED // page_bytes
    for known, room in ((most, most + 1), (most - 1, 3)):
        store, layers = PageStore(known), [torch.nn.Identity(), torch.nn.Identity()]
        store.reserve(3)
        written = torch.randn(2, 3 * PAGE, 2, 64)
        for layer in layers:
            keys, _ = store.write(layer, torch.arange(3 * PAGE), *written)
        assert store.pages == room and keys.shape == (2, room * PAGE, 64)
        store.select(torch.tensor([1]))
        assert store.pages == 1
        store.reserve(2)
        keys, _ = store.write(layers[0], torch.arange(0), *written[:, :0])
        assert store.pages == max(2, room if known == most else 0)
        assert torch.equal(keys[:, :PAGE].transpose(0, 1), written[0, PAGE : 2 * PAGE]) and not keys[:, PAGE:].any()
    store = PageStore(most)
    store.reserve(3)
    store.write(layers[0], torch.arange(3 * PAGE), *written)
    moves = store.moves
    store.reserve(most)
    assert not store.shrinks(most - 1)
    assert (store.moves, store.pages) == (moves, most + 1)


@pytest.mark.long
def test_a_store_has_little_room_where_addresses_are_limited(tiny_model_path: Path) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
sampler = LocalSampler(cache_bytes=1 << 40)
job = sampler.begin(Policy(ModelPool({{"m": {str(tiny_model_path)!r}}}).get("m")), [[4, 5]], SamplingParams(4, seed=0))
while sampler.turn():
    sampler.step()
assert 0 < len(job.samples().token_ids) <= 4
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("lists", "firsts"), [([(2, 3), (2, 3), (4, 5)], [2, 4]), ([(2, 3), (5, 4)], [None])])
def test_pages_that_follow_one_another_are_not_copied(lists: list[tuple[int, ...]], firsts: list[int | None]) -> None:
    flat = torch.arange(6 * PAGE * 2 * 3).view(2, 6 * PAGE, 3)
    classes = shared_lists(lists, fills=False).classes
    assert [each.first for each in classes] == firsts
    for each in classes:
        taken = each.taken(flat)
        expected = flat.view(2, 6, PAGE, 3)[:, each.table].flatten(2, 3).transpose(0, 1)
        assert torch.equal(taken, expected) and taken.stride()[2:] == expected.stride()[2:]
        assert (taken.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()) == (each.first is not None)


def test_a_whole_distribution_is_inverted_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(600, 1000, generator=generator) * 3
    assert logits.numel() > CHUNK_ELEMENTS
    logits[:, ::3] = -torch.inf
    uniform = torch.rand(600, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    tokens, logprobs = draw(logits, uniform, SamplingParams(max_tokens=1, seed=0))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert (tokens == expected).float().mean() > 0.99  # the others are one place beside it, by rounding
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 262_144])
def test_sums_of_blocks_in_float32_draw_what_float64_draws(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number falls into the share of the token that it draws, but for the rounding of 128 summands of a block.

    On a GPU, too, all rows are drawn at once there. Logits are as a product in bfloat16 leaves them, and of some rows
    nearly equal: then the sums of all blocks are, and rounding could move every place after them.
    """
    monkeypatch.setattr(drawing, "CHUNK_ELEMENTS", 16 * vocabulary)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(16, vocabulary, generator=generator) * torch.logspace(-3, 1, 16)[:, None]
    logits = logits.bfloat16().float()
    uniform = torch.rand(16, dtype=torch.float64, generator=generator)
    uniform[::4] = torch.tensor([0.0, 0.5, 1 - 2**-30, 1 - 2**-53])
    tokens, logprobs = draw(logits, uniform, SamplingParams(max_tokens=1, seed=0))
    p = logits.double().softmax(-1)
    ends = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    share = p.gather(1, tokens[:, None])[:, 0]
    rounding = 2**-20
    assert bool((uniform >= ends - share - rounding).all()) and bool((uniform <= ends + rounding).all())
    torch.testing.assert_close(logprobs.double(), share.log(), atol=2e-6, rtol=2e-7)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tokens_are_drawn_from_float32_whatever_the_weights_are(device: str) -> None:
    """Blocks are summed in the logits' dtype."""
    states, weight = (torch.zeros(rows, 32, dtype=torch.bfloat16, device=device) for rows in (3, 2 * BLOCK))
    assert token_logits(states, OutputHead(weight), temperature=0.7).dtype == torch.float32


def test_only_a_prompt_longer_than_a_forward_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "CHUNK_TOKENS", 40)
    lengths = [10, 5, 6, 90, 3, 17]
    prompts = [paging._Prompt(None, b"", [1] * length, [], [], None, 0) for length in lengths]  # type: ignore[arg-type]
    forwards = paging._pieces(prompts, 20)
    assert forwards[:2] == [[(0, 0, 10), (1, 0, 5)], [(2, 0, 6)]]
    assert forwards[2:] == [[(3, 0, 40)], [(3, 40, 80)], [(3, 80, 90), (4, 0, 3)], [(5, 0, 17)]]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_head_is_that_of_the_products(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 2, 3, 8, generator=generator)
    k, v = (torch.randn(2, 7, PAGE, size, generator=generator).transpose(0, 1) for size in (8, 5))
    lists = PageLists(torch.zeros(7, 1), torch.zeros(7, 1), torch.arange(1, 8) if masked else None)
    mask = paged._mask(lists, q.dtype)
    expected = paged._by_products(q, k, v, mask, 0.3)
    torch.testing.assert_close(paged._by_head(q, k, v, mask, 0.3), expected)
