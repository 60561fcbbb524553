"""Graders that need more than the row: similarities against counts by hand, and models against a judge of the test."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from gradwire.rl.rewards.graders import GraderError, Question, Sample, SampleError, grader_of

SIMILAR = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
SCORE = {
    "type": "score_model", "name": "judged", "model": "big",
    "input": [{"role": "developer", "content": "Be strict."}, {"role": "user", "content": "{{ sample.output_text }}?"}],
}  # fmt: skip
LABEL = SCORE | {"type": "label_model", "name": "label", "labels": ["good", "fair", "bad"], "passing_labels": ["good"]}


class Scripted:
    """A judge that says what it is told to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[Question] = []

    async def answer(self, question: Question) -> str:
        self.asked.append(question)
        return self.text


def metric(name: str) -> dict[str, Any]:
    return SIMILAR | {"evaluation_metric": name}


async def graded(spec: Mapping[str, Any], text: str, answer: str = "", judge: Any = None) -> float:
    return await grader_of(spec, judge=judge).grade(Sample(text, {"answer": answer}))


def f_measure(hits: int, of_text: int, of_reference: int) -> float:
    return 2 * hits / (of_text + of_reference)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # text: "the cat sat on a mat", reference: "the cat is on the mat"; equal: the, cat, on, mat
        ("rouge_1", f_measure(4, 6, 6)),
        ("rouge_2", f_measure(1, 5, 5)),
        ("rouge_3", 0.0),
        ("rouge_l", f_measure(4, 6, 6)),
        ("gleu", (4 + 1) / (6 + 5 + 4 + 3)),
        # four orders of which two have no hit, smoothed to a half and a quarter of one (Chen and Cherry, method 3)
        ("bleu", math.exp(sum(map(math.log, (4 / 6, 1 / 5, 1 / (2 * 4), 1 / (4 * 3)))) / 4)),
    ],
)
async def test_similarities_are_those_of_the_papers(name: str, expected: float) -> None:
    found = await graded(metric(name), "the cat sat on a mat", "the cat is on the mat")
    assert found == pytest.approx(expected, abs=1e-6)
    assert await graded(metric(name), "one two three four five", "one two three four five") == pytest.approx(
        1, abs=0.01
    )
    assert await graded(metric(name), "", "one two three four five") == 0


async def test_meteor_counts_stems_and_chunks() -> None:
    # of four words "one", "two" and the stem of "threes" are equal, in two chunks
    found = await graded(metric("meteor"), "one two threes nine", "one two four three")
    assert found == pytest.approx(3 / 4 * (1 - 0.5 * (2 / 3) ** 3))


async def test_a_fuzzy_match_is_the_share_of_characters_in_a_common_order() -> None:
    assert await graded(metric("fuzzy_match"), "kitten", "sitting") == pytest.approx(2 * len("ittn") / 13)


async def test_a_model_scores_within_its_range() -> None:
    judge = Scripted('{"result": 7.5}')
    spec = SCORE | {"range": [0, 10], "sampling_params": {"temperature": 0.5, "max_completions_tokens": 9, "seed": 3}}
    assert await graded(spec, "so", judge=judge) == 7.5
    (asked,) = judge.asked
    assert list(asked.messages) == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "so?"},
    ]
    assert (asked.model, asked.temperature, asked.max_tokens, asked.seed) == ("big", 0.5, 9, 3)
    assert asked.json_schema["properties"]["result"] == {
        "type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.1,
    }  # fmt: skip
    for text in ("7.5", '{"result": "7"}', '{"result": 11}', '{"result": NaN}', "[" * 100_000, ""):
        with pytest.raises(SampleError) as caught:
            await graded(spec, "so", judge=Scripted(text))
        assert caught.value.kind == "model_grader_parse_error"
    with pytest.raises(SampleError, match="no server whose models") as caught:
        await graded(spec, "so")
    assert caught.value.kind == "model_grader_server_error"


async def test_a_label_passes_or_not() -> None:
    both = {"type": "multi", "graders": {"label": LABEL, "score": SCORE}, "calculate_output": "label"}
    for label, reward in (("good", 1.0), ("bad", 0.0)):
        judge = Scripted(json.dumps({"result": label}))
        assert await graded(both | {"graders": {"label": LABEL}}, "so", judge=judge) == reward
        assert judge.asked[0].json_schema["properties"]["result"] == {"enum": ["good", "fair", "bad"]}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (metric("cosine"), "evaluation_metric cosine is for evaluations"),
        (metric("rouge_9"), "evaluation_metric must be one of fuzzy_match, bleu"),
        (SCORE | {"range": [1, 1]}, "range must be two numbers, the lower one first"),
        (SCORE | {"range": [0, math.inf]}, "range must be two numbers"),
        (SCORE | {"input": "say"}, "input must be a list of messages"),
        (SCORE | {"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role must be one of user"),
        (SCORE | {"input": [{"role": "user", "content": "{{ env.key }}"}]}, "there are item.FIELD"),
        (SCORE | {"model": ""}, "model is missing"),
        (SCORE | {"sampling_params": {"top_k": 3}}, "sampling_params.top_k is not served"),
        (SCORE | {"sampling_params": {"top_p": 3}}, "sampling_params.top_p must be a number from 0 to 1"),
        (LABEL, "put it within a multi grader"),
        (
            {"type": "multi", "graders": {"a": LABEL | {"passing_labels": ["fine"]}}, "calculate_output": "a"},
            "graders.a.passing_labels has 'fine', which is none of the labels",
        ),
    ],
)
def test_what_is_no_grader_is_said(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GraderError, match=sentence):
        grader_of(spec)
