"""What keys have used: tokens and seconds by hour, session and model; checkpoints and their bytes.

There are no prices here. A result counts when it is first delivered, in the hour in which it is.
"""

from __future__ import annotations

import time
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
from gradwire_server.doors.http.tinker.store import ModelRecord, SamplerRecord, TinkerStore, UsageRecord
from gradwire_server.errors import ServiceError

HOUR_S = 3600
MOST_HOURS = 14 * 24
KEPT_S = 90 * 86_400.0


class UsageCounts:
    """Counts in memory; :meth:`save` makes them durable. A killed server loses those since the last time."""

    def __init__(self, store: TinkerStore) -> None:
        self._store = store
        self._new: dict[str, UsageRecord] = {}

    def trained(self, model: ModelRecord, result: pb.OperationResult) -> None:
        """Count an operation of a model."""
        self._add(
            model, model.model_id, training_tokens=result.loss.num_tokens, seconds=result.timings.engine_s,
            checkpoints=int(result.HasField("checkpoint") or result.HasField("export")),
        )  # fmt: skip

    def sampled(self, sampler: SamplerRecord, result: pb.OperationResult) -> None:
        """Count a request of a sampler."""
        self._add(
            sampler, "", prompt_tokens=result.sample.num_prompt_tokens,
            sampled_tokens=result.sample.num_sampled_tokens, seconds=result.timings.engine_s,
        )  # fmt: skip

    def _add(self, of: ModelRecord | SamplerRecord, model_id: str, **counted: float) -> None:
        hour = int(time.time()) // HOUR_S * HOUR_S
        where = {"owner": of.owner, "session_id": of.session_id, "base_model": of.base_model, "model_id": model_id}
        added = UsageRecord.model_validate({**where, "hour": hour, **counted})
        self._new[added.key] = added.plus(self._new.get(added.key))

    async def save(self) -> None:
        """Add what is new to the store, and delete what is old there."""
        new, self._new = self._new, {}
        for key, record in new.items():
            await self._store.put(self._store.usage, record.plus(self._store.usage.get(key)))
        oldest = time.time() - KEPT_S
        await self._store.delete(
            self._store.usage, *[key for key, each in self._store.usage.items() if each.hour < oldest]
        )

    def between(self, start: float, end: float) -> list[UsageRecord]:
        """What was counted in some hours."""
        new = {key: each.plus(self._store.usage.get(key)) for key, each in self._new.items()}
        return [record for record in (dict(self._store.usage) | new).values() if start <= record.hour < end]


def routes(core: Core, store: TinkerStore, counts: UsageCounts) -> APIRouter:
    """The routes. An admin key sees what all keys have used, and any other key its own."""
    router = APIRouter()

    @router.get("/billing/usage/events")
    async def usage(caller: CallerOf, starting_on: AwareDatetime, ending_before: AwareDatetime) -> dict[str, Any]:
        """Usage by hour."""
        start, end = _window(starting_on, ending_before)
        events: list[tuple[int, int, dict[str, Any]]] = []
        for record in counts.between(start, end):
            if _sees(caller, record.owner):
                events += [(record.hour, -tokens, _event(record, info)) for tokens, info in _infos(record)]
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

    def _event(record: UsageRecord, info: dict[str, Any]) -> dict[str, Any]:
        return {
            "bucket_start": _time(record.hour), "bucket_end": _time(record.hour + HOUR_S),
            "base_model": record.base_model, "user_id": record.owner or "anyone", "user_name": record.owner or "anyone",
            "session_id": record.session_id, "project_id": _project(record.session_id) or None, "event_info": info,
        }  # fmt: skip

    return router


def _infos(record: UsageRecord) -> Iterator[tuple[int, dict[str, Any]]]:
    """The kinds of usage in a record, with their tokens. ``engine_seconds`` and ``training_run_id`` are beside those
    that the SDK knows."""
    if not record.model_id:
        yield record.prompt_tokens, {"type": "sampling_prefill", "cached": False, "token_count": record.prompt_tokens}
        sampled = {"type": "sampling_sample", "token_count": record.sampled_tokens, "engine_seconds": record.seconds}
        yield record.sampled_tokens, sampled
        return
    trained = {"type": "training", "token_count": record.training_tokens, "engine_seconds": record.seconds}
    yield record.training_tokens, trained | {"training_run_id": record.model_id}
    if record.checkpoints:
        yield 0, {"type": "checkpoint", "count": record.checkpoints, "training_run_id": record.model_id}


def _window(starting_on: datetime, ending_before: datetime) -> tuple[float, float]:
    start, end = starting_on.timestamp(), ending_before.timestamp()
    if start % HOUR_S or end % HOUR_S:
        raise _invalid("starting_on and ending_before are whole hours of UTC", "starting_on")
    if not 0 < end - start <= MOST_HOURS * HOUR_S:
        raise _invalid("ending_before is after starting_on, and 14 days after it at most", "ending_before")
    return start, end


def _invalid(message: str, field: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field=field)


def _sees(caller: Caller, owner: str) -> bool:
    return caller.role == "admin" or caller.name == owner


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()


def _texts(metadata: dict[str, Any]) -> dict[str, str] | None:
    return {name: str(value) for name, value in metadata.items()} or None
