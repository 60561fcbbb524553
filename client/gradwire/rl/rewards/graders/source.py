"""The grader ``python``: code of its author's own, in the sandbox."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, SampleError, number_of, text_of
from gradwire.rl.rewards.sandbox import Sandbox, SandboxLimits

SOURCE_LIMITS = SandboxLimits(isolation="required")


class Python(Grader):
    """The number that a function ``grade(sample, item)`` returns, in the sandbox."""

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = str(spec.get("name") or "python")
        self._source = text_of(spec, "source", where)
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
        return number_of(outcome.value, "python_grader_runtime_error")

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def _run_source(source: str, sample: dict[str, Any], item: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {"__name__": "grader"}
    exec(source, scope)
    return scope["grade"](sample, item)
