"""A simulated help desk of a shop: customers' messages, a careless clerk's answers, and raters."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

ITEMS = ("lamp", "chair", "kettle", "phone", "jacket", "bike", "camera", "table", "clock", "radio", "tent", "sofa")
PEOPLE = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fay", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lea")

QUESTIONS = {
    "delivery": ("Where is my {item}?", "When does the {item} arrive?"),
    "refund": ("I want my money back for the {item}.", "Please refund the {item}."),
    "broken": ("My {item} is broken.", "The {item} does not work."),
    "colour": ("Do you have the {item} in blue?", "Is there a blue {item}?"),
    "price": ("What does the {item} cost?", "How much is the {item}?"),
}
ANSWERS = {
    "delivery": "It arrives on Monday.",
    "refund": "We return your money this week.",
    "broken": "We send you a new one today.",
    "colour": "Yes, we have it in blue.",
    "price": "It costs forty euros.",
}
VAGUE = "That is not our problem."
GREETING, RUDE = "Hello, thank you for writing.", "What do you want now?"
CLOSING = "Can I help you with anything else?"


@dataclass(frozen=True)
class Question:
    """A customer's message: ``prompt`` is what the policy continues."""

    person: str
    topic: str
    item: str
    text: str

    @property
    def prompt(self) -> str:
        return f"{self.person}: {self.text}\nClerk:"


def questions(seed: int, held_out: int) -> tuple[list[Question], list[Question]]:
    """Return all questions in random order, split into working questions and held-out questions."""
    every = [
        Question(person, topic, item, text.format(item=item))
        for person in PEOPLE
        for topic, texts in QUESTIONS.items()
        for item in ITEMS
        for text in texts
    ]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def clerk(question: Question, rng: random.Random) -> str:
    """Write a careless clerk's answer, which the first policy imitates: often rude or irrelevant."""
    opening = rng.choices((GREETING, "", RUDE), (3, 4, 3))[0]
    topic = question.topic if rng.random() < 0.45 else rng.choice(list(ANSWERS))
    body = VAGUE if rng.random() < 0.25 else ANSWERS[topic]
    closing = CLOSING if rng.random() < 0.3 else ""
    return "".join(f" {part}" for part in (opening, body, closing) if part)


def true_score(question: Question, answer: str) -> float:
    """Score an answer from 0 to 1: relevant 0.6, greeting 0.2 (0 if rude, else 0.1), offer of help 0.2."""
    text = re.sub(r"\s+", " ", answer).strip()
    score = 0.1
    if text.startswith(GREETING):
        text, score = text.removeprefix(GREETING).strip(), 0.2
    elif text.startswith(RUDE):
        text, score = text.removeprefix(RUDE).strip(), 0.0
    if text.endswith(CLOSING):
        text, score = text.removesuffix(CLOSING).strip(), score + 0.2
    if text != VAGUE and text not in ANSWERS.values():
        return 0.0  # not an answer at all
    return score + 0.6 * (text == ANSWERS[question.topic])


@dataclass(frozen=True)
class Rater:
    """A rater: the true score plus a personal bias and noise."""

    bias: float
    noise: float

    def rate(self, question: Question, answer: str, rng: random.Random) -> float:
        """Rate an answer from 0 to 1, in steps of 0.05 as on a slider."""
        felt = true_score(question, answer) + self.bias + rng.gauss(0, self.noise)
        return round(min(1.0, max(0.0, felt)) * 20) / 20


def raters(count: int, seed: int) -> Sequence[Rater]:
    """Create raters with biases of standard deviation 0.1 and noise between 0.05 and 0.25."""
    rng = random.Random(seed)
    return [Rater(rng.gauss(0, 0.1), rng.uniform(0.05, 0.25)) for _ in range(count)]
