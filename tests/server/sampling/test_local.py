"""The local sampler: its distribution, its log-probabilities, when samples end, and what they depend on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.drawing.draw import draw
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Sample, SamplingParams
from support.sampling import samples_of

FullLogprobs = Callable[..., torch.Tensor]
MakePolicy = Callable[..., Policy]


def draw_samples(*args: Any, sampler: LocalSampler | None = None) -> list[list[Sample]]:
    return samples_of(*args, sampler=sampler).by_prompt()


PROMPTS = [[1, 40, 41, 42], [1, 5], [1, 90, 17, 33, 64, 21, 8], [1, 40, 41]]


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}],
    ids=str,
)
def test_logprobs_are_those_of_the_whole_distribution(
    full_logprobs: FullLogprobs, policy: Policy, settings: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=12, seed=3, n=3, **settings)  # type: ignore[arg-type]
    samples = draw_samples(policy, PROMPTS, params)
    assert [len(of_prompt) for of_prompt in samples] == [3] * 4
    for prompt, of_prompt in zip(PROMPTS, samples, strict=True):
        for sample in of_prompt:
            expected = full_logprobs(policy, prompt, sample.token_ids, params.temperature)
            assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


def test_greedy_takes_the_most_probable_token(policy: Policy) -> None:
    samples = draw_samples(policy, PROMPTS, SamplingParams(max_tokens=10, seed=0, temperature=0))
    for prompt, (sample,) in zip(PROMPTS, samples, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == sample.token_ids


def test_samples_do_not_depend_on_what_they_are_batched_with(policy: Policy) -> None:
    params = SamplingParams(max_tokens=15, seed=11, n=4)
    together = draw_samples(policy, PROMPTS, params)
    one_by_one = draw_samples(policy, PROMPTS, params, sampler=LocalSampler(cache_bytes=1))
    assert [[s.token_ids for s in of_prompt] for of_prompt in together] == [
        [s.token_ids for s in of_prompt] for of_prompt in one_by_one
    ]
    assert len({tuple(s.token_ids) for s in together[0]}) > 1
    other = draw_samples(policy, PROMPTS, SamplingParams(max_tokens=15, seed=12, n=4))
    assert [s.token_ids for s in other[0]] != [s.token_ids for s in together[0]]


def test_first_tokens_follow_the_distribution(policy: Policy) -> None:
    n = 6000
    params = SamplingParams(max_tokens=1, seed=5, n=n, temperature=1.5, top_k=12)
    (samples,) = draw_samples(policy, [PROMPTS[0]], params)
    counts = np.bincount([sample.token_ids[0] for sample in samples], minlength=policy.facts.vocab_size)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].float() / 1.5
    kept = logits.topk(12)
    expected = torch.zeros_like(logits).scatter(0, kept.indices, kept.values.softmax(0)).numpy()
    assert not counts[expected == 0].any()
    deviation = np.abs(counts / n - expected) / np.sqrt(expected * (1 - expected) / n + 1e-12)
    assert deviation[expected > 0].max() < 4.5


def test_draw_inverts_the_distribution_at_its_edges() -> None:
    logits = torch.log(torch.tensor([[0.0, 0.5, 0.3, 0.2, 0.0]])).expand(5, 5)
    uniform = torch.tensor([0.0, 0.4999, 0.5001, 0.81, 1 - 2**-53], dtype=torch.float64)
    plain = SamplingParams(max_tokens=1, seed=0)
    tokens, logprobs = draw(logits, uniform, plain)
    assert tokens.tolist() == [1, 1, 2, 3, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.2, 0.2]))
    nucleus, logprobs = draw(logits, uniform, SamplingParams(max_tokens=1, seed=0, top_p=0.7))
    assert nucleus.tolist() == [1, 1, 1, 2, 2]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.5, 0.3, 0.3]))
    assert draw(logits, uniform, SamplingParams(max_tokens=1, seed=0, top_p=1e-9))[0].tolist() == [1] * 5


def test_samples_end_at_end_tokens_stop_tokens_limits_and_the_context(policy: Policy) -> None:
    free = draw_samples(policy, PROMPTS, SamplingParams(max_tokens=30, seed=2, n=6, ignore_eos=True))
    assert {s.stop_reason for of in free for s in of} == {"length"}
    assert {len(s.token_ids) for of in free for s in of} == {30}
    stop = free[0][0].token_ids[7]
    params = SamplingParams(max_tokens=30, seed=2, n=6, ignore_eos=True, stop_token_ids=frozenset({stop}))
    stopped = draw_samples(policy, PROMPTS, params)
    for before, after in zip(chain(*free), chain(*stopped), strict=True):
        expected = before.token_ids
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
            assert after.stop_reason == "stop"
        assert after.token_ids == expected
    eos = policy.facts.eos_token_ids[0]
    ended = draw_samples(policy, PROMPTS, SamplingParams(max_tokens=120, seed=2, n=40, temperature=3.0))
    reasons = {(s.stop_reason, s.token_ids[-1] == eos) for of in ended for s in of}
    assert reasons == {("eos", True), ("length", False)}
    long = [7] * (policy.facts.context_length - 3)
    ((last,),) = draw_samples(policy, [long], SamplingParams(max_tokens=50, seed=0, ignore_eos=True))
    assert (len(last.token_ids), last.stop_reason) == (3, "length")


def test_texts_end_before_the_stop_string(policy: Policy, tokenizer: TextTokenizer) -> None:
    params = SamplingParams(max_tokens=40, seed=4, n=3, ignore_eos=True)
    free = draw_samples(policy, PROMPTS, params, tokenizer)
    target = free[1][2].text
    assert target is not None and len(target) > 20
    stop = target[10:13]
    params = SamplingParams(max_tokens=40, seed=4, n=3, ignore_eos=True, stop=(stop, "never there"))
    stopped = draw_samples(policy, PROMPTS, params, tokenizer)
    sample = stopped[1][2]
    assert sample.text == target[: target.index(stop)]
    assert sample.stop_reason == "stop"
    assert tokenizer.decode([sample.token_ids])[0] == target[: target.index(stop)] + stop
    assert len(sample.logprobs) == len(sample.token_ids)


def test_an_adapter_is_sampled_as_it_is_scored(full_logprobs: FullLogprobs, tiny_model_path: Path) -> None:
    split_model = ModelPool({"tiny": str(tiny_model_path)}).get("tiny")
    policies = [LoraPolicy(split_model, f"run-{i}", training_pb2.LoraSettings(rank=4), seed=i) for i in range(2)]
    with torch.no_grad():
        for number, policy in enumerate(policies):
            for master in policy.masters().values():
                master.normal_(std=0.5, generator=torch.Generator().manual_seed(number))
    params = SamplingParams(max_tokens=10, seed=1)
    samples = [draw_samples(p, PROMPTS, params) for p in (*policies, Policy(split_model))]
    assert len({tuple(sample[0][0].token_ids) for sample in samples}) == 3
    for policy, of_policy in zip(policies, samples, strict=False):
        for prompt, (sample,) in zip(PROMPTS, of_policy, strict=True):
            assert torch.allclose(
                torch.tensor(sample.logprobs), full_logprobs(policy, prompt, sample.token_ids), atol=1e-4
            )


@pytest.mark.parametrize(
    ("prompts", "row", "words"),
    [([], None, "at least one"), ([[1], []], 1, "no tokens"), ([[1, 101]], 0, "101"), ([[1] * 256], 0, "context")],
    ids=["none", "empty", "vocabulary", "context"],
)
def test_bad_prompts_are_named(policy: Policy, prompts: list[list[int]], row: int | None, words: str) -> None:
    with pytest.raises(OperationError, match=words) as caught:
        draw_samples(policy, prompts, SamplingParams(max_tokens=1, seed=0))
    assert (caught.value.field, caught.value.row) == ("prompts", row)


def test_stop_strings_need_a_tokenizer(policy: Policy) -> None:
    with pytest.raises(OperationError, match="stop_token_ids"):
        draw_samples(policy, PROMPTS, SamplingParams(max_tokens=1, seed=0, stop=("x",)))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop"),
    ],
    ids=str,
)
def test_arguments_are_checked(call: dict[str, object], field: str) -> None:
    with pytest.raises(OperationError, match="the rule is") as caught:
        SamplingParams.from_call(training_pb2.SampleCall(**{"max_tokens": 4} | call), seed=0)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
        ("gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
        ("phi3", {}),
    ],
)
def test_padding_and_windows_of_other_architectures(
    make_policy: MakePolicy, full_logprobs: FullLogprobs, kind: str, settings: dict[str, Any]
) -> None:
    """Rows of different lengths beyond the window, in one padded batch, against one sequence at a time."""
    policy = make_policy(kind, **settings)
    prompts = [[1, 5], list(range(3, 22)), [9, 8, 7, 6, 5, 4, 3], list(range(10, 19))]
    for of_prompt, prompt in zip(
        draw_samples(policy, prompts, SamplingParams(max_tokens=14, seed=1, n=2)),
        prompts,
        strict=True,
    ):
        for sample in of_prompt:
            expected = full_logprobs(policy, prompt, sample.token_ids)
            assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)
