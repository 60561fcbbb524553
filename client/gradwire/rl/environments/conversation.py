"""Conversations of several turns with a respondent: a function, a script, another model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gradwire.rl.environments.base import BaseEnvironment, History, StepResult, first_messages
from gradwire.rl.threads import called
from gradwire.rl.types import Action, State, Task

Reply = str | StepResult | None
Respond = Callable[[State, Action], Reply | Awaitable[Reply]]


class ConversationEnvironment(BaseEnvironment):
    """A conversation that starts with the task's messages; the chat template formats the prompts.

    Args:
        respond: ``(state, action) -> text`` of the other side; None ends the episode; a :class:`StepResult` gives full
            control. May be ``async``; a plain one runs in its own thread while ``blocking``.
        max_turns: The policy's limit of turns.
        system: A system message before the task's own.
        stop: Strings at which a turn ends.
        history: As for :class:`BaseEnvironment`.

    Subclass and override :meth:`respond` if a function is not enough.
    """

    def __init__(
        self,
        respond: Respond | None = None,
        *,
        max_turns: int = 8,
        system: str = "",
        stop: tuple[str, ...] = (),
        history: History = "template",
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self._respond = respond
        self.max_steps = max_turns
        self.system = system
        self.stop = stop
        self.history = history

    def reset(self, task: Task, seed: int) -> State | Awaitable[State]:
        return State(task, first_messages(task, self.system), data={"seed": seed})

    def respond(self, state: State, action: Action) -> Reply | Awaitable[Reply]:
        """Return the other side's turn; by default calls the function given at construction, or ends the episode."""
        return self._respond(state, action) if self._respond is not None else None

    async def step(self, state: State, action: Action) -> StepResult:
        reply: Reply = await called(self.respond, state, action, blocking=self.blocking)
        if isinstance(reply, StepResult):
            return reply
        return StepResult(terminated=True) if reply is None else StepResult(reply)
