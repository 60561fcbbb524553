"""Collected groups on disk: a training that was killed goes on with them instead of collecting them again."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.rl import metrics as kinds
from gradwire.rl.metrics import Elapsed, Metric
from gradwire.rl.types import (
    Action,
    EvaluateResult,
    IntArray,
    StepData,
    StepOutput,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
)
from gradwire.whole_files import whole_file

Collected = tuple[int, int | None, Task, Sequence[Trajectory], Mapping[str, Metric]]
"""A group's number, the ledger's turn when its collection began, its task, its trajectories and the metrics of its
collection, of which those of the clock are not kept."""


class GroupLog:
    """A file of scored groups, one a line, which begins with the group's number.

    What a reward or a later algorithm may read is kept: tokens, log-probabilities, versions, texts, rewards. An
    environment's own objects (``Trajectory.state``, ``Action.parsed``) are not.

    Args:
        path: The file; None: nothing is written.

    Attributes:
        places: Places in the order of completion, in which a resumed training reads the groups.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.places = path, itertools.count()
        self._writer = ThreadPoolExecutor(1, "group-log")  # one: whoever waits goes on in the order of the lines

    async def add(self, groups: Sequence[Collected]) -> list[int]:
        """Append groups that were collected together; return their places."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._add, groups)

    def _add(self, groups: Sequence[Collected]) -> list[int]:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, groups)))
        return [next(self.places) for _ in groups]

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield each group's number and content, in the order of their collection; an incomplete line is left out."""
        if self.path is not None and self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                for line in file:
                    number, _, content = line.partition("\t")
                    if line.endswith("\n"):
                        yield int(number), content

    def groups(self, tasks: Mapping[int, Task]) -> Iterator[list[Trajectory]]:
        """Yield the trajectories of these groups, given by number and task, as far as they are in the file."""
        logged = {number: content for number, content in self.lines() if number in tasks}
        for number, task in tasks.items():
            if read := read_group(logged.get(number, ""), task):
                yield read[0]

    async def keep(self, wanted: Callable[[int], bool]) -> None:
        """Remove the groups whose numbers are not wanted."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._keep, wanted)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        if self.path is None or not self.path.exists():
            return
        with whole_file(self.path) as whole:
            for number, content in self.lines():
                if wanted(number):
                    whole.write(f"{number}\t{content}".encode())


def _line(collected: Collected) -> str:
    number, turn, task, group, metrics = collected
    timeless = {
        name: [type(each).__name__, *vars(each).values()]
        for name, each in metrics.items()
        if not isinstance(each, Elapsed)
    }
    trajectories = [_packed(each) for each in group]
    content = {"task": task.key, "turn": turn, "metrics": timeless, "trajectories": trajectories}
    return f"{number}\t{json.dumps(content, default=_plain)}\n"


def read_group(content: str, task: Task) -> tuple[list[Trajectory], dict[str, Metric], int | None] | None:
    """Read a logged group of a task, its metrics and turn; None if there is none, or it is a group of another task."""
    if not content:
        return None
    read = json.loads(content)
    if read["task"] != task.key:
        return None
    metrics = {name: getattr(kinds, kind)(*values) for name, (kind, *values) in read["metrics"].items()}
    return [_unpacked(each, task) for each in read["trajectories"]], metrics, read["turn"]


def _packed(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON data; each step's prompt and messages without what the step before had already."""
    steps, before = [], np.zeros(0, np.int64)
    for step in trajectory.steps:
        size, told = _shared(before, step.prompt_ids), len(step.messages)
        begins = step.messages == trajectory.messages[:told]
        changed = {"prompt_ids": [size, step.prompt_ids[size:]], "messages": told if begins else step.messages,
                   "action": step.action.raw}  # fmt: skip
        steps.append(vars(step) | changed)
        before = np.concatenate([step.prompt_ids, step.response_ids])
    return {name: value for name, value in vars(trajectory).items() if name not in ("task", "state")} | {"steps": steps}


def _unpacked(read: dict[str, Any], task: Task) -> Trajectory:
    messages, before, steps = tuple(read["messages"]), np.zeros(0, np.int64), []
    for step in read["steps"]:
        size, rest = step["prompt_ids"]
        prompt, response = np.concatenate([before[:size], _array(rest)]), _array(step["response_ids"])
        told = step["messages"]
        changed = {
            "prompt_ids": prompt,
            "response_ids": response,
            "logprobs": _array(step["logprobs"]),
            "token_versions": _array(step["token_versions"]) if step["token_versions"] else None,
            "state_key": _frozen(step["state_key"]),
            "action": Action(step["action"]),
            "messages": messages[:told] if isinstance(told, int) else tuple(told),
            "tool_results": tuple(
                ToolResult(**each | {"call": ToolCall(**each["call"])}) for each in step["tool_results"]
            ),
        }
        steps.append(StepData(**step | changed))
        before = np.concatenate([prompt, response])
    verdict = read["evaluation"]
    if verdict is not None:
        outputs = [StepOutput(**each) for each in verdict["step_outputs"]]
        verdict = EvaluateResult(**verdict | {"step_outputs": outputs})
    return Trajectory(task, **read | {"steps": steps, "messages": messages, "evaluation": verdict})


def _shared(before: IntArray, after: IntArray) -> int:
    """Number of tokens that both rows begin with."""
    size = min(len(before), len(after))
    differs = np.flatnonzero(before[:size] != after[:size])
    return int(differs[0]) if len(differs) else size


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kept = value.astype(np.int32 if value.dtype.kind in "iu" else np.float32)
        return [kept.dtype.str, base64.b64encode(kept.tobytes()).decode()]
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value, key=repr) if isinstance(value, Set) else repr(value)


def _array(packed: list[str]) -> npt.NDArray[Any]:
    read = np.frombuffer(base64.b64decode(packed[1]), packed[0])
    return read.astype(np.int64) if read.dtype.kind == "i" else read.copy()


def _frozen(value: Any) -> Any:
    """A key of a state as it was before JSON made lists of its tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
