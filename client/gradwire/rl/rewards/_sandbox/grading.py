"""The share of tests that a policy's program passes."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from .program import IsolationError, PolicyProgram, ProgramError


def share_of_passed(code: str, tests: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Grade a program by tests, each a text of statements or ``{"input": …, "output": …}`` of a whole program.

    The metrics are the number of passed tests and, if the machine could not isolate the program, ``isolated`` as 0.

    Raises:
        IsolationError: The machine cannot isolate the program and ``limits`` require it.
    """
    tests = [tests] if isinstance(tests, str | Mapping) else list(tests)
    statements = [test for test in tests if not isinstance(test, Mapping)]
    programs: list[PolicyProgram] = []

    def start() -> PolicyProgram:
        programs.append(PolicyProgram(code, **limits))
        return programs[-1]

    failures = [_try_program(start(), test) for test in tests if isinstance(test, Mapping)]
    failures += _try_statements(start(), statements) if statements else []
    metrics = {"passed": float(failures.count(""))}
    if not all(program.isolated for program in programs):
        metrics["isolated"] = 0.0
    reason = next((failure for failure in failures if failure), "")
    return {"score": metrics["passed"] / max(len(tests), 1), "metrics": metrics, "reason": reason}


def _try_program(program: PolicyProgram, test: Mapping[str, Any]) -> str:
    """Return why the program fails the test, empty if it passes; trailing spaces of lines are ignored."""
    if set(test) != {"input", "output"}:
        raise ValueError(f'a test of a program has "input" and "output"; this one has {", ".join(map(str, test))}')
    try:
        with program:
            printed = program.run(str(test["input"]))
    except IsolationError:
        raise
    except Exception as error:  # whatever the program raised
        return _reason("input " + repr(test["input"])[:100], error)
    if _lines(printed) == _lines(str(test["output"])):
        return ""
    return f"input {test['input']!r}: printed {printed!r}"[:500]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _try_statements(program: PolicyProgram, tests: list[str]) -> list[str]:
    """Return why the program fails each test, empty where it passes."""
    with program:
        try:
            names = program.load()
        except Exception as error:  # whatever the program raised
            return [_reason("", error)] * len(tests)
        return [_try_statement(test, names) for test in tests]


def _try_statement(test: str, names: Mapping[str, Any]) -> str:
    compiled = compile(test, "test", "exec")
    try:
        exec(compiled, _scope(compiled, names))
    except BaseException as error:  # includes SystemExit: a test that exits early has not passed
        return _reason(test, error)
    return ""


def _scope(test: CodeType, names: Mapping[str, Any]) -> dict[str, Any]:
    """Build the global names of a test: the program's names, with builtins and modules of this process.

    Otherwise a program that defines ``abs`` or patches ``math`` could decide its own test. A builtin's name refers to
    the program's definition only if the test uses nothing else of the program: then the definition is what is tested.
    """
    used = {name: names[name] for name in dict.fromkeys(names_of(test)) if name in names}
    scope: dict[str, Any] = {"__name__": "test"}
    for name, value in used.items():
        if isinstance(value, str):
            if value.partition(".")[0] in sys.stdlib_module_names | {"numpy", "sympy", "scipy", "pandas"}:
                scope[name] = importlib.import_module(value)
        elif not hasattr(builtins, name):
            scope[name] = value
    if not any(not isinstance(value, str) and not hasattr(builtins, name) for name, value in used.items()):
        scope.update({name: value for name, value in used.items() if hasattr(builtins, name)})
    return scope


def names_of(code: CodeType) -> Iterator[str]:
    """The global names and attributes that a code and the codes in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def _reason(where: str, error: BaseException) -> str:
    what = str(error) if type(error) is ProgramError else f"{type(error).__name__}: {error}"
    return (f"{where}: {what}" if where else what)[:500]
