"""Agents as they are: programs and functions in sessions of their own, told apart by how they end."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai  # noqa: F401  # importing takes longer than a test may hold its loop
import pytest
from gradwire import rl
from gradwire.rl import AgentEnvironment, AlgorithmConfig, GRPOAlgorithm, RolloutManager, Task, Trajectory
from gradwire.rl.environments.programs import Exit, Program
from gradwire.rollout import Main, Rollout, Turn
from gradwire.sessions import SessionLimits
from support.checking_run import ALGORITHMS, CheckingRun

Answer = Callable[[str], str]


class ScriptedSession:
    """One session; :meth:`call` is what an agent does with its client."""

    key = "gws-scripted"
    url = "http://127.0.0.1:9/sessions/s"

    def __init__(self, number: int, answer: Answer, options: dict[str, Any]) -> None:
        self.session_id, self.options, self._answer = f"s{number}", options, answer
        self.turns: list[Turn] = []
        self.ended = ""
        self.rewards: tuple[float, dict[int, float]] | None = None

    def call(self, text: str, **about: Any) -> str:
        """Answer a prompt that goes on with everything before it, one token a character."""
        if len(self.turns) >= self.options["limits"].max_turns:
            self.ended = self.ended or "it has had its turns (max_turns)"
            raise PermissionError("the session has ended")
        said = self._answer(text)
        codes = [np.frombuffer(each.encode("latin-1"), np.uint8).astype(np.int64) for each in (text, said)]
        turn = Turn(
            len(self.turns), codes[0], codes[1], np.full(len(said), -0.5, np.float32), np.zeros(len(said), np.int64),
            len(self.turns) - 1, text=said, messages=({"role": "user", "content": text},),
        )  # fmt: skip
        self.turns.append(replace(turn, **about))
        return said

    def environment(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key, "ANTHROPIC_BASE_URL": self.url}

    async def rollout(self, main: Main = "longest") -> Rollout:
        return Rollout(self.session_id, tuple(self.turns), end_reason=self.ended, main=main)

    async def end(self, reason: str = "done", reward: float | None = None, turn_rewards: Any = None) -> None:
        self.ended = self.ended or reason
        if reward is not None:
            self.rewards = (reward, dict(turn_rewards))


class ScriptedSessions:
    """An inference module of which environments with a loop of their own need the sessions alone."""

    version = 0
    codec: Any = None

    def __init__(self, answer: Answer = str.upper, calls: int = 0) -> None:
        self._answer, self._calls = answer, calls
        self.made: list[ScriptedSession] = []

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version

    async def rollout_session(self, **options: Any) -> ScriptedSession:
        """Make a session; with ``calls`` it has some already, as if a program had made them."""
        session = ScriptedSession(len(self.made), self._answer, options)
        self.made.append(session)
        for _ in range(self._calls):
            session.call("go")
        return session


pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


async def played(
    environment: AgentEnvironment, sessions: ScriptedSessions, *tasks: Any, **options: Any
) -> list[Trajectory]:
    manager = RolloutManager(sessions, environment, **options)  # type: ignore[arg-type]
    return (await manager.collect(tasks or [Task("go", task_id="t")])).trajectories


async def asks(session: Any, prompt: str) -> str:
    session.call(prompt)
    return str(session.call("and?"))


async def test_a_functions_calls_become_the_trajectory() -> None:
    sessions = ScriptedSessions()
    (one,) = await played(AgentEnvironment(asks), sessions, "hi", max_steps_per_rollout=5)
    assert [step.action.raw for step in one.steps] == ["HI", "AND?"]
    assert [step.observation for step in one.steps] == ["hi", "and?"]
    assert [message["content"] for message in one.messages] == ["hi", "HI", "and?", "AND?"]
    assert bytes(one.steps[1].prompt_ids.tolist()) == b"hiHIand?" and one.status == "completed"
    assert one.state is not None and one.state.data["result"] == "AND?"
    options = sessions.made[0].options
    assert options["limits"].max_turns == 5 and options["task"] == {"task_id": "", "prompt": "hi"}
    assert options["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 64, "fixed": True}
    assert sessions.made[0].ended == "the agent ended"


async def test_how_an_agent_ends_is_told_apart() -> None:
    def plain(session: Any) -> None:
        session.call("x")

    async def crash(session: Any) -> None:
        session.call("x")
        raise KeyError("tool")

    async def hang(session: Any) -> None:
        session.call("x")
        await asyncio.sleep(60)

    async def hasty(session: Any) -> None:
        session.call("x")
        raise TimeoutError("its own")

    async def endless(session: Any) -> None:
        while True:
            session.call("x")

    async def idle() -> None: ...

    async def unused(session: Any) -> None:
        session.call("x", used=False)

    found = {}
    for agent in (plain, crash, hang, hasty, endless, idle, unused):
        environment = AgentEnvironment(agent, timeout_s=0.3, reward=lambda: 1.0)
        (one,) = await played(environment, ScriptedSessions(), max_steps_per_rollout=3)
        environment.close()
        found[agent.__name__] = (one.status, one.error, one.evaluation is not None)
    assert found == {
        "plain": ("completed", "", True),
        "crash": ("failed", "KeyError: 'tool'", False),
        "hang": ("timeout", "the agent was still running after 0.3 s", False),
        "hasty": ("failed", "TimeoutError: its own", False),
        "endless": ("truncated", "", True),
        "idle": ("failed", "the agent made no call of the model: is it pointed at the session?", False),
        "unused": ("failed", "none of the agent's 1 calls is trained on (main is 'longest')", False),
    }


async def test_a_crashed_agent_is_started_again_in_another_session() -> None:
    attempts = []

    async def fails_once(session: Any) -> None:
        session.call("x" * (1 + len(attempts)))
        attempts.append(session.session_id)
        if len(attempts) == 1:
            raise RuntimeError("flaky")

    sessions = ScriptedSessions()
    (one,) = await played(AgentEnvironment(fails_once, retries=1), sessions)
    assert (one.status, one.error, one.traceback, attempts) == ("completed", "", "", ["s0", "s1"])
    assert [step.action.raw for step in one.steps] == ["XX"]
    assert sessions.made[0].ended == "RuntimeError: flaky" and sessions.made[1].options["name"].endswith("attempt 2")
    attempts.clear()
    (one,) = await played(AgentEnvironment(fails_once, retries=0), ScriptedSessions())
    assert (one.status, one.error, len(attempts)) == ("failed", "RuntimeError: flaky", 1)


PROGRAM = """
import os, pathlib, sys
here = pathlib.Path.cwd()
print(sys.argv[1], sys.stdin.read(), sorted(each.name for each in here.iterdir()), sep="|")
print(os.environ["OPENAI_BASE_URL"], os.environ["MINE"], os.listdir(os.environ["HOME"]), sep="|")
print(sorted(set(os.environ) & {"SECRET", "AWS_SECRET_ACCESS_KEY"}), here.joinpath("settings.json").read_text())
(here / "made.txt").write_text("42")
sys.exit(int((here / "status").read_text()))
"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template" / "t"
    folder.mkdir(parents=True)
    (folder / "status").write_text("0")
    (folder / "agent.py").write_text(PROGRAM)
    return folder


async def test_a_program_works_in_its_own_copy_of_a_folder_and_is_scored_there(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "not for agents")
    folders = []

    async def reward(folder: str, output: str, exit_status: int, response: str, session: Any) -> float:
        folders.append(folder)
        assert exit_status == 0 and response == "GO" and session.key == "gws-scripted"
        return float((Path(folder) / "made.txt").read_text())

    environment = AgentEnvironment(
        command=[sys.executable, "agent.py", "do {prompt} {not this}"],
        workdir=str(template.parent / "{task_id}"),
        files={"settings.json": '{"url": "{openai_url}"}'},
        env={"MINE": "{key}"},
        stdin="in {task_id}",
        reward=reward,
    )
    trajectories = await played(environment, ScriptedSessions(calls=1), Task("it", task_id="t"), group_size=3)
    for one in trajectories:
        assert one.status == "completed" and one.evaluation is not None and one.evaluation.score == 42
        assert one.state is not None
        first, second, third = one.state.data["output"].splitlines()
        assert first == "do it {not this}|in t|['agent.py', 'settings.json', 'status']"
        assert second == "http://127.0.0.1:9/sessions/s/v1|gws-scripted|[]"
        assert third == '[] {"url": "http://127.0.0.1:9/sessions/s/v1"}'
    assert len({*folders}) == 3
    assert not {Path(folder).parent.name for folder in folders} & {*os.listdir(tempfile.gettempdir())}
    assert sorted(os.listdir(template)) == ["agent.py", "status"]


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (Task("a", task_id="missing"), "NotADirectoryError: workdir: there is no folder templates/missing"),
        (Task("a"), r"ValueError: workdir is templates/\{task_id\}, and the task has no task_id"),  # not all templates
    ],
)
async def test_a_task_without_a_template_folder_is_told(task: Task, error: str) -> None:
    os.makedirs("templates/other")
    (one,) = await played(AgentEnvironment(asks, workdir="templates/{task_id}"), ScriptedSessions(), task)
    assert one.status == "failed" and re.match(error, one.error)


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        ({}, "failed", "the agent ended with status 3: oh no"),
        ({"exit_statuses": (0, 3)}, "completed", ""),
        ({"exit_statuses": None}, "completed", ""),
        (
            {"command": ["sh", "-c", "echo waiting; sleep 60"], "timeout_s": 0.3},
            "timeout",
            "the agent was still running after 0.3 s: waiting",
        ),
        ({"command": ["/nowhere/agent"]}, "failed", "the agent could not be started: "),
    ],
)
async def test_a_programs_exit_status_tells_a_crash(options: Mapping[str, Any], status: str, error: str) -> None:
    environment = AgentEnvironment(**{"command": ["sh", "-c", "echo oh no >&2; exit 3"], **options})
    (one,) = await played(environment, ScriptedSessions(calls=1))
    assert one.status == status and one.error.startswith(error) and bool(one.error) == bool(error)


async def test_a_program_in_a_container_of_ones_own() -> None:
    programs: list[Program] = []

    async def runner(program: Program) -> Exit:
        programs.append(program)
        return Exit(0, "done", "")

    environment = AgentEnvironment(
        command=["agent", "{url}"],
        runner=runner,
        server_url="http://host.docker.internal:8080/",
        limits=SessionLimits(7),
    )
    sessions = ScriptedSessions(calls=1)
    (one,) = await played(environment, sessions)
    assert one.state is not None and one.state.data["output"] == "done"
    assert programs[0].command == ("agent", "http://host.docker.internal:8080/sessions/s")
    assert programs[0].env["OPENAI_BASE_URL"] == "http://host.docker.internal:8080/sessions/s/v1"
    assert sessions.made[0].options["limits"].max_turns == 7


async def test_a_cancelled_collection_ends_its_programs(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    environment = AgentEnvironment(
        command=["sh", "-c", f"sleep 60 & echo $! > {number}.new; mv {number}.new {number}; wait"]
    )
    task = asyncio.create_task(played(environment, ScriptedSessions(calls=1)))
    while number.name not in os.listdir(tmp_path):  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(number.read_text()), 0)
            await asyncio.sleep(0.01)


async def test_rewards_of_turns_and_errors_of_rewards() -> None:
    async def by_turn(rollout: Any) -> float:
        rollout.turn_rewards[0] = 0.25
        return 1.0

    sessions = ScriptedSessions()
    (one,) = await played(AgentEnvironment(asks, reward=by_turn), sessions)
    assert sessions.made[0].rewards == (1.0, {0: 0.25})
    assert one.evaluation is not None and one.evaluation.score == 1.0
    assert [(each.step_index, each.base_reward) for each in one.evaluation.step_outputs or ()] == [(0, 0.25)]

    async def wrong(folder: str) -> float:
        raise OSError("no such file")

    (one,) = await played(AgentEnvironment(asks, reward=wrong), ScriptedSessions())
    assert one.evaluation is not None and "wrong: OSError: no such file" in one.evaluation.error and not one.ok


async def compares(session: Any) -> None:
    session.call("a long question")
    session.call("title", parent=-1, system_digest="other")
    session.call("and more", parent=0)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_every_algorithm_trains_through_an_agent(name: str, mode: Any) -> None:
    kind, head, _ = ALGORITHMS[name]
    run, count = CheckingRun(head), iter(range(1000))

    async def reward(response: str) -> float:
        return float(next(count) % 3)

    settings = AlgorithmConfig(batch_size=2, group_size=3)
    environment = AgentEnvironment(compares, reward=reward)
    algorithm = kind(
        None, run, ["one", "two", "three"], rl.environment_reward(), settings, environment=environment,
        inference=ScriptedSessions(lambda text: text.upper()),
    )  # fmt: skip
    metrics = await algorithm.train(2, progress_bar=False, mode=mode)
    assert all(each["train/trajectories"] == 6 and each["train/rows"] == 6 for each in metrics)
    assert len(run.batches) == 2 and {each["rollouts/avg_trajectory_length"] for each in metrics} == {2}
    assert mode == "async" or metrics[0]["rewards/reward"] == 1.0


async def test_what_agents_need_is_said() -> None:
    with pytest.raises(ValueError, match="a function or a command"):
        AgentEnvironment()
    with pytest.raises(ValueError, match="a function or a command"):
        AgentEnvironment(asks, command=["x"])
    with pytest.raises(TypeError, match=r"list of words, such as \['claude', '-p'\]"):
        AgentEnvironment(command="claude -p")
    with pytest.raises(TypeError, match="no argument 'comand'"):
        AgentEnvironment(comand=["x"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="parameter 'model' that is unknown; it may take client"):
        AgentEnvironment(lambda model: None)
    with pytest.raises(ValueError, match="client must be openai or anthropic"):
        AgentEnvironment(asks, client="google")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot enter a sandbox"):
        AgentEnvironment(asks, reward=lambda rollout: 1.0)
    with pytest.raises(ValueError, match="compares a group"):
        AgentEnvironment(asks, reward=rl.reward_function(batch=True)(lambda folder: [1.0]))
    algorithm = GRPOAlgorithm(
        None, CheckingRun(), ["a"], rl.environment_reward(), environment=AgentEnvironment(asks),
        inference=rl.OpenAIInference("http://127.0.0.1:9/v1", "m"), allow_stale=True,
    )  # fmt: skip
    with pytest.raises(rl.RolloutsFailedError, match="agents need sessions of the run's own sampler"):
        await algorithm.train(1, progress_bar=False)


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
async def test_a_sandboxed_program_writes_to_its_folder_alone(tmp_path: Path) -> None:
    script = (
        "echo mine > here; echo tmp > $TMPDIR/x; echo home > ~/y; cat here; (sleep 60 &); ls /proc | grep -c '^[0-9]';"
        f" touch {tmp_path}/outside || echo refused; touch /etc/outside || echo refused; exit 5"
    )
    environment = AgentEnvironment(command=["sh", "-c", script], sandbox=True, exit_statuses=(5,))
    (one,) = await played(environment, ScriptedSessions(calls=1))
    if one.error and "this machine refuses" in one.error:
        pytest.skip(one.error)
    assert one.status == "completed" and one.state is not None, one.error
    mine, processes, *rest = one.state.data["output"].split()
    assert mine == "mine" and rest == ["refused", "refused"] and int(processes) < 8
    environment = AgentEnvironment(command=["/nowhere/agent"], sandbox=True)
    (one,) = await played(environment, ScriptedSessions(calls=1))
    assert one.error == "the agent ended with status 127: /nowhere/agent: No such file or directory"
    with pytest.raises(ValueError, match="sandbox is for programs"):
        AgentEnvironment(asks, sandbox=True)
