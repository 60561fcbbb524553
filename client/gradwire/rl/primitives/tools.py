"""Tools by name: ``available_tools=["calculator"]``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.rl.environments import Tool

BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
MOST_DIGITS = 300


def calculator(expression: str) -> str:
    """Evaluate arithmetic: numbers, + - * / // % ** and parentheses."""
    return str(_evaluated(ast.parse(expression.strip(), mode="eval").body))


def _evaluated(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluated(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _evaluated(left), _evaluated(right)
            if abs(exponent) > MOST_DIGITS or abs(base) > 10**MOST_DIGITS:
                raise ValueError("the power is too large")
            return _bounded(base**exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _bounded(BINARY[type(op)](_evaluated(left), _evaluated(right)))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")


def _bounded(value: Any) -> float:
    if isinstance(value, complex):
        raise ValueError("the result is not real")
    if isinstance(value, int) and abs(value) >= 10 ** (4 * MOST_DIGITS):
        raise ValueError("the result is too large")
    return value  # type: ignore[no-any-return]


_tools: dict[str, Tool] = {"calculator": Tool.of(calculator)}


def register_tool(tool: Tool | Callable[..., Any], name: str | None = None) -> None:
    """Register a tool under its name or another one; replaces a tool of the same name."""
    made = Tool.of(tool)
    if name is not None:
        made = Tool(name, made.description, made.function, made.parameters, made.cost, made.timeout_s)
    _tools[made.name] = made


def tools_of(tools: Iterable[str | Tool | Callable[..., Any]]) -> list[Tool]:
    """Resolve tools; names refer to registered tools.

    Raises:
        ValueError: A name is not registered.
    """
    chosen = []
    for each in tools:
        if isinstance(each, str) and each not in _tools:
            raise ValueError(
                f"there is no tool {each!r}: register_tool(function, name={each!r}) adds it; registered are "
                f"{', '.join(sorted(_tools))}"
            )
        chosen.append(_tools[each] if isinstance(each, str) else Tool.of(each))
    return chosen
