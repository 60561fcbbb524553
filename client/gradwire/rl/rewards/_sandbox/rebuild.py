"""Rebuild a function from the output of ``gradwire.rl.rewards.portable.capture``."""

from __future__ import annotations

import builtins
import importlib
import marshal
import pickle
import types
from typing import Any


def rebuild(captured: dict[str, Any]) -> Any:
    records = captured["functions"]
    scope: dict[str, Any] = {"__builtins__": builtins, "__name__": "reward_function"}
    functions: list[Any] = []
    for record in records:
        cells = tuple(types.CellType() for _ in record["closure"])
        functions.append(types.FunctionType(marshal.loads(record["code"]), scope, record["name"], None, cells or None))

    def value(encoded: tuple[str, Any]) -> Any:
        kind, content = encoded
        if kind == "module":
            for name in content[1:]:
                importlib.import_module(name)
            return importlib.import_module(content[0])
        if kind == "sandbox":
            return getattr(importlib.import_module(content[0]), content[1])
        return functions[content] if kind == "function" else pickle.loads(content)

    for record, function in zip(records, functions):
        scope.update({name: value(each) for name, each in record["globals"].items()})
        for cell, each in zip(function.__closure__ or (), record["closure"]):
            if each is not None:
                cell.cell_contents = value(each)
        function.__defaults__ = tuple(map(value, record["defaults"])) or None
        function.__kwdefaults__ = {name: value(each) for name, each in record["kwdefaults"].items()} or None
    return functions[0]
