"""Usage through this door: tokens and seconds by hour, session and model; checkpoints and their bytes.

There are no prices here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import AwareDatetime

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.store import TinkerStore
from gradwire_server.errors import invalid

HOUR_S = 3600
"""Usage is counted by whole hours of UTC."""
MOST_HOURS = 14 * 24
SAMPLING = ":sample"
BY = ("hour", "owner", "run", "model")


def sampling_label(session_id: str) -> str:
    """Under what the sampling of a session is counted; what its models do is under their ids."""
    return f"{session_id}{SAMPLING}"


def routes(core: Core, store: TinkerStore) -> APIRouter:
    """The routes. An admin key sees what all keys have used, and any other key its own."""
    router = APIRouter()

    @router.get("/billing/usage/events")
    async def usage(caller: CallerOf, starting_on: AwareDatetime, ending_before: AwareDatetime) -> dict[str, Any]:
        """Usage by hour."""
        start, end = _window(starting_on, ending_before)
        owner = None if caller.role == "admin" else caller.name
        events: list[tuple[float, int, dict[str, Any]]] = []
        for entry in await core.storage.usage.between(start, end, BY, owner):
            if session_id := _session_of(entry.label):
                events += [(entry.start, -tokens, _event(entry, session_id, info)) for tokens, info in _infos(entry)]
        data = [event for _, _, event in sorted(events, key=lambda each: each[:2])]
        known = [store.sessions.get(session_id) for session_id in {event["session_id"] for event in data}]
        metadata = {
            each.session_id: {"user_metadata": _texts(each.user_metadata)} for each in known if each is not None
        }
        return {"data": data, "sessions": metadata}

    @router.get("/billing/usage/checkpoints/current")
    async def checkpoints(caller: CallerOf, project_id: str | None = None) -> dict[str, Any]:
        """Checkpoints that are there now, by project and key."""
        numbers, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for model in store.models.values():
            if not (model.run_id and _sees(caller, model.owner)):
                continue
            of = _project(model.session_id), model.owner
            if project_id in (None, of[0]):
                for saved in core.runs.list_checkpoints(Caller(model.owner), model.run_id):
                    if TinkerPath.stored(model.model_id, saved.name) is not None:
                        numbers[of] += 1
                        sizes[of] += saved.size_bytes
        data = [
            {
                "project_id": project or None, "org_user_urn": owner or "anyone", "user_name": owner or "anyone",
                "checkpoint_count": count, "size_bytes": sizes[project, owner],
                "size_gigabytes": sizes[project, owner] / 1e9,
            }
            for (project, owner), count in sorted(numbers.items())
        ]  # fmt: skip
        return {"data": data}

    def _project(session_id: str) -> str:
        session = store.sessions.get(session_id)
        return session.project_id if session is not None else ""

    def _event(entry: pb.UsageEntry, session_id: str, info: dict[str, Any]) -> dict[str, Any]:
        return {
            "bucket_start": _time(entry.start), "bucket_end": _time(entry.start + HOUR_S),
            "base_model": entry.base_model, "user_id": entry.owner or "anyone", "user_name": entry.owner or "anyone",
            "session_id": session_id, "project_id": _project(session_id) or None, "event_info": info,
        }  # fmt: skip

    return router


def _session_of(label: str) -> str:
    """The session of a label; empty if what it stands for was not done through this door."""
    if label.endswith(SAMPLING):
        return label.removesuffix(SAMPLING)
    session_id, kind, _ = label.rpartition(":train:")
    return session_id if kind else ""


def _infos(entry: pb.UsageEntry) -> Iterator[tuple[int, dict[str, Any]]]:
    """The kinds of usage in an entry, with their tokens. ``engine_seconds`` and ``training_run_id`` are beside those
    that the SDK knows."""
    seconds = {"engine_seconds": entry.engine_s}
    if entry.label.endswith(SAMPLING):
        yield entry.prompt_tokens, {"type": "sampling_prefill", "cached": False, "token_count": entry.prompt_tokens}
        yield entry.sampled_tokens, {"type": "sampling_sample", "token_count": entry.sampled_tokens} | seconds
        return
    of = {"training_run_id": entry.label}
    yield entry.training_tokens, {"type": "training", "token_count": entry.training_tokens} | seconds | of
    if entry.checkpoints:
        yield 0, {"type": "checkpoint", "count": entry.checkpoints} | of


def _window(starting_on: datetime, ending_before: datetime) -> tuple[float, float]:
    start, end = starting_on.timestamp(), ending_before.timestamp()
    if start % HOUR_S or end % HOUR_S:
        raise invalid("starting_on and ending_before are whole hours of UTC", "starting_on")
    if not 0 < end - start <= MOST_HOURS * HOUR_S:
        raise invalid("ending_before is after starting_on, and 14 days after it at most", "ending_before")
    return start, end


def _sees(caller: Caller, owner: str) -> bool:
    return caller.role == "admin" or caller.name == owner


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()


def _texts(metadata: dict[str, Any]) -> dict[str, str] | None:
    return {name: str(value) for name, value in metadata.items()} or None
