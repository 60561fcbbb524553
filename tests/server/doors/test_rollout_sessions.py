"""Rollout sessions through their URLs: what agents are answered, what is recorded, and what their keys open."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gradwire
import httpx
import numpy as np
import openai
import pytest
from gradwire.cli.app import app
from gradwire.rollout import Rollout, Turn
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model
from typer.testing import CliRunner

SHORT: Any = {"model": "any", "max_tokens": 4}
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
DOORS = ("chat", "chat streamed", "messages", "messages streamed", "responses", "responses streamed", "completions")


@pytest.fixture
async def service(openai_server: HttpServer) -> AsyncIterator[gradwire.ServiceClient]:
    async with gradwire.connect(openai_server.address) as service:
        yield service


class Agent:
    """An agent of one door, which appends to its conversation."""

    def __init__(self, session: gradwire.RolloutSession, door: str, **headers: str) -> None:
        self.door, _, streamed = door.partition(" ")
        self.streamed, self.said = bool(streamed), [dict(each) for each in ASK]
        key = {"x-api-key": session.key}
        self.http = httpx.AsyncClient(base_url=session.url, headers=key | headers, timeout=60)

    async def ask(self, more: str = "", **settings: Any) -> dict[str, Any]:
        """Ask; the answer's text is appended, as agents trim it."""
        if more:
            self.said.append({"role": "user", "content": more})
        asked: dict[str, Any] = {"model": "any", "stream": self.streamed, **settings}
        if self.door == "chat":
            asked |= {"messages": self.said, "max_tokens": 6} | settings
            path = "/v1/chat/completions"
        elif self.door == "messages":
            asked |= {"system": self.said[0]["content"], "messages": self.said[1:], "max_tokens": 6} | settings
            path = "/v1/messages"
        elif self.door == "responses":
            asked |= {"input": self.said, "max_output_tokens": 16, "store": False} | settings
            path = "/v1/responses"
        else:
            asked |= {"prompt": "".join(each["content"] for each in self.said), "max_tokens": 6} | settings
            asked["logit_bias"] = {str(special): -100 for special in range(4)}  # which no text of an answer has
            path = "/v1/completions"
        answer = await self.http.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        text = self._text(answer)
        self.said.append({"role": "assistant", "content": text if self.door == "completions" else text.strip()})
        return {} if self.streamed else answer.json()

    def _text(self, answer: httpx.Response) -> str:
        if not self.streamed:
            found = answer.json()
            return {
                "chat": lambda: found["choices"][0]["message"]["content"],
                "messages": lambda: "".join(block["text"] for block in found["content"]),
                "responses": lambda: found["output"][-1]["content"][0]["text"],
                "completions": lambda: found["choices"][0]["text"],
            }[self.door]() or ""  # fmt: skip
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        if self.door == "chat":
            return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
        kind = "content_block_delta" if self.door == "messages" else "response.output_text.delta"
        deltas = [each["delta"] for each in events if each["type"] == kind]
        return "".join(each["text"] if isinstance(each, dict) else each for each in deltas)


def rows(turns: tuple[Turn, ...]) -> list[np.ndarray[Any, Any]]:
    """The prompt of each turn with its response."""
    found: list[Any] = []
    for turn in turns:
        before = found[turn.parent][: turn.shared] if turn.parent >= 0 else []
        found.append(np.concatenate([before, turn.prompt_suffix, turn.response_ids]).astype(int))
    return found


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
async def test_a_conversation_of_any_door_is_one_sequence(service: gradwire.ServiceClient, door: str) -> None:
    session = await service.rollout_session("tiny", task={"n": 1}, group="g", sampling={"temperature": 0.7})
    agent = Agent(session, door)
    for more in ("", "sat on", "the mat"):
        await agent.ask(more)
    rollout = await session.rollout()
    assert (rollout.task, rollout.group, rollout.state) == ({"n": 1}, "g", "open")
    assert [(turn.parent, turn.fork) for turn in rollout.turns] == [(-1, ""), (0, ""), (1, "")]
    whole = rows(rollout.turns)
    assert all(np.array_equal(longer[: len(shorter)], shorter) for shorter, longer in pairwise(whole))
    assert {(turn.door, turn.temperature, turn.used) for turn in rollout.turns} == {(agent.door, 0.7, True)}
    assert all(len(turn.logprobs) == len(turn.response_ids) and (turn.logprobs < 0).all() for turn in rollout.turns)
    [branch] = rollout.branches
    assert branch.sampled.sum() == sum(len(turn.response_ids) for turn in rollout.turns)
    if door == "chat":
        last = await agent.ask("and?", return_token_ids=True, logprobs=True)
        turn = (await session.rollout()).turns[-1]
        assert rows((await session.rollout()).turns)[-1].tolist() == [
            *last["prompt_token_ids"], *last["choices"][0]["token_ids"]
        ]  # fmt: skip
        said = [each["logprob"] for each in last["choices"][0]["logprobs"]["content"]]
        assert turn.logprobs.tolist() == pytest.approx(said)
        assert [message["content"] for message in turn.messages] == ["and?"] and not turn.system
        assert rollout.turns[0].system == "be brief" and turn.system_digest == rollout.turns[0].system_digest


@pytest.mark.long
async def test_what_leaves_a_conversation_says_why(service: gradwire.ServiceClient) -> None:
    session = await service.rollout_session("tiny")
    agent = Agent(session, "chat")
    for more in ("", "sat on"):
        await agent.ask(more)
    begun = list(agent.said)
    agent.said = [{"role": "system", "content": "make a title"}, ASK[1]]
    await agent.ask()
    agent.said = [ASK[0], {"role": "user", "content": "in short: the cat sat on"}]
    await agent.ask()
    agent.said = [*begun[:3], {"role": "user", "content": "stood on"}]
    await agent.ask()
    agent.said = begun[:4]
    await agent.ask()
    turns = (await session.rollout()).turns
    assert [turn.fork for turn in turns] == ["", "", "system", "compaction", "", "retry"]
    assert [turn.parent for turn in turns[4:]] == [0, 1] and [turn.used for turn in turns] == [True, False, *[True] * 4]


@pytest.mark.long
async def test_a_call_that_the_client_repeats_is_answered_once(service: gradwire.ServiceClient) -> None:
    session = await service.rollout_session("tiny")
    once, again = Agent(session, "chat", **{"idempotency-key": "k"}), Agent(session, "chat", **{"idempotency-key": "k"})
    first, second = await asyncio.gather(once.ask(), again.ask())
    assert first["choices"] == second["choices"]
    assert first["usage"]["total_tokens"] == second["usage"]["total_tokens"]
    streamed = Agent(session, "chat streamed", **{"x-stainless-retry-count": "1"})
    await streamed.ask(max_tokens=5)
    await Agent(session, "chat streamed", **{"x-stainless-retry-count": "2"}).ask(max_tokens=5)
    turns = (await session.rollout()).turns
    assert [turn.fork for turn in turns] == ["", "retry"] and turns[1].response_ids.size == 5


async def test_a_sessions_key_opens_its_doors_and_nothing_else(
    service: gradwire.ServiceClient, openai_server: HttpServer
) -> None:
    session, other = [await service.rollout_session("tiny") for _ in range(2)]
    async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {session.key}"}) as http:

        async def status(url: str, method: str = "GET", **body: Any) -> int:
            return (await http.request(method, url, json=body or None)).status_code

        asked: Any = {"model": "x", "messages": ASK, "max_tokens": 2}
        root = openai_server.url
        assert await status(f"{root}/v1/chat/completions", "POST", **asked) == 200  # the key alone names the session
        assert await status(f"{session.url}/chat/completions", "POST", **asked) == 200
        assert await status(f"{session.url}/v1/models") == await status(f"{session.url}/v1/models/x") == 200
        assert await status(f"{session.url}/tokenize", "POST", model="x", prompt="cat") == 200
        assert await status(f"{other.url}/v1/models") == 401
        for path in ("/v1/sessions", "/v1/files", "/v1/fine_tuning/jobs", f"/v1/sessions/{session.session_id}/rollout"):
            assert await status(root + path) == await status(session.url + path) == 403, path
        assert await status(f"{session.url}/api/v1/get_server_capabilities") in (403, 404)
    with pytest.raises(gradwire.UnauthenticatedError):
        async with gradwire.connect(openai_server.address, api_key=session.key) as stranger:
            await stranger.rollout_session("tiny")
    assert len((await session.rollout()).turns) == 2


@pytest.mark.long
async def test_beyond_its_limits_a_session_ends(service: gradwire.ServiceClient) -> None:
    async def refused(session: gradwire.RolloutSession) -> str:
        answer = await Agent(session, "chat").http.post("/v1/chat/completions", json={"model": "x", "messages": ASK})
        assert answer.status_code == 403
        return str(answer.json()["error"]["message"])

    session = await service.rollout_session("tiny", limits=gradwire.SessionLimits(max_turns=1))
    await Agent(session, "chat").ask()
    assert "1 turns" in await refused(session) and "max_turns" in (await session.refresh()).end_reason
    session = await service.rollout_session("tiny", limits=gradwire.SessionLimits(max_turns=2))
    calls = [
        Agent(session, "chat").http.post("/v1/chat/completions", json={"messages": ASK, **SHORT}) for _ in range(5)
    ]
    assert sorted(each.status_code for each in await asyncio.gather(*calls)) == [200, 200, 403, 403, 403]
    session = await service.rollout_session("tiny", limits=gradwire.SessionLimits(max_tokens=4))
    answer = await Agent(session, "chat").ask()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 4
    assert "4 tokens" in await refused(session)
    session = await service.rollout_session("tiny", limits=gradwire.SessionLimits(idle_s=0.1))
    await asyncio.sleep(3)
    assert "idle_s" in await refused(session)
    await session.end("later")
    assert "idle_s" in (await session.refresh()).end_reason
    fixed: Any = {"temperature": 1.0, "fixed": True, "max_tokens": 3}
    session = await service.rollout_session("tiny", sampling=fixed)
    ones = [await Agent(session, "chat").ask(temperature=0, seed=1) for _ in range(3)]
    assert {turn.temperature for turn in (await session.rollout()).turns} == {1.0}
    assert len({each["choices"][0]["message"]["content"] for each in ones}) > 1


async def test_sessions_are_listed_and_deleted_by_their_owner(service: gradwire.ServiceClient) -> None:
    session = await service.rollout_session("tiny", group="listed")
    found = await service.sessions.list(group="listed")
    assert [each.session_id for each in found] == [session.session_id]
    again = await service.sessions.get(session.session_id)
    assert again.key == "" and again.url == session.url
    async with httpx.AsyncClient(base_url=session.url.partition("/sessions")[0], timeout=60) as http:
        made = (await http.post("/v1/sessions", json={"model": "tiny", "task": [1], "group": "listed"})).json()
        assert made["key"].startswith("gws-") and made["task"] == [1] and made["num_turns"] == 0
        listed = (await http.get("/v1/sessions", params={"group": "listed"})).json()["data"]
        assert [each["id"] for each in listed] == [made["id"], session.session_id] and "key" not in listed[0]
        ended = (await http.post(f"/v1/sessions/{made['id']}/end", json={"reason": "enough"})).json()
        assert (ended["state"], ended["end_reason"]) == ("ended", "enough")
        rewarded = await http.post(f"/v1/sessions/{made['id']}/end", json={"reward": 1, "turn_rewards": {}})
        assert rewarded.json()["reward"] == 1.0 and "reward" not in ended
        for wrong in ({"x": 1}, {"0": "high"}, {"0": 1}):  # it has no turn
            answer = await http.post(f"/v1/sessions/{made['id']}/end", json={"turn_rewards": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "turn_rewards"
        assert (await http.get(f"/v1/sessions/{made['id']}/rollout")).json()["turns"] == []
    await session.delete()
    with pytest.raises(gradwire.UnknownSessionError):
        await session.refresh()


@pytest.mark.long
async def test_a_session_outlives_its_server(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", context_length=1024)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    server = HttpServer(model, tmp_path / "state", free_port())
    server.start()
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora=4)
        session = await run.rollout_session(group="g")
        agent = Agent(session, "chat")
        await agent.ask()
        await run.forward_backward({"input_ids": [[1, 2, 3]]}, "causal_lm")
        await run.optim_step(learning_rate=0.1)
        await agent.ask("more", n=2)
    server.end(signal.SIGKILL)
    server.start()
    async with gradwire.connect(server.address) as service:
        found = await service.sessions.get(session.session_id)
        assert (found.info.num_turns, found.info.state, found.info.group) == (3, "open", "g")
        await agent.ask("and more")
        rollout: Rollout = await found.rollout()
    assert server.end() == 0
    assert [(turn.parent, turn.fork) for turn in rollout.turns] == [(-1, ""), (0, ""), (1, "other"), (1, "")]
    assert [set(turn.versions.tolist()) for turn in rollout.turns] == [{0}, {1}, {1}, {1}]
    assert [turn.used for turn in rollout.turns] == [True, True, True, True]


async def test_the_package_of_openai_is_an_agent(service: gradwire.ServiceClient) -> None:
    async with await service.rollout_session("tiny") as session:
        async with openai.AsyncOpenAI(
            base_url=session.environment()["OPENAI_BASE_URL"], api_key=session.environment()["OPENAI_API_KEY"]
        ) as client:
            await client.chat.completions.create(model="gpt-x", messages=ASK, max_tokens=3)  # type: ignore[arg-type]
        rollout = await session.rollout()
    assert len(rollout.turns) == 1 and session.info.state == "ended" and session.info.end_reason == "done"


@pytest.mark.long
async def test_an_embedded_server_opens_a_door_for_agents(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        session = await service.rollout_session("tiny")
        async with httpx.AsyncClient(base_url=session.url, timeout=60) as http:
            assert (await http.get("/v1/models")).status_code == 401
            listed = await http.get("/v1/models", headers={"authorization": f"Bearer {session.key}"})
    assert session.url.startswith("http://127.0.0.1:") and [each["id"] for each in listed.json()["data"]] == ["tiny"]


@pytest.mark.long
async def test_the_command_line_shows_what_an_agent_did(
    service: gradwire.ServiceClient, openai_server: HttpServer
) -> None:
    session = await service.rollout_session("tiny", group="shown")
    agent = Agent(session, "chat")
    await agent.ask()
    await agent.ask("sat on")
    agent.said = [{"role": "system", "content": "make a title"}, ASK[1]]
    await agent.ask()

    async def command(*words: str) -> str:
        said = await asyncio.to_thread(
            CliRunner().invoke, app, ["sessions", *words, "--address", openai_server.address], env={"COLUMNS": "300"}
        )
        assert said.exit_code == 0, said.output
        return str(said.output)

    listed = await command("list", "--group", "shown")
    assert session.session_id in listed and "open" in listed and "tiny" in listed
    shown = await command("show", session.session_id)
    found = await service.usage(["session"])
    [used] = [each for each in found if each.session_id == session.session_id]
    info = await session.refresh()
    assert (used.sampled_tokens, used.operations) == (info.num_sampled_tokens, 3)
    assert 0 < used.prompt_tokens <= info.num_prompt_tokens  # less those that were known
    assert shown.index("branch 0, main") < shown.index("user: sat on") < shown.index("branch 1, side call, leaves turn")
    title = (await session.rollout()).turns[2]
    assert "system: make a title" in shown and f"turn 2, {len(title.response_ids)} tokens, version 0" in shown
    assert "enough" in await command("end", session.session_id, "--reason", "enough")
    assert (await session.refresh()).end_reason == "enough"


@pytest.mark.long
async def test_a_keys_sessions_stay_within_its_room(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    limits = {"key_sessions": 2, "key_session_bytes": 500, "max_session_turns": 90, "max_session_calls": 5}
    limits |= {"max_session_seconds": 800, "session_idle_seconds": 70}
    words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value}")]
    server = HttpServer(model, tmp_path / "state", free_port(), *words)
    server.start()
    async with gradwire.connect(server.address) as service:
        first, second = [
            await service.rollout_session("tiny", limits=asked)
            for asked in (
                None,
                gradwire.SessionLimits(max_turns=9, max_seconds=9999, max_concurrent_calls=9, idle_s=60),
            )
        ]
        given = [
            (each.max_turns, each.max_concurrent_calls, each.max_seconds, each.idle_s)
            for each in (first.info.limits, second.info.limits)
        ]
        assert given == [(90, 5, 800, 70), (9, 5, 800, 60)]
        with pytest.raises(gradwire.LimitExceededError, match="key_sessions"):
            await service.rollout_session("tiny")
        await Agent(first, "completions").ask()
        size = (await first.refresh()).size_bytes
        assert 0 < size < 500
        await first.end()
        third = await service.rollout_session("tiny")
        for _ in range(500 // size + 1):
            await Agent(third, "completions").ask()
        with pytest.raises(gradwire.UnknownSessionError):  # the oldest that has ended went
            await first.refresh()
        full = await Agent(third, "completions").http.post("/v1/completions", json={"model": "x", "prompt": "cat"})
        assert full.status_code == 400 and "key_session_bytes" in full.text
        assert len((await third.rollout()).turns) == 500 // size + 1
        await third.delete()
        await Agent(second, "completions").ask()
    assert server.end() == 0


@pytest.mark.long
async def test_an_answer_with_its_stop_string_put_back_is_recognized(service: gradwire.ServiceClient) -> None:
    session = await service.rollout_session("tiny")
    agent = Agent(session, "chat")
    stops = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ")
    await agent.ask(max_tokens=60, stop=stops)
    first = (await session.rollout()).turns[0]
    assert first.finish_reason == "stop"
    [sampled] = await service.decode("tiny", [first.response_ids])
    agent.said[-1]["content"] = first.text + sampled[len(first.text)]
    await agent.ask("go on", max_tokens=2)
    assert [(turn.parent, turn.fork) for turn in (await session.rollout()).turns] == [(-1, ""), (0, "")]


@pytest.mark.long
async def test_half_a_surrogate_pair_stops_neither_a_conversation_nor_a_list(
    service: gradwire.ServiceClient, openai_server: HttpServer
) -> None:
    session = await service.rollout_session("tiny")
    look = {"name": "look", "description": "\ud83d", "parameters": {"type": "object"}}
    written = r'\{"name": "look", "parameters": \{"word": "\\ud83d"\}\}'
    settings: Any = {**SHORT, "max_tokens": 99, "tools": [{"type": "function", "function": look}]}
    agent = Agent(session, "chat").http

    async def ask(messages: Any, **more: Any) -> Any:
        answer = await agent.post("/v1/chat/completions", content=json.dumps({**settings, "messages": messages} | more))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    agent.headers["content-type"] = "application/json"
    called = await ask(ASK, structured_outputs={"regex": written})
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"word": "\ufffd"}  # what the model wrote is no Unicode
    await ask([*ASK, called, {"role": "tool", "tool_call_id": call["id"], "content": "nothing"}])
    first, second = (await session.rollout()).turns
    assert (second.parent, second.fork) == (first.number, "")
    theirs = {**call, "id": "theirs", "function": {"name": "look", "arguments": r'{"word": "\ud83d"}'}}
    await ask([*ASK, {**called, "tool_calls": [theirs]}, {"role": "tool", "tool_call_id": "theirs", "content": "."}])
    with pytest.raises(gradwire.InvalidArgumentError, match="task"):
        await service.rollout_session("tiny", task="\ud83d")
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{openai_server.url}/v1/sessions")).status_code == 200


@pytest.mark.long
async def test_mistakes_name_their_place_and_the_sessions_model(
    service: gradwire.ServiceClient, openai_server: HttpServer
) -> None:
    async with httpx.AsyncClient(base_url=openai_server.url) as http:
        for given, message in (
            ({"limits": {"max_turns": -1}}, "limits.max_turns: Input should be greater"),
            ({"sampling": {"temp": 1}}, "sampling.temp is not a parameter"),
            ({"limits": 3}, "limits: Input should be"),
            ({"foo": 1}, "foo is not a parameter"),
        ):
            error = (await http.post("/v1/sessions", json={"model": "tiny", **given})).json()["error"]
            assert error["message"].startswith(message) and error["param"] == next(iter(given))
    with pytest.raises(gradwire.InvalidArgumentError, match=r"SessionLimits\(max_turns"):
        await service.rollout_session("tiny", limits={"max_turns": 2})  # type: ignore[typeddict-item]
    run = await service.create_run("tiny", lora=2)
    session = await run.rollout_session()
    with pytest.raises(gradwire.InvalidArgumentError, match="temperature"):
        await run.rollout_session(sampling={"temperature": float("nan")})
    for rewards in ({"reward": float("nan")}, {"turn_rewards": {0: float("inf")}}):
        with pytest.raises(gradwire.InvalidArgumentError, match="finite"):
            await session.end(**rewards)
    with pytest.raises(gradwire.InvalidArgumentError, match="there are open, ended"):
        await service.sessions.list(state="close")  # type: ignore[arg-type]
    await service.delete_run(run.run_id)
    answer = await Agent(session, "chat").http.post("/v1/chat/completions", json={**SHORT, "messages": ASK})
    assert answer.status_code == 404 and run.run_id in answer.json()["error"]["message"]
