"""The grader ``multi``: a formula over the rewards of others."""

from __future__ import annotations

import ast
import asyncio
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, SampleError, number_of, text_of

MAX_GRADERS = 16
MAX_FORMULA_CHARS = 1000
Build = Callable[[Any, str], Grader]
"""A grader of its description, and of the description's path in a larger one."""


class Multi(Grader):
    """A formula over the rewards of other graders, such as ``0.8 * right + 0.2 * short``."""

    def __init__(self, spec: Mapping[str, Any], where: str, build: Build) -> None:
        self.name = str(spec.get("name") or "multi")
        graders = spec.get("graders")
        if isinstance(graders, Mapping) and isinstance(graders.get("type"), str):
            graders = {str(graders.get("name") or "grader"): graders}  # a single one
        if not isinstance(graders, Mapping) or not 1 <= len(graders) <= MAX_GRADERS:
            raise GraderError(f"{where}graders must map names to graders, {MAX_GRADERS} at most")
        for name, each in graders.items():
            if isinstance(each, Mapping) and each.get("type") == "multi":
                raise GraderError(f"{where}graders.{name} is a multi grader inside of another")
        self.graders = {name: build(each, f"{where}graders.{name}.") for name, each in graders.items()}
        formula = text_of(spec, "calculate_output", where)
        self._formula = Formula(formula, self.graders, f"{where}calculate_output")

    async def grade(self, sample: Sample) -> float:
        return self.combined(await self.scores(sample))

    async def scores(self, sample: Sample) -> dict[str, float]:
        """The reward of each grader."""
        found = await asyncio.gather(*(grader.grade(sample) for grader in self.graders.values()))
        return dict(zip(self.graders, found))

    def combined(self, scores: Mapping[str, float]) -> float:
        """The value of the formula."""
        return number_of(self._formula.value(scores), "formula_parse_error")

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
