"""``@reward_function``: user functions that score trajectories, one at a time or in a batch."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np

from gradwire.rl.rewards.sandbox import Outcome, Sandbox, SandboxLimits
from gradwire.rl.threads import called
from gradwire.rl.types import Action, EvaluateResult, Message, StepData, StepOutput, Task, Trajectory


class Scorer(Protocol):
    """Scores trajectories: one result each, in order. A single failure does not raise: see ``error``."""

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]: ...


def view_of(trajectory: Trajectory) -> dict[str, Any]:
    """Build the data that a reward function may request by the names of its parameters."""
    steps = [
        {
            "index": step.index,
            "observation": step.observation,
            "action": step.action.raw,
            "tool_results": [
                {"name": r.call.name, "arguments": dict(r.call.arguments), "content": r.content, "error": r.error}
                for r in step.tool_results
            ],
            "stop_reason": step.stop_reason,
            "num_tokens": len(step.response_ids),
        }
        for step in trajectory.steps
    ]
    return {
        "messages": [dict(message) for message in trajectory.messages],
        "ground_truth": trajectory.ground_truth,
        "response": trajectory.response,
        "prompt": trajectory.task.prompt,
        "steps": steps,
        "task_id": trajectory.task.task_id,
        "data": dict(trajectory.task.data),
        "status": trajectory.status,
        "num_tokens": trajectory.num_tokens,
        **{name: None if trajectory.state is None else trajectory.state.data.get(name) for name in OF_AGENTS},
    }


LIVE = ("session", "rollout")
OF_AGENTS = ("folder", "exit_status", "output", "errors", "result", *LIVE)
"""Arguments that only episodes of :class:`~gradwire.rl.AgentEnvironment` fill; None for others."""
PARAMETERS = (
    "messages", "ground_truth", "response", "prompt", "steps", "task_id", "data", "status", "num_tokens", *OF_AGENTS
)  # fmt: skip


class RewardFunction:
    """A user's function as a :class:`Scorer`; calling the object calls the function directly.

    Attributes:
        batch: The function takes lists and returns a list: see :func:`reward_function`.
        sandboxed: Evaluations run in the sandbox.
        limits: Limits of one evaluation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: bool = False,
        sandboxed: bool = True,
        limits: SandboxLimits | None = None,
        workers: int = 4,
    ) -> None:
        self.__reward_function__ = function
        self.__doc__, self.__name__ = function.__doc__, getattr(function, "__name__", "reward")
        self.batch = batch
        self.sandboxed = sandboxed and not inspect.iscoroutinefunction(function)
        self.limits = limits or SandboxLimits()
        self._workers = workers
        self._sandbox: Sandbox | None = None
        self._wanted = _wanted(function, self.__name__)
        if self.sandboxed and (live := [name for name in LIVE if name in self._wanted]):
            raise TypeError(
                f"{self.__name__} takes {' and '.join(live)}, which cannot enter a sandbox: make it async, or use "
                "@reward_function(sandboxed=False)"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__reward_function__(*args, **kwargs)

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        views = [{name: value for name, value in view_of(t).items() if name in self._wanted} for t in trajectories]
        if self.batch:
            return await self._evaluate_batches(trajectories, views)
        return [self._result(outcome) for outcome in await self._run_all(views)]

    def close(self) -> None:
        """Stop the sandbox; the next evaluation starts a new one."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    async def _evaluate_batches(
        self, trajectories: Sequence[Trajectory], views: list[dict[str, Any]]
    ) -> list[EvaluateResult]:
        members: dict[int, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            members.setdefault(trajectory.group, []).append(index)
        columns = [
            {name: [views[index][name] for index in group] for name in self._wanted} for group in members.values()
        ]
        outcomes = await self._run_all(columns)
        results: dict[int, EvaluateResult] = {}
        for group, outcome in zip(members.values(), outcomes):
            results.update(zip(group, self._batch_results(outcome, len(group))))
        return [results[index] for index in range(len(trajectories))]

    def _batch_results(self, outcome: Outcome, size: int) -> list[EvaluateResult]:
        value, error = outcome.value, outcome.error
        if not error and (not isinstance(value, list) or len(value) != size):
            got = f"{len(value)} results" if isinstance(value, list) else type(value).__name__
            error = f"returned {got} for a batch of {size}; a batch function must return a list of {size} results"
        if error:
            return [EvaluateResult(0.0, error=f"{self.__name__}: {error}")] * size
        return [self._result(Outcome(value=each)) for each in value]

    def _result(self, outcome: Outcome) -> EvaluateResult:
        if outcome.error:
            return EvaluateResult(0.0, error=f"{self.__name__}: {outcome.error}")
        try:
            return to_result(outcome.value)
        except (TypeError, ValueError) as error:
            return EvaluateResult(0.0, error=f"{self.__name__}: {error}")

    async def _run_all(self, views: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        if not self.sandboxed:
            return list(await asyncio.gather(*map(self._run, views)))
        if self._sandbox is None:
            self._sandbox = Sandbox(self.__reward_function__, self.limits, workers=self._workers)
        return await self._sandbox.map(views)

    async def _run(self, view: Mapping[str, Any]) -> Outcome:
        try:
            async with asyncio.timeout(self.limits.time_s):
                return Outcome(await called(functools.partial(self.__reward_function__, **view)))
        except TimeoutError:
            return Outcome(error=f"took more than {self.limits.time_s:g} s")
        except Exception as error:  # the user's function may raise anything; only one evaluation fails
            return Outcome(error=f"{type(error).__name__}: {error}{_line(error, self.__reward_function__)}")


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """Find the line of the function's own file in which it was raised, from the sandbox's report."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f" (line {where[-1].lineno})" if where else ""


def _wanted(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return tuple(name for name in PARAMETERS if name not in OF_AGENTS)
        if parameter.name in PARAMETERS:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"{name} has a parameter {parameter.name!r} that is unknown; a reward function may take "
                f"{', '.join(PARAMETERS)}"
            )
    return tuple(wanted)


def to_result(value: Any) -> EvaluateResult:
    """Convert a return value to an :class:`EvaluateResult`: an instance, a number, or a mapping of its fields.

    Raises:
        TypeError, ValueError: Anything else; the message names it.
    """
    if isinstance(value, EvaluateResult):
        value = vars(value)
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        return EvaluateResult(_number(value, "the score"))
    if not isinstance(value, Mapping):
        raise TypeError(f"returned {type(value).__name__}; a reward must be a number or an EvaluateResult")
    unknown = set(value) - {"score", "step_outputs", "metrics", "reason", "error", "scored_by_steps"}
    steps = tuple(_step(each) for each in value.get("step_outputs") or ())
    if unknown or (value.get("score") is None and not steps):
        raise TypeError(
            f"returned a mapping with {', '.join(map(str, value)) or 'nothing'}; a reward needs at least a score, or "
            "step_outputs"
        )
    if value.get("score") is None or value.get("scored_by_steps"):
        return EvaluateResult(step_outputs=steps, metrics=_metrics(value), reason=str(value.get("reason") or ""))
    return EvaluateResult(
        score=_number(value["score"], "the score"),
        step_outputs=steps,
        metrics=_metrics(value),
        reason=str(value.get("reason") or ""),
    )


def _metrics(value: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(each, name) for name, each in (value.get("metrics") or {}).items()}


def _step(value: Any) -> StepOutput:
    if isinstance(value, StepOutput):
        value = vars(value)
    if not isinstance(value, Mapping) or not {"step_index", "base_reward"} <= set(value):
        raise TypeError("a step output needs at least step_index and base_reward")
    index = value["step_index"]
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"step_index is {type(index).__name__}; it must be an integer, counted from 0")
    return StepOutput(
        index,
        _number(value["base_reward"], f"base_reward of step {index}"),
        _metrics(value),
        str(value.get("reason") or ""),
    )


def _number(value: Any, what: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {type(value).__name__}; it must be a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; it must be finite")
    return number


@overload
def reward_function(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(
    *, batch: bool = False, sandboxed: bool = True, limits: SandboxLimits | None = None, workers: int = 4
) -> Callable[[Callable[..., Any]], RewardFunction]: ...
def reward_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    batch: bool = False,
    sandboxed: bool = True,
    limits: SandboxLimits | None = None,
    workers: int = 4,
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Create a reward function from a function.

    Its parameters are any of ``messages``, ``ground_truth``, ``response`` (the policy's last response), ``prompt``,
    ``steps``, ``task_id``, ``data``, ``status``, ``num_tokens`` (written by the policy). It returns an
    :class:`~gradwire.rl.types.EvaluateResult` or a number. See ``docs/reward_functions.md``.

    Args:
        batch: The function takes lists of these for one group of trajectories, and returns a list of results.
        sandboxed: Evaluations run in a separate process, under limits; ``async`` functions never do.
        limits: Limits of one evaluation.
        workers: Sandboxed evaluations at once.
    """

    def decorate(inner: Callable[..., Any]) -> RewardFunction:
        return RewardFunction(inner, batch=batch, sandboxed=sandboxed, limits=limits, workers=workers)

    return decorate if function is None else decorate(function)


class RewardSandbox:
    """Runs a reward function over conversations, in the sandbox.

    Args:
        function: A function or ``@reward_function``, see ``docs/reward_functions.md``; it may take ``messages``,
            ``ground_truth``, ``response``, ``prompt`` and ``steps``.
        batch: The function takes lists of these; all conversations form one group.
        limits: Limits of one evaluation.
    """

    def __init__(
        self, function: Callable[..., Any], *, batch: bool = False, limits: SandboxLimits | None = None
    ) -> None:
        self._function = (
            function if isinstance(function, RewardFunction) else RewardFunction(function, batch=batch, limits=limits)
        )

    async def execute_user_reward_code(
        self, rollouts_messages: Sequence[Sequence[Message]], ground_truths: Sequence[Any]
    ) -> list[EvaluateResult]:
        """Evaluate the conversations, in order; a failure affects only its own conversation and sets its ``error``.

        Args:
            rollouts_messages: The conversations.
            ground_truths: One per conversation.
        """
        if len(rollouts_messages) != len(ground_truths):
            raise ValueError(f"there are {len(rollouts_messages)} rollouts and {len(ground_truths)} ground truths")
        rollouts = [
            told(messages, truth, member)
            for member, (messages, truth) in enumerate(zip(rollouts_messages, ground_truths))
        ]
        return await self._function.evaluate(rollouts)

    def close(self) -> None:
        """Stop the sandbox's processes."""
        self._function.close()


def told(messages: Sequence[Message], ground_truth: Any, member: int) -> Trajectory:
    """Build a trajectory from a conversation: one step per assistant turn, without tokens."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    steps: list[StepData] = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            seen = messages[at - 1]["content"] if at else ""
            none, action = np.zeros(0, np.int64), Action(message["content"])
            steps.append(StepData(len(steps), seen, seen, none, action, none, none.astype(np.float32)))
    opening = list(messages[:first])
    prompt = opening[0]["content"] if len(opening) == 1 and opening[0]["role"] == "user" else opening
    return Trajectory(Task(prompt, ground_truth), member=member, steps=steps, messages=tuple(messages))
