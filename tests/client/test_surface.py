"""The public surface, frozen: a change here is a change for everyone who uses gradwire."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import gradwire
import pytest
from gradwire import rlhf, sync

HERE = Path(__file__).parent
FROZEN = HERE / "surface.txt"
INTERNAL = ("from_wire", "from_message")


def surface() -> str:
    """Exports with their signatures, a line each; below a class its public methods and properties."""
    lines: list[str] = []
    for module, names in (
        ("gradwire", gradwire.__all__),
        ("gradwire.sync", ["ServiceClient", "TrainingClient", "connect"]),
        ("gradwire.rlhf", rlhf.__all__),
    ):
        for name in sorted(names):
            value = getattr(importlib.import_module(module), name)
            if inspect.ismodule(value):
                lines.append(f"{module}.{name}: module")
            elif inspect.isclass(value) and issubclass(value, Exception):
                lines.append(f"{module}.{name}({value.__bases__[0].__name__})")
            elif inspect.isclass(value):
                lines.append(f"{module}.{name}")
                if hasattr(value, "__dataclass_fields__"):
                    lines += [f"    {each.name}: {each.type}" for each in value.__dataclass_fields__.values()]
                lines += members(value)
            elif callable(value):
                lines.append(f"{module}.{name}{inspect.signature(value)}")
            else:
                lines.append(f"{module}.{name} = {value}")
    return "\n".join(lines) + "\n"


def members(kind: type) -> list[str]:
    found = []
    for name, value in sorted(inspect.getmembers(kind)):
        if name.startswith("_") and name not in ("__await__", "__aenter__", "__enter__", "__getitem__"):
            continue
        if name in INTERNAL:
            continue
        if inspect.isfunction(value):
            marker = "async " if inspect.iscoroutinefunction(value) and "sync" not in kind.__module__ else ""
            found.append(f"    {marker}{name}{inspect.signature(value)}")
        elif isinstance(value, property):
            found.append(f"    {name}: property")
    return found


def test_the_surface_is_the_frozen_one() -> None:
    current = surface()
    assert current == FROZEN.read_text(), (
        "the public surface changed; if that is meant, run: python tests/client/test_surface.py"
    )


def test_everything_exported_is_documented() -> None:
    for name in gradwire.__all__:
        value = getattr(gradwire, name)
        assert (value.__doc__ or "").strip(), name
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, method in inspect.getmembers(value, inspect.isfunction):
                if not member.startswith("_") and member not in INTERNAL:
                    assert (method.__doc__ or "").strip(), f"{name}.{member}"
    for kind in (sync.ServiceClient, sync.TrainingClient):
        for member, method in inspect.getmembers(kind, inspect.isfunction):
            assert member.startswith("_") or method.__doc__, member


def test_documented_arguments_are_those_of_the_signature() -> None:
    """The site refuses ``a, b: ...``, which describes an argument of neither name."""
    for name in gradwire.__all__:
        value = getattr(gradwire, name)
        functions = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else [(name, value)]
        for member, function in functions:
            _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
            documented = re.findall(r"^    (\S[^:]*):", section.partition("\n\n")[0], re.MULTILINE)
            if documented:
                known = inspect.signature(function).parameters
                assert {each.lstrip("*") for each in documented} <= known.keys(), f"{name}.{member}: {documented}"


@pytest.mark.slow
def test_wrong_calls_fail_to_check() -> None:
    """Each line of ``typing_cases.py`` with a comment ``# wrong: CODE`` must be mypy's error CODE, and no other."""
    cases = HERE / "typing_cases.py"
    expected = {
        (number, line.rsplit("# wrong: ", 1)[1].strip())
        for number, line in enumerate(cases.read_text().splitlines(), 1)
        if "# wrong: " in line
    }
    root = HERE.parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(cases)],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    found = {
        (int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]"))
        for line in result.stdout.splitlines()
        if "typing_cases.py" in line and ": error: " in line
    }
    assert found == expected, result.stdout + result.stderr


if __name__ == "__main__":
    FROZEN.write_text(surface())
