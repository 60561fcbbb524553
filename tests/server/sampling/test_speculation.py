"""Drafts from a sample's own context: what is drawn is the same to the bit with and without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from _support.small_model import small_model
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import FullPolicy, LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling import speculation
from gradwire_server.engine.sampling.drawing.draw import draw, top_tokens
from gradwire_server.engine.sampling.growing import drafts as drafting
from gradwire_server.engine.sampling.growing.drafts import GRAM, LENGTHS, Drafts, occurrences
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.page_cache import PageCache
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams
from gradwire_server.engine.sampling.speculation import Mode
from gradwire_server.tokenizer_files import find_tokenizer
from support.sampling import token_bytes

TEXT = '{"name": "cat", "age": 3}'
FEW = tuple((token, 30.0) for token in range(5, 9))
"""Biases with which a random model repeats itself as a text does."""
PROMPTS = [[1, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [1, *range(9, 40), *range(9, 20)]]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logit_bias": FEW},
    "temperature": {"logit_bias": FEW},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "logit_bias": FEW},
    "top-k": {"top_k": 3, "logit_bias": FEW},
    "min-p": {"min_p": 0.2, "logit_bias": FEW},
    "penalties": {
        "temperature": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1,
        "logit_bias": FEW,
    },
    "several": {"n": 4, "temperature": 0.4, "logit_bias": FEW},
    "end tokens": {"logit_bias": (*FEW, (2, 28.0)), "ignore_eos": False, "min_tokens": 9, "n": 3},
    "stop tokens": {"logit_bias": FEW, "stop_token_ids": frozenset({8}), "n": 4, "temperature": 0.5},
    "stop strings": {"logit_bias": FEW, "stop": ('#$#', '%%"'), "n": 4},
    "likeliest": {"logit_bias": FEW, "top_logprobs": 3, "temperature": 0.5},
    "a form": {"regex": "(ab, cd: )+(dc. ba)*", "ignore_eos": False, "n": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("drafted"), hidden_size=64, num_layers=2, texts=[TEXT], vocab_size=280)


POOLS = {
    "float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False),
    "float32, deterministic": (torch.float32, True), "bfloat16, deterministic": (torch.bfloat16, True),
}  # fmt: skip
SLOW_POOLS = ("bfloat16", "float32, deterministic")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW_POOLS else ()) for name in POOLS],
)
def pool(folder: Path, request: pytest.FixtureRequest) -> ModelPool:
    dtype, exact = POOLS[request.param]
    return ModelPool({"model": str(folder)}, dtype=dtype, exact=exact)


@pytest.fixture(scope="module")
def whole_pool(folder: Path) -> ModelPool:
    return ModelPool({"model": str(folder)}, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> TextTokenizer:
    file = find_tokenizer(str(folder))
    assert file is not None
    return TextTokenizer(file)


def adapter_of(pool: ModelPool, name: str, rank: int) -> Policy:
    policy = LoraPolicy(pool.get("model"), name, training_pb2.LoraSettings(rank=rank), seed=1)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


class Found:
    """The samples of requests that ran at the same time, and the steps that they took."""

    def __init__(self, mode: Mode, ask: Callable[[LocalSampler], Sequence[LocalJob]], **arguments: Any) -> None:
        sampler = LocalSampler(speculate=mode, **arguments)
        jobs = ask(sampler)
        self.steps = 0
        with patch.object(drafting, "LEAST_GAIN", 0.0):  # also what is rarely drawn is drafted
            while sampler.turn():
                sampler.step()
                self.steps += jobs[0].begun
        self.samples = [job.samples() for job in jobs]

    @property
    def accepted(self) -> int:
        return sum(each.num_accepted_tokens for each in self.samples)


def check_same(found: Sequence[Samples], expected: Sequence[Samples]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        assert (one.stop_reasons, one.texts) == (other.stop_reasons, other.texts)
        assert (one.top is None) == (other.top is None)
        if one.top is not None and other.top is not None:
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one.top, other.top, strict=True))


def compared(ask: Callable[[LocalSampler], Sequence[LocalJob]], **arguments: Any) -> Found:
    """The samples with drafts, compared with those without."""
    found, expected = Found("auto", ask, **arguments), Found("off", ask, **arguments)
    check_same(found.samples, expected.samples)
    assert not expected.accepted
    return found


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_samples_are_the_same_to_the_bit(pool: ModelPool, tokens: TextTokenizer, options: str) -> None:
    params = SamplingParams(**{"max_tokens": 60, "seed": 3, "ignore_eos": True} | OPTIONS[options])
    policy = Policy(pool.get("model"))
    found = compared(lambda sampler: [sampler.begin(policy, PROMPTS, params, tokens, alone=True)])
    if speculation._same_products(policy):  # in bfloat16 by torch, which does not promise it
        assert found.accepted > 3
        assert found.steps < max(found.samples[0].lengths)
    else:
        assert not found.accepted


@pytest.mark.long
@pytest.mark.parametrize("rank", [4, 20])
def test_an_adapter_is_drafted_for(pool: ModelPool, rank: int) -> None:
    policy = adapter_of(pool, f"of {rank}", rank)
    params = SamplingParams(max_tokens=40, seed=3, n=2, temperature=0.5, ignore_eos=True, logit_bias=FEW)
    found = compared(lambda sampler: [sampler.begin(policy, PROMPTS, params)])
    alike = speculation._same_products(policy)
    assert found.accepted > 3 if alike else not found.accepted
    policy.close()


@pytest.mark.long
def test_rows_of_several_adapters_are_drafted_for(whole_pool: ModelPool) -> None:
    policies = [adapter_of(whole_pool, "one", 4), adapter_of(whole_pool, "other", 8), Policy(whole_pool.get("model"))]
    params = SamplingParams(max_tokens=60, seed=3, temperature=0.5, ignore_eos=True, logit_bias=FEW)
    found = compared(lambda sampler: [sampler.begin(each, PROMPTS, params, mixed=True) for each in policies])
    assert all(each.num_accepted_tokens > 3 for each in found.samples)


@pytest.mark.long
def test_requests_of_different_options_share_steps(whole_pool: ModelPool, tokens: TextTokenizer) -> None:
    policy = Policy(whole_pool.get("model"))

    def ask(sampler: LocalSampler) -> Sequence[LocalJob]:
        settings = [{"max_tokens": 50, "seed": 5, "ignore_eos": True} | options for options in OPTIONS.values()]
        return [sampler.begin(policy, PROMPTS, SamplingParams(**each), tokens) for each in settings]

    assert compared(ask).accepted > 20


@pytest.mark.long
def test_rows_that_leave_for_others_come_back_with_their_drafts(whole_pool: ModelPool) -> None:
    policy = Policy(whole_pool.get("model"))
    params = SamplingParams(max_tokens=50, seed=3, n=2, temperature=0.5, ignore_eos=True, logit_bias=FEW)
    room = 9 * PAGE * token_bytes(policy)

    def ask(sampler: LocalSampler) -> Sequence[LocalJob]:
        return [sampler.begin(policy, PROMPTS, params, owner=owner) for owner in ("one", "other")]

    found, expected = Found("auto", ask, cache_bytes=room), Found("off", ask, cache_bytes=room)
    assert found.accepted > 3
    for one, other in zip(found.samples, expected.samples, strict=True):  # a row that comes back is computed otherwise
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_weights_that_change_between_steps(whole_pool: ModelPool) -> None:
    """As a partial rollout sees them: a request that ends, and a second one that goes on from its tokens."""

    def both(mode: Mode) -> list[Samples]:
        policy = FullPolicy(whole_pool.load("model"))
        sampler, params = LocalSampler(speculate=mode), {"seed": 3, "ignore_eos": True, "logit_bias": FEW}
        found: list[Samples] = []
        prompts = PROMPTS
        for _ in range(2):
            settings = SamplingParams(max_tokens=40, temperature=0.5, **params)  # type: ignore[arg-type]
            job = sampler.begin(policy, prompts, settings)
            while not job.done:
                sampler.step()
            found.append(job.samples())
            ids = found[-1].token_ids.reshape(len(prompts), -1).tolist()
            prompts = [[*prompt, *sampled] for prompt, sampled in zip(prompts, ids, strict=True)]
            with torch.no_grad():
                for parameter in policy.trainable_parameters().values():
                    parameter.mul_(1.1)
            policy.sync()
        policy.close()
        return found

    found = both("auto")
    check_same(found, both("off"))
    assert all(each.num_accepted_tokens > 3 for each in found)


def test_a_stream_hands_out_every_token(whole_pool: ModelPool, tokens: TextTokenizer) -> None:
    policy = Policy(whole_pool.get("model"))
    settings: dict[str, Any] = {"max_tokens": 60, "seed": 3, "n": 2, "ignore_eos": True, "logit_bias": FEW}
    params = SamplingParams(**settings, temperature=0.3, stop=('#$%"#$',), top_logprobs=2, stream=True)
    sampler, most = LocalSampler(), 0
    job = sampler.begin(policy, PROMPTS, params, tokens)
    deltas: dict[int, list[training_pb2.SampleDelta]] = {row: [] for row in range(4)}
    while not job.done:
        sampler.step()
        for delta in job.new_tokens():
            deltas[delta.row].append(delta)
            most = max(most, len(delta.token_ids))
    assert most > 1
    samples = [each for of_prompt in job.samples().by_prompt() for each in of_prompt]
    for sample, parts in zip(samples, deltas.values(), strict=True):
        assert [token for part in parts for token in part.token_ids] == sample.token_ids
        assert [number for part in parts for number in part.logprobs] == sample.logprobs
        assert "".join(text for part in parts for text in part.texts) == sample.text
        assert all(len(part.texts) == len(part.token_ids) for part in parts)
        assert [part.stop_reason for part in parts if part.stop_reason] == [sample.stop_reason]


def test_pages_of_refused_tokens_are_given_back(whole_pool: ModelPool) -> None:
    policy = Policy(whole_pool.get("model"))
    pages, tokens = Pages(PageCache(1 << 10)), np.arange(4, 40)

    def work() -> None:
        pages.prefill([policy], [tokens[: PAGE + 2].tolist()], np.zeros(1, np.int64))
        before = pages.held()
        positions = np.arange(PAGE + 2, PAGE + 18)
        pages.decode([policy] * 16, tokens[positions], positions, np.zeros(16, np.int64))
        assert pages.held() > before
        pages.trim(np.array([PAGE + 3]))
        assert pages.held() == before

    with torch.no_grad():
        policy.activate()
        policy.compute(work)


def test_nothing_is_drafted_where_neighbours_change_bits(
    whole_pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(whole_pool.get("model"))
    params = SamplingParams(max_tokens=60, seed=3, temperature=0.5, ignore_eos=True, logit_bias=FEW)

    def ask(sampler: LocalSampler) -> Sequence[LocalJob]:
        return [sampler.begin(policy, PROMPTS, params)]

    monkeypatch.setattr(speculation, "_same_states", lambda policy: False)
    assert Found("auto", ask).samples[0].num_drafted_tokens == 0
    assert Found("on", ask).accepted > 3


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_p": 0.8}, {"top_k": 9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_draw_has_the_same_bits_whatever_is_beside_it(settings: dict[str, Any], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    params = SamplingParams(max_tokens=1, seed=0, **settings)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40_000, generator=generator) * 3
    uniform = torch.rand(5, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, uniform, params)
    ids, tops = top_tokens(logits, 4)
    for row in range(5):
        alone = slice(row, row + 1)
        token, logprob = draw(logits[alone], uniform[alone], params)
        assert (token.item(), logprob.item()) == (tokens[row].item(), logprobs[row].item())
        assert torch.equal(top_tokens(logits[alone], 4)[1], tops[alone])
    torch.set_num_threads(before)
    assert ids.shape == (5, 4)


# ------------------------------------------------------------------ drafts alone


def drafts_of(prompt: Sequence[int], sampled: Sequence[int] = ()) -> Drafts:
    return Drafts(prompt, occurrences(prompt), sampled)


def test_a_draft_is_what_stood_behind_the_same_tokens() -> None:
    prompt = [*range(10, 30), 1, 2, 3]
    drafts = drafts_of(prompt, [12, 13, 14])
    assert drafts.draft(0.01, 15)[:4] == [15, 16, 17, 18]
    assert drafts.draft(0.01, 2) == [15, 16]
    assert drafts_of(prompt, [12, 14, 13]).draft(0.01, 15) == []


def test_after_another_token_the_draft_goes_on_as_before() -> None:
    source = list(range(10, 60))
    drafts = drafts_of([*source, 1, 2, 3], [*source[:20], 5])
    assert drafts.draft(0.01, 15) == []  # until one more token agrees
    drafts.add(source[21])
    assert drafts.draft(0.01, 3) == source[22:25]


def test_of_equal_places_the_one_behind_the_last_is_taken() -> None:
    line = [7, 8, 9]
    prompt = [*line, 20, 21, *line, 30, 31, *line, 40, 41, 1, 2]
    drafts = drafts_of(prompt, [50, 51])
    assert drafts.draft(0.01, 1) == []
    for token in line:
        drafts.add(token)
    assert drafts.draft(0.01, 2)[0] == 20  # nothing was alike before: the first
    for token in [30, 31, *line]:
        drafts.add(token)
    assert drafts.draft(0.01, 2)[0] == 40


def test_a_repeating_text_is_drafted_beyond_its_end() -> None:
    drafts = drafts_of([1, 2], [4, 5, 6] * 3)
    assert drafts.draft(0.001, 7) == [4, 5, 6, 4, 5, 6, 4]


def test_lengths_follow_what_is_accepted() -> None:
    source = list(range(100, 400))
    drafts = drafts_of([*source, 1, 2, 3], source[:3])
    lengths = []
    for token in source[3:80]:
        lengths.append(len(drafts.draft(1 / 17, 99)))
        drafts.add(token)
    assert lengths[0] < lengths[-1] == max(LENGTHS) and sorted(lengths) == lengths
    for number in range(40):  # each time alike, and then something else
        for token in (*source[:GRAM], *range(1000 + 5 * number, 1005 + 5 * number)):
            drafts.add(token)
    for token in source[:GRAM]:
        drafts.add(token)
    assert drafts.draft(1 / 17, 99) == [] and drafts.share < 1 / 17
    drafts = drafts_of([*source, 1, 2, 3], source[:6])
    assert len(drafts.draft(0.5, 99)) < len(drafts.draft(1 / 17, 99))


def test_a_context_that_says_a_third_of_the_tokens_is_not_drafted_from() -> None:
    """As prose, which repeats phrases: a forward with a draft costs more than such a draft brings."""
    source = list(range(100, 400))
    drafts, drafted = drafts_of([*source, 1, 2, 3]), list[int]()
    for number in range(90):  # three tokens as before and another one, or four
        begin = 3 * number
        for token in (*source[begin : begin + GRAM + (number % 3 == 0)], 1000 + number):
            drafts.add(token)
            drafted.append(len(drafts.draft(1 / 17, 99)))
    assert 0.1 < drafts.share < 0.4 and any(drafted[:8]) and not any(drafted[40:])


def test_an_index_is_as_long_as_its_text() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 4, 500).tolist()
    found = occurrences(text)
    assert sum(map(len, found.values())) == len(text) - GRAM
    for gram, places in found.items():
        expected = [at for at in range(GRAM, len(text)) if tuple(text[at - GRAM : at]) == gram]
        assert places == expected
    assert occurrences([1, 2]) == {}
