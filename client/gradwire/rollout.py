"""A rollout: the forest of model calls that an agent made in its session, and its branches as tokens to train on.

A *turn* is one answered call. A *branch* is the conversation that ends with a turn which nothing continued: the tokens
of its last prompt and answer, in which the answers of its turns are marked. Branches share their beginnings; a turn in
several of them is marked in one only, so that nothing is trained on twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gradwire.rl.types import AnyTask, EvaluateResult, Message, Trajectory

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Turn:
    """One answered model call of a session.

    Its prompt is the first ``shared`` tokens of the parent's prompt and answer, then ``prompt_suffix``.

    Attributes:
        number: Number in the session, from 0, in order of the answers' ends.
        prompt_suffix: ``[tokens]``, what the prompt adds to the tokens that it shares with its parent.
        response_ids: ``[tokens]``, the sampled tokens.
        logprobs: ``[tokens]``, log-probability of each in nats, of the whole distribution at ``temperature``.
        versions: ``[tokens]``, optimizer steps of the weights that sampled each.
        parent: Number of the turn that the prompt shares most tokens with; -1 if it shares none.
        shared: Number of those tokens.
        fork: Empty if the prompt begins with everything of its parent; else the reason why it does not: ``system``,
            ``tools``, ``compaction``, ``edit``, ``reasoning``, ``retry`` or ``other``.
        finish_reason: Why the answer ended: ``stop``, ``length`` or ``tool_calls``.
        temperature: Temperature of the sampling.
        door: The API that was called: ``chat``, ``responses``, ``messages`` or ``completions``.
        system_digest: Digest of the system prompt; empty if there was none.
        system: Beginning of the system prompt, for people.
        tool_names: Names of the tools that were offered.
        messages: Messages of the request that the parent's conversation does not have.
        text, reasoning, tool_calls: The answer as the agent got it.
        started_at: Unix time in seconds.
        seconds: Duration of the call.
        used: False for an answer that the agent cut off or asked for again.
    """

    number: int
    prompt_suffix: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    parent: int = -1
    shared: int = 0
    fork: str = ""
    finish_reason: str = "stop"
    temperature: float = 1.0
    door: str = "chat"
    system_digest: str = ""
    system: str = ""
    tool_names: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    started_at: float = 0.0
    seconds: float = 0.0
    used: bool = True


@dataclass(frozen=True, eq=False)
class Branch:
    """A conversation from its first token to the last answer.

    Attributes:
        turns: The turns whose answers are in it whole, in order.
        own: The turns among them that no earlier branch has.
        ids: ``[tokens]``.
        sampled: ``[tokens]``, True at the answers of ``own`` turns; the rest is context.
        logprobs: ``[tokens]``, of the sampled tokens; 0 elsewhere.
        versions: ``[tokens]``, optimizer steps of the weights that sampled them; -1 elsewhere.
        starts: Number of the token at which each of ``turns`` begins its answer.
        forked_from: Number of the turn that it left before its end; -1 if it left none.
        reason: Why it did: see :attr:`Turn.fork`.
        main: Whether it belongs to the agent's task; side calls (titles, summaries, subagents) do not.
    """

    turns: tuple[Turn, ...]
    own: tuple[Turn, ...]
    ids: IntArray
    sampled: BoolArray
    logprobs: FloatArray
    versions: IntArray
    starts: tuple[int, ...]
    forked_from: int = -1
    reason: str = ""
    main: bool = True

    @property
    def trained(self) -> BoolArray:
        """``[tokens]``, the sampled tokens that are trained on: those of used turns, if the branch is a main one."""
        result = np.zeros(len(self.ids), np.bool_)
        for turn, start in zip(self.turns, self.starts):
            result[start : start + len(turn.response_ids)] = turn.used and self.main
        return result & self.sampled

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Why the answer of each of ``turns`` ended."""
        return tuple(turn.finish_reason for turn in self.turns)

    @property
    def system_digest(self) -> str:
        """Digest of the last turn's system prompt."""
        return self.turns[-1].system_digest

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools that the last turn was offered."""
        return self.turns[-1].tool_names


Main = Literal["longest", "all"] | Mapping[str, Any] | Callable[[Branch], bool]
"""Which branches are trained on.

``longest``: those with the system prompt of the branch with the most tokens, and a tool in common with it if it has
any. ``all``: every branch. A mapping ``{"system": digest}`` or ``{"tools": names}``: those with that system prompt, or
which were offered all of these tools. A function: those for which it returns True.
"""


@dataclass(eq=False)
class Rollout:
    """The calls of an agent in a session, and their rewards.

    Attributes:
        session_id: The session.
        turns: All answered calls, by number.
        task: The task that the session was made with.
        group: Rollouts of one group are compared with each other.
        state: ``open`` or ``ended``.
        end_reason: Why the session ended.
        main: Which branches are trained on: ``longest`` (the default), ``all``, ``{"system": digest}``,
            ``{"tools": names}`` or a function of a branch.
        reward: Reward of the whole rollout; by default the sum of those of branches and turns.
        branch_rewards: Rewards of branches, by their index in ``branches``; each is credited to the branch's last turn.
        turn_rewards: Rewards of turns, by number.
    """

    session_id: str
    turns: Sequence[Turn]
    task: Any = None
    group: str = ""
    state: str = "ended"
    end_reason: str = ""
    main: Main = "longest"
    reward: float | None = None
    branch_rewards: dict[int, float] = field(default_factory=dict)
    turn_rewards: dict[int, float] = field(default_factory=dict)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The branches, in order of their last answers."""
        return _branches(self.turns, self.main)

    @property
    def side(self) -> tuple[Branch, ...]:
        """The branches that are not trained on."""
        return tuple(branch for branch in self.branches if not branch.main)

    @property
    def trained(self) -> list[tuple[Branch, Turn, int]]:
        """The turns that are trained on, branch by branch: each with its branch and the start of its answer there."""
        return [
            (branch, turn, start)
            for branch in self.branches
            for turn, start in zip(branch.turns, branch.starts)
            if branch.main and turn.used and turn in branch.own
        ]

    def to_trajectory(self, task: AnyTask | None = None, *, group: int = 0, member: int = 0) -> Trajectory:
        """Return the rollout for the algorithms: each turn that is trained on is a step, branch by branch.

        ``rows_of`` makes a row of each branch, and a trajectory counts once in its group however many rows it has.

        Args:
            task: The task; by default the session's own, if it is a text or has a ``prompt``.
            group, member: Number of the group of rollouts of one task, and of the rollout in it.

        Raises:
            ValueError: A reward is for a turn or a branch that is not trained on.
        """
        from gradwire.rl.rewards.aligner import align
        from gradwire.rl.types import Action, StepData, Task, Trajectory

        if task is None:
            known = isinstance(self.task, str) or (isinstance(self.task, Mapping) and "prompt" in self.task)
            task = self.task if known else Task("", task_id=self.group, data={"task": self.task})
        trajectory = Trajectory(Task.of(task), group, member)
        messages: list[Message] = []
        for branch, turn, start in self.trained:
            messages += [_shown(message) for message in turn.messages]
            observation = messages[-1]["content"] if turn.messages else ""
            answer: Any = {"role": "assistant", "content": turn.text}
            if turn.tool_calls:
                answer["tool_calls"] = [dict(call) for call in turn.tool_calls]
            messages.append(answer)
            trajectory.steps.append(
                StepData(
                    index=len(trajectory.steps),
                    observation=observation,
                    state_key=observation or turn.prompt_suffix.tobytes(),
                    prompt_ids=branch.ids[:start],
                    action=Action(turn.text, turn.tool_calls),
                    response_ids=turn.response_ids,
                    logprobs=turn.logprobs,
                    messages=tuple(messages),
                    policy_version=int(turn.versions.min()) if len(turn.versions) else 0,
                    stop_reason=turn.finish_reason,
                )
            )
        trajectory.messages = tuple(messages)
        evaluation = self.evaluation()
        if evaluation is not None:
            align(trajectory, evaluation)
        return trajectory

    def evaluation(self) -> EvaluateResult | None:
        """Return the rewards for the steps of :meth:`to_trajectory`; None if there are none.

        Raises:
            ValueError: A reward is for a turn or a branch that is not trained on.
        """
        from gradwire.rl.types import EvaluateResult, StepOutput

        steps = {turn.number: index for index, (_, turn, _) in enumerate(self.trained)}
        rewards = dict(self.turn_rewards)
        for index, reward in self.branch_rewards.items():
            used = [turn.number for turn in self.branches[index].own if turn.used]
            number = used[-1] if used else self.branches[index].turns[-1].number
            rewards[number] = rewards.get(number, 0.0) + reward
        if astray := rewards.keys() - steps.keys():
            raise ValueError(
                f"turn {min(astray)} of session {self.session_id} has a reward and is not trained on: it is unused, or "
                f"belongs to no main branch (main is {self.main!r})"
            )
        if not rewards and self.reward is None:
            return None
        outputs = tuple(StepOutput(steps[number], reward) for number, reward in rewards.items())
        return EvaluateResult(self.reward, outputs)  # type: ignore[arg-type]  # None: their sum


def _shown(message: Mapping[str, Any]) -> Message:
    """A message whose content is text; other parts are named in brackets."""
    content = message.get("content")
    if not isinstance(content, str):
        content = "\n".join(
            part if isinstance(part, str) else str(part.get("text", f"[{part.get('type', 'part')}]"))
            for part in content or ()
        )
    shown: Any = {**message, "content": content}
    return shown  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Path:
    """The tokens of a turn's prompt and answer, and the turns whose answers are in them whole."""

    ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    turns: tuple[Turn, ...] = ()
    starts: tuple[int, ...] = ()

    def cut(self, tokens: int) -> _Path:
        """Return the path of the first tokens."""
        whole = sum(start + len(turn.response_ids) <= tokens for turn, start in zip(self.turns, self.starts))
        return _Path(self.ids[:tokens], self.turns[:whole], self.starts[:whole])

    def extended(self, turn: Turn) -> _Path:
        ids = np.concatenate([self.ids, turn.prompt_suffix, turn.response_ids]).astype(np.int64)
        return _Path(ids, (*self.turns, turn), (*self.starts, len(ids) - len(turn.response_ids)))

    def branch(self, own: Collection[int], main: bool) -> Branch:
        """Return the path as a branch in which the answers of these turns are marked."""
        sampled = np.zeros(len(self.ids), np.bool_)
        logprobs, versions = np.zeros(len(self.ids), np.float32), np.full(len(self.ids), -1, np.int64)
        for turn, start in zip(self.turns, self.starts):
            if turn.number in own:
                there = slice(start, start + len(turn.response_ids))
                sampled[there], logprobs[there], versions[there] = True, turn.logprobs, turn.versions
        mine = tuple(turn for turn in self.turns if turn.number in own)
        first = mine[0] if mine else self.turns[-1]
        return Branch(
            self.turns, mine, self.ids, sampled, logprobs, versions, self.starts, first.parent, first.fork, main
        )


def _branches(turns: Sequence[Turn], main: Main) -> tuple[Branch, ...]:
    paths: dict[int, _Path] = {}
    continued: set[int] = set()
    for turn in turns:  # a parent was answered before its children
        before = paths.get(turn.parent, _Path())
        shared = turn.shared if turn.fork else len(before.ids)
        if shared > len(before.ids):
            raise ValueError(
                f"turn {turn.number} shares {shared} tokens with turn {turn.parent}, which has {len(before.ids)}"
            )
        if shared == len(before.ids):
            continued.add(turn.parent)
        paths[turn.number] = before.cut(shared).extended(turn)
    ends = [path for number, path in paths.items() if number not in continued]
    chosen = _chosen([path.branch({turn.number for turn in path.turns}, True) for path in ends], main)
    # A turn belongs to the first branch that is trained on, if there is one: an answer that was cut off and asked for
    # again takes nothing from the branch that went on.
    order = sorted(range(len(ends)), key=lambda index: (not chosen[index], not ends[index].turns[-1].used, index))
    owners: dict[int, int] = {}
    for index in order:
        for turn in ends[index].turns:
            owners.setdefault(turn.number, index)
    return tuple(
        path.branch({turn.number for turn in path.turns if owners[turn.number] == index}, chosen[index])
        for index, path in enumerate(ends)
    )


def _chosen(branches: Sequence[Branch], main: Main) -> list[bool]:
    """Tell for each branch whether it is a main one."""
    if callable(main):
        return [bool(main(branch)) for branch in branches]
    if main == "all" or not branches:
        return [True] * len(branches)
    if main == "longest":
        longest = max(branches, key=lambda branch: len(branch.ids))
        tools = set(longest.tool_names)
        return [
            branch.system_digest == longest.system_digest and (not tools or not tools.isdisjoint(branch.tool_names))
            for branch in branches
        ]
    if not isinstance(main, Mapping) or not main or main.keys() - {"system", "tools"}:
        raise ValueError(
            f'main must be "longest", "all", {{"system": digest}}, {{"tools": names}} or a function of a branch; '
            f"got {main!r}"
        )
    return [
        branch.system_digest == main.get("system", branch.system_digest)
        and set(main.get("tools", ())) <= set(branch.tool_names)
        for branch in branches
    ]
