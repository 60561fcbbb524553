"""One prompt, one response: the form of most verifiable tasks."""

from __future__ import annotations

from gradwire.rl.environments.base import BaseEnvironment, StepResult
from gradwire.rl.types import Action, Message, Prompt, State, Task, UserText


class SimpleTextEnvironment(BaseEnvironment):
    """The policy answers the prompt once and the episode ends.

    A prompt is a conversation, or a text: the user's message for a model with a chat template, and a text to continue
    for a model without one.

    Args:
        template: Format of a plain text prompt, e.g. ``"Q: {prompt}\\nA:"``; with any format but the default, every
            model continues the text as it is.
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
        if not isinstance(state.task.prompt, str):
            return state.messages
        text = state.messages[0]["content"]
        return UserText(text) if self.template == "{prompt}" else text

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult(terminated=True)
