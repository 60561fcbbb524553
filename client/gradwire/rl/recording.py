"""Record selected trajectories: in a file, one JSON object per line, or with the run on the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gradwire.errors import LimitExceededError, StorageFullError
from gradwire.loop.loggers import JsonlLogger
from gradwire.rl.generation import TextCodec
from gradwire.rl.types import StepData, Trajectory
from gradwire.training import TrainingClient

logger = logging.getLogger("gradwire.rl")


class Recorder(Protocol):
    """Takes the trajectories of each iteration."""

    def forget(self, iteration: int) -> None:
        """Remove what was recorded from this iteration on."""

    async def record(self, iteration: int, trajectories: Sequence[Trajectory], codec: TextCodec) -> int:
        """Record those that are wanted; return their number."""

    def close(self) -> None:
        """Write what is left."""


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

    def forget(self, iteration: int) -> None:
        """Remove what was recorded from this iteration on."""
        JsonlLogger(self.path).forget(iteration)

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


class RunRecorder:
    """Keeps trajectories with the run on the server, for the console and ``run.recorded_rollouts(iteration)``.

    Args:
        run: The run that learns from them.
        every: Record every n-th iteration, 1 or more.
        limit: Maximum number of trajectories per iteration; groups are kept whole where they fit.
    """

    def __init__(self, run: TrainingClient, *, every: int = 1, limit: int = 64) -> None:
        self._run, self._every, self._limit = run, every, limit

    def forget(self, iteration: int) -> None:
        """Do nothing: an iteration that is repeated replaces what was recorded of it."""

    async def record(self, iteration: int, trajectories: Sequence[Trajectory], codec: TextCodec) -> int:
        """Record an iteration that is due; return the number of trajectories."""
        if iteration % self._every:
            return 0
        records = [await as_record(iteration, each, codec) for each in trajectories[: self._limit]]
        try:
            return await self._run.record_rollouts(iteration, records)
        except (LimitExceededError, StorageFullError) as error:  # the training goes on without them
            logger.warning("the rollouts of iteration %d are not recorded: %s", iteration, error)
            return 0

    def close(self) -> None:
        """Do nothing: each trajectory is already recorded."""


class Recorders:
    """Several recorders as one."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders

    def forget(self, iteration: int) -> None:
        """Remove what was recorded from this iteration on."""
        for each in self._recorders:
            each.forget(iteration)

    async def record(self, iteration: int, trajectories: Sequence[Trajectory], codec: TextCodec) -> int:
        """Record with each; return the largest number of trajectories that one of them wanted."""
        return max([await each.record(iteration, trajectories, codec) for each in self._recorders])

    def close(self) -> None:
        """Write what is left."""
        for each in self._recorders:
            each.close()


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
        "token_versions": None if step.token_versions is None else step.token_versions.tolist(),
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
