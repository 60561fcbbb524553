"""The runs that one key of the server may see, followed by one stream for all of its pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import gradwire
from gradwire import History, RunInfo, TrainingClient

from gradwire_console.answers import Answers
from gradwire_console.feedback import Feedback
from gradwire_console.series import Record, Records, only

log = logging.getLogger(__name__)
T = TypeVar("T")
RATE_S = 20.0
TRAINING_S = 5.0
PATIENCE_S = 5.0
AGAIN_S = 1.0
ACTIVITY = 256
OVERVIEW = 1200
"""Operations of a long record that are shown while all of it is fetched."""
WHOLE_AFTER_S = 1.0
SKETCHED, SKETCH, GROWN = 1000, 120, 20
"""Newest runs that have figures and a small curve in the list, operations of such a curve, and the factor by which it
may grow before it is fetched again."""
USAGE_S = 30 * 86_400.0
EVENTS, LOG_CHARS = 500, 20_000
"""Limits of a watched job: its newest events, and the characters at the end of its log."""
FOLLOWED_JOBS = 64
CHECK_S = 1.0
"""Seconds between two questions whether a key is still good; a page asks when it is opened."""
SILENT_S, LOOK_S = 5.0, 1.0
"""Seconds after which a silent server is asked whether it is there, as long again it may take to answer, and seconds
between two looks at the time; nobody is told, so nothing is asked, while no page is open."""


@dataclass(frozen=True)
class Server:
    """The server that a console is of."""

    address: str
    ca_cert: Path | None = None

    @property
    def url(self) -> str:
        """The address for another process, which trusts the authority by ``trusted``."""
        secure = self.ca_cert is not None and "://" not in self.address
        return f"https://{self.address}" if secure else self.address

    @property
    def trusted(self) -> dict[str, str]:
        """The environment in which gRPC trusts the server's authority."""
        return {} if self.ca_cert is None else {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(self.ca_cert.resolve())}

    async def connect(self, key: str) -> gradwire.ServiceClient:
        """Connect with a key; "" for none."""
        return await gradwire.connect(
            self.address, api_key=key or None, ca_cert=self.ca_cert, connect_timeout=10.0, reconnect_timeout=PATIENCE_S
        )


@dataclass
class LiveRun:
    """A run and what its pace was in the last seconds."""

    info: RunInfo
    changed_at: float = 0.0
    job_id: str = ""
    job_name: str = ""
    paces: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    @property
    def name(self) -> str:
        """The run's display name: that of the job that trains it, else its own, else its id."""
        return self.job_name or self.info.name or self.info.run_id

    @property
    def state(self) -> str:
        """``"parked"``, ``"training"`` or ``"idle"``."""
        if self.info.parked:
            return "parked"
        busy = self.info.accepted_seq > self.info.applied_seq or time.time() - self.changed_at < TRAINING_S
        return "training" if busy else "idle"

    @property
    def tokens_per_s(self) -> float:
        """Tokens of operations that ended in the last seconds, per second."""
        since = time.time() - RATE_S
        return sum(tokens for at, tokens in self.paces if at >= since) / RATE_S


@dataclass
class FollowedJob:
    """A job with its newest events, oldest first, and the end of its log."""

    job: gradwire.Job
    events: deque[gradwire.JobEvent] = field(default_factory=lambda: deque(maxlen=EVENTS))
    log: str = ""
    read: int = 0  # bytes of the log


class Workspace:
    """The runs of one key, live.

    Attributes:
        runs: The runs by id, newest first.
        revision: Grows with every change.
        jobs_revision: Grows with every change of a job.
        away: Why the server cannot be reached at the moment; "" while it can.
        away_since: Unix time since when it cannot.
        looked_at: Monotonic time at which an open page last looked.
    """

    def __init__(self, service: gradwire.ServiceClient, read_only: bool = False) -> None:
        self.service = service
        self._read_only = read_only
        self.runs: dict[str, LiveRun] = {}
        self.revision = self.jobs_revision = 0
        self.away = ""
        self.away_since = 0.0
        self.looked_at = self._heard_at = time.monotonic()
        self.role = ""
        self.key_name = ""
        self._answers = Answers()
        self._jobs: dict[str, FollowedJob] = {}
        self._checked_at = 0.0
        self._vocab_sizes: dict[str, int] = {}
        self._records = Records()
        self._clients: dict[str, TrainingClient] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._overviews: dict[str, Record] = {}
        self._sketches: dict[str, Record] = {}
        self._sketching: asyncio.Task[None] | None = None
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._awaited = asyncio.Event()
        self._meanwhile: dict[str, list[History]] = {}  # what came while a run's record is fetched
        self._followers: list[Callable[[str, History], object]] = []
        self._listed = asyncio.Event()
        self._changed = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())
        self._heeding = asyncio.create_task(self._heed())

    async def check_key(self) -> None:
        """Ask the server whether it still takes the key, unless it was asked a moment ago.

        Raises:
            UnauthenticatedError: It does not.
        """
        now = time.monotonic()
        if now - self._checked_at < CHECK_S:
            return
        self._checked_at = self.looked_at = now
        try:
            async with asyncio.timeout(LOOK_S if self.away else SILENT_S):
                info = await self.service.server_info()
            self.role, self.key_name, self._heard_at = info.role, info.key_name, time.monotonic()
        except gradwire.UnauthenticatedError:
            raise
        except TimeoutError:
            self._hangs()
        except gradwire.GradwireError as error:
            self._says(str(error))

    async def _heed(self) -> None:
        """Ask a server whose stream is silent whether it is there: one that hangs keeps its connections."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - self._heard_at < SILENT_S or now - self.looked_at > SILENT_S:
                continue
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._answers.of("info", self.service.server_info, every_s=SILENT_S, stale_s=SILENT_S)
            except TimeoutError:
                self._hangs()
            except gradwire.GradwireError as error:
                self._says(str(error))
            else:
                self._heard_at, self.away = time.monotonic(), ""

    def _hangs(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        self._says(f"nothing was heard of the server for {silent_s:.0f} s", time.time() - silent_s)

    async def _told(self, question: str, ask: Callable[[], Coroutine[Any, Any, T]], **when: Any) -> T:
        """The answer to a question; see :meth:`Answers.of`."""
        return await self._reached(self._answers.of(question, ask, **when))

    async def _reached(self, answer: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer, until the server turns out to be away.

        Raises:
            ConnectionLostError: It is.
        """
        task = asyncio.create_task(answer)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if self.away:
                    raise gradwire.ConnectionLostError(self.away)
        finally:
            task.cancel()
        return task.result()

    def may_change(self, owner: str | None = None) -> bool:
        """Whether this key may change something by this console: what another key made if ``owner`` is its name."""
        if self._read_only or self.role == "viewer":
            return False
        return owner is None or self.role != "user" or owner == self.key_name

    @property
    def may_sample(self) -> bool:
        """Whether this key may ask models: a viewer's takes no time of an engine."""
        return self.role != "viewer"

    async def server_info(self) -> gradwire.ServerInfo:
        """The server: asked every two seconds while runs change, every ten while they do not."""
        ask = self.service.server_info
        return await self._told("info", ask, version=self.revision, every_s=2.0, stale_s=10.0)

    async def queues(self) -> list[gradwire.QueuedRun]:
        """The runs that wait, and for whom; asked as often as :meth:`server_info`."""
        ask = self.service.list_queues
        return await self._told("queues", ask, version=self.revision, every_s=2.0, stale_s=10.0)

    async def usage(self) -> list[gradwire.Usage]:
        """Return each key's usage of the last 30 days; asked every ten seconds while runs change."""

        async def ask() -> list[gradwire.Usage]:
            return await self.service.usage(["owner"], time.time() - USAGE_S)

        return await self._told("usage", ask, version=self.revision, every_s=10.0)

    async def keys(self) -> list[gradwire.KeyInfo]:
        """The server's keys, of which the stream tells nothing: asked every 30 seconds."""
        return await self._told("keys", self.service.list_keys, every_s=30.0, stale_s=30.0)

    async def models(self) -> dict[str, gradwire.ModelInfo]:
        """The models that are served by name, of ten seconds ago at most."""

        async def ask() -> dict[str, gradwire.ModelInfo]:
            return {model.name: model for model in await self.service.list_models()}

        return await self._told("models", ask, every_s=10.0, stale_s=10.0)

    async def vocab_size(self, run_id: str) -> int:
        """Tokens that a run's model tells apart; 0 where that is not known."""
        live = self.runs.get(run_id)
        model = live.info.base_model if live is not None else ""
        if model and model not in self._vocab_sizes:
            with contextlib.suppress(gradwire.GradwireError):
                self._vocab_sizes = {name: each.vocab_size for name, each in (await self.models()).items()}
        return self._vocab_sizes.get(model, 0)

    async def uploads(self) -> list[gradwire.Upload]:
        """The uploads, oldest first, of which the stream tells nothing: asked every ten seconds."""
        return await self._told("uploads", self.service.list_uploads, every_s=2.0, stale_s=10.0)

    async def sessions(self, most: int) -> list[gradwire.SessionInfo]:
        """The newest rollout sessions, of which the stream tells nothing: asked every two seconds."""
        return await self._told("sessions", lambda: self.service.sessions.list(most=most), every_s=2.0, stale_s=10.0)

    async def changing_uploads(self, change: Awaitable[object]) -> None:
        """Wait for a change of the uploads that is made here."""
        await change
        self._answers.forget("uploads")

    async def activity(self, run_id: str, every_s: float = 1.0) -> gradwire.RunActivity:
        """The newest operations of a run; asked again when one was accepted or has ended."""
        live = self.runs.get(run_id)
        version = live and (live.info.accepted_seq, live.info.applied_seq, live.info.parked, live.info.engine)

        async def ask() -> gradwire.RunActivity:
            return await self.client(run_id).activity(ACTIVITY)

        return await self._told(f"activity {run_id}", ask, version=version, every_s=every_s)

    async def jobs(self) -> Sequence[gradwire.Job]:
        """The jobs, newest first; asked again when one has changed."""
        jobs = await self._told("jobs", self.service.jobs.list, version=self.jobs_revision, every_s=1.0)
        for job in jobs:
            if job.run_id in self.runs:
                self.runs[job.run_id].job_id, self.runs[job.run_id].job_name = job.job_id, job.name
        return jobs

    async def job(self, job_id: str) -> FollowedJob:
        """A job with its events and its log; asked again when a job has changed.

        Raises:
            GradwireError: There is no such job.
        """

        async def ask() -> FollowedJob:
            jobs = self.service.jobs
            job = await jobs.get(job_id)
            followed = self._jobs.pop(job_id, None) or FollowedJob(job)
            followed.job = job
            followed.events += await jobs.events(job_id, followed.events[-1].number if followed.events else 0)
            added = await jobs.log(job_id, followed.read)
            followed.read += len(added.encode())
            followed.log = (followed.log + added)[-LOG_CHARS:]
            self._jobs[job_id] = followed
            if len(self._jobs) > FOLLOWED_JOBS:
                del self._jobs[next(iter(self._jobs))]
            return followed

        known = self._jobs.get(job_id)
        stale_s = math.inf if known is not None and known.job.has_ended else 5.0  # a log grows untold
        version = self.jobs_revision
        return await self._told(f"job {job_id}", ask, version=version, every_s=1.0, stale_s=stale_s)

    async def close(self) -> None:
        tasks = [
            self._watching,
            self._heeding,
            *self._loading.values(),
            *([self._sketching] if self._sketching else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.service.close()

    def on_history(self, take: Callable[[str, History], object]) -> None:
        """Call a function with the id of a run and its operations, whenever some have ended."""
        self._followers.append(take)

    async def listed(self) -> None:
        """Wait until the runs have been listed, or the server turns out to be away."""
        await self._listed.wait()

    async def shows(self, run_id: str) -> None:
        """Wait until a run that was just created has been told of."""
        while run_id not in self.runs and not self.away:
            self._changed = asyncio.Event()
            await self._changed.wait()

    def client(self, run_id: str) -> TrainingClient:
        """A client of a run; it takes no run over before an operation is submitted by it."""
        if run_id not in self._clients:
            self._clients[run_id] = self.service.get_training_client(run_id)
        return self._clients[run_id]

    async def checkpoints(self, run_id: str) -> list[gradwire.Checkpoint]:
        """The checkpoints of a run, oldest first; asked for again once there is a newer one or one was deleted."""
        newest = self.runs[run_id].info.latest_checkpoint if run_id in self.runs else ""
        ask = self.client(run_id).list_checkpoints
        return await self._told(f"checkpoints {run_id}", ask, version=newest, every_s=1.0)

    async def delete_checkpoint(self, checkpoint: gradwire.Checkpoint) -> None:
        run_id = checkpoint.path.partition("/")[0]
        await self.client(run_id).delete_checkpoint(checkpoint)
        self._answers.forget(f"checkpoints {run_id}")
        self.revision += 1

    def sketches(self) -> Mapping[str, Record]:
        """Each run's measurements at few operations; those that are missing are fetched in the background."""
        if self._sketching is None or self._sketching.done():
            missing = [run.info.run_id for run in self.newest_first()[:SKETCHED] if self._has_unread(run)]
            if missing:
                self._sketching = asyncio.create_task(self._sketch(missing))
        return self._sketches

    def _has_unread(self, run: LiveRun) -> bool:
        return run.info.run_id not in self._sketches and run.info.applied_seq > 0

    async def _sketch(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            meanwhile = self._meanwhile.setdefault(f"sketch {run_id}", [])
            try:
                self._sketches[run_id] = Record(await self.client(run_id).history(SKETCH))
                for history in meanwhile:
                    self._sketches[run_id].append(history)
            except gradwire.GradwireError as error:
                if self.away:
                    return
                log.info("the record of %s could not be read: %s", run_id, error)
                self._sketches[run_id] = Record(History.from_wire([]))
            finally:
                del self._meanwhile[f"sketch {run_id}"]
            self.revision += 1

    async def record(self, run_id: str) -> Record:
        """Return a run's measurements: of a long run an overview first, all of them soon after; then followed.

        Raises:
            GradwireError: The run is not there, or the server is away.
        """
        async with self._locks.setdefault(run_id, asyncio.Lock()):
            record = self._records.get(run_id) or self._overviews.get(run_id)
            if record is None:
                meanwhile = self._meanwhile[run_id] = []
                try:
                    record = Record(await self._reached(self.client(run_id).history(OVERVIEW)))
                except BaseException:
                    del self._meanwhile[run_id]
                    raise
                if 2 * len(record) > OVERVIEW:  # it may have been thinned
                    self._overviews[run_id] = record
                    self._loading[run_id] = asyncio.create_task(self._load(run_id, meanwhile))
                else:
                    self._keep(run_id, record, meanwhile)
            return record

    async def whole_record(self, run_id: str) -> Record:
        """The record of a run without an overview before it."""
        record = await self.record(run_id)
        if run_id in self._loading:
            self._awaited.set()
            await asyncio.shield(self._loading[run_id])
            record = await self.record(run_id)
        return record

    async def _load(self, run_id: str, meanwhile: list[History]) -> None:
        with contextlib.suppress(TimeoutError):  # the page with the overview comes first
            await asyncio.wait_for(self._awaited.wait(), WHOLE_AFTER_S)
        self._awaited.clear()
        try:
            history = await self.client(run_id).history()
            self._keep(run_id, await asyncio.to_thread(Record, history), meanwhile)
        except gradwire.GradwireError as error:
            del self._meanwhile[run_id]
            log.warning("the record of %s could not be read: %s", run_id, error)
        finally:
            del self._overviews[run_id], self._loading[run_id]
            self.revision += 1

    def _keep(self, run_id: str, record: Record, meanwhile: list[History]) -> None:
        """Keep a record with what came while it was fetched, and follow it from now on."""
        del self._meanwhile[run_id]
        for history in meanwhile:
            record.append(history)
        self._records.put(run_id, record)

    async def _watch(self) -> None:
        cursor = ""
        while True:
            try:
                async with contextlib.aclosing(self.service.watch(cursor, with_points=True)) as updates:
                    async for update in updates:
                        cursor = update.cursor or cursor
                        self._take(update)
            except gradwire.UnauthenticatedError as error:
                self._says(f"the server refuses the key: {error}")
                return
            except gradwire.GradwireError as error:
                self._says(str(error))
                await asyncio.sleep(AGAIN_S)

    def _says(self, away: str, since: float = 0.0) -> None:
        if not self.away:
            self.away_since = since or time.time() - PATIENCE_S  # for so long the client tried to reach it
        self.away = away
        self.revision += 1
        self._changed.set()
        self._listed.set()

    def _take(self, update: gradwire.RunUpdates) -> None:
        self.away, self._heard_at = "", time.monotonic()
        now = time.time()
        if update.whole:
            self.jobs_revision += 1
            self.runs.clear()
            self._records.forget()
            self._sketches.clear()
        for info in update.runs:
            known = self.runs.get(info.run_id)
            if known is None:
                self.runs[info.run_id] = LiveRun(info)
            else:
                if info.applied_seq != known.info.applied_seq:
                    known.changed_at = now
                known.info = info
        for run_id in update.gone:
            self.runs.pop(run_id, None)
            self._records.forget(run_id)
            self._sketches.pop(run_id, None)
        self._follow(update.history)
        self.jobs_revision += update.jobs_changed
        self.revision += 1
        self._changed.set()
        if update.cursor:
            self._listed.set()

    def _follow(self, history: History) -> None:
        for run_id, at, tokens in zip(history.run_id.tolist(), history.time.tolist(), history.tokens.tolist()):
            if run_id in self.runs:
                self.runs[run_id].paces.append((at, tokens))
        for run_id in dict.fromkeys(history.run_id.tolist()):
            own = only(history, run_id)
            for take in self._followers:
                take(run_id, own)
            for waiting in (run_id, f"sketch {run_id}"):
                if waiting in self._meanwhile:
                    self._meanwhile[waiting].append(own)
            for record in (self._records.get(run_id), self._sketches.get(run_id)):
                if record is not None:
                    record.append(own)
            if len(self._sketches.get(run_id, ())) > GROWN * SKETCH:
                del self._sketches[run_id]  # it is fetched again, thinner

    def newest_first(self) -> list[LiveRun]:
        """The runs, newest first."""
        return sorted(self.runs.values(), key=lambda run: (run.info.created_at, run.info.run_id), reverse=True)


class Workspaces:
    """The workspaces of a console, one a key; a browser has one by its session.

    Args:
        own_key: The key of everyone who opens the console on its own machine; None: they sign in.
        read_only: Whether nothing may be changed through this console.
        feedback: The feedback service beside it, if there is one.
    """

    def __init__(
        self, server: Server, own_key: str | None, read_only: bool = False, feedback: Feedback | None = None
    ) -> None:
        self.server, self.read_only, self.feedback = server, read_only, feedback
        self._own_key = own_key
        self._by_key: dict[str, Workspace] = {}
        self._keys: dict[str, str] = {}  # browser -> key; in memory alone, so that no key is on disk
        self._opening = asyncio.Lock()

    @property
    def asks(self) -> bool:
        """Whether browsers sign in."""
        return self._own_key is None

    async def sign_in(self, browser: str, key: str) -> str:
        """Give a browser the workspace of a key; return why the server refuses it, or ""."""
        try:
            await self.of_key(key)
        except gradwire.UnauthenticatedError:
            return "The server does not know this key."
        except gradwire.GradwireError as error:
            return str(error)
        self._keys[browser] = key
        return ""

    def sign_out(self, browser: str) -> None:
        self._keys.pop(browser, None)

    async def of(self, browser: str) -> Workspace | None:
        """The workspace of a browser; None if it has to sign in.

        Raises:
            GradwireError: The server is away, and has not been reached so far.
        """
        key = self._keys.get(browser, self._own_key)
        if key is None:
            return None
        try:
            return await self.of_key(key)
        except gradwire.UnauthenticatedError:  # revoked since
            self._keys.pop(browser, None)
            return None

    async def of_key(self, key: str) -> Workspace:
        """The workspace of a key.

        Raises:
            UnauthenticatedError: The server does not know the key.
            GradwireError: The server is away, and has not been reached so far.
        """
        async with self._opening:
            if key not in self._by_key:
                self._by_key[key] = Workspace(await self.server.connect(key), self.read_only)
            workspace = self._by_key[key]
        try:
            await workspace.check_key()
        except gradwire.UnauthenticatedError:
            if self._by_key.get(key) is workspace:
                del self._by_key[key]
                await workspace.close()
            raise
        return workspace

    async def close(self) -> None:
        await asyncio.gather(*(workspace.close() for workspace in self._by_key.values()))
