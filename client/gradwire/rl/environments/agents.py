"""Agents as they are: programs and functions that call the model by themselves, each in a rollout session of its own.

The agent is pointed at the session's URL and does its work unchanged; what it did there becomes the trajectory, with
the sampled tokens, their log-probabilities and the versions of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from gradwire.extras import require
from gradwire.rl.environments.base import EpisodeEnvironment, Policy, first_messages
from gradwire.rl.environments.programs import PASSED, Exit, Program, own_folder, run_in_sandbox, run_program
from gradwire.rl.rewards.computer import as_scorer
from gradwire.rl.rewards.functions import RewardFunction, Scorer
from gradwire.rl.threads import called
from gradwire.rl.types import EvaluateResult, State, Status, Task, Trajectory
from gradwire.rollout import Main, Rollout
from gradwire.sessions import History, RolloutSession, SessionLimits, SessionSampling
from gradwire.wire.options import check_options

Runner = Callable[[Program], Awaitable[Exit]]
"""Runs a program to its end, as :func:`~gradwire.rl.environments.programs.run_program` does."""
CLIENTS = {"openai": "AsyncOpenAI", "anthropic": "AsyncAnthropic"}
LIMITED = re.compile(r"\((max_turns|max_tokens|max_seconds)\)$")
"""The end of the reason of a session that a limit ended."""
PATIENCE = 10
"""How often a function's client repeats a call, for about a minute: a server may be restarted meanwhile."""
SPARE_S = 60.0
"""Seconds that a session lasts longer than its agent may."""
SHOWN = 2_000
"""Characters of an agent's standard error in the message of its failure."""


class AgentOptions(TypedDict, total=False):
    """The keyword arguments of :class:`AgentEnvironment`.

    ``{prompt}``, ``{task_id}``, ``{folder}``, ``{url}``, ``{openai_url}``, ``{key}`` and ``{home}`` in ``command``,
    ``env``, ``files`` and ``stdin`` stand for the episode's own; ``{task_id}`` also in ``workdir``.

    Attributes:
        command: The program that is started for each episode, and its arguments.
        workdir: A template folder; each episode works in a copy, which is removed afterwards. By default an empty one.
        files: Path in that folder -> text, written into each copy: configurations that name the session's URL.
        env: Environment variables besides ``PATH``, the language and those of the session. ``HOME`` is an empty folder.
        stdin: The program's standard input; none by default.
        reward: Scores each episode while its folder is there: a reward function of ``folder``, ``exit_status``,
            ``output``, ``errors``, ``result``, ``messages``, ``ground_truth`` and others, or any scorer. The algorithm
            then takes ``environment_reward()``.
        runner: Starts programs in place of :func:`~gradwire.rl.run_program`: in a container, on another machine.
        sandbox: Programs can write to their episode's folder alone and see their own processes alone, which all end
            with them; they can read what you can, and reach the network. Needs Linux with user namespaces. False by
            default.
        client: The client that a function gets as ``client``: ``openai`` (the default) or ``anthropic``.
        timeout_s: Seconds after which an agent is ended; 600 by default.
        retries: How often an agent that crashed or ran too long is started again; 0 by default.
        exit_statuses: Exit statuses of a program that did its work, whatever it is worth; others are crashes. 0 alone
            by default; None for all.
        max_parallel: Agents at once; 32 by default.
        main: Which branches are trained on: see :class:`~gradwire.rollout.Rollout`; ``longest`` by default.
        history: ``keep`` (the default) or ``template``: see :class:`~gradwire.SessionOptions`.
        limits: Limits of each session; by default the algorithm's ``max_steps_per_rollout`` turns.
        sampling: Changes to the algorithm's sampling parameters, which hold whatever the agent asks for.
        output_bytes: The last bytes of a program's output, and of its errors, that are kept; 65,536 by default.
        server_url: The server as agents reach it, such as ``http://host.docker.internal:8080``; by default as this
            program does.
    """

    command: Sequence[str]
    workdir: Path | str | None
    files: Mapping[str, str]
    env: Mapping[str, str]
    stdin: str
    reward: Scorer | Callable[..., Any]
    runner: Runner
    sandbox: bool
    client: Literal["openai", "anthropic"]
    timeout_s: float
    retries: int
    exit_statuses: Collection[int] | None
    max_parallel: int
    main: Main
    history: History
    limits: SessionLimits
    sampling: SessionSampling
    output_bytes: int
    server_url: str


@dataclass(frozen=True)
class _Ended:
    """How an agent ended: ``status`` is ``completed`` unless it crashed or ran too long, with an ``error`` then."""

    status: Status = "completed"
    error: str = ""
    traceback: str = ""
    exit_status: int | None = None
    output: str = ""
    errors: str = ""
    result: Any = None


class AgentEnvironment(EpisodeEnvironment):
    """Agents as they are: each episode is a program, or a call of a function, in a rollout session of its own.

    An agent that crashes (another exit status, an exception, no call of the model at all) or runs too long is not one
    that failed its task: its episode is ``failed`` or ``timeout``, has no reward and is not trained on. An agent whose
    session ended by a limit is ``truncated``, and is scored.

    The sampler must be the run's own (:class:`~gradwire.rl.RunInference`), on a server with an HTTP door.

    Args:
        agent: A function, ``async`` or plain, in place of ``command``. Its parameters are any of ``client`` (a ready
            ``openai.AsyncOpenAI`` or ``anthropic.AsyncAnthropic``), ``prompt``, ``task``, ``session``, ``folder``.
        options: ``command``, ``workdir``, ``reward`` and others: see :class:`AgentOptions`.
    """

    def __init__(self, agent: Callable[..., Any] | None = None, **options: Unpack[AgentOptions]) -> None:
        check_options(AgentOptions, options, type(self))
        command = options.get("command", ())
        if isinstance(command, str):
            raise TypeError(f"command is a list of words, such as {command.split()!r}")
        if (agent is None) == (not command):
            raise ValueError("AgentEnvironment needs a function or a command, one of them")
        self._agent, self._command, self._options = agent, tuple(command), options
        if agent is not None:
            self._wanted = _parameters(agent)
        if options.get("sandbox", False) and ("runner" in options or agent is not None):
            raise ValueError("sandbox is for programs that no runner of your own starts")
        reward = options.get("reward")
        self._scorer = None if reward is None else as_scorer(reward)
        if isinstance(self._scorer, RewardFunction) and self._scorer.batch:
            raise ValueError("a batch reward compares a group: give it to the algorithm, not to the environment")
        if options.get("max_parallel", 32) < 1 or options.get("retries", 0) < 0:
            raise ValueError("max_parallel must be at least 1, and retries at least 0")
        self._timeout_s = options.get("timeout_s", 600.0)
        self._places = asyncio.Semaphore(options.get("max_parallel", 32))
        self._clients = _SharedClient(options.get("client", "openai"))

    async def play(self, trajectory: Trajectory, policy: Policy) -> None:
        if not hasattr(policy.inference, "rollout_session"):
            raise TypeError(
                f"agents need sessions of the run's own sampler (RunInference), and {type(policy.inference).__name__} "
                "has none"
            )
        async with self._places:
            for attempt in range(1 + self._options.get("retries", 0)):
                await self._attempt(trajectory, policy, attempt)
                if trajectory.status not in ("failed", "timeout"):
                    break

    async def _attempt(self, trajectory: Trajectory, policy: Policy, attempt: int) -> None:
        """Run the agent once and write what it did into the trajectory."""
        session: RolloutSession = await policy.inference.rollout_session(  # type: ignore[attr-defined]
            **self._session_options(trajectory, policy, attempt)
        )
        try:
            async with self._folders(trajectory.task) as root:
                ended = await _Run(self, trajectory.task, session, root).agent()
                await session.end("the agent ended" if ended.status == "completed" else ended.error[:200])
                rollout = await session.rollout(main=self._options.get("main", "longest"))
                _write(trajectory, rollout, ended)
                _describe(trajectory, ended, str(root / "work"), {"session": session, "rollout": rollout})
                trajectory.evaluation = await self._score(trajectory, rollout)
            await _record(session, rollout, trajectory.evaluation)
        except BaseException as error:
            await session.end(f"the episode failed: {type(error).__name__}")
            raise

    async def _score(self, trajectory: Trajectory, rollout: Rollout) -> EvaluateResult | None:
        if self._scorer is None or trajectory.status not in ("completed", "truncated"):
            return None
        (result,) = await self._scorer.evaluate([trajectory])
        if result.error or not (rollout.turn_rewards or rollout.branch_rewards):
            return result
        rollout.reward = result.score if rollout.reward is None else rollout.reward
        given = rollout.evaluation()
        assert given is not None
        return replace(result, score=given.score, step_outputs=given.step_outputs)

    def _session_options(self, trajectory: Trajectory, policy: Policy, attempt: int) -> dict[str, Any]:
        params, limits = policy.params, self._options.get("limits") or SessionLimits()
        sampling = SessionSampling(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, max_tokens=params.max_tokens,
            fixed=True,
        )  # fmt: skip
        sampling.update(self._options.get("sampling", {}))
        task = trajectory.task
        return {
            "task": {"task_id": task.task_id, "prompt": prompt_text(task)[:SHOWN]},
            "group": str(trajectory.group),
            "name": f"episode {trajectory.group}.{trajectory.member}" + f", attempt {attempt + 1}" * bool(attempt),
            "limits": replace(
                limits,
                max_turns=limits.max_turns or policy.max_steps,
                max_seconds=limits.max_seconds or self._timeout_s + SPARE_S,  # also if this process is killed
            ),
            "sampling": sampling,
            "history": self._options.get("history", "keep"),
        }

    def _folders(self, task: Task) -> contextlib.AbstractAsyncContextManager[Path]:
        given = self._options.get("workdir")
        if given is None:
            return own_folder(None)
        if "{task_id}" in str(given) and not task.task_id:
            raise ValueError(
                f"workdir is {given}, and the task has no task_id: rl.Task(prompt, ground_truth, task_id), or a row's"
                " column task_id"
            )
        template = Path(filled(str(given), {"task_id": task.task_id})).expanduser()
        if not template.is_dir():
            raise NotADirectoryError(f"workdir: there is no folder {template}")
        return own_folder(template)

    def close(self) -> None:
        """Stop the reward's sandbox."""
        if isinstance(self._scorer, RewardFunction):
            self._scorer.close()


@dataclass(frozen=True)
class _Run:
    """One agent at work."""

    environment: AgentEnvironment
    task: Task
    session: RolloutSession
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "work"

    async def agent(self) -> _Ended:
        environment = self.environment
        for name, text in environment._options.get("files", {}).items():
            await called(self._write_file, name, text)
        return await (self._function() if environment._agent is not None else self._program())

    async def _program(self) -> _Ended:
        options = self.environment._options
        env = {name: os.environ[name] for name in PASSED if name in os.environ}
        env |= {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"), **self._addresses()}
        env |= {name: self._filled(value) for name, value in options.get("env", {}).items()}
        program = Program(
            tuple(self._filled(word) for word in self.environment._command), self.folder, env,
            stdin=self._filled(options.get("stdin", "")), timeout_s=self.environment._timeout_s,
            output_bytes=options.get("output_bytes", 1 << 16),
        )  # fmt: skip
        try:
            found = await options.get("runner", run_in_sandbox if options.get("sandbox") else run_program)(program)
        except OSError as error:
            return _Ended("failed", f"the agent could not be started: {error}")
        about: dict[str, Any] = {"exit_status": found.status, "output": found.output, "errors": found.errors}
        statuses = options.get("exit_statuses", (0,))
        if found.status is None:
            return _Ended("timeout", self._too_long + _told(found), **about)
        if statuses is not None and found.status not in statuses:
            return _Ended("failed", f"the agent ended with status {found.status}{_told(found)}", **about)
        return _Ended(**about)

    async def _function(self) -> _Ended:
        environment, agent = self.environment, self.environment._agent
        assert agent is not None
        given = {"prompt": prompt_text(self.task), "task": self.task, "session": self.session, "folder": self.folder}
        limit = asyncio.timeout(environment._timeout_s)
        try:
            async with limit, contextlib.AsyncExitStack() as stack:
                if "client" in environment._wanted:
                    client = environment._clients.of(self._url, self.session.key)
                    given["client"] = await stack.enter_async_context(client)
                arguments = {name: given[name] for name in environment._wanted}
                return _Ended(result=await called(functools.partial(agent, **arguments)))
        except Exception as error:  # the user's agent may raise anything; only this episode fails
            if isinstance(error, TimeoutError) and limit.expired():
                return _Ended("timeout", self._too_long)
            return _Ended("failed", f"{type(error).__name__}: {error}", traceback.format_exc())

    @property
    def _too_long(self) -> str:
        return f"the agent was still running after {self.environment._timeout_s:g} s"

    @property
    def _url(self) -> str:
        """The session's base URL, as agents reach it."""
        given = self.environment._options.get("server_url", "")
        path = re.sub(r"^\w+://[^/]*", "", self.session.url)
        return given.rstrip("/") + path if given else self.session.url

    def _addresses(self) -> dict[str, str]:
        """The session's environment variables, with the address as agents reach it."""
        own, url = self.session.url, self._url
        return {name: value.replace(own, url) for name, value in self.session.environment().items()}

    def _filled(self, text: str) -> str:
        return filled(text, {
            "prompt": prompt_text(self.task), "task_id": self.task.task_id, "folder": str(self.folder),
            "url": self._url, "openai_url": f"{self._url}/v1", "key": self.session.key, "home": str(self.root / "home"),
        })  # fmt: skip

    def _write_file(self, name: str, text: str) -> None:
        path = self.folder / self._filled(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._filled(text), encoding="utf-8")


class _SharedClient:
    """One connection pool for all agents that are at work, closed with the last of them."""

    def __init__(self, kind: str) -> None:
        if kind not in CLIENTS:
            raise ValueError(f"client must be {' or '.join(CLIENTS)}, got {kind!r}")
        self._kind = kind
        self._made: asyncio.Task[Any] | None = None
        self._users = 0

    @contextlib.asynccontextmanager
    async def of(self, url: str, key: str) -> AsyncIterator[Any]:
        """Yield a client of a session."""
        self._users += 1
        try:
            if self._made is None:  # in a thread: its TLS context takes a while
                self._made = asyncio.create_task(asyncio.to_thread(self._make))
            made = await asyncio.shield(self._made)
            yield made.copy(base_url=f"{url}/v1" if self._kind == "openai" else url, api_key=key)
        finally:
            self._users -= 1
            if not self._users and self._made is not None:
                making, self._made = self._made, None
                await asyncio.wait([making])
                if making.exception() is None:
                    await making.result().close()

    def _make(self) -> Any:
        module = require(self._kind, self._kind, "AgentEnvironment's client")
        client = getattr(module, CLIENTS[self._kind])
        return client(base_url="http://localhost", api_key="-", max_retries=PATIENCE)


def _write(trajectory: Trajectory, rollout: Rollout, ended: _Ended) -> None:
    """Write a rollout and its end into a trajectory."""
    found = rollout.to_trajectory(trajectory.task)
    trajectory.steps, trajectory.messages = found.steps, found.messages or first_messages(trajectory.task)
    trajectory.status, trajectory.error, trajectory.traceback = ended.status, ended.error, ended.traceback
    if LIMITED.search(rollout.end_reason):
        trajectory.status, trajectory.error, trajectory.traceback = "truncated", "", ""
    elif ended.status == "completed" and not rollout.turns:
        trajectory.status = "failed"
        trajectory.error = f"the agent made no call of the model: is it pointed at the session?{_told(ended)}"
    elif ended.status == "completed" and not found.steps:
        trajectory.status = "failed"
        trajectory.error = f"none of the agent's {len(rollout.turns)} calls is trained on (main is {rollout.main!r})"


def _describe(trajectory: Trajectory, ended: _Ended, folder: str, live: Mapping[str, Any]) -> None:
    """Write into the trajectory what rewards see of the agent's end."""
    about = {name: vars(ended)[name] for name in ("exit_status", "output", "errors", "result")}
    trajectory.state = State(
        trajectory.task, trajectory.messages, len(trajectory.steps), terminated=trajectory.status == "completed",
        truncated=trajectory.status == "truncated", data={**about, **live, "folder": folder},
    )  # fmt: skip
    for step in trajectory.steps:  # states of a group's members are equal but for the folder's name
        if isinstance(step.state_key, str):
            step.state_key = step.state_key.replace(folder, ".")


async def _record(session: RolloutSession, rollout: Rollout, result: EvaluateResult | None) -> None:
    """Keep the rewards with the session, for people."""
    if result is None or result.error:
        return
    numbers = dict(enumerate(turn.number for _, turn, _ in rollout.trained))
    count = len(numbers)
    given = {each.step_index % count: each.base_reward for each in result.step_outputs or () if count}
    await session.end(reward=result.score, turn_rewards={numbers[index]: reward for index, reward in given.items()})


def _told(found: Exit | _Ended) -> str:
    """The end of what a program wrote to its standard error, or else to its output."""
    said = (found.errors.strip() or found.output.strip())[-SHOWN:]
    return f": {said}" if said else ""


def _parameters(agent: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that an agent's function wants."""
    known = ("client", "prompt", "task", "session", "folder")
    wanted = []
    for parameter in inspect.signature(agent).parameters.values():
        if parameter.name in known:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"the agent has a parameter {parameter.name!r} that is unknown; it may take {', '.join(known)}"
            )
    return tuple(wanted)


def prompt_text(task: Task) -> str:
    """The text of a task's prompt: of a conversation, its last message."""
    return task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by the values; other braces stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
