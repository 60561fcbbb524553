"""Tasks with answers that a program can check: generated arithmetic, or JSONL files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar


class Problem(NamedTuple):
    """A prompt, a worked answer, and the number at the end of the answer."""

    prompt: str
    answer: str
    number: str


class Preference(NamedTuple):
    prompt: str
    chosen: str
    rejected: str


T = TypeVar("T", Problem, Preference)


@dataclass(frozen=True)
class Task:
    """Training and evaluation data of the three stages.

    Attributes:
        demonstrations: Prompts and answers to imitate.
        held_out_demonstrations: For the imitation loss; not seen in any stage.
        prompts: Prompts for PPO.
        held_out: For accuracy and reward; not seen in any stage.
        preferences, held_out_preferences: Empty if they are to be made from the policy's own right and wrong
            answers.
        source, preference_source, prompt_source: What the demonstrations, pairs and prompts are, for a reader.
    """

    demonstrations: Sequence[Problem]
    held_out_demonstrations: Sequence[Problem]
    prompts: Sequence[Problem]
    held_out: Sequence[Problem]
    preferences: Sequence[Preference] = ()
    held_out_preferences: Sequence[Preference] = ()
    source: str = ""
    preference_source: str = ""
    prompt_source: str = ""


def last_number(text: str) -> str:
    """Return the last number of an answer, after its last ``#`` if it has one; empty if there is none."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.rsplit("#", 1)[-1].replace(",", ""))
    return numbers[-1] if numbers else ""


def is_right(problem: Problem, answer: str) -> bool:
    return last_number(answer) == problem.number


# ---------------------------------------------------------------- arithmetic

ARITHMETIC_CHARACTERS = "0123456789+=,#"


def sum_problem(rng: random.Random, carelessness: float = 0.0) -> Problem:
    """Two numbers of three digits, added digit by digit: ``478+256=`` ``8+6=14,7+5+1=13,4+2+1=7#734``.

    ``carelessness`` is the chance, at each digit after the first, to forget a carry or to add one that is not there.
    The rest is then worked correctly from the slip on, as a careless pupil would; ``number`` is the true sum.
    """
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    steps, total, carry = [], 0, 0
    for place in range(3):
        x, y = a // 10**place % 10, b // 10**place % 10
        slipped = place > 0 and rng.random() < carelessness
        one = carry ^ slipped
        digit_sum = x + y + one
        steps.append(f"{x}+{y}{'+1' if one else ''}={digit_sum}")
        total += digit_sum % 10 * 10**place
        carry = digit_sum // 10
    return Problem(f"{a}+{b}=", f"{','.join(steps)}#{total + 1000 * carry}", str(a + b))


def arithmetic(seed: int, demonstrations: int, prompts: int = 8192, held_out: int = 256) -> Task:
    """Sums, demonstrated by careless pupils who make mistakes at three carries in ten."""
    rng = random.Random(seed)
    reserved = {problem.prompt: problem for problem in (sum_problem(rng) for _ in range(held_out))}

    def fresh(count: int, carelessness: float) -> list[Problem]:
        made = (sum_problem(rng, carelessness) for _ in range(count))
        return [problem for problem in made if problem.prompt not in reserved]

    reserved_demonstrations = fresh(held_out, 0.3)
    reserved |= {problem.prompt: problem for problem in reserved_demonstrations}
    return Task(
        demonstrations=fresh(demonstrations, 0.3),
        held_out_demonstrations=reserved_demonstrations,
        prompts=fresh(prompts, 0.0),
        held_out=[problem for problem in reserved.values() if problem not in reserved_demonstrations],
        source="sums of two numbers of three digits, worked by pupils who slip at three carries in ten",
        preference_source="the SFT policy's own right and wrong answers, and right answers that were spoiled",
        prompt_source="sums of two numbers of three digits",
    )


def spoiled(answer: str, rng: random.Random) -> str:
    """Change, drop, add or cut off one to three characters of the answer: an obviously bad answer."""
    text = list(answer)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(text)), rng.random()
        if kind < 0.6:
            text[at] = rng.choice("0123456789" if text[at].isdigit() else ARITHMETIC_CHARACTERS)
        elif kind < 0.75 and len(text) > 1:
            del text[at]
        elif kind < 0.9:
            text.insert(at, rng.choice(ARITHMETIC_CHARACTERS))
        else:
            text = text[: at + 1]
    return "".join(text)


# ---------------------------------------------------------------- files


def from_files(sft_data: Path, preference_data: Path, prompt_data: Path, seed: int) -> Task:
    """A task from JSONL: ``question`` and ``answer`` (demonstrations, prompts); ``prompt``, ``chosen``, ``rejected``.

    One question in twenty of the demonstrations, one in eight of the preferences and one in four of the prompts are
    held out, by question: pairs on one question are never on both sides, and held-out prompts are removed from the
    training data of the other files."""
    demonstrations = [_problem(row) for row in _rows(sft_data, ("question", "answer"))]
    problems = [_problem(row) for row in _rows(prompt_data, ("question", "answer"))]
    pairs = [
        Preference(row["prompt"] + "\n", row["chosen"], row["rejected"])
        for row in _rows(preference_data, ("prompt", "chosen", "rejected"))
    ]
    prompts, held_out = _split(problems, 4, seed)
    reserved = {problem.prompt for problem in held_out}
    demonstrations, held_out_demonstrations = _split(demonstrations, 20, seed, reserved)
    pairs, held_out_pairs = _split(pairs, 8, seed, reserved)
    return Task(
        demonstrations, held_out_demonstrations, prompts, held_out, pairs, held_out_pairs,
        source=sft_data.name, preference_source=preference_data.name, prompt_source=prompt_data.name,
    )  # fmt: skip


def _problem(row: dict[str, str]) -> Problem:
    return Problem(row["question"] + "\n", row["answer"], last_number(row["answer"]))


def _rows(path: Path, fields: tuple[str, ...]) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        missing = [name for name in fields if not isinstance(row.get(name), str)]
        if missing:
            raise SystemExit(f"{path}, line {number}: no text under {', '.join(missing)}; the fields are {fields}")
    if not rows:
        raise SystemExit(f"{path} has no rows")
    return rows


def _split(rows: list[T], one_in: int, seed: int, reserved: Set[str] = frozenset()) -> tuple[list[T], list[T]]:
    """Split the rows into training and held-out rows: one question in ``one_in``, and the ``reserved`` questions."""
    questions = sorted({row.prompt for row in rows} - reserved)
    random.Random(seed).shuffle(questions)
    held_out = reserved | set(questions[: max(1, len(questions) // one_in)])
    return [row for row in rows if row.prompt not in held_out], [row for row in rows if row.prompt in held_out]
