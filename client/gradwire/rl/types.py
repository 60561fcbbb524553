"""Data types of the toolkit: tasks, states, steps, trajectories, evaluation results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class _Message(TypedDict):
    role: str
    content: str


class Message(_Message, total=False):
    """One turn of a conversation: ``role`` is ``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``."""

    name: str


Prompt = str | Sequence[Message]
"""The prompt of a policy: plain text, or a conversation that a chat template turns into text."""


class UserText(str):
    """A prompt of plain text that is a user's message where the model has a chat template."""


@dataclass(frozen=True)
class Task:
    """One problem of a task set.

    Attributes:
        prompt: Text, or the first messages.
        ground_truth: The reference for rewards; the policy never sees it.
        task_id: Identifies the task in logs and curricula; by default the prompt's text.
        data: Extra data for an environment or a reward.
    """

    prompt: Prompt
    ground_truth: Any = None
    task_id: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.task_id or (self.prompt if isinstance(self.prompt, str) else str(list(self.prompt)))

    @staticmethod
    def of(task: AnyTask) -> Task:
        """Convert a task, a prompt, or a row with ``prompt`` (or ``question``) and ``ground_truth`` (or ``answer``)."""
        if isinstance(task, Task):
            return task
        if isinstance(task, str):
            return Task(task)
        if isinstance(task, Sequence) and task and all(isinstance(each, Mapping) for each in task):
            return Task(task)
        if not isinstance(task, Mapping):
            raise TypeError(f"a task is a prompt (text or messages), a row or a Task; got {task!r:.200}")
        row = dict(task)
        for name, other in (("prompt", "question"), ("ground_truth", "answer")):
            if name not in row and other in row:
                row[name] = row.pop(other)
        if "prompt" not in row:
            raise ValueError(f'a task needs "prompt" (or "question"); this row has {", ".join(row) or "nothing"}')
        return Task(row.pop("prompt"), row.pop("ground_truth", None), str(row.pop("task_id", "")), row)


AnyTask = Task | Prompt | Mapping[str, Any]
"""Anything that :meth:`Task.of` accepts."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call, or its ``error``."""

    call: ToolCall
    content: str
    error: str = ""
    cost: float = 0.0


@dataclass(frozen=True)
class Action:
    """One step of the policy: the ``raw`` text, and the environment's interpretation (``parsed``)."""

    raw: str
    parsed: Any = None


@dataclass(frozen=True)
class State:
    """The state of an episode. Immutable: a step creates the next state.

    Attributes:
        task: The problem.
        messages: The conversation so far.
        step: Number of steps taken.
        terminated: The episode ended by its own rules, including the task's limit of turns.
        truncated: A limit that is not the task's cut the episode off.
        data: The environment's own data.
    """

    task: Task
    messages: tuple[Message, ...] = ()
    step: int = 0
    terminated: bool = False
    truncated: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **changes: Any) -> State:
        """Return a copy with these fields changed; keys of ``data`` that are not given are kept."""
        if "data" in changes:
            changes["data"] = {**self.data, **changes["data"]}
        return type(self)(**vars(self) | changes)


@dataclass(frozen=True)
class StepOutput:
    """A reward function's result for one step.

    Attributes:
        step_index: Index of the step (the assistant's turn) from 0; a negative index counts from the end.
        base_reward: Reward of that step.
        metrics: Numbers to log.
        reason: An explanation for people.
    """

    step_index: int
    base_reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class EvaluateResult:
    """A reward function's result for one trajectory.

    Attributes:
        score: Score of the whole trajectory; by default the sum of the steps' rewards, if there are ``step_outputs``.
        step_outputs: Rewards of single steps; none by default (None reads as an empty sequence).
        metrics: Numbers to log; also the objectives of :class:`~gradwire.rl.rewards.ParetoRewardComputer`.
        reason: An explanation for people.
        error: The reason why there is no score; ``score`` is then 0 and is ignored.
        scored_by_steps: The score is the sum of step rewards. PPO, which uses the steps' rewards, does not add it
            again.
    """

    score: float = None  # type: ignore[assignment]  # filled from step_outputs
    step_outputs: Sequence[StepOutput] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    error: str = ""
    scored_by_steps: bool = False

    def __post_init__(self) -> None:
        if self.step_outputs is None:
            object.__setattr__(self, "step_outputs", ())
        if self.score is None:
            if not self.step_outputs:
                raise ValueError("an EvaluateResult needs a score or step_outputs")
            object.__setattr__(self, "score", float(sum(each.base_reward for each in self.step_outputs)))
            object.__setattr__(self, "scored_by_steps", True)


@dataclass
class StepData:
    """One step: observation, response and result.

    Attributes:
        index: Index from 0.
        observation: The newest text that the policy saw before it acted.
        state_key: Key that identifies this step's state (the anchor state of GiGPO).
        prompt_ids: ``[prompt tokens]``, the whole prompt.
        action: The response and its interpretation.
        response_ids: ``[tokens]``, the response.
        logprobs: ``[tokens]``, log-probabilities of the response at the sampling temperature.
        value: Estimate of the state's value, if there is a critic.
        tool_results: Results of the tool calls.
        messages: The conversation after the step.
        policy_version: Optimizer steps of the policy that wrote this; of several, the first.
        token_versions: ``[tokens]``, that of each token where several policies wrote the response; None:
            ``policy_version`` for all.
        stop_reason: Why generation stopped: ``"eos"``, ``"stop"`` or ``"length"``.
        reward: Reward of this step alone; set by rewards.
        rewarded: Whether the reward was given for this step (by a step output, or as the score at the end) and is not
            a default.
        advantage: Set by an algorithm that estimates it per step.
        metrics: Metrics from the reward function.
    """

    index: int
    observation: str
    state_key: Any
    prompt_ids: IntArray
    action: Action
    response_ids: IntArray
    logprobs: FloatArray
    value: float | None = None
    tool_results: tuple[ToolResult, ...] = ()
    messages: tuple[Message, ...] = ()
    policy_version: int = 0
    stop_reason: str = ""
    reward: float = 0.0
    advantage: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewarded: bool = False
    token_versions: IntArray | None = None

    @property
    def base_reward(self) -> float:
        """The reward of this step, under the name that :class:`StepOutput` uses."""
        return self.reward

    @property
    def policy_logprobs(self) -> FloatArray:
        """``[tokens]``, log-probabilities under the policy that wrote the response."""
        return self.logprobs

    @property
    def policy_value_estimate(self) -> float | None:
        """The critic's value of the state before the step."""
        return self.value


Status = Literal["completed", "truncated", "failed", "timeout"]


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        task: The problem.
        group: Trajectories of one group started from the same state.
        member: Index within the group.
        seed: Seed of the environment.
        steps: The steps in order.
        messages: The whole conversation.
        status: ``completed``: ended by the task's own rules, including its limit of turns. ``truncated``: cut
            off by another limit, such as ``max_steps_per_rollout``. ``failed`` and ``timeout``
            trajectories have an ``error`` and are not trained on.
        error: The cause of a failure.
        traceback: The traceback, if the cause was an exception of the environment or the sampler.
        state: The last state.
        seconds: Duration.
        reward: Reward of the whole trajectory; set by rewards.
        evaluation: The result that the reward comes from.
        by_other: Another policy wrote it than the rollouts' own (``GroupBuilder.inferences``): it is not trained on.
    """

    task: Task
    group: int = 0
    member: int = 0
    seed: int = 0
    steps: list[StepData] = field(default_factory=list)
    messages: tuple[Message, ...] = ()
    status: Status = "completed"
    error: str = ""
    traceback: str = ""
    state: State | None = None
    seconds: float = 0.0
    reward: float = 0.0
    evaluation: EvaluateResult | None = None
    by_other: bool = False

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: it ran, has a response, and has a score if scoring was tried."""
        scored = self.evaluation is None or not self.evaluation.error
        return (
            self.status in ("completed", "truncated") and scored and any(len(step.response_ids) for step in self.steps)
        )

    @property
    def was_cut(self) -> bool:
        """Whether a limit cut off the episode, or its last response (``max_tokens``): ``mask_truncated`` of losses."""
        return self.status == "truncated" or (bool(self.steps) and self.steps[-1].stop_reason == "length")

    @property
    def ground_truth(self) -> Any:
        return self.task.ground_truth

    @property
    def response(self) -> str:
        """The policy's last response."""
        return self.steps[-1].action.raw if self.steps else ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(len(step.response_ids) for step in self.steps)
