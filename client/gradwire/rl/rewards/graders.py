"""Graders of OpenAI's form: ``string_check``, ``python``, and ``multi``, which combines others.

A grader compares an answer, the *sample*, with the row that it belongs to, the *item*. Its texts may name both, as
``{{ sample.output_text }}``, ``{{ sample.output_json.FIELD }}`` and ``{{ item.FIELD }}``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.rl.rewards.sandbox import Sandbox, SandboxLimits
from gradwire.rl.types import EvaluateResult, Trajectory

MAX_GRADERS = 16
MAX_FORMULA_CHARS = 1000
MAX_ABSOLUTE = 1e6
SOURCE_LIMITS = SandboxLimits(isolation="required")
_TEMPLATE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_PLACE = re.compile(r"(item|sample)((?:\.\w+)+)")


class GraderError(ValueError):
    """A grader that is none; the message says why."""


class SampleError(ValueError):
    """A sample that a grader could not grade.

    Attributes:
        kind: What went wrong, in the words of OpenAI's ``errors``.
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
            SampleError: The sample or the item has not what a place names.
        """
        return _TEMPLATE.sub(lambda found: self._value(found[1]), template)

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


class StringCheck(Grader):
    """1 if a comparison of two texts holds, else 0."""

    OPERATIONS: Mapping[str, Callable[[str, str], bool]] = {
        "eq": operator.eq,
        "ne": operator.ne,
        "like": lambda text, part: part in text,
        "ilike": lambda text, part: part.lower() in text.lower(),
    }

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = _text(spec, "name", where)
        self._input, self._reference = _template(spec, "input", where), _template(spec, "reference", where)
        operation = _text(spec, "operation", where)
        if operation not in self.OPERATIONS:
            raise GraderError(f"{where}operation must be one of {', '.join(self.OPERATIONS)}, not {operation[:50]!r}")
        self._holds = self.OPERATIONS[operation]

    async def grade(self, sample: Sample) -> float:
        return float(self._holds(sample.filled(self._input), sample.filled(self._reference)))


class Python(Grader):
    """The number that a function ``grade(sample, item)`` returns, in the sandbox."""

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = str(spec.get("name") or "python")
        self._source = _text(spec, "source", where)
        try:
            tree = ast.parse(self._source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise GraderError(f"{where}source is no Python: {error}") from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == "grade" for node in tree.body):
            raise GraderError(f"{where}source has no function grade(sample, item)")
        self._sandbox: Sandbox | None = None

    async def grade(self, sample: Sample) -> float:
        self._sandbox = self._sandbox or Sandbox(_run_source, SOURCE_LIMITS)
        outcome = await self._sandbox.call(self._source, sample.namespace, dict(sample.item))
        if outcome.error:
            raise SampleError("python_grader_runtime_error", outcome.error)
        return _number(outcome.value, "python_grader_runtime_error")

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


class Multi(Grader):
    """A formula over the rewards of other graders, such as ``0.8 * right + 0.2 * short``."""

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = str(spec.get("name") or "multi")
        given = spec.get("graders")
        if isinstance(given, Mapping) and isinstance(given.get("type"), str):
            given = {str(given.get("name") or "grader"): given}  # a single one
        if not isinstance(given, Mapping) or not 1 <= len(given) <= MAX_GRADERS:
            raise GraderError(f"{where}graders must map names to graders, {MAX_GRADERS} at most")
        for name, each in given.items():
            if isinstance(each, Mapping) and each.get("type") == "multi":
                raise GraderError(f"{where}graders.{name} is a multi grader inside of another")
        self.graders = {name: grader_of(each, f"{where}graders.{name}.") for name, each in given.items()}
        formula = _text(spec, "calculate_output", where)
        self._formula = Formula(formula, self.graders, f"{where}calculate_output")

    async def grade(self, sample: Sample) -> float:
        return self.combined(await self.scores(sample))

    async def scores(self, sample: Sample) -> dict[str, float]:
        """The reward of each grader."""
        found = await asyncio.gather(*(grader.grade(sample) for grader in self.graders.values()))
        return dict(zip(self.graders, found))

    def combined(self, scores: Mapping[str, float]) -> float:
        """The value of the formula."""
        return _number(self._formula.value(scores), "formula_parse_error")

    def close(self) -> None:
        for grader in self.graders.values():
            grader.close()


class Formula:
    """Arithmetic on named numbers: ``+ - * / **``, and ``min max abs floor ceil exp sqrt log``.

    Raises:
        GraderError: It is something else.
    """

    OPERATORS: Mapping[type, Callable[..., Any]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.Pow: lambda base, power: math.pow(base, power), ast.USub: operator.neg, ast.UAdd: operator.pos,
    }  # fmt: skip
    FUNCTIONS: Mapping[str, Callable[..., Any]] = {
        "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp,
        "sqrt": math.sqrt, "log": math.log,
    }  # fmt: skip

    def __init__(self, text: str, names: Mapping[str, Any], where: str) -> None:
        if len(text) > MAX_FORMULA_CHARS:
            raise GraderError(f"{where} has {len(text)} characters; {MAX_FORMULA_CHARS} at most")
        try:
            self._tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise GraderError(f"{where} is no formula: {error}") from None
        self._check(self._tree, names, where)

    def value(self, numbers: Mapping[str, float]) -> float:
        """The value for these numbers.

        Raises:
            SampleError: There is none, such as of a division by zero.
        """
        try:
            return float(self._value(self._tree, numbers))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise SampleError("formula_parse_error", f"calculate_output: {error}") from None

    def _check(self, node: ast.expr, names: Mapping[str, Any], where: str) -> None:
        parts: list[ast.expr]
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            parts = []
        elif isinstance(node, ast.Name):
            if node.id not in names:
                raise GraderError(f"{where} names {node.id!r}; there are {', '.join(names)}")
            parts = []
        elif isinstance(node, ast.BinOp) and type(node.op) in self.OPERATORS:
            parts = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and type(node.op) in self.OPERATORS:
            parts = [node.operand]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.FUNCTIONS:
            if node.keywords or not node.args:
                raise GraderError(f"{where}: {node.func.id} takes numbers, one at least")
            parts = node.args
        else:
            raise GraderError(f"{where} has {ast.unparse(node)[:50]!r}, which is no arithmetic on the graders' names")
        for part in parts:
            self._check(part, names, where)

    def _value(self, node: ast.expr, numbers: Mapping[str, float]) -> Any:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]  # checked to be a number
        if isinstance(node, ast.Name):
            return numbers[node.id]
        if isinstance(node, ast.BinOp):
            return self.OPERATORS[type(node.op)](self._value(node.left, numbers), self._value(node.right, numbers))
        if isinstance(node, ast.UnaryOp):
            return self.OPERATORS[type(node.op)](self._value(node.operand, numbers))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return self.FUNCTIONS[node.func.id](*(self._value(each, numbers) for each in node.args))


KINDS: Mapping[str, Callable[[Mapping[str, Any], str], Grader]] = {
    "string_check": StringCheck,
    "python": Python,
    "multi": Multi,
}
NOT_SERVED = ("text_similarity", "score_model", "label_model")


def grader_of(spec: Any, where: str = "") -> Grader:
    """Build a grader from its description.

    Args:
        where: Path of the description in a larger one, for errors.

    Raises:
        GraderError: It describes none.
    """
    if not isinstance(spec, Mapping):
        raise GraderError(f"{where.rstrip('.') or 'the grader'} must be an object with a type")
    kind = spec.get("type")
    if kind in NOT_SERVED:
        raise GraderError(f"{where}type {kind} is not served yet; there are {', '.join(KINDS)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise GraderError(f"{where}type is {str(kind)[:50]!r}; it must be one of {', '.join(KINDS)}")
    return KINDS[kind](spec, where)


def _run_source(source: str, sample: dict[str, Any], item: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {"__name__": "grader"}
    exec(source, scope)
    return scope["grade"](sample, item)


def _text(spec: Mapping[str, Any], field: str, where: str) -> str:
    value = spec.get(field)
    if not isinstance(value, str) or not value:
        raise GraderError(f"{where}{field} is missing, or no text")
    return value


def _template(spec: Mapping[str, Any], field: str, where: str) -> str:
    template = _text(spec, field, where)
    for place in _TEMPLATE.findall(template):
        found = _PLACE.fullmatch(place)
        if found is None or (found[1] == "sample" and found[2].split(".")[1] not in ("output_text", "output_json")):
            raise GraderError(
                f"{where}{field} has {{{{ {place[:50]} }}}}; there are item.FIELD, sample.output_text and"
                " sample.output_json.FIELD"
            )
    return template


def _number(value: Any, kind: str) -> float:
    if isinstance(value, bool | int | float) and abs(value) <= MAX_ABSOLUTE:  # NaN is not
        return float(value)
    raise SampleError(kind, f"the result is {str(value)[:50]!r}, not a number of at most {MAX_ABSOLUTE:g}")
