"""Rollout sessions: base URLs for agents that cannot be changed, and what the agents did there."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypedDict

import numpy as np
from gradwire_proto.v1 import sessions_pb2 as pb

from gradwire.errors import InvalidArgumentError
from gradwire.losses import model_path
from gradwire.results import Checkpoint
from gradwire.rollout import Main, Rollout, Turn
from gradwire.wire.transport import Transport

PAGE_SIZE = 200
WILDCARDS = ("0.0.0.0", "[::]")
History = Literal["keep", "template"]


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session; 0 is the server's own limit.

    Beyond the limits of turns, tokens and time the session ends, and its calls are refused with status 403, which
    clients do not repeat. An answer is cut with the finish reason ``length`` where the limit of tokens ends it.

    Attributes:
        max_turns: Answered calls.
        max_tokens: Tokens that are sampled in all.
        max_seconds: Seconds since it was created.
        max_concurrent_calls: Calls that are computed at a time; further ones wait.
        idle_s: Seconds without a call after which the session ends.
    """

    max_turns: int = 0
    max_tokens: int = 0
    max_seconds: float = 0.0
    max_concurrent_calls: int = 0
    idle_s: float = 0.0


class SessionSampling(TypedDict, total=False):
    """How a session samples where its agent asks for nothing; with ``fixed``, whatever the agent asks for.

    ``max_tokens`` bounds every answer, whatever the agent asks for.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    fixed: bool


class SessionOptions(TypedDict, total=False):
    """Options of a new session.

    Attributes:
        task: JSON data for rewards and people; it comes back with the rollout.
        group: Rollouts of one group are compared with each other.
        name: A label for people.
        limits: Its limits.
        sampling: How it samples.
        history: ``"keep"`` (the default): what was sampled stays in the prompt, reasoning included, so that a
            conversation that is appended to is one sequence. ``"template"``: as the model's chat template writes it; a
            turn behind a prompt from which the template drops something begins a branch.
    """

    task: Any
    group: str
    name: str
    limits: SessionLimits
    sampling: SessionSampling
    history: History


@dataclass(frozen=True)
class SessionInfo:
    """A session as the server knows it. Times are Unix seconds, 0 for what has not happened.

    Attributes:
        session_id: Its id.
        owner: Name of the key that created it.
        model: The run, checkpoint or base model that it samples from.
        base_model: The base model of that.
        run_id: The run; empty for a base model.
        task, group, name, limits, sampling, history: See :class:`SessionOptions`.
        state: ``"open"`` or ``"ended"``.
        end_reason: Why it ended.
        num_turns, num_prompt_tokens, num_sampled_tokens: Answered calls and their tokens.
        created_at, used_at, ended_at: Its creation, newest answer and end.
        size_bytes: Size of its turns on the server's disk.
        reward, turn_rewards: Rewards of the rollout, and of turns by number, that its owner has noted.
    """

    session_id: str
    owner: str
    model: str
    base_model: str
    run_id: str
    task: Any
    group: str
    name: str
    limits: SessionLimits
    sampling: SessionSampling
    history: History
    state: Literal["open", "ended"]
    end_reason: str
    num_turns: int
    num_prompt_tokens: int
    num_sampled_tokens: int
    created_at: float
    used_at: float
    ended_at: float
    size_bytes: int
    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)

    @staticmethod
    def from_message(session: pb.RolloutSession) -> SessionInfo:
        limits, sampling = session.limits, session.sampling
        return SessionInfo(
            session_id=session.session_id,
            owner=session.owner,
            model=session.model,
            base_model=session.base_model,
            run_id=session.run_id,
            task=json.loads(session.task_json or "null"),
            group=session.group,
            name=session.name,
            limits=SessionLimits(
                limits.max_turns, limits.max_tokens, limits.max_seconds, limits.max_concurrent_calls, limits.idle_s
            ),
            sampling=SessionSampling(**{each.name: value for each, value in sampling.ListFields()}),  # type: ignore[typeddict-item]
            history="template" if session.history == "template" else "keep",
            state="ended" if session.state == "ended" else "open",
            end_reason=session.end_reason,
            num_turns=session.num_turns,
            num_prompt_tokens=session.num_prompt_tokens,
            num_sampled_tokens=session.num_sampled_tokens,
            created_at=session.created_at,
            used_at=session.used_at,
            ended_at=session.ended_at,
            size_bytes=session.size_bytes,
            reward=session.reward if session.HasField("reward") else None,
            turn_rewards=dict(session.turn_rewards),
        )


class RolloutSession:
    """A session. Created by ``run.rollout_session(...)`` or ``service.rollout_session(model=...)``.

    ``async with`` ends it. Under its URL the server answers as OpenAI's and Anthropic's servers do, with the session's
    model whatever model the agent names, and records every answered call.

    .. code-block:: python

        async with await run.rollout_session(task={"file": "a.py"}, group="a.py") as session:
            subprocess.run(["my-agent", "fix a.py"], env=os.environ | session.environment())
            rollout = await session.rollout()
    """

    def __init__(self, transport: Transport, session: pb.RolloutSession) -> None:
        self._transport, self._key = transport, session.key
        self._info = SessionInfo.from_message(session)
        self._url = _reachable(session.url, transport.address)

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._info.session_id

    @property
    def key(self) -> str:
        """The API key of its agent, which opens this session and nothing else; empty unless this process created it."""
        return self._key

    @property
    def url(self) -> str:
        """The base URL, for ``ANTHROPIC_BASE_URL``."""
        return self._url

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's clients, for ``OPENAI_BASE_URL``."""
        return f"{self._url}/v1"

    @property
    def info(self) -> SessionInfo:
        """The session as it was when this client last heard of it."""
        return self._info

    def environment(self) -> dict[str, str]:
        """Environment variables with which agents on the libraries of OpenAI and Anthropic find the session."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": self._url,
            "ANTHROPIC_API_KEY": self._key,
        }

    async def refresh(self) -> SessionInfo:
        """Ask the server for the session's present state."""
        request = pb.GetRolloutSessionRequest(session_id=self.session_id)
        self._info = SessionInfo.from_message(
            await self._transport.session_call(lambda stub: stub.GetRolloutSession, request)
        )
        return self._info

    async def rollout(self, main: Main = "longest") -> Rollout:
        """Return what the agent has done so far; callable at any time.

        Args:
            main: Which branches are trained on: see :class:`gradwire.rollout.Rollout`.
        """
        turns: list[Turn] = []
        request = pb.GetRolloutRequest(session_id=self.session_id)
        for frame in await self._transport.rollout(request):
            if frame.HasField("session"):
                self._info = SessionInfo.from_message(frame.session)
            turns += map(turn_of, frame.turns)
        info = self._info
        return Rollout(
            session_id=info.session_id,
            turns=tuple(turns),
            task=info.task,
            group=info.group,
            state=info.state,
            end_reason=info.end_reason,
            main=main,
            reward=info.reward,
            turn_rewards=dict(info.turn_rewards),
        )

    async def end(
        self, reason: str = "done", reward: float | None = None, turn_rewards: Mapping[int, float] | None = None
    ) -> SessionInfo:
        """End the session: its key opens nothing any more, and calls that are under way are cut off.

        A session that has ended stays as it is, but for rewards.

        Args:
            reason: Why, for people.
            reward: Reward of the whole rollout, kept with the session for its readers.
            turn_rewards: Rewards of turns, by number, also kept with the session.
        """
        request = pb.EndRolloutSessionRequest(
            session_id=self.session_id, reason=reason, reward=reward, turn_rewards=turn_rewards
        )
        self._info = SessionInfo.from_message(
            await self._transport.session_call(lambda stub: stub.EndRolloutSession, request)
        )
        return self._info

    async def delete(self) -> None:
        """Delete the session with its turns."""
        await self._transport.session_delete(
            lambda stub: stub.DeleteRolloutSession, pb.DeleteRolloutSessionRequest(session_id=self.session_id)
        )

    async def __aenter__(self) -> RolloutSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end("done" if kind is None else f"the program raised {kind.__name__}")

    def __repr__(self) -> str:
        return f"<RolloutSession {self.session_id} {self._info.state}>"


class RolloutSessions:
    """The sessions of a server: ``service.sessions``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(self, model: str | Checkpoint, options: SessionOptions) -> RolloutSession:
        """Create a session; see :meth:`gradwire.ServiceClient.rollout_session`."""
        limits, sampling = options.get("limits") or SessionLimits(), options.get("sampling") or {}
        if not isinstance(limits, SessionLimits):
            message = f"limits are gradwire.SessionLimits(max_turns=…), not a {type(limits).__name__}"
            raise InvalidArgumentError(message, field="limits")
        try:
            request = pb.CreateRolloutSessionRequest(
                model=model_path(model),
                task_json=json.dumps(options.get("task")),
                group=options.get("group", ""),
                name=options.get("name", ""),
                limits=pb.SessionLimits(**vars(limits)),
                sampling=pb.SessionSampling(**sampling),
                history=options.get("history", "keep"),
                idempotency_key=secrets.token_hex(16),
            )
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the session's options: {error}", field="session") from error
        return RolloutSession(
            self._transport, await self._transport.session_call(lambda stub: stub.CreateRolloutSession, request)
        )

    async def get(self, session_id: str) -> RolloutSession:
        """Find a session of your key by its id; its key is known to the process alone that created it.

        Raises:
            NotFoundError: There is none.
        """
        request = pb.GetRolloutSessionRequest(session_id=session_id)
        found = await self._transport.session_call(lambda stub: stub.GetRolloutSession, request)
        return RolloutSession(self._transport, found)

    async def list(
        self, run_id: str = "", group: str = "", state: Literal["", "open", "ended"] = "", most: int = 0
    ) -> list[SessionInfo]:
        """List sessions, the newest first: your key's, with an administrator's or a viewer's key all.

        Args:
            run_id: Only those of this run.
            group: Only those of this group.
            state: Only those in this state.
            most: At most so many; 0 for all.
        """
        found: list[SessionInfo] = []
        request = pb.ListRolloutSessionsRequest(run_id=run_id, group=group, state=state, page_size=most or PAGE_SIZE)
        while True:
            page = await self._transport.session_call(lambda stub: stub.ListRolloutSessions, request)
            found += map(SessionInfo.from_message, page.sessions)
            request.page_token = page.next_page_token
            if not page.next_page_token or 0 < most <= len(found):
                return found[: most or None]


def turn_of(turn: pb.SessionTurn) -> Turn:
    """A turn of a rollout, read from the wire."""
    lengths = [span.tokens for span in turn.versions]
    versions = np.repeat(np.array([span.step for span in turn.versions], np.int64), lengths)
    if not lengths:
        versions = np.zeros(len(turn.response_ids), np.int64)
    calls: tuple[Mapping[str, Any], ...] = tuple(json.loads(turn.tool_calls_json or "[]"))
    return Turn(
        number=turn.number,
        prompt_suffix=np.array(turn.prompt_suffix, np.int64),
        response_ids=np.array(turn.response_ids, np.int64),
        logprobs=np.array(turn.logprobs, np.float32),
        versions=versions,
        parent=turn.parent,
        shared=turn.shared,
        fork=turn.fork,
        finish_reason=turn.finish_reason,
        temperature=turn.temperature,
        door=turn.door,
        system_digest=turn.system_digest,
        system=turn.system,
        messages=tuple(json.loads(turn.new_messages_json or "[]")),
        tool_names=tuple(turn.tool_names),
        text=turn.text,
        reasoning=turn.reasoning,
        tool_calls=calls,
        started_at=turn.started_at,
        seconds=turn.seconds,
        used=turn.used,
    )


def _reachable(url: str, address: str) -> str:
    """The URL of a server that listens on all of its addresses, with the one by which this client reaches it."""
    scheme, found, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not found or host not in WILDCARDS:
        return url
    return f"{scheme}://{address.rpartition(':')[0]}{colon}{port}{slash}{path}"
