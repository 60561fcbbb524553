"""Tasks from data sets: mathematics, multiple choice and code, from JSONL, from ``datasets``, or from rows.

A source is the path of a JSONL, CSV or Parquet file, the name of a data set for ``datasets.load_dataset`` (needs
``gradwire[data]``), or an iterable of rows. Each loader names the grader of ``gradwire.rl.rewards`` to use with it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradwire.data.sources import DataError, Row, Source, read
from gradwire.rl.types import Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FINAL = re.compile(r"####\s*(.+)")


def rows(source: Source, *, split: str = "train", **options: Any) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a source, each with its location for error messages: see :func:`gradwire.data.read`.

    Raises:
        gradwire.data.DataError: A row cannot be read.
    """
    for where, row in read(source, split=split, **options):
        if isinstance(row, DataError):
            raise row
        yield where, row


def math_tasks(
    source: Source,
    *,
    question: str = "",
    answer: str = "",
    template: str = "{question}",
    split: str = "train",
    limit: int | None = None,
    **options: Any,
) -> list[Task]:
    """Load problems whose ground truth is a number or an expression.

    The answer of a worked solution follows ``####`` (GSM8K) or is in its last ``\\boxed{}`` (MATH). Grade
    numbers with :func:`~gradwire.rl.rewards.last_number`, other answers with :func:`~gradwire.rl.rewards.math_answer`.

    Args:
        source, split, options: See :func:`rows`.
        question, answer: Field names; by default the first present of ``question``, ``problem``, ``prompt``
            and of ``answer``, ``final_answer``, ``solution``.
        template: Prompt template for the question.
        limit: Maximum number of tasks.
    """
    tasks = []
    for where, row in itertools.islice(rows(source, split=split, **options), limit):
        asked = _text(row, where, question, "question", "problem", "prompt")
        told = _text(row, where, answer, "answer", "final_answer", "solution")
        tasks.append(Task(template.replace("{question}", asked), final_answer(told)))
    return _some(tasks, source)


def final_answer(solution: str) -> str:
    """Extract the final answer of a worked solution: after ``####``, in its last ``\\boxed{}``, or the whole text."""
    marked = _FINAL.findall(solution)
    if marked:
        return str(marked[-1]).strip().replace(",", "")
    start = solution.rfind("\\boxed{")
    if start < 0:
        return solution.strip()
    depth, begin = 0, start + len("\\boxed")
    for at in range(begin, len(solution)):
        depth += (solution[at] == "{") - (solution[at] == "}")
        if not depth:
            return solution[begin + 1 : at].strip()
    return solution[begin + 1 :].strip()


def choice_tasks(
    source: Source,
    *,
    question: str = "",
    choices: str = "",
    answer: str = "",
    template: str = "{question}\n\n{options}\n\nAnswer with the letter of the right option.",
    split: str = "train",
    limit: int | None = None,
    **options: Any,
) -> list[Task]:
    """Load questions with options, whose ground truth is a letter.

    Options are a list, or ``{"text": [...], "label": [...]}`` (ARC); the answer is an index from 0, a label, or an
    option's text. Grade with :func:`~gradwire.rl.rewards.multiple_choice`.

    Args:
        source, split, options: See :func:`rows`.
        question, choices, answer: Field names; by default the first present of ``question``, ``prompt``, of
            ``choices``, ``options``, ``endings``, and of ``answer``, ``answerKey``, ``label``.
        template: Prompt template for the question.
        limit: Maximum number of tasks.
    """
    tasks = []
    for where, row in itertools.islice(rows(source, split=split, **options), limit):
        asked = _text(row, where, question, "question", "prompt")
        given = _field(row, where, choices, "choices", "options", "endings")
        texts = list(given["text"]) if isinstance(given, Mapping) else list(given)
        labels = list(given["label"]) if isinstance(given, Mapping) else []
        right = _place(_field(row, where, answer, "answer", "answerKey", "label"), texts, labels, where)
        if len(texts) > len(LETTERS):
            raise ValueError(f"{where}: {len(texts)} options, but there are only {len(LETTERS)} letters")
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts))
        prompt = template.replace("{question}", asked).replace("{options}", listed)
        tasks.append(Task(prompt, LETTERS[right], data={"options": texts}))
    return _some(tasks, source)


def _place(answer: Any, texts: list[Any], labels: list[Any], where: str) -> int:
    """Find the index of the right option."""
    if isinstance(answer, int) and 0 <= answer < len(texts):
        return answer
    for known in (labels, list(LETTERS[: len(texts)]), texts, [str(number) for number in range(len(texts))]):
        if answer in known:
            return known.index(answer)
    raise ValueError(f"{where}: the answer {answer!r} matches none of the {len(texts)} options")


def code_tasks(
    source: Source,
    *,
    prompt: str = "",
    tests: str = "",
    template: str = "{prompt}",
    split: str = "train",
    limit: int | None = None,
    **options: Any,
) -> list[Task]:
    """Load programming problems whose ground truth is a list of tests.

    Tests are statements (``assert add(1, 2) == 3``, MBPP's ``test_list``), or pairs of a program's input and output
    as a list of ``{"input": ..., "output": ...}`` or as two lists under ``inputs`` and ``outputs`` (APPS), also
    as JSON text. Grade with :func:`~gradwire.rl.rewards.code_passes`.

    Args:
        source, split, options: See :func:`rows`.
        prompt, tests: Field names; by default the first present of ``prompt``, ``text``, ``question``, and of
            ``test_list``, ``tests``, ``input_output``.
        template: Prompt template for the problem.
        limit: Maximum number of tasks.
    """
    tasks = []
    for where, row in itertools.islice(rows(source, split=split, **options), limit):
        asked = _text(row, where, prompt, "prompt", "text", "question")
        found = _tests(_field(row, where, tests, "test_list", "tests", "input_output"), where)
        tasks.append(Task(template.replace("{prompt}", asked), found))
    return _some(tasks, source)


def _tests(tests: Any, where: str) -> list[Any]:
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= set(tests):
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": expected} for given, expected in pairs]
    listed = [tests] if isinstance(tests, str) else list(tests)
    if not listed:
        raise ValueError(f"{where}: there are no tests")
    return listed


def _field(row: Row, where: str, name: str, *usual: str) -> Any:
    for each in (name,) if name else usual:
        if row.get(each) is not None:
            return row[each]
    asked = f"the field {name!r}" if name else f"any of {', '.join(usual)}"
    raise ValueError(
        f"{where}: a row does not have {asked}; it has {', '.join(row) or 'nothing'}. Pass the field names"
    )


def _text(row: Row, where: str, name: str, *usual: str) -> str:
    return str(_field(row, where, name, *usual))


def _some(tasks: list[Task], source: Source) -> list[Task]:
    if not tasks:
        raise ValueError(f"{source if isinstance(source, str | Path) else 'the source'} has no rows")
    return tasks
