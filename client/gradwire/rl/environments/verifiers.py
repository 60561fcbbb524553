"""Classic environments of ``verifiers`` (0.1 to 0.3): a dataset, ``env_response`` and ``is_completed``.

Messages are plain text here; use a ``ToolEnvironment`` for an environment that expects parsed ``tool_calls``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire.rl.environments.base import BaseEnvironment, StepResult, first_messages
from gradwire.rl.threads import called
from gradwire.rl.types import Action, Message, State, Task


def verifiers_tasks(env: Any, split: str = "train") -> list[Task]:
    """Return the dataset of a ``verifiers`` environment (``prompt`` or ``question``, ``answer``, ``info``) as tasks."""
    dataset = env.get_eval_dataset() if split != "train" and hasattr(env, "get_eval_dataset") else env.get_dataset()
    return [Task.of(row) for row in dataset]


class VerifiersEnvironment(BaseEnvironment):
    """Wraps an object with ``env_response`` and ``is_completed``, plain or ``async``.

    Supported signatures: ``(messages, state)`` or ``(state)`` for ``is_completed``; ``env_response`` returns messages,
    or messages and the state. The state mapping is kept in the state's ``data["verifiers"]``.

    Args:
        env: The environment.
        max_turns: The policy's limit of turns; by default the environment's own ``max_turns``.
    """

    def __init__(self, env: Any, *, max_turns: int | None = None, stop: tuple[str, ...] = ()) -> None:
        missing = [name for name in ("env_response", "is_completed") if not hasattr(env, name)]
        if missing:
            raise TypeError(
                f"{type(env).__name__} has no {' and no '.join(missing)}: it is not an environment of this kind"
            )
        self.env = env
        own = getattr(env, "max_turns", None)
        self.max_steps = max_turns or (own if isinstance(own, int) and own > 0 else None)
        self.stop = stop
        self._native = _own_messages(env)

    async def reset(self, task: Task, seed: int) -> State:
        system = getattr(self.env, "system_prompt", None) or ""
        messages = first_messages(task, system if isinstance(task.prompt, str) else "")
        inner: dict[str, Any] = {
            "prompt": self._native(messages), "completion": [], "answer": task.ground_truth, "turn": 0,
            "info": task.data.get("info", {}), "trajectory": [], "final_env_response": None, "error": None,
        }  # fmt: skip
        setup = getattr(self.env, "setup_state", None)
        if setup is not None:
            inner = await called(setup, inner) or inner
        return State(task, messages, data={"verifiers": inner})

    async def step(self, state: State, action: Action) -> StepResult:
        inner = dict(state.data["verifiers"])
        before = self._native(state.messages)
        said = self._native([{"role": "assistant", "content": action.raw}])
        messages = [*before, *said]
        inner["completion"] = [*inner["completion"], *said]
        inner["turn"] = state.step + 1
        inner["trajectory"] = [*inner["trajectory"], {"prompt": before, "completion": said}]
        if await self._completed(messages, inner):
            return self._result("", "user", inner, done=True)
        response = await called(self.env.env_response, messages, inner)
        if isinstance(response, tuple):
            response, inner = response[0], dict(response[1])
        if isinstance(response, str):
            text, role, answer = response, "user", self._native([{"role": "user", "content": response}])
        else:
            answer = response if isinstance(response, list) else [response]
            text, role = _text(answer), _role(answer)
            inner["completion"] = [*inner["completion"], *answer]
        return self._result(text, role, inner, done=await self._completed([*messages, *answer], inner))

    def _result(self, text: str, role: str, inner: dict[str, Any], *, done: bool) -> StepResult:
        return StepResult(text, terminated=done, data={"verifiers": inner}, role=role)

    async def _completed(self, messages: Sequence[Message], inner: Mapping[str, Any]) -> bool:
        check = self.env.is_completed
        needed = [
            p
            for p in inspect.signature(check).parameters.values()
            if p.default is p.empty and p.kind < p.VAR_POSITIONAL
        ]
        return bool(await called(check, messages, inner) if len(needed) > 1 else await called(check, inner))


def _own_messages(env: Any) -> Callable[[Sequence[Message]], list[Any]]:
    """Convert messages to the library's form: its own types since 0.1.11, dicts before."""
    if any(base.__module__.startswith("verifiers.") for base in type(env).__mro__):
        with contextlib.suppress(ImportError, AttributeError):
            normalize = importlib.import_module("verifiers.utils.message_utils").normalize_messages
            return lambda messages: list(normalize([dict(message) for message in messages]))
    return list


def _text(messages: Sequence[Any]) -> str:
    contents = (message.get("content") or "" for message in messages)
    return "\n".join(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    )


def _role(messages: Sequence[Any]) -> str:
    return str(messages[-1].get("role", "user")) if messages else "user"
