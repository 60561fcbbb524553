"""One prompt, one response: the form of most verifiable tasks."""

from __future__ import annotations

from gradwire.rl.environments.base import BaseEnvironment, StepResult
from gradwire.rl.types import Action, Message, Prompt, State, Task


class SimpleTextEnvironment(BaseEnvironment):
    """The policy continues the prompt once and the episode ends. The chat template formats messages.

    Args:
        template: Format of a plain text prompt, e.g. ``"Q: {prompt}\nA:"``.
        stop: Strings at which the response ends.
    """

    blocking = False

    def __init__(self, template: str = "{prompt}", stop: tuple[str, ...] = ()) -> None:
        if "{prompt}" not in template:
            raise ValueError(f'template must contain "{{prompt}}", got {template!r}')
        self.template = template
        self.stop = stop

    def reset(self, task: Task, seed: int) -> State:
        if not isinstance(task.prompt, str):
            return State(task, tuple(task.prompt))
        message: Message = {"role": "user", "content": self.template.replace("{prompt}", task.prompt)}
        return State(task, (message,))

    def build_prompt(self, state: State) -> Prompt:
        return state.messages[0]["content"] if isinstance(state.task.prompt, str) else state.messages

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult(terminated=True)
