"""Deletion of what is not needed any more: expired checkpoints, snapshots of samplers, results that were fetched,
models whose runs are gone, samplers and sessions that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.tinker.models import Models
from gradwire_server.doors.http.tinker.names import TinkerPath
from gradwire_server.doors.http.tinker.samplers import Samplers
from gradwire_server.doors.http.tinker.saved_weights import SavedWeights
from gradwire_server.doors.http.tinker.store import ModelRecord, SamplerRecord, SavedRecord, TinkerStore
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

EVERY_S = 30.0
UNUSED_S = 3600.0
"""A snapshot goes when its sampler was not used for so long, or when its session has ended."""
RESULTS_KEPT_S = 600.0
"""A result is kept for so long after it was sent, as the answer may have been lost on the way."""
RESULTS_KEPT = 1024
"""Results of one model beyond this number go earlier, those sent first."""
SESSION_KEPT_S = 86_400.0
"""A session without a sign of its client for so long has ended: a laptop may sleep for a night."""
FAILED_KEPT_S = 3600.0
"""A model that could not be made is kept for so long, for its client to read why."""
SNAPSHOTS_KEPT = 64
"""Snapshots of one session beyond this number go too, those unused for longest."""


class TinkerCollection:
    """The periodic deletion."""

    def __init__(
        self,
        core: Core,
        store: TinkerStore,
        saved: SavedWeights,
        models: Models,
        samplers: Samplers,
    ) -> None:
        self._core, self._store, self._saved, self._models, self._samplers = core, store, saved, models, samplers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def collect(self) -> None:
        """Delete what is due now."""
        now = time.time()
        self._samplers.many_made.clear()
        for saved in list(self._store.saved.values()):
            if self._saved.is_outdated(saved):
                await self._store.delete(self._store.saved, saved.key)
            elif saved.expired and self._saved.is_of_what_is_there(saved):
                await self._expire(saved)
        for sampler in self._due_snapshots(now):
            await self._drop_snapshot(sampler)
        await self._models.release_delivered(now - RESULTS_KEPT_S, RESULTS_KEPT)
        await self._models.forget(*[model for model in self._store.models.values() if self._is_gone(model, now)])
        await self._end_sessions(now)
        await self._store.give_back_space()

    def _is_gone(self, model: ModelRecord, now: float) -> bool:
        if model.run_id:
            return self._core.storage.records.find(model.run_id) is None
        kept_s = FAILED_KEPT_S if model.error else SESSION_KEPT_S
        return now - model.created_at > kept_s and not self._models.being_made(model.model_id)

    def _has_ended(self, session_id: str, now: float) -> bool:
        session = self._store.sessions.get(session_id)
        return session is None or session.ended or now - self._store.used_at(session) > SESSION_KEPT_S

    async def _end_sessions(self, now: float) -> None:
        """Delete what ended sessions leave: samplers, and the sessions themselves once nothing belongs to them."""
        store = self._store
        ended = [
            sampler.sampler_id
            for sampler in store.samplers.values()
            if not (sampler.snapshot or self._samplers.busy(sampler.sampler_id))
            and self._has_ended(sampler.session_id, now)
        ]
        for sampler_id in ended:
            self._samplers.used_at.pop(sampler_id, None)
        await store.delete(store.samplers, *ended)
        kept = {model.session_id for model in store.models.values()}
        kept |= {sampler.session_id for sampler in store.samplers.values()}
        sessions = [each for each in store.sessions if each not in kept and self._has_ended(each, now)]
        await store.delete(store.sessions, *sessions)

    def _due_snapshots(self, now: float) -> list[SamplerRecord]:
        of_session: dict[str, list[SamplerRecord]] = {}
        for sampler in self._store.samplers.values():
            if sampler.snapshot and not self._samplers.busy(sampler.sampler_id):
                of_session.setdefault(sampler.session_id, []).append(sampler)
        due: list[SamplerRecord] = []
        for session_id, snapshots in of_session.items():
            ended = self._has_ended(session_id, now)
            newest_first = sorted(snapshots, key=self._used_at, reverse=True)
            for place, sampler in enumerate(newest_first):
                if ended or place >= SNAPSHOTS_KEPT or now - self._used_at(sampler) > UNUSED_S:
                    due.append(sampler)
        return due

    def _used_at(self, sampler: SamplerRecord) -> float:
        return self._samplers.used_at.get(sampler.sampler_id, sampler.created_at)

    async def _drop_snapshot(self, sampler: SamplerRecord) -> None:
        try:
            await self._core.runs.delete_checkpoint(Caller(sampler.owner), sampler.source)
        except ServiceError as error:
            run_id = sampler.source.partition("/")[0]
            if self._core.storage.records.find(run_id) and time.time() - sampler.created_at < UNUSED_S:
                return  # its operation may still be in the queue
            log.info("the snapshot %s: %s", sampler.source, error)
        self._samplers.used_at.pop(sampler.sampler_id, None)
        await self._store.delete(self._store.samplers, sampler.sampler_id)

    async def _expire(self, saved: SavedRecord) -> None:
        try:
            await self._saved.delete(Caller(saved.owner), TinkerPath.read(saved.path))
        except ServiceError as error:
            log.info("the expired checkpoint %s: %s", saved.path, error)
            if error.code == pb.ERROR_CODE_UNKNOWN_CHECKPOINT:
                await self._store.delete(self._store.saved, saved.key)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._samplers.many_made.wait(), EVERY_S)
            try:
                await self.collect()
            except Exception as error:  # tried again after the next interval
                log.error("old checkpoints were not deleted: %s", error)
