"""How tokens are chosen, against transformers' processors and formulas written out, whatever the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.drawing.draw import draw
from gradwire_server.engine.sampling.drawing.kinds import adjusted
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams
from support.sampling import samples_of
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

FullLogprobs = Callable[..., torch.Tensor]
Float64 = npt.NDArray[np.float64]

PROMPTS = [[1, 40, 41, 42], [1, 5], [1, 90, 17, 33, 64, 21, 8], [1, 40, 41]]
CHOICES: list[dict[str, Any]] = [
    {"min_p": 0.2},
    {"min_p": 0.1, "top_k": 12, "top_p": 0.8, "temperature": 1.7},
    {"logit_bias": ((7, 4.0), (9, -100.0)), "temperature": 0.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "logit_bias": ((40, -3.0),), "top_p": 0.9, "temperature": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0.8},
    {"presence_penalty": -1.0, "repetition_penalty": 1.2, "min_p": 0.05, "top_k": 20},
]


def reference_probabilities(logits: Float64, prompt: list[int], sampled: list[int], params: SamplingParams) -> Float64:
    """Probabilities of the next token by transformers' processors in float64, and OpenAI's penalties written out."""
    scores = torch.from_numpy(logits.copy())[None]
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = processors(torch.tensor([prompt + sampled]), scores)
    for token in set(sampled):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * sampled.count(token)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    found: Float64 = warpers(torch.tensor([prompt + sampled]), scores)[0].softmax(-1).numpy()
    return found


@pytest.mark.parametrize("settings", CHOICES, ids=str)
def test_tokens_are_drawn_from_the_distribution_of_transformers(settings: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1, seed=0, **settings)
    vocabulary, draws = 60, 8192
    generator = np.random.default_rng(0)
    for _ in range(6):
        logits = generator.normal(0, 3, vocabulary)
        prompt, sampled = generator.integers(0, vocabulary, 9).tolist(), generator.integers(0, 12, 14).tolist()
        expected = reference_probabilities(logits, prompt, sampled, params)
        scaled = (torch.from_numpy(logits) / params.temperature).float().expand(draws, vocabulary)
        choices = None
        if params.adjusts:
            rows = np.tile(np.array([*sampled, 0, 0], np.int32), (draws, 1))
            choices = adjusted(scaled, params, [prompt] * draws, rows, np.full(draws, len(sampled)))
        uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
        tokens, logprobs = draw(scaled, uniform, params, choices)
        # Each token has one interval of the uniform numbers, so its count is exact to one draw, but for rounding.
        counts = np.bincount(tokens.numpy(), minlength=vocabulary)
        assert np.abs(counts - draws * expected).max() <= 1.02
        assert not counts[expected == 0].any()
        whole = torch.from_numpy(logits / params.temperature).log_softmax(-1)
        assert torch.allclose(logprobs.double(), whole[tokens], atol=1e-5)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_greedy_sample_is_that_of_transformers_generate(policy: Policy, penalty: float) -> None:
    bias = {7: 1.5, 12: -2.0}
    params = SamplingParams(
        max_tokens=24,
        seed=0,
        temperature=0,
        repetition_penalty=penalty,
        logit_bias=tuple(bias.items()),
        ignore_eos=True,
    )
    samples = samples_of(policy, PROMPTS, params).by_prompt()
    for prompt, (sample,) in zip(PROMPTS, samples, strict=True):
        generated = policy.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            repetition_penalty=penalty,
            sequence_bias=[[[token], value] for token, value in bias.items()],
            eos_token_id=-1,
        )
        assert generated[0, len(prompt) :].tolist() == sample.token_ids


def test_frequent_tokens_become_rare(policy: Policy) -> None:
    """Each choice of a greedy sample, recomputed in float64 from the model's own logits of the whole text."""
    params = SamplingParams(
        max_tokens=30, seed=0, temperature=0, presence_penalty=0.6, frequency_penalty=0.4, ignore_eos=True
    )
    ((sample,),) = samples_of(policy, PROMPTS[:1], params).by_prompt()
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPTS[0] + sample.token_ids])).logits[0].double().numpy()
    for place, token in enumerate(sample.token_ids):
        before = sample.token_ids[:place]
        scores = logits[len(PROMPTS[0]) - 1 + place].copy()
        for seen in set(before):
            scores[seen] -= 0.6 + 0.4 * before.count(seen)
        assert token == scores.argmax()
    free = samples_of(policy, PROMPTS[:1], SamplingParams(max_tokens=30, seed=0, temperature=0, ignore_eos=True))
    assert len(set(sample.token_ids)) > len(set(free.token_ids.tolist()))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_top_logprobs_are_the_models_own(policy: Policy, temperature: float) -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=2, temperature=temperature, top_logprobs=5, presence_penalty=2.0)
    samples = samples_of(policy, PROMPTS, params)
    assert samples.top is not None and samples.top[0].shape == (len(samples.token_ids), 5)
    row = 0
    for prompt, of_prompt in zip(PROMPTS, samples.by_prompt(), strict=True):
        for sample in of_prompt:
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([prompt + sample.token_ids])).logits[
                    0, len(prompt) - 1 : -1
                ]
            expected = (logits.double() / (temperature or 1)).log_softmax(-1).topk(5)
            part = slice(row, row + len(sample.token_ids))
            row = part.stop
            assert np.allclose(samples.top[1][part], expected.values, atol=1e-4)
            assert samples.top[0][part].tolist() == expected.indices.tolist()
            for token, logprob, ids, logprobs in zip(
                sample.token_ids, sample.logprobs, samples.top[0][part], samples.top[1][part], strict=True
            ):
                if token in ids:
                    assert logprob == pytest.approx(logprobs[ids.tolist().index(token)], abs=1e-6)


REQUESTS: list[tuple[list[list[int]], dict[str, Any]]] = [
    ([[1, 40, 41, 42], [1, 5]], {"max_tokens": 20, "seed": 1, "n": 3, "repetition_penalty": 1.3, "ignore_eos": True}),
    ([[1, 33, 17]], {"max_tokens": 9, "seed": 2, "temperature": 0.0, "frequency_penalty": 1.0, "top_logprobs": 3}),
    ([[1, 9, 8, 7, 6, 5, 4, 3, 22, 21]], {"max_tokens": 30, "seed": 3, "min_p": 0.1, "presence_penalty": 0.5}),
    ([[1, 5], [1, 2, 3]], {"max_tokens": 11, "seed": 4, "logit_bias": ((7, 3.0), (2, -100.0)), "top_logprobs": 2}),
    ([[1, 60]], {"max_tokens": 25, "seed": 5, "ignore_eos": True}),
]


def begun_together(policy: Policy, sampler: LocalSampler) -> list[Samples]:
    jobs: list[LocalJob] = []
    for prompts, settings in REQUESTS:
        jobs.append(sampler.begin(policy, prompts, SamplingParams(**settings)))
        sampler.step()
    while sampler.turn():
        sampler.step()
    return [job.samples() for job in jobs]


def check_alone(policy: Policy, found: list[Samples]) -> None:
    for (prompts, settings), samples in zip(REQUESTS, found, strict=True):
        alone = samples_of(policy, prompts, SamplingParams(**settings))
        assert samples.token_ids.tolist() == alone.token_ids.tolist()
        assert np.allclose(samples.logprobs, alone.logprobs, atol=1e-4)
        assert (samples.top is None) == (alone.top is None)
        if samples.top is not None and alone.top is not None:
            assert samples.top[0].tolist() == alone.top[0].tolist()
            assert np.allclose(samples.top[1], alone.top[1], atol=1e-4)


def test_neighbours_change_nothing(policy: Policy) -> None:
    check_alone(policy, begun_together(policy, LocalSampler()))


@pytest.mark.long
def test_a_restart_after_memory_ran_out_changes_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Pages.decode

    def small(self: Pages, policy: Policy, tokens: Any, positions: Any, of: Any = None) -> torch.Tensor:
        if len(tokens) > 5:
            raise MemoryError
        return decode(self, policy, tokens, positions, of)

    monkeypatch.setattr(Pages, "decode", small)
    found = begun_together(policy, LocalSampler())
    monkeypatch.undo()
    check_alone(policy, found)


@pytest.mark.long
def test_drawing_parameters_of_past_requests_are_forgotten(policy: Policy) -> None:
    sampler = LocalSampler(speculate="off")  # a token a step
    sampler.begin(policy, [[1, 7]], SamplingParams(max_tokens=240, seed=0, ignore_eos=True))
    for number in range(200):
        job = sampler.begin(policy, [[1, 7]], SamplingParams(max_tokens=1, seed=0, temperature=1 + number / 1000))
        sampler.step()
        assert job.done
    (batch,) = sampler._batches.values()
    assert len(batch._kinds) < 50


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": [training_pb2.LogitBias(token_id=3, bias=101)]}, "logit_bias"),
        ({"logit_bias": [training_pb2.LogitBias(token_id=3, bias=1)] * 2}, "logit_bias"),
        ({"json_schema": "{}", "ignore_eos": True}, "json_schema"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_arguments_are_checked(call: dict[str, Any], field: str) -> None:
    with pytest.raises(OperationError, match="the rule is") as caught:
        SamplingParams.from_call(training_pb2.SampleCall(**{"max_tokens": 4} | call), seed=0)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"logit_bias": ((100, 1.0),)}, "logit_bias"), ({"top_logprobs": 101}, "top_logprobs")],
    ids=str,
)
def test_ids_and_counts_beyond_the_vocabulary_are_named(policy: Policy, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(OperationError, match="100") as caught:
        samples_of(policy, PROMPTS, SamplingParams(max_tokens=1, seed=0, **settings))
    assert caught.value.field == field


def test_no_tokens_are_wanted(policy: Policy, tiny_model_path: Path) -> None:
    samples = samples_of(policy, PROMPTS, SamplingParams(max_tokens=0, seed=0, n=2))
    assert samples.lengths.tolist() == [0] * 8 and samples.stop_reasons == ["length"] * 8
