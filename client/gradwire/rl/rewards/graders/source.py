"""The grader ``python``: its author's code, sealed off from the machine."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, SampleError, number_of, text_of
from gradwire.rl.rewards.sandbox import Outcome, Sandbox, SandboxLimits
from gradwire.rl.types import EvaluateResult, Trajectory

SOURCE_LIMITS = SandboxLimits(isolation="sealed")


class Python(Grader):
    """The number that a function ``grade(sample, item)`` returns, in the sandbox for others' code."""

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

    async def refusal(self) -> str:
        """Why this machine does not run such code; "" if it does."""
        (outcome,) = await self._outcomes([Sample("", {})], source="def grade(sample, item): return 0.0")
        return outcome.error

    async def grade(self, sample: Sample) -> float:
        (outcome,) = await self._outcomes([sample])
        return _reward_of(outcome)

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        """Evaluate all at once, as :meth:`Grader.evaluate` does; far cheaper than one by one."""
        results = []
        for outcome in await self._outcomes([Sample(each.response, each.ground_truth) for each in trajectories]):
            try:
                results.append(EvaluateResult(_reward_of(outcome)))
            except SampleError as error:
                results.append(EvaluateResult(0.0, error=f"{self.name}: {error}"))
        return results

    async def _outcomes(self, samples: Sequence[Sample], source: str = "") -> list[Outcome]:
        self._sandbox = self._sandbox or Sandbox(_run_source, SOURCE_LIMITS)
        return await self._sandbox.map(
            [{"source": source or self._source, "sample": each.namespace, "item": dict(each.item)} for each in samples]
        )

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def _reward_of(outcome: Outcome) -> float:
    if outcome.error:
        raise SampleError("python_grader_runtime_error", outcome.error)
    return number_of(outcome.value, "python_grader_runtime_error")


def _run_source(source: str, sample: dict[str, Any], item: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {"__name__": "grader"}
    exec(source, scope)
    return scope["grade"](sample, item)
