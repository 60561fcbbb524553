"""Tasks from rows as the well-known data sets have them, and the graders that go with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.rl.datasets import choice_tasks, code_tasks, final_answer, math_tasks
from gradwire.rl.rewards import code_passes, last_number, math_answer, multiple_choice
from gradwire.rl.rewards.answers import find_choice
from gradwire.rl.types import Action, StepData, Task, Trajectory


def answered(task: Task, *responses: str) -> list[Trajectory]:
    ids = np.array([1])
    return [
        Trajectory(task, steps=[StepData(0, "", "", ids, Action(response), ids, np.zeros(1, np.float32))])
        for response in responses
    ]


async def scores(grader: Any, trajectories: Sequence[Trajectory]) -> list[float]:
    results = await grader.evaluate(trajectories)
    await asyncio.to_thread(grader.close)  # waits for the processes
    assert not any(result.error for result in results), results
    assert all(result.reason or result.metrics for result in results), results
    return [result.score for result in results]


@pytest.fixture
def math_verify() -> None:
    pytest.importorskip("math_verify")


@pytest.mark.long
@pytest.mark.usefixtures("math_verify")
async def test_mathematics(tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl"
    lines = [
        {"question": "How many?", "answer": "2 * 617 = 1,234\n#### 1,234"},
        {"problem": "Half?", "solution": r"So it is \boxed{\frac{1}{2}}."},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    many, half = math_tasks(file, template="Solve: {question}")
    assert (many.prompt, many.ground_truth, half.ground_truth) == ("Solve: How many?", "1234", r"\frac{1}{2}")
    assert await scores(last_number(), answered(many, "it is 1,234", "1233")) == [1, 0]
    right = (r"\boxed{0.5}", "the answer is $1/2$", r"$\frac{2}{4}$")
    assert await scores(math_answer(format_score=0.1), answered(half, *right, "$0.4$", "no idea")) == [1, 1, 1, 0.1, 0]
    with pytest.raises(ValueError, match="has no rows"):
        math_tasks([])
    with pytest.raises(
        ValueError, match="row 0: a row does not have any of answer, final_answer, solution; it has question"
    ):
        math_tasks([{"question": "?"}])
    file.write_text("{")
    with pytest.raises(ValueError, match=r"math.jsonl, line 1: not valid JSON"):
        math_tasks(str(file))


def test_what_a_solution_ends_with() -> None:
    assert final_answer(r"\boxed{1}, no: \boxed{\sqrt{x_{2}}} is it") == r"\sqrt{x_{2}}"
    assert final_answer(" 7 ") == "7"


async def test_multiple_choice() -> None:
    rows = [
        {"question": "Sky?", "choices": ["green", "blue"], "answer": 1},  # MMLU
        {"question": "Sky?", "choices": {"text": ["green", "blue"], "label": ["1", "2"]}, "answerKey": "2"},  # ARC
        {"question": "Sky?", "options": ["green", "blue"], "answer": "blue"},
        {"prompt": "Sky?", "endings": ["green", "blue"], "label": "1"},  # HellaSwag
    ]
    tasks = choice_tasks(rows)
    assert [task.ground_truth for task in tasks] == ["B"] * 4
    assert "A. green\nB. blue" in str(tasks[0].prompt)
    said = ("B", "The answer is (B).", r"\boxed{\text{B}}", "A is wrong, so B", "Answer: A", "I cannot tell")
    assert await scores(multiple_choice(format_score=0.1), answered(tasks[0], *said)) == [1, 1, 1, 1, 0.1, 0]
    assert find_choice("Because of this, the answer is (a).") == "A"
    assert find_choice("the answer is a blue sky: B") == "B"
    with pytest.raises(ValueError, match="row 0: the answer 'red' matches none of the 2 options"):
        choice_tasks([{**rows[0], "answer": "red"}])


async def test_code() -> None:
    rows = [
        {"text": "Add.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},  # MBPP
        {"question": "Echo.", "input_output": json.dumps({"inputs": ["a\n"], "outputs": ["a\n"]})},  # APPS
    ]
    add, echo = code_tasks(rows)
    assert echo.ground_truth == [{"input": "a\n", "output": "a\n"}]
    written = "```python\ndef add(a, b):\n    return a + b\n```"
    assert await scores(code_passes(), answered(add, written, "def add(a, b):\n    return a or 3")) == [1, 0]
    with pytest.raises(ValueError, match="row 0: there are no tests"):
        code_tasks([{"prompt": "?", "tests": []}])
