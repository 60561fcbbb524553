"""Grammars are compiled beside the engine's thread, a key at a time, and what goes wrong is the request's error."""

from __future__ import annotations

import dataclasses
import json
import re
import threading

import pytest
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling import jobs
from gradwire_server.engine.sampling.drawing import grammar
from gradwire_server.engine.sampling.drawing.grammars import Grammars
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from support.sampling import samples_of

GUIDED = SamplingParams(max_tokens=5, seed=0, json_schema='{"type": "boolean"}')


def test_samples_go_on_while_a_schema_is_compiled(
    bpe: Policy, tokens: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compile_now = threading.Event(), LocalJob.compile
    monkeypatch.setattr(LocalJob, "compile", lambda job: (go_on.wait(60), compile_now(job))[1])
    sampler = LocalSampler()
    guided = sampler.begin(bpe, [[1, 7]], GUIDED, tokens)
    free = sampler.begin(bpe, [[1, 7]], SamplingParams(max_tokens=5, seed=0), tokens)
    assert {guided, free} == set(sampler.turn()) and sampler.uses(bpe)
    while not free.done:
        sampler.step()
    assert set(sampler.turn()) == {guided} and not guided.done and sampler.uses(bpe)
    go_on.set()
    while not guided.done:
        sampler.step()
    assert guided.samples().texts is not None and not sampler.turn() and not sampler.uses(bpe)


def test_a_cancelled_schema_begins_no_sample(
    bpe: Policy, tokens: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compile_now = threading.Event(), LocalJob.compile
    monkeypatch.setattr(LocalJob, "compile", lambda job: (go_on.wait(60), compile_now(job))[1])
    sampler = LocalSampler()
    compiled, waiting = (sampler.begin(bpe, [[1, 7]], GUIDED, tokens) for _ in range(2))
    sampler.cancel(waiting)
    sampler.cancel(compiled)
    assert not sampler.uses(bpe)
    go_on.set()
    while sampler.turn():
        sampler.step()
    assert not compiled.done and not waiting.done


@pytest.mark.long
def test_a_schema_that_would_compile_for_hours_is_refused_and_the_next_one_followed(
    bpe: Policy, tokens: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = [{"pattern": f".*{letter}.{{{n}}}.*"} for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 1)]
    endless = SamplingParams(max_tokens=5, seed=0, json_schema=json.dumps({"type": "string", "allOf": patterns}))
    monkeypatch.setattr(grammar, "TRIAL_S", 1.0)
    sampler = LocalSampler()
    refused = sampler.begin(bpe, [[1, 7]], endless, tokens)
    while not refused.done:
        sampler.step()
    assert isinstance(refused.error, OperationError)
    assert refused.error.code == training_pb2.ERROR_CODE_LIMIT_EXCEEDED
    assert "more than 1 s to compile" in str(refused.error)
    monkeypatch.undo()
    guided = sampler.begin(bpe, [[1, 7]], GUIDED, tokens)
    while sampler.turn():
        sampler.step()
    assert guided.samples().texts is not None


def test_keys_take_turns() -> None:
    class Job:
        def __init__(self, owner: str) -> None:
            self.owner = owner

        def compile(self) -> None: ...

    first, second, other = Job("many"), Job("many"), Job("one")
    grammars: Grammars[Job] = Grammars()
    for job in (first, second, other):
        grammars.add(job)
    order = []
    while grammars.compiling:
        grammars.wait()
        if (job := grammars.take()) is not None:
            order.append(job)
    assert order == [first, other, second]


def test_a_panic_is_the_requests_error(bpe: Policy, tokens: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 raises one."""

    def panic(*_: object) -> None:
        raise PanicException("index out of range")

    monkeypatch.setattr(jobs, "Grammar", panic)
    sampler = LocalSampler()
    job = sampler.begin(bpe, [[1, 7]], GUIDED, tokens)
    while sampler.turn():
        sampler.step()
    with pytest.raises(OperationError, match="index out of range") as caught:
        job.samples()
    assert caught.value.code == training_pb2.ERROR_CODE_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("form", "text", "pattern"),
    [
        ("regex", r"(cat|mat){2} [0-9]{3}", r"(cat|mat){2} [0-9]{3}"),
        ("grammar", 'start: "yes" | "no \\"x\\" +*"', r'yes|no "x" \+\*'),
        ("grammar", 'root ::= "a" [0-9] [0-9]', "a[0-9]{2}"),
    ],
)
def test_samples_are_of_their_form(bpe: Policy, tokens: TextTokenizer, form: str, text: str, pattern: str) -> None:
    found = samples_of(bpe, [[1, 7]], SamplingParams(max_tokens=40, seed=1, n=4, **{form: text}), tokens)
    assert found.texts is not None and set(found.stop_reasons) == {"eos"}
    assert all(re.fullmatch(pattern, each) for each in found.texts), found.texts


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("regex", "(", "regular expression"),
        ("grammar", "start: other", "grammar"),
        ("grammar", '{"grammars": []}', "begins as JSON"),
    ],
)
def test_forms_that_are_none_are_refused(bpe: Policy, tokens: TextTokenizer, form: str, text: str, words: str) -> None:
    with pytest.raises(OperationError, match=words) as caught:
        samples_of(bpe, [[1]], SamplingParams(max_tokens=5, seed=0, **{form: text}), tokens)
    assert caught.value.field == form


def test_nothing_ends_a_sample_before_its_minimum(bpe: Policy, tokens: TextTokenizer) -> None:
    every = tuple(range(4, 60))
    short = SamplingParams(max_tokens=30, seed=1, n=8, stop_token_ids=every, stop=("a", "e", "t"))
    assert samples_of(bpe, [[1, 7]], short, tokens).lengths.min() < 9
    found = samples_of(bpe, [[1, 7]], dataclasses.replace(short, min_tokens=9), tokens)
    assert found.lengths.min() >= 9 and (found.lengths < 30).any()
    ends = {2, *every}
    for sample in found.by_prompt()[0]:
        assert not ends & set(sample.token_ids[:8])


def test_special_tokens_are_text_if_they_are_wanted(bpe: Policy, tokens: TextTokenizer) -> None:
    bias = ((1, 90.0),)
    plain = SamplingParams(max_tokens=6, seed=1, logit_bias=bias, stream=True)
    kept = dataclasses.replace(plain, keep_special_tokens=True)
    assert samples_of(bpe, [[1, 7]], plain, tokens).texts == [""]
    assert samples_of(bpe, [[1, 7]], kept, tokens).texts == ["<s>" * 6]
