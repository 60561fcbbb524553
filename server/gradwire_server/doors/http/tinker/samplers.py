"""Samplers of the protocol: what each samples from, and the samples in progress.

A sample is not journaled: after a restart its promise is gone, and the client asks again. Within one life of the server
a number of a sampler stands for one request, so that a repeated one is not computed twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.tinker.names import request_id_of, sampler_id_of
from gradwire_server.doors.http.tinker.store import SamplerRecord, TinkerStore
from gradwire_server.errors import ServiceError

MAX_KEPT = 20_000
MAX_KEPT_BYTES = 256 << 20
"""Samples that were computed are kept up to this number and size, the newest ones, as an answer may be lost."""
MAX_IN_PROGRESS = 20_000
MANY_SNAPSHOTS = 64


@dataclass(eq=False)
class _Asked:
    owner: str
    content: bytes
    task: asyncio.Task[bytes]
    size: int = 0
    cancelled: bool = False


class Samplers:
    """The samplers of every client.

    Attributes:
        used_at: Unix time of each sampler's last request.
        many_made: Set when many snapshots were made since it was cleared.
    """

    def __init__(self, core: Core, store: TinkerStore) -> None:
        self._core, self._store = core, store
        self._asked: OrderedDict[tuple[str, int], _Asked] = OrderedDict()
        self.used_at: dict[str, float] = {}
        self._in_progress = 0
        self._busy: Counter[str] = Counter()
        self._kept_bytes = 0
        self._made = 0
        self.many_made = asyncio.Event()

    async def stop(self) -> None:
        """End the samples in progress."""
        tasks = [asked.task for asked in self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, caller: Caller, sampler_id: str) -> SamplerRecord:
        """A sampler of the caller's."""
        sampler = self._store.samplers.get(sampler_id)
        if sampler is None or not (caller.role == "admin" or caller.name == sampler.owner):
            message = f"there is no sampling session {sampler_id[:200]!r}"
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_CHECKPOINT, message, field="sampling_session_id")
        return sampler

    def source(self, sampler: SamplerRecord) -> str:
        """The path that a sampler samples from now; for an inflight one, its model's newest inflight snapshot."""
        if not sampler.inflight:
            return sampler.source
        run_id = sampler.source.partition("/")[0]
        record = self._core.storage.records.find(run_id)
        newest, source = -1, sampler.source
        for other in self._store.samplers.values():
            if record is not None and other.inflight and other.source.startswith(run_id + "/"):
                snapshot = record.checkpoints.get(other.source.partition("/")[2])
                if snapshot is not None and snapshot.seq > newest:
                    newest, source = snapshot.seq, other.source
        return source

    async def create(self, caller: Caller, session_id: str, number: int, asked: SamplerRecord) -> SamplerRecord:
        """Make a sampler, once.

        Raises:
            ServiceError: SEQ_REUSED for the number of another sampler.
        """
        sampler_id = sampler_id_of(session_id, number)
        known = self._store.samplers.get(sampler_id)
        if known is not None:
            if (known.owner, known.source) != (asked.owner, asked.source):
                message = f"the sampling session {sampler_id} was made for something else: take another number"
                raise ServiceError(pb.ERROR_CODE_SEQ_REUSED, message, field="sampling_session_seq_id")
            return known
        await self._store.put(self._store.samplers, asked)
        self._made += asked.snapshot
        if self._made >= MANY_SNAPSHOTS:
            self._made = 0
            self.many_made.set()
        return asked

    def ask(
        self, caller: Caller, sampler: SamplerRecord, seq: int, content: bytes, work: Callable[[], Awaitable[bytes]]
    ) -> str:
        """Start a request of a sampler, once; returns its promise.

        Args:
            content: The request; tells a repeated one from another with the same number.
            work: Computes its result.

        Raises:
            ServiceError: SEQ_REUSED; LIMIT_EXCEEDED for too many at once.
        """
        self.used_at[sampler.sampler_id] = time.time()
        key, digest = (sampler.sampler_id, seq), hashlib.sha256(content).digest()
        known = self._asked.get(key)
        if known is not None:
            if known.content != digest:
                message = f"request {seq} of {sampler.sampler_id} was another one: take another number"
                raise ServiceError(pb.ERROR_CODE_SEQ_REUSED, message, field="seq_id")
            return request_id_of(*key, "sample")
        if self._in_progress >= MAX_IN_PROGRESS:
            message = f"{self._in_progress} samples are in progress; try again"
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, message, rule="samples_in_progress")
        self._in_progress += 1
        self._busy[sampler.sampler_id] += 1
        asked = _Asked(caller.name, digest, asyncio.ensure_future(_run(work)))
        self._asked[key] = asked
        asked.task.add_done_callback(lambda done: self._ended(sampler.sampler_id, asked, done))
        return request_id_of(*key, "sample")

    def refused(self, sampler: SamplerRecord, seq: int) -> ServiceError | None:
        """The error of a request that was refused because too much is asked at once, which is then forgotten."""
        key = (sampler.sampler_id, seq)
        asked = self._asked.get(key)
        if asked is None or not asked.task.done() or asked.task.cancelled():
            return None
        error = asked.task.exception()
        if isinstance(error, ServiceError) and error.code == pb.ERROR_CODE_LIMIT_EXCEEDED:
            del self._asked[key]
            return error
        return None

    async def result(self, caller: Caller, sampler_id: str, seq: int) -> bytes:
        """Wait for a sample.

        Raises:
            SampleGoneError: It is not known, after a restart or long after it was computed.
            ServiceError: It failed, or was cancelled.
        """
        asked = self._own(caller, sampler_id, seq)
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.cancelled and asked.task.done():
                raise ServiceError(pb.ERROR_CODE_CANCELLED, "this sample was cancelled") from None
            raise

    def cancel(self, caller: Caller, sampler_id: str, seq: int) -> None:
        """End a sample in progress; one that is done stays as it is.

        Raises:
            SampleGoneError: As for :meth:`result`.
        """
        asked = self._own(caller, sampler_id, seq)
        asked.cancelled = asked.task.cancel() or asked.cancelled

    def _own(self, caller: Caller, sampler_id: str, seq: int) -> _Asked:
        asked = self._asked.get((sampler_id, seq))
        if asked is None or not (caller.role == "admin" or caller.name == asked.owner):
            raise SampleGoneError
        return asked

    def busy(self, sampler_id: str) -> bool:
        """Whether a sample of it is in progress."""
        return sampler_id in self._busy

    def _ended(self, sampler_id: str, asked: _Asked, done: asyncio.Task[bytes]) -> None:
        self._in_progress -= 1
        self._busy[sampler_id] -= 1
        if not self._busy[sampler_id]:
            del self._busy[sampler_id]
        if not done.cancelled() and done.exception() is None:
            asked.size = len(done.result())
            self._kept_bytes += asked.size
        while len(self._asked) > MAX_KEPT + self._in_progress or self._kept_bytes > MAX_KEPT_BYTES:
            key = next((key for key, each in self._asked.items() if each.task.done()), None)
            if key is None:
                return
            self._kept_bytes -= self._asked.pop(key).size


class SampleGoneError(Exception):
    """A sample is not known to this server any more; the client asks for it again."""


async def _run(work: Callable[[], Awaitable[bytes]]) -> bytes:
    return await work()
