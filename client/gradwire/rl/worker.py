"""Run one episode from the first state to the last."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.rl.environments.base import HISTORIES, BaseEnvironment, Environment, Policy, StepResult
from gradwire.rl.generation import Generation, InferenceModule, SamplingParams
from gradwire.rl.prompts import TokenHistory
from gradwire.rl.threads import called, is_cancelled
from gradwire.rl.types import AnyTask, IntArray, Message, State, StepData, Task, Trajectory

logger = logging.getLogger("gradwire.rl")

Generate = Callable[[IntArray, SamplingParams], Awaitable[Generation]]


class RLRolloutWorker:
    """Runs episodes of an environment, one per call; a failure of an episode is recorded in its trajectory.

    Args:
        environment: The environment.
        params: Sampling parameters; the environment's stop strings are added.
        new_history: Makes a :class:`~gradwire.rl.prompts.TokenHistory` for an episode.
        inference: The sampler, which environments with a loop of their own need.
        max_steps: Truncate an episode after this many steps.
        timeout_s: Time limit of an episode; None waits without limit.
    """

    def __init__(
        self,
        environment: Environment,
        params: SamplingParams,
        new_history: Callable[[], TokenHistory],
        *,
        inference: InferenceModule | None = None,
        max_steps: int = 16,
        timeout_s: float | None = None,
    ) -> None:
        self._environment, self._inference = environment, inference
        if isinstance(environment, BaseEnvironment):
            stop = (environment.stop,) if isinstance(environment.stop, str) else environment.stop
            params = replace(params, stop=tuple(dict.fromkeys((*params.stop, *stop))))
        self._params = params
        self._new_history = new_history
        self._max_steps = max_steps
        self._timeout_s = timeout_s
        self._source: tuple[Task, InferenceModule] | None = None

    @staticmethod
    def of(
        environment: Environment,
        inference: InferenceModule,
        task: AnyTask,
        *,
        params: SamplingParams | None = None,
        max_steps: int = 16,
        timeout_s: float | None = None,
    ) -> RLRolloutWorker:
        """Make a worker with its sampler and task, for :meth:`run_episode`."""

        def new_history() -> TokenHistory:
            return TokenHistory(inference.codec)

        sampling = params or SamplingParams()
        worker = RLRolloutWorker(
            environment, sampling, new_history, inference=inference, max_steps=max_steps, timeout_s=timeout_s
        )
        worker._source = Task.of(task), inference
        return worker

    async def run_episode(self, seed: int = 0) -> tuple[list[StepData], list[Message], Any]:
        """Run one episode of the worker's task: its steps, the conversation, and the task's ground truth.

        Episodes with the same seed start from the same state and can form a group.

        Raises:
            RuntimeError: The episode failed; the message has the cause.
        """
        if self._source is None:
            raise ValueError("run_episode needs a sampler and a task: make the worker with RLRolloutWorker.of(...)")
        task, inference = self._source

        async def generate(prompt: IntArray, params: SamplingParams) -> Generation:
            return (await inference.generate([prompt], params))[0]

        trajectory = await self.run(task, generate, seed=seed)
        if trajectory.status in ("failed", "timeout"):
            raise RuntimeError(f"the episode {trajectory.status}: {trajectory.error}")
        return trajectory.steps, list(trajectory.messages), trajectory.ground_truth

    async def run(
        self, task: Task, generate: Generate, *, group: int = 0, member: int = 0, seed: int = 0
    ) -> Trajectory:
        """Run one episode. Errors of the environment or the sampler are not raised; see ``status`` and ``error``."""
        trajectory, started = Trajectory(task, group, member, seed), time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._play(trajectory, generate)
        except TimeoutError as error:
            late = self._timeout_s is not None and time.monotonic() - started >= self._timeout_s
            trajectory.status = "timeout" if late else "failed"
            trajectory.error = f"gave up after {self._timeout_s:g} s" if late else f"TimeoutError: {error}"
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's environment may raise anything
            if is_cancelled():
                raise
            trajectory.status, trajectory.error = "failed", f"{type(error).__name__}: {error}"
            trajectory.traceback = traceback.format_exc()
            logger.debug("episode %d.%d failed", group, member, exc_info=True)
        finally:
            trajectory.seconds = time.monotonic() - started
        logger.debug(
            "episode %d.%d: %d steps, %s%s, %.3g s",
            group, member, len(trajectory.steps), trajectory.status, f" ({trajectory.error})" * bool(trajectory.error),
            trajectory.seconds,
        )  # fmt: skip
        return trajectory

    async def _play(self, trajectory: Trajectory, generate: Generate) -> None:
        environment = self._environment
        if isinstance(environment, BaseEnvironment):
            if environment.history not in HISTORIES:
                raise ValueError(f"history is {environment.history!r}; there are {', '.join(HISTORIES)}")
            history = self._new_history()
            history.keeps = environment.history == "keep"
            episode = _Episode(environment, history, generate, self._params)
            try:
                await episode.play(trajectory, self._max_steps)
            finally:
                if trajectory.state is not None:
                    episode.close(trajectory)
        elif self._inference is None:
            raise TypeError(
                f"{type(environment).__name__} needs a worker with a sampler: RLRolloutWorker(inference=...)"
            )
        else:
            await environment.play(trajectory, Policy(self._inference, self._params, self._max_steps))


@dataclass(frozen=True)
class _Episode:
    """An episode in progress."""

    environment: BaseEnvironment
    history: TokenHistory
    generate: Generate
    params: SamplingParams

    async def play(self, trajectory: Trajectory, max_steps: int) -> None:
        environment = self.environment
        state: State = await self._call(environment.reset, trajectory.task, trajectory.seed)
        trajectory.state, trajectory.messages = state, state.messages
        while not environment.is_terminal(state):
            if state.step >= max_steps:
                state = state.having(truncated=True)
                break
            state = await self._step(trajectory, state)
        trajectory.state = state
        trajectory.status = "truncated" if state.truncated and not state.terminated else "completed"

    async def _step(self, trajectory: Trajectory, state: State) -> State:
        environment = self.environment
        observation, key = environment.observation(state), environment.state_key(state)
        prompt_ids = await self.history.prompt_ids(environment.build_prompt(state))
        generation = await self.generate(prompt_ids, self.params)
        self.history.wrote(generation, self.params.stop)
        action = environment.parse_action(state, generation.text)
        step = StepData(
            index=len(trajectory.steps),
            observation=observation,
            state_key=key,
            prompt_ids=prompt_ids,
            action=action,
            response_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_version=generation.version,
            token_versions=generation.token_versions,
            stop_reason=generation.stop_reason,
        )
        trajectory.steps.append(step)
        result: StepResult = await self._call(environment.step, state, action)
        state = environment.update_state(state, action, result)
        step.tool_results, step.messages = result.tool_results, state.messages
        trajectory.state, trajectory.messages = state, state.messages
        if logger.isEnabledFor(logging.DEBUG):
            explain_step(trajectory, step)
        return state

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await called(method, *args, blocking=self.environment.blocking)

    def close(self, trajectory: Trajectory) -> None:
        assert trajectory.state is not None
        try:
            self.environment.close(trajectory.state)
        except Exception as error:  # the episode is over and its data is kept; the failure to close is logged
            logger.warning(
                "closing episode %d.%d: %s: %s", trajectory.group, trajectory.member, type(error).__name__, error
            )


def explain_step(trajectory: Trajectory, step: StepData) -> None:
    """Log a step at DEBUG: observation, response, interpretation, log-probabilities, value, and tool results."""
    name = f"episode {trajectory.group}.{trajectory.member} step {step.index}"
    logger.debug("%s: observation %.500r", name, step.observation)
    logger.debug("%s: action %.500r, understood as %.500r, ended by %s", name, step.action.raw, step.action.parsed,
                 step.stop_reason)  # fmt: skip
    logger.debug("%s: log-probabilities %s", name, np.round(step.logprobs, 4).tolist())
    logger.debug("%s: policy_value_estimate %s", name, step.policy_value_estimate)
    for result in step.tool_results:
        got = f"failed: {result.error}" if result.error else f"gave {result.content:.500}"
        logger.debug(
            "%s: tool %s(%s) %s, cost %g", name, result.call.name, dict(result.call.arguments), got, result.cost
        )
    logger.debug("%s: messages now %.2000s", name, list(step.messages))
