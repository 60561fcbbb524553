"""Several turns with someone who answers: a function, a script, another model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gradwire.rl.environments.base import BaseEnvironment, StepResult, first_messages
from gradwire.rl.threads import called
from gradwire.rl.types import Action, State, Task

Reply = str | StepResult | None
Respond = Callable[[State, Action], Reply | Awaitable[Reply]]


class ConversationEnvironment(BaseEnvironment):
    """A conversation from the task's messages on; prompts are conversations, so a chat template writes them.

    Args:
        respond: ``(state, action) -> text`` of the other side; None ends the episode; a :class:`StepResult` says more.
            May be ``async``; a plain one runs in a thread of its own while ``blocking``.
        max_turns: of the policy.
        system: a system message before the task's own.
        stop: strings at which a turn ends.

    Inherit and override :meth:`respond` instead of giving one, where it needs more than a function.
    """

    def __init__(
        self, respond: Respond | None = None, *, max_turns: int = 8, system: str = "", stop: tuple[str, ...] = ()
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1; this is {max_turns}")
        self._respond = respond
        self.max_steps = max_turns
        self.system = system
        self.stop = stop

    def reset(self, task: Task, seed: int) -> State | Awaitable[State]:
        return State(task, first_messages(task, self.system), data={"seed": seed})

    def respond(self, state: State, action: Action) -> Reply | Awaitable[Reply]:
        """The other side's turn; by default the function given at construction, or the end."""
        return self._respond(state, action) if self._respond is not None else None

    async def step(self, state: State, action: Action) -> StepResult:
        reply: Reply = await called(self.respond, state, action, blocking=self.blocking)
        if isinstance(reply, StepResult):
            return reply
        return StepResult(terminated=True) if reply is None else StepResult(reply)
