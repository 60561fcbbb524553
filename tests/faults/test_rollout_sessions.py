"""Agents at work while front and engine are killed: every answer that one got is recorded, once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import httpx
import pytest
from gradwire_http.child_processes import start_process
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

pytestmark = pytest.mark.long

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GROUPS, SIZE, TURNS = 8, 32, 3
PROGRAM = """
import json, os, sys
import httpx

url, key, file, turns = sys.argv[1:]
said = json.load(open(file))
while len(said) < 2 * int(turns):
    body = {"model": "x", "messages": said, "max_tokens": 60, "stream": True}
    text = ""
    with httpx.stream("POST", url + "/chat/completions", json=body, headers={"x-api-key": key}, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                print(".", flush=True)
                sys.stdin.readline()
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    with open(file + ".new", "w") as new:
        json.dump(said, new)
    os.replace(file + ".new", file)
"""
"""An agent that keeps its conversation in a file, and goes on with it when it is started again."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    model = tiny_model(tmp_path / "model", context_length=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    running = HttpServer(model, tmp_path / "state", free_port())
    running.start()
    yield running
    running.end()


class Agent:
    """An agent that streams its answers, and asks again after whatever goes wrong."""

    def __init__(self, session: gradwire.RolloutSession, rng: random.Random) -> None:
        self._session, self._rng = session, rng
        self.said: list[dict[str, Any]] = [{"role": "user", "content": f"task {rng.randrange(1000)}"}]
        self.got: list[str] = []

    async def work(self) -> None:
        async with httpx.AsyncClient(base_url=self._session.openai_url, timeout=30) as http:
            while len(self.got) < TURNS:
                try:
                    text = await self._asked(http)
                except (httpx.HTTPError, json.JSONDecodeError, LookupError):
                    await asyncio.sleep(self._rng.uniform(0.1, 0.6))
                    continue
                self.got.append(text)
                self.said += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

    async def _asked(self, http: httpx.AsyncClient) -> str:
        body = {"model": "x", "messages": self.said, "max_tokens": 8, "stream": True}
        async with http.stream(
            "POST", "/chat/completions", json=body, headers={"x-api-key": self._session.key}
        ) as answer:
            answer.raise_for_status()
            text, ended = "", False
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["delta"].get("content") or ""
                    ended = ended or bool(choice["finish_reason"])
                if not ended and text and self._rng.random() < 0.01:
                    raise httpx.ReadError("the agent was cut off")
            if not ended:
                raise httpx.ReadError("the server was")
            return text


@pytest.mark.slow
async def test_no_answer_is_lost_or_recorded_twice(server: HttpServer) -> None:
    rng = random.Random(0)
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora=2)
        made = [
            asyncio.create_task(run.rollout_session(group=str(group))) for group in range(GROUPS) for _ in range(SIZE)
        ]
        sessions = [await each for each in made]
    agents = [Agent(session, random.Random(number)) for number, session in enumerate(sessions)]
    working = [asyncio.create_task(agent.work()) for agent in agents]
    for kill in ("engine", "front", "engine", "front"):
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        assert any(not each.done() for each in working) or kill != "engine"
        if kill == "engine":
            os.kill(server.engine_pid, signal.SIGKILL)
        else:
            await asyncio.to_thread(server.end, signal.SIGKILL)
            await asyncio.to_thread(server.start)
    await asyncio.gather(*working)
    async with gradwire.connect(server.address) as service:
        for session, agent in zip(sessions, agents, strict=True):
            rollout = await (await service.sessions.get(session.session_id)).rollout()
            used = [turn for turn in rollout.turns if turn.used]
            assert [turn.text for turn in used] == agent.got
            assert [turn.number for turn in rollout.turns] == list(range(len(rollout.turns)))
            (branch,) = [each for each in rollout.branches if each.trained.any()]
            assert branch.trained.sum() == sum(len(turn.response_ids) for turn in used)
            assert {turn.fork for turn in rollout.turns} <= {"", "retry"}


async def test_an_agent_that_is_killed_in_mid_turn_goes_on(server: HttpServer, tmp_path: Path) -> None:
    """Of each turn that it kept there is one record; those that it did not keep are not trained on."""
    rng = random.Random(0)
    async with gradwire.connect(server.address) as service:
        made = [await service.rollout_session("tiny", task=number) for number in range(4)]
        kills = sum(await asyncio.gather(*(killed_at_work(tmp_path, session, rng) for session in made)))
        assert kills >= 8
        for session in made:
            rollout = await session.rollout()
            kept = json.loads(conversation(tmp_path, session).read_text())[1::2]
            assert [turn.text for turn in rollout.turns if turn.used] == [each["content"] for each in kept]
            trained = sum(branch.trained.sum() for branch in rollout.branches)
            assert trained == sum(len(turn.response_ids) for turn in rollout.turns if turn.used)
            assert {turn.fork for turn in rollout.turns} <= {"", "retry"}


def conversation(folder: Path, session: gradwire.RolloutSession) -> Path:
    return folder / f"{session.session_id}.json"


async def killed_at_work(folder: Path, session: gradwire.RolloutSession, rng: random.Random) -> int:
    """Start an agent again and again and kill it after some parts of an answer; returns how often it was killed."""
    file, kills = conversation(folder, session), 0
    parts_before = [1, 1, *rng.sample((5, 20), 2)]  # an answer has at least one part; the rest depends on the machine
    await asyncio.to_thread(file.write_text, json.dumps([{"role": "user", "content": session.session_id[:4]}]))
    while True:
        asked = (session.openai_url, session.key, str(file), str(TURNS))
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        program = await start_process(sys.executable, "-c", PROGRAM, *asked, **pipes)
        assert program.stdin is not None and program.stdout is not None
        parts = 0
        while await program.stdout.readline():
            parts += 1
            if kills < 4 and parts == parts_before[kills]:
                program.kill()
                kills += 1
                break
            program.stdin.write(b"\n")  # it waits for this after each part, so that it is killed in mid-turn
        if await program.wait() == 0:
            return kills
