"""Texts that grow: stop strings across token borders, schemas, streams; and the scores of prompts."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.growing.growing_text import GrowingText, StopString
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.prompt_scores import score_prompts
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.scoring.planner import Budget
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import samples_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@settings(max_examples=150)
@given(
    text=st.text(alphabet="abcé\U0001f600 ", max_size=40),
    stops=st.lists(st.text(alphabet="abcé\U0001f600", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
def test_stop_strings_are_found_across_token_borders(tokens: TextTokenizer, text: str, stops: list[str]) -> None:
    growing = GrowingText(tokens, [StopString(stop) for stop in stops])
    places = [text.find(stop) for stop in stops if stop in text]
    shown = ""
    for token in tokens.encode([text], add_special_tokens=False)[0]:
        growing.add(token)
        assert growing.shown.startswith(shown)
        shown = growing.shown
        held = growing.text[len(shown) :]
        assert growing.end is not None or not held or any(stop.startswith(held) for stop in stops)
        if growing.end is not None:
            break
    if not places:
        assert growing.end is None and growing.text == text
    else:
        assert growing.end is not None and growing.shown == growing.text[: growing.end]
        # The first stop string that is complete; of several that one token completes, the one that begins first.
        completed = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        assert len(growing.text) >= completed
        assert growing.end == min(growing.text.find(stop) for stop in stops if stop in growing.text)


def test_a_stop_string_of_several_tokens_ends_a_sample(bpe: Policy, tokens: TextTokenizer) -> None:
    free = samples_of(bpe, [[1, 40, 41]], SamplingParams(max_tokens=60, seed=4, ignore_eos=True), tokens)
    assert free.texts is not None
    (text,) = free.texts
    start = next(
        place
        for place in range(20, len(text))
        if text[place : place + 6].isprintable() and "�" not in text[place : place + 6]
    )
    stop = text[start : start + 6]
    assert len(tokens.encode([stop], add_special_tokens=False)[0]) > 1
    params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True, stop=(stop,))
    stopped = samples_of(bpe, [[1, 40, 41]], params, tokens)
    assert stopped.texts == [text[: text.index(stop)]] and stopped.stop_reasons == ["stop"]
    assert stopped.token_ids.tolist() == free.token_ids[: len(stopped.token_ids)].tolist()


def test_samples_follow_their_schema(bpe: Policy, tokens: TextTokenizer) -> None:
    sampler = LocalSampler()
    schema = json.dumps(PERSON)
    guided = SamplingParams(max_tokens=150, seed=1, n=6, temperature=2.0, json_schema=schema, top_logprobs=1)
    free = SamplingParams(max_tokens=30, seed=2, n=2, ignore_eos=True)
    jobs = [sampler.begin(bpe, [[1, 7, 8]], guided, tokens), sampler.begin(bpe, [[1, 7, 8]], free, tokens)]
    while sampler.turn():
        sampler.step()
    (found,), (alone,) = jobs[0].samples().by_prompt(), samples_of(bpe, [[1, 7, 8]], guided, tokens).by_prompt()
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in alone]
    complete = [sample for sample in found if sample.stop_reason == "eos"]
    assert len(complete) >= 3 and len({sample.text for sample in complete}) > 1
    for sample in complete:
        assert sample.text is not None
        jsonschema.validate(json.loads(sample.text), PERSON)
    for sample in found:  # the log-probabilities are the model's own, not those within the schema
        with torch.no_grad():
            logits = bpe.model(input_ids=torch.tensor([[1, 7, 8, *sample.token_ids]])).logits[0, 2:-1] / 2.0
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)
    (undisturbed,) = samples_of(bpe, [[1, 7, 8]], free, tokens).by_prompt()
    assert [s.token_ids for s in jobs[1].samples().by_prompt()[0]] == [s.token_ids for s in undisturbed]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "EOF"),
        ("[]", "JSON schema"),
        ('{"type": "nothing"}', "nothing"),
        ('{"type": "string", "pattern": "("}', "regex"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"$ref": "http://example.com/schema"}', "example.com"),
    ],
)
def test_bad_schemas_are_refused(bpe: Policy, tokens: TextTokenizer, schema: str, words: str) -> None:
    params = SamplingParams(max_tokens=5, seed=0, json_schema=schema)
    with pytest.raises(OperationError, match=words) as caught:
        samples_of(bpe, [[1]], params, tokens)
    assert caught.value.code == training_pb2.ERROR_CODE_INVALID_ARGUMENT and caught.value.field == "json_schema"


def test_tokenizers_that_have_no_bytes_are_refused(policy: Policy, tokenizer: TextTokenizer) -> None:
    params = SamplingParams(max_tokens=5, seed=0, json_schema="{}")
    for given_tokenizer, words in ((tokenizer, "cannot read"), (None, "no tokenizer")):
        with pytest.raises(OperationError, match=words) as caught:
            samples_of(policy, [[1]], params, given_tokenizer)
        assert caught.value.code == training_pb2.ERROR_CODE_UNSUPPORTED


@pytest.mark.long
@pytest.mark.parametrize("short_of_memory", [False, True])
def test_a_stream_is_the_sample(
    bpe: Policy, tokens: TextTokenizer, monkeypatch: pytest.MonkeyPatch, short_of_memory: bool
) -> None:
    wanted = {"max_tokens": 50, "seed": 6, "n": 3, "stop": ("ca", "t;"), "top_logprobs": 2}
    whole = samples_of(bpe, [[1, 70], [1, 80]], SamplingParams(**wanted), tokens)  # type: ignore[arg-type]
    if short_of_memory:
        decode, steps = Pages.decode, iter(range(10_000))

        def failing(self: Pages, policy: Policy, ids: object, positions: object, of: object = None) -> torch.Tensor:
            if len(ids) > 3 and next(steps) > 4:  # type: ignore[arg-type]
                raise MemoryError
            return decode(self, policy, ids, positions, of)  # type: ignore[arg-type]

        monkeypatch.setattr(Pages, "decode", failing)
    sampler = LocalSampler()
    job = sampler.begin(bpe, [[1, 70], [1, 80]], SamplingParams(**wanted, stream=True), tokens)  # type: ignore[arg-type]
    rows: dict[int, list[training_pb2.SampleDelta]] = {row: [] for row in range(6)}
    steps_with_news = 0
    while not job.done:
        sampler.step()
        deltas = job.new_tokens()
        steps_with_news += bool(deltas)
        for delta in deltas:
            assert not rows[delta.row] or not rows[delta.row][-1].stop_reason
            rows[delta.row].append(delta)
    assert steps_with_news > 5 and not job.new_tokens()
    found = job.samples()
    assert found.token_ids.tolist() == whole.token_ids.tolist() and found.texts == whole.texts
    ends = np.cumsum(whole.lengths)
    assert whole.texts is not None and whole.top is not None
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        assert [token for delta in rows[row] for token in delta.token_ids] == whole.token_ids[start:end].tolist()
        logprobs = [logprob for delta in rows[row] for logprob in delta.logprobs]
        assert np.allclose(logprobs, whole.logprobs[start:end], atol=1e-4)
        tops = [token for delta in rows[row] for token in delta.top_token_ids]
        assert tops == whole.top[0][start:end].flatten().tolist()
        assert "".join(text for delta in rows[row] for text in delta.texts) == whole.texts[row]
        assert rows[row][-1].stop_reason == whole.stop_reasons[row]


@pytest.mark.parametrize("budget", [Budget(), Budget(microbatch_tokens=5, logits_elements=1)], ids=["whole", "tiny"])
def test_prompts_are_scored_as_by_transformers(policy: Policy, budget: Budget) -> None:
    prompts = [[1, 40, 41, 42, 17, 8], [1], [1, 90, 17, 33], [5, 6]]
    found = score_prompts(policy, prompts, temperature=0.7, top=3, budget=budget, agreement=Agreement())
    assert found.lengths.tolist() == [5, 0, 3, 1] and found.top is not None
    start = 0
    for prompt in prompts:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([prompt])).logits[0, :-1].double()
        log_p = (logits / 0.7).log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        part = slice(start, start + len(prompt) - 1)
        start = part.stop
        assert np.allclose(found.logprobs[part], expected, atol=1e-4)
        assert found.top[0][part].tolist() == log_p.topk(3).indices.tolist()
        assert np.allclose(found.top[1][part], log_p.topk(3).values, atol=1e-4)


@pytest.mark.long
def test_scoring_goes_on_with_less_when_memory_runs_out(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 2, 3, 4], [1, 5, 6], [1, 7]]
    expected = score_prompts(policy, prompts, budget=Budget(), agreement=Agreement())
    hidden, sizes = Policy.hidden, []

    def small(self: Policy, input_ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        sizes.append(len(input_ids))
        if len(input_ids) > 4:
            raise MemoryError
        return hidden(self, input_ids, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Policy, "hidden", small)
    found = score_prompts(policy, prompts, budget=Budget(), agreement=Agreement())
    assert max(sizes) == 9 and np.allclose(found.logprobs, expected.logprobs, atol=1e-5)
    monkeypatch.setattr(Policy, "hidden", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        score_prompts(policy, prompts, budget=Budget(), agreement=Agreement())
