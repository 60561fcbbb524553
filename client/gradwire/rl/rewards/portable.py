"""Make a function portable: its code and dependencies, for a process that cannot import its module.

A function of a notebook or a script cannot be imported elsewhere, and running the script again would run its training.
So functions of the same module are sent as code; modules and everything importable are sent by name.
"""

from __future__ import annotations

import marshal
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from gradwire.rl.rewards._sandbox.grading import names_of

Encoded = tuple[str, Any]
SANDBOX = f"{__package__}._sandbox"


class NotPortableError(TypeError):
    """The function uses something that cannot be sent to the sandbox."""


def capture(function: Callable[..., Any]) -> dict[str, Any]:
    """Capture a function in the form that ``_sandbox.rebuild`` reads.

    Raises:
        NotPortableError: It refers to something that can neither be imported nor copied; names it.
    """
    if not isinstance(function, FunctionType):
        raise NotPortableError(
            f"the sandbox needs a plain function, got {type(function).__name__}. Call it in your own function, "
            "or use reward_function(sandboxed=False)"
        )
    return _Capture(function).result()


class _Capture:
    def __init__(self, function: FunctionType) -> None:
        self._module = function.__module__
        self._numbers: dict[int, int] = {}
        self._kept: list[FunctionType] = []
        self._root = function

    def result(self) -> dict[str, Any]:
        self._number(self._root)
        records = []
        for function in self._kept:  # grows while functions refer to others
            records.append(self._record(function))
        return {"functions": records}

    def _number(self, function: FunctionType) -> int:
        if id(function) not in self._numbers:
            self._numbers[id(function)] = len(self._kept)
            self._kept.append(function)
        return self._numbers[id(function)]

    def _record(self, function: FunctionType) -> dict[str, Any]:
        name, names = function.__qualname__, sorted(set(names_of(function.__code__)))
        cells = [(cell, free) for cell, free in zip(function.__closure__ or (), function.__code__.co_freevars)]
        return {
            "name": function.__name__,
            "code": marshal.dumps(function.__code__),
            "globals": {
                each: self._value(function.__globals__[each], f"{name}: {each}", names)
                for each in names
                if each in function.__globals__
            },
            "closure": [self._cell(cell, f"{name}: {free}", names) for cell, free in cells],
            "defaults": [self._value(each, f"{name}: a default", names) for each in function.__defaults__ or ()],
            "kwdefaults": {
                each: self._value(default, f"{name}: the default of {each}", names)
                for each, default in (function.__kwdefaults__ or {}).items()
            },
        }

    def _cell(self, cell: Any, where: str, names: list[str]) -> Encoded | None:
        try:
            content = cell.cell_contents
        except ValueError:
            return None
        return self._value(content, where, names)

    def _value(self, value: Any, where: str, names: list[str]) -> Encoded:
        value = getattr(value, "__reward_function__", value)
        if isinstance(value, ModuleType):
            used = [f"{value.__name__}.{name}" for name in names]
            return "module", [value.__name__, *(name for name in used if name in sys.modules)]
        if isinstance(value, FunctionType) and value.__module__ in (self._module, "__main__"):
            return "function", self._number(value)
        if isinstance(value, FunctionType | type) and value.__module__.startswith(SANDBOX):
            # The sandbox imports its own package under a shorter name and does not import gradwire.
            return "sandbox", [value.__module__.removeprefix(f"{__package__}."), value.__qualname__]
        of = value if isinstance(value, type) else type(value)
        if of.__module__ == "__main__":
            raise NotPortableError(
                f"{where} is of the class {of.__qualname__} of this script, which the sandbox cannot import: move the "
                "class into a module, define it inside the function, or use @reward_function(sandboxed=False)"
            )
        try:
            return "pickle", pickle.dumps(value)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            raise NotPortableError(
                f"{where} ({type(value).__name__}) cannot be sent to the sandbox: {error}. Make it inside the "
                "function, or use @reward_function(sandboxed=False)"
            ) from None
