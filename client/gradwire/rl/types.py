"""What the parts of the toolkit hand to each other: tasks, states, steps, trajectories, results of evaluation."""

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
"""What a policy continues: plain text, or a conversation that a chat template turns into text."""


@dataclass(frozen=True)
class Task:
    """One problem of a prompt set.

    Attributes:
        prompt: text, or the first messages.
        ground_truth: what rewards compare with; the policy never sees it.
        task_id: tells tasks apart in logs and curricula; the prompt's own text by default.
        data: anything that an environment or a reward wants besides.
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
        """From a task, a prompt, or a row with ``prompt`` (or ``question``) and ``ground_truth`` (or ``answer``)."""
        if isinstance(task, Task):
            return task
        if isinstance(task, str):
            return Task(task)
        if isinstance(task, Sequence) and task and all(isinstance(each, Mapping) for each in task):
            return Task(task)
        if not isinstance(task, Mapping):
            raise TypeError(f"a task is a prompt (text or messages), a row or a Task; this is {task!r:.200}")
        row = dict(task)
        for name, other in (("prompt", "question"), ("ground_truth", "answer")):
            if name not in row and other in row:
                row[name] = row.pop(other)
        if "prompt" not in row:
            raise ValueError(f'a task needs "prompt" (or "question"); this row has {", ".join(row) or "nothing"}')
        return Task(row.pop("prompt"), row.pop("ground_truth", None), str(row.pop("task_id", "")), row)


AnyTask = Task | Prompt | Mapping[str, Any]
"""What :meth:`Task.of` makes a task of."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that the policy asked for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a tool gave back, or why it did not (``error``)."""

    call: ToolCall
    content: str
    error: str = ""
    cost: float = 0.0


@dataclass(frozen=True)
class Action:
    """What the policy wrote in one step: ``raw`` text, and what the environment understood (``parsed``)."""

    raw: str
    parsed: Any = None


@dataclass(frozen=True)
class State:
    """Where an episode stands. Never changed in place: a step makes the next one.

    Attributes:
        task: the problem.
        messages: the conversation so far.
        step: steps taken.
        terminated: it is over by its own rules, the task's limit of turns among them.
        truncated: it was cut off by a limit that is not the task's.
        data: the environment's own.
    """

    task: Task
    messages: tuple[Message, ...] = ()
    step: int = 0
    terminated: bool = False
    truncated: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **changes: Any) -> State:
        """A copy with these fields changed; keys of ``data`` that are not given stay."""
        if "data" in changes:
            changes["data"] = {**self.data, **changes["data"]}
        return type(self)(**vars(self) | changes)


@dataclass(frozen=True)
class StepOutput:
    """A reward function's word on one step.

    Attributes:
        step_index: the step of the trajectory (the assistant's turn) from 0; a negative one counts from the end.
        base_reward: of that step.
        metrics: numbers to log.
        reason: for a person.
    """

    step_index: int
    base_reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class EvaluateResult:
    """A reward function's verdict on one trajectory.

    Attributes:
        score: of the whole trajectory; where only the steps are judged, the sum of their rewards.
        step_outputs: rewards of single steps, where there are any.
        metrics: numbers to log; also the objectives of :class:`~gradwire.rl.rewards.ParetoRewardComputer`.
        reason: for a person.
        error: why there is no score; then ``score`` is 0 and does not count.
        scored_by_steps: the score is that sum, so that PPO, which has the steps' rewards, does not add it to them.
    """

    score: float = None  # type: ignore[assignment]  # filled from step_outputs
    step_outputs: Sequence[StepOutput] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    error: str = ""
    scored_by_steps: bool = False

    def __post_init__(self) -> None:
        if self.score is None:
            if not self.step_outputs:
                raise ValueError("an EvaluateResult needs a score, or step_outputs that say it all")
            object.__setattr__(self, "score", float(sum(each.base_reward for each in self.step_outputs)))
            object.__setattr__(self, "scored_by_steps", True)


@dataclass
class StepData:
    """One step: what the policy saw, what it wrote, what came of it.

    Attributes:
        index: from 0.
        observation: the text that the policy saw last, before it acted.
        state_key: what tells this step's state apart from others (the anchor state of GiGPO).
        prompt_ids: ``[prompt tokens]``, all that the policy was given.
        action: what it wrote, and what that was understood as.
        response_ids: ``[tokens]``, what it wrote.
        logprobs: ``[tokens]``, of what it wrote, at the sampling's temperature.
        value: an estimate of the state's value, where there is a critic.
        tool_results: of the tools it called.
        messages: the conversation after the step.
        policy_version: optimizer steps that the policy had taken when it wrote this.
        stop_reason: why the writing stopped: ``"eos"``, ``"stop"`` or ``"length"``.
        reward: of this step alone; filled by rewards.
        advantage: filled by an algorithm that estimates it per step.
        metrics: from the reward function.
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

    @property
    def base_reward(self) -> float:
        """The reward of this step, as :class:`StepOutput` calls it."""
        return self.reward

    @property
    def policy_logprobs(self) -> FloatArray:
        """``[tokens]``, the log-probabilities of the policy that wrote it."""
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
        task: the problem.
        group: trajectories of one group started from the same state.
        member: which of its group.
        seed: of the environment.
        steps: in order.
        messages: the whole conversation.
        status: how it ended. ``completed``: by the task's own rules, its limit of turns among them. ``truncated``: cut
            off by another limit, such as ``max_steps_per_rollout``; more could have come. ``failed`` and ``timeout``
            ones carry ``error`` and train nothing.
        error: what went wrong.
        traceback: where, when that was an exception of the environment or the sampler.
        state: the last state.
        seconds: it took.
        reward: of the whole; filled by rewards.
        evaluation: the verdict that the reward comes from.
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

    @property
    def ok(self) -> bool:
        """Whether it can be trained on: it ran, wrote something, and was scored if scoring was tried."""
        scored = self.evaluation is None or not self.evaluation.error
        return (
            self.status in ("completed", "truncated") and scored and any(len(step.response_ids) for step in self.steps)
        )

    @property
    def ground_truth(self) -> Any:
        return self.task.ground_truth

    @property
    def response(self) -> str:
        """What the policy wrote last."""
        return self.steps[-1].action.raw if self.steps else ""

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(len(step.response_ids) for step in self.steps)
