"""Record selected trajectories on disk, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire.rl.generation import TextCodec
from gradwire.rl.types import StepData, Trajectory

Condition = Callable[[int, Trajectory], bool]


class TrajectoryRecorder:
    """Appends trajectories to a JSONL file, for ``gradwire trajectories view FILE``.

    Args:
        path: The file; created with its folder.
        every: Record every n-th iteration; 1: each, 0: none, except by ``condition``.
        condition: ``(iteration, trajectory) -> bool``: trajectories to record in any iteration, e.g. failed ones.
        limit: Maximum number of trajectories per iteration.
        tokens: Include the text and log-probability of each token.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        every: int = 1,
        condition: Condition | None = None,
        limit: int = 32,
        tokens: bool = True,
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._every, self._condition, self._limit, self._tokens = every, condition, limit, tokens

    async def record(self, iteration: int, trajectories: Sequence[Trajectory], codec: TextCodec) -> int:
        """Write the trajectories that the rule selects; return their number."""
        due = self._every > 0 and iteration % self._every == 0
        condition = self._condition
        chosen = [
            each for each in trajectories if due or (condition is not None and condition(iteration, each))
        ][: self._limit]  # fmt: skip
        lines = [json.dumps(await as_record(iteration, each, codec if self._tokens else None)) for each in chosen]
        if lines:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        return len(lines)

    def close(self) -> None:
        """Do nothing: each trajectory is already written."""


async def as_record(iteration: int, trajectory: Trajectory, codec: TextCodec | None) -> dict[str, Any]:
    """Convert a trajectory to JSON data, with its tokens' texts if there is a codec."""
    verdict = trajectory.evaluation
    return {
        "iteration": iteration,
        "group": trajectory.group,
        "member": trajectory.member,
        "task": trajectory.task.key,
        "ground_truth": _plain(trajectory.ground_truth),
        "status": trajectory.status,
        "error": trajectory.error or (verdict.error if verdict is not None else ""),
        "reward": trajectory.reward,
        "reason": verdict.reason if verdict is not None else "",
        "metrics": dict(verdict.metrics) if verdict is not None else {},
        "seconds": trajectory.seconds,
        "steps": [await _step(step, codec) for step in trajectory.steps],
    }


async def _step(step: StepData, codec: TextCodec | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": step.index,
        "observation": step.observation,
        "state_key": _plain(step.state_key),
        "prompt_ids": step.prompt_ids.tolist(),
        "response_ids": step.response_ids.tolist(),
        "logprobs": step.logprobs.tolist(),
        "messages": _plain(list(step.messages)),
        "action": step.action.raw,
        "reward": step.reward,
        "advantage": step.advantage,
        "value": step.value,
        "metrics": dict(step.metrics),
        "stop_reason": step.stop_reason,
        "policy_version": step.policy_version,
        "tool_results": [
            {"name": r.call.name, "arguments": _plain(dict(r.call.arguments)), "content": r.content, "error": r.error}
            for r in step.tool_results
        ],
    }
    if codec is not None and len(step.response_ids):
        texts = await codec.decode([[int(token)] for token in step.response_ids])
        record["tokens"] = [[text, float(logprob)] for text, logprob in zip(texts, step.logprobs)]
    return record


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
