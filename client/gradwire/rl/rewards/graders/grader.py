"""The base of all graders: templates, samples, errors and the class itself."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.rl.types import EvaluateResult, Trajectory

MAX_ABSOLUTE = 1e6
MAX_FILLED_CHARS = 1 << 22
"""Characters of a template with its places filled in."""
_TEMPLATE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_PLACE = re.compile(r"(item|sample)((?:\.\w+)+)")


class GraderError(ValueError):
    """An invalid specification of a grader; the message says why."""


class SampleError(ValueError):
    """A sample that a grader could not grade.

    Attributes:
        kind: The kind of error, in the words of OpenAI's ``errors``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Sample:
    """An answer with its row."""

    text: str
    item: Mapping[str, Any]

    def filled(self, template: str) -> str:
        """A template with its places filled in.

        Raises:
            SampleError: The sample or the item has not what a place names, or the text is too long.
        """
        size = 0

        def value(found: re.Match[str]) -> str:
            nonlocal size
            text = self._value(found[1])
            size += len(text)
            if size > MAX_FILLED_CHARS:
                raise SampleError("other_error", f"a template's places have more than {MAX_FILLED_CHARS} characters")
            return text

        return _TEMPLATE.sub(value, template)

    @property
    def namespace(self) -> dict[str, Any]:
        """The sample as graders of Python code get it."""
        try:
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            parsed = None
        return {"output_text": self.text, "output_json": parsed}

    def _value(self, place: str) -> str:
        root, *path = place.split(".")
        value: Any = self.item if root == "item" else self.namespace
        for number, name in enumerate(path):
            if not isinstance(value, Mapping) or name not in value:
                where = ".".join([root, *path[:number]])
                kind = "sample_parse_error" if root == "sample" else "other_error"
                raise SampleError(kind, f"{{{{ {place} }}}}: {where} has no {name}")
            value = value[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Grader(ABC):
    """Grades samples; also a scorer of trajectories, whose tasks have the item as their ground truth.

    Attributes:
        name: For people, and for the formulas of ``multi``.
    """

    name: str

    @abstractmethod
    async def grade(self, sample: Sample) -> float:
        """The reward of a sample.

        Raises:
            SampleError: It could not be graded.
        """

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        """Grade the last answer of each trajectory; one that could not be graded has an error, and no reward."""
        return list(await asyncio.gather(*map(self._evaluated, trajectories)))

    def close(self) -> None:  # noqa: B027  most graders start nothing
        """Stop what the grader has started."""

    async def _evaluated(self, trajectory: Trajectory) -> EvaluateResult:
        try:
            return EvaluateResult(await self.grade(Sample(trajectory.response, trajectory.ground_truth)))
        except SampleError as error:
            return EvaluateResult(0.0, error=f"{self.name}: {error}")


def text_of(spec: Mapping[str, Any], field: str, where: str) -> str:
    """A text of a description.

    Raises:
        GraderError: It is missing, or empty.
    """
    value = spec.get(field)
    if not isinstance(value, str) or not value:
        raise GraderError(f"{where}{field} is missing, or no text")
    return value


def template_of(spec: Mapping[str, Any], field: str, where: str) -> str:
    """A template of a description, whose places are checked.

    Raises:
        GraderError: It is missing, or names what there is not.
    """
    template = text_of(spec, field, where)
    for place in _TEMPLATE.findall(template):
        found = _PLACE.fullmatch(place)
        if found is None or (found[1] == "sample" and found[2].split(".")[1] not in ("output_text", "output_json")):
            raise GraderError(
                f"{where}{field} has {{{{ {place[:50]} }}}}; there are item.FIELD, sample.output_text and"
                " sample.output_json.FIELD"
            )
    return template


def number_of(value: Any, kind: str) -> float:
    """A result that is a number.

    Raises:
        SampleError: The result is not a number; the error has this kind.
    """
    if isinstance(value, bool | int | float) and abs(value) <= MAX_ABSOLUTE:  # NaN is not
        return float(value)
    raise SampleError(kind, f"the result is {str(value)[:50]!r}, not a number of at most {MAX_ABSOLUTE:g}")
