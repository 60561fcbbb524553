"""The simulated help desk: its true score, its clerk and its raters."""

from __future__ import annotations

import random
import statistics

import pytest
from _support.help_desk import ANSWERS, CLOSING, GREETING, RUDE, VAGUE, Question, clerk, questions, raters, true_score

ASKED = Question("Ana", "price", "lamp", "What does the lamp cost?")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (f"{GREETING} {ANSWERS['price']} {CLOSING}", 1.0),
        (f" {ANSWERS['price']}", 0.7),
        (f"{RUDE} {ANSWERS['price']}", 0.6),
        (f"{GREETING} {ANSWERS['refund']}", 0.2),
        (f"{RUDE} {VAGUE}", 0.0),
        (f"{GREETING} {ANSWERS['price']} {ANSWERS['price']}", 0.0),
        ("", 0.0),
    ],
)
def test_the_true_score(answer: str, score: float) -> None:
    assert true_score(ASKED, answer) == pytest.approx(score)


def test_the_clerk_is_careless_and_always_understood() -> None:
    rng = random.Random(0)
    scores = [true_score(ASKED, clerk(ASKED, rng)) for _ in range(2000)]
    assert 0.3 < statistics.fmean(scores) < 0.5
    assert all("  " not in clerk(ASKED, rng) for _ in range(100))


def test_held_out_questions_are_no_others() -> None:
    practice, held_out = questions(0, 256)
    assert len(held_out) == 256
    assert not {question.prompt for question in practice} & {question.prompt for question in held_out}


def test_raters_are_biased_and_noisy_about_the_truth() -> None:
    rng = random.Random(0)
    crowd = raters(200, 0)
    answer = f" {ANSWERS['price']}"
    ratings = [[rater.rate(ASKED, answer, rng) for _ in range(20)] for rater in crowd]
    means = [statistics.fmean(each) for each in ratings]
    assert statistics.fmean(means) == pytest.approx(0.7, abs=0.05)
    assert 0.05 < statistics.stdev(means) < 0.15, "a bias each"
    assert statistics.fmean(statistics.stdev(each) for each in ratings) > 0.08
    assert all(0 <= rating <= 1 for each in ratings for rating in each)
