"""Run an environment's own ``step`` loop as an episode of the toolkit.

In the toolkit, the environment answers an action that the toolkit sampled; here, ``step`` requests the sample itself.
So each episode has a thread in which the environment's ``step`` runs; a call of ``generate`` blocks the thread until
the toolkit has sampled for all waiting episodes and recorded the response.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import random
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gradwire.rl.environments import BaseEnvironment as AsyncEnvironment
from gradwire.rl.environments import StepResult
from gradwire.rl.threads import called
from gradwire.rl.types import Action, Message, Prompt, Task
from gradwire.rl.types import State as AsyncState

IDLE_STEPS = 1000
KEPT_STARTS = 4096
FIGURES = ("verification_cost", "tool_cost", "budget", "answer")
"""Keys of a state's data that rewards read."""


class EpisodeClosed(BaseException):
    """Ends the thread of an abandoned episode; not an ``Exception``, so that user code does not catch it."""


@dataclass(frozen=True)
class Asked:
    """The environment requests a response to this prompt."""

    prompt: Prompt


@dataclass(frozen=True)
class Ended:
    """The environment has ended the episode."""

    state: Any


@dataclass(frozen=True)
class Failed:
    error: BaseException


class Episode:
    """One episode of a user's environment, in its own thread.

    Args:
        environment: The episode's own copy.
        state: The start state.
        inference: The module whose ``generate`` is the policy's.
    """

    def __init__(self, environment: Any, state: Any, inference: Any) -> None:
        self._environment, self.state, self.inference = environment, state, inference
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Asked | Ended | Failed] = asyncio.Queue()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._asked = 0

    async def start(self) -> Asked | Ended:
        """Run until the first prompt."""
        threading.Thread(target=self._run, name="gradwire episode", daemon=True).start()
        return await self._event()

    async def answer(self, text: str) -> Asked | Ended:
        """Pass the response to the last prompt; run until the next prompt."""
        self._answers.put(text)
        return await self._event()

    def close(self) -> None:
        self._answers.put(None)

    def ask(self, prompt: Prompt) -> str:
        """Called in the thread: return the policy's response."""
        self._asked += 1
        self._tell(Asked(prompt))
        answer = self._answers.get()
        if answer is None:
            raise EpisodeClosed
        return answer

    async def _event(self) -> Asked | Ended:
        event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error
        return event

    def _tell(self, event: Asked | Ended | Failed) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _run(self) -> None:
        _thread.episode = self
        try:
            idle = 0
            while not self._environment.is_terminal(self.state):
                before = self._asked
                following = self._environment.step(self.state)
                self.state = self.state if following is None else following
                idle = idle + 1 if self._asked == before else 0
                if idle >= IDLE_STEPS:
                    raise RuntimeError(
                        f"step() was called {idle} times without asking self.inference, and is_terminal stays False"
                    )
            self._tell(Ended(self.state))
        except EpisodeClosed:
            return
        except Exception as error:  # the user's environment may raise anything; only this episode fails
            self._tell(Failed(error))
        except BaseException as error:  # exit() in user code must fail only that code
            self._tell(Failed(RuntimeError(f"{type(error).__name__} in the environment")))


_thread = threading.local()


def running_episode(inference: Any) -> Episode | None:
    """Return the episode whose environment runs in this thread, if this module is its policy."""
    episode: Episode | None = getattr(_thread, "episode", None)
    return episode if episode is not None and episode.inference is inference else None


class EpisodeEnvironment(AsyncEnvironment):
    """Adapts a user's environment to the toolkit's rollouts.

    Each episode has a shallow copy of the environment; those of a group start from copies of one ``reset()``.
    """

    blocking = False

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.stop = tuple(environment.stop)
        self._starts: OrderedDict[Hashable, asyncio.Future[tuple[Any, Any]]] = OrderedDict()

    async def reset(self, task: Task, seed: int) -> AsyncState:
        environment, state = await self._start(task, seed)
        episode = Episode(copy.copy(environment), copy.deepcopy(state), self._environment.inference)
        event = await episode.start()
        first = AsyncState(task, data={"episode": episode, "prompt": "", "state": episode.state})
        if isinstance(event, Ended):
            return first.having(terminated=True)
        return first.having(messages=as_messages(event.prompt), data={"prompt": event.prompt})

    async def _start(self, task: Task, seed: int) -> tuple[Any, Any]:
        key = (task.key, seed)
        if key not in self._starts:
            self._starts[key] = asyncio.ensure_future(self._reset(task, seed))
            while len(self._starts) > KEPT_STARTS:
                self._starts.popitem(last=False)
        return await asyncio.shield(self._starts[key])

    async def _reset(self, task: Task, seed: int) -> tuple[Any, Any]:
        environment = copy.copy(self._environment)
        environment.task, environment.rng = task, random.Random(seed)
        state = await called(environment.reset)
        if state is None or not hasattr(state, "prompt"):
            raise TypeError(
                f"{type(environment).__name__}.reset returned {type(state).__name__}; it must return a State"
            )
        return environment, state

    def build_prompt(self, state: AsyncState) -> Prompt:
        prompt: Prompt = state.data["prompt"]
        return prompt

    def state_key(self, state: AsyncState) -> Hashable:
        """The whole prompt."""
        return repr(state.data["prompt"])

    async def step(self, state: AsyncState, action: Action) -> StepResult:
        episode: Episode = state.data["episode"]
        event = await episode.answer(action.raw)
        own = getattr(episode.state, "data", {})
        results = tuple(own.get("tool_results", ()))
        data = {name: own[name] for name in FIGURES if name in own}
        data |= {"state": episode.state, "tool_results": len(results)}
        new = results[state.data.get("tool_results", 0) :]
        if isinstance(event, Ended):
            return StepResult(terminated=True, data=data, tool_results=new)
        observation = what_is_new(state.data["prompt"], action.raw, event.prompt)
        return StepResult(observation, data={**data, "prompt": event.prompt}, tool_results=new)

    def close(self, state: AsyncState) -> None:
        state.data["episode"].close()


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def what_is_new(before: Prompt, response: str, prompt: Prompt) -> str:
    """Return the part of a prompt beyond the last prompt and its response; all of it if it does not continue them."""
    if isinstance(prompt, str):
        told = before + response if isinstance(before, str) else ""
        return prompt.removeprefix(told) if told else prompt
    return prompt[-1]["content"] if prompt else ""
