"""A task that an agent can solve by a tool alone: to say a secret word. Its model has all it needs but the habit.

The model says one of the words without knowing, or calls the tool; behind the tool's answer it says the right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire.rl import Action, State, StepResult, Task, ToolEnvironment, reward_function

from support.saying_model import saying_model

WORDS = ("ALPHA", "BETA", "GAMMA")
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
QUESTION = "Which word is it?"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ message.content }}{% endif %}</s>"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look the word up.", "parameters": {}}}]


def secret_word_model(path: Path) -> Path:
    """Write the model, with the template and its tools."""
    follows = {"?": (CALL, *WORDS), CALL: ("</s>",)}
    follows |= {word.lower(): (word,) for word in WORDS} | dict.fromkeys(WORDS, ("</s>",))
    saying_model(path, follows, context_length=256, special=False)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def tasks() -> list[Task]:
    return [Task(QUESTION, word, word) for word in WORDS]


def right(response: str, ground_truth: str) -> float:
    return float(response.strip() == ground_truth)


secret_word_reward = reward_function(sandboxed=False)(right)


async def agent(client: Any, prompt: str, task: Task) -> str:
    """An agent as one writes them with the ``openai`` package: it knows nothing of training."""
    return await converse(client, [{"role": "user", "content": prompt}], str(task.ground_truth).lower())


async def converse(client: Any, messages: list[Any], word: str) -> str:
    """Go on with a conversation until an answer calls no tool."""
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": word})


class OwnEnvironment(ToolEnvironment):
    """The same task as an environment of ``gradwire.rl``."""

    def __init__(self) -> None:
        super().__init__(describe_tools=False, stop=())

    async def step(self, state: State, action: Action) -> StepResult:
        if action.parsed and not isinstance(action.parsed, str):
            return StepResult(str(state.task.ground_truth).lower(), role="tool")
        return await super().step(state, action)
