"""The core: every use case of the server, for callers that a door has authenticated.

Messages of ``training.proto`` serve as its data types; they do not depend on a transport. Every method that acts for a
caller takes a :class:`.keys.Caller` first and accesses only what that caller may access.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from importlib.metadata import version

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import Calls
from gradwire_server.access.keys import ANYONE, Caller, Keys
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.core.incoming import Incoming
from gradwire_server.core.jobs.file_parts import FileParts
from gradwire_server.core.jobs.files import Files
from gradwire_server.core.jobs.jobs import JobService
from gradwire_server.core.jobs.specs import JobSpecs
from gradwire_server.core.jobs.states import JobStates
from gradwire_server.core.jobs.turns import JobTurns
from gradwire_server.core.jobs.webhook import Webhook
from gradwire_server.core.jobs.workers import JobWorkers
from gradwire_server.core.observed import Observed
from gradwire_server.core.recordings import Recordings
from gradwire_server.core.rollouts.sessions import RolloutSessions, Source
from gradwire_server.core.runs import Runs
from gradwire_server.core.sampling import Sampling
from gradwire_server.core.session import Session
from gradwire_server.core.startable import Startable
from gradwire_server.core.texts import Texts
from gradwire_server.core.uploads import Uploads
from gradwire_server.engine_client.agents import Agents
from gradwire_server.engine_client.client import EngineClient
from gradwire_server.engine_client.pool import EnginePool, own_engines
from gradwire_server.errors import ServiceError, check_length
from gradwire_server.journal.recorded_files import RecordedFiles
from gradwire_server.journal.rows import StoredResult
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.state_folder import FolderLock
from gradwire_server.journal.storage import Storage
from gradwire_server.observability.metrics import Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.checks import check_rows
from gradwire_server.scheduling.scheduler import Scheduler
from gradwire_server.stores.store import PASSING
from gradwire_server.tokenizer_files import find_tokenizer

log = logging.getLogger(__name__)

VERSION = version("gradwire")
PROTOCOL = 1
"""Version of the protocol, reported to clients."""
ENGINE_GRACE_S = 5.0


class Core(Startable):
    """A server on one state folder, without doors.

    Args:
        engines: Engines to use instead of the child processes that the settings describe; the caller stops them.
        tracing: Tracing to use instead of what the settings describe; the caller closes it.
        own_key: Key that callers must present; see :class:`.keys.Keys`.
        on_parked: Called with the number of parked runs when it may have changed.

    Attributes:
        agents: Takes engines on other machines.
        calls: Turns of the keys' calls; a door takes one before it reads a call's body.
        folder_lock: Keeps other processes from the state folder.
        storage: The state folder: the journal, the rows of runs and checkpoints; available after :meth:`start`.
        texts: Conversions between text and token ids.
        runs: Creation, listing and deletion of runs, and their checkpoints; available after :meth:`start`.
        observed: Views of runs for people, beside results; available after :meth:`start`.
        recordings: Records of runs, to be executed again elsewhere; available after :meth:`start`.
        uploads: Uploaded weights that runs can start from; available after :meth:`start`.
        rollouts: The sessions of agents; available after :meth:`start`.
        jobs, files: Trainings that the server runs by itself, and their data; available after :meth:`start`.
        file_parts: Files that arrive in parts.
        job_turns: Which job starts next, and what its worker reports.
        job_workers: The processes that run jobs; a door gives them its address.
        left: Number of operations without a result, by run id; set by :meth:`drain`.
    """

    def __init__(
        self,
        config: ServerConfig,
        engines: Sequence[EngineClient] = (),
        tracing: Tracing | None = None,
        own_key: str = "",
        on_parked: Callable[[int], object] | None = None,
    ) -> None:
        self.config = config
        self.keys = Keys(config.state_dir, open_door=config.loopback or config.insecure_bind, own_key=own_key)
        self.metrics = Metrics(per_run=config.metrics_runs)
        self.calls = Calls(config.limits)
        self.left: dict[str, int] = {}
        self._models = ModelNames(config.all_models, tuple(config.models))
        self._tokenizer_files: Mapping[str, str] = {}
        self.texts = Texts(lambda: self._tokenizer_files or self.engines.hello.tokenizer_files, self._models, config)
        self._own_engines = [] if engines else own_engines(config)
        self.engines = EnginePool(engines or self._own_engines)
        self.agents = Agents(config, self.engines)
        self._on_parked = on_parked
        self._given_tracing, self._tracing = tracing, Tracing()
        self.folder_lock, self._closing = FolderLock(config.state_dir), AsyncExitStack()
        self._running = False
        self._began = time.monotonic()

    # ---- lifecycle ----

    async def start(self) -> None:
        """Lock the state folder, start the engines, and load every run with its queued operations.

        Raises:
            ServiceError: An engine did not start.
            SystemExit: The state folder is in use or cannot be read, or OpenTelemetry is not installed; with a message.
        """
        config = self.config
        self.storage, loaded = await Storage.open(config, self.folder_lock, self._closing)
        storage = self.storage
        if config.store:
            await storage.folders.in_thread(storage.folders.delete_all, PASSING)
        await self.agents.start()
        await asyncio.gather(*(engine.start() for engine in self._own_engines))
        self._know_losses()
        if not self.engines.is_known:
            self.engines.watch(self._know_losses)
            self._tokenizer_files = await asyncio.to_thread(_found_tokenizers, config.all_models)
        storage.journal.store.on_commit = self.metrics.committed
        self._start_tracing()
        recorded = RecordedFiles(config.state_dir, config.limits.max_recorded_bytes)
        self.scheduler = Scheduler(
            self.engines,
            storage,
            config,
            self.keys.quota,
            self.metrics,
            self._tracing,
            recorded,
            self._on_parked or (lambda count: None),
        )
        self.uploads = Uploads(config, storage.folders, self._models, self.keys.quota, self.scheduler.ask)
        await asyncio.to_thread(self.uploads.load)
        self.runs = Runs(
            self.scheduler,
            storage,
            self.keys,
            self.calls,
            self._models,
            self.uploads,
            config,
            self.engines.ranks_for,
        )
        self.observed = Observed(self.scheduler, storage, recorded, config.limits.max_recorded_bytes)
        self.recordings = Recordings(config.state_dir, storage)
        await asyncio.to_thread(self.recordings.clean)
        self.files = Files(config, storage.files, self.keys.quota, lambda file_id: self.jobs.states.needing(file_id))
        self.file_parts = FileParts(self.files, config.state_dir / "file_parts", config.limits)
        await asyncio.to_thread(self.file_parts.clean)
        await self.files.load()
        states = JobStates(storage.jobs, self._jobs_changed, self.scheduler.feed.job_changed)
        self.jobs = JobService(config, states, JobSpecs(config, self.keys, self.files, self._models))
        self.job_turns = JobTurns(config, states, self.keys)
        self.job_workers = JobWorkers(self.jobs, self.job_turns, self.keys, config.job_workers)
        self._webhook = Webhook(self.jobs, config.webhook, config.state_dir / "webhook.secret")
        await states.load()
        self.rollouts = RolloutSessions(config.limits, self.keys, storage.sessions, self.source)
        await self.rollouts.start()
        self._sampling = Sampling(
            config, storage.records, storage.checkpoints, self._models, self.scheduler, storage.usage
        )
        await self.scheduler.start(loaded)
        self._running = True
        await self._webhook.start()

    async def drain(self) -> None:
        """Accept nothing more, wait for the operations that are being executed, and set :attr:`left`.

        A second call does nothing.
        """
        running, self._running = self._running, False
        if running:
            await self._webhook.stop()
            await self.rollouts.stop()
            self.left = await self.scheduler.drain(self.config.grace)

    async def stop(self) -> None:
        """Drain, stop the engines, close the journal, and unlock the state folder. A second call does nothing."""
        await self.drain()
        await self.texts.close()
        await self.agents.stop()
        engines, self._own_engines = self._own_engines, []
        await asyncio.gather(*(engine.stop(ENGINE_GRACE_S) for engine in engines))
        tracing, self._tracing = self._tracing, Tracing()
        if tracing is not self._given_tracing:
            await asyncio.to_thread(tracing.close)
        await self._closing.aclose()

    def _know_losses(self) -> None:
        self.metrics.know(self.engines.hello.losses)

    def _jobs_changed(self) -> None:
        self.job_workers.look()
        self._webhook.look()

    # ---- the server ----

    def info(self) -> pb.ServerInfo:
        """Version, device, status and limits of the server."""
        return pb.ServerInfo(
            version=VERSION,
            protocol=PROTOCOL,
            device=self.engines.hello.device,
            engine_ready=self.engines.is_ready,
            uptime_s=time.monotonic() - self._began,
            durability=self.config.durability,
            limits=self.config.limits.model_dump() | {"max_chunk_bytes": CHUNK_BYTES},
            engines=self.scheduler.engines(),
            price_per_hour=self.config.price_per_hour,
        )

    def models(self, name: str = "") -> Sequence[pb.ModelInfo]:
        """The models from which runs can be created, or the one of this name or path.

        Raises:
            ServiceError: ENGINE_UNAVAILABLE: no engine has come so far, so they are not known. UNKNOWN_MODEL.
        """
        self.engines.check_known()
        models = self.engines.hello.models
        return [self.model_info(self._models.find(name, "name"))] if name else models

    def model_info(self, name: str) -> pb.ModelInfo:
        """The facts of a model; only its name for one that the server no longer serves."""
        return next((model for model in self.models() if model.name == name), pb.ModelInfo(name=name))

    def known_model(self, name: str) -> str | None:
        """The name of the model with this name or path; None if there is none."""
        return self._models.known(name)

    def model_name(self, name: str) -> str:
        """The name of the model with this name or path.

        Raises:
            ServiceError: UNKNOWN_MODEL.
        """
        return self._models.find(name, "base_model")

    def source(self, caller: Caller, name: str) -> Source:
        """Resolve a name to weights to sample from: a base model, a run's current weights, or a checkpoint of a run.

        Raises:
            ServiceError: UNKNOWN_RUN, UNKNOWN_CHECKPOINT.
        """
        if (base := self.known_model(name)) is not None:
            return Source(base, base)
        run_id, step = name.partition("/")[0], None
        if "/" in name and run_id.startswith("run-"):
            step = self.storage.checkpoints.get(name, caller)[1].step
        return Source(name, self.runs.get(caller, run_id).config.base_model, run_id, step)

    def losses(self) -> Sequence[pb.LossInfo]:
        """The available losses, with their fields, arguments and metrics.

        Raises:
            ServiceError: ENGINE_UNAVAILABLE: no engine has come so far, so they are not known.
        """
        self.engines.check_known()
        return self.engines.hello.losses

    # ---- operations ----

    async def open_run(self, caller: Caller, run_id: str, writer: str = "", *, takeover: bool = False) -> pb.Run:
        """Make a writer the run's only one; the returned run holds its epoch.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; RUN_BUSY if another writer holds the run and ``takeover`` is
                not set.
        """
        record = self._writable(caller, run_id)
        check_length(writer, "max_name_chars", self.config.limits.max_name_chars, "writer")
        epoch = await self.scheduler.open(record, takeover, writer)
        run = self.runs.described(record)
        run.epoch = epoch  # another writer may have opened the run meanwhile: this one is told at its first operation
        return run

    async def open_session(
        self,
        caller: Caller,
        run_id: str,
        writer: str = "in-process",
        *,
        takeover: bool = False,
        keep_results: bool = False,
    ) -> Session:
        """Open a run for a caller in this process; the session handles numbers, digests and results.

        Args:
            keep_results: Leave results on the server after they were delivered, for a caller that may be killed before
                it has passed them on. They go after the server's retention time.

        Raises:
            ServiceError: As for :meth:`open_run`.
        """
        run = await self.open_run(caller, run_id, writer, takeover=takeover)
        return Session(self, caller, run, keep_results=keep_results)

    def receive(self, caller: Caller, header: pb.OperationHeader) -> Incoming:
        """Begin to receive an operation's payload. Errors of the operation are kept and raised by :meth:`submit`."""
        header.ClearField("refusal")  # the server's own
        incoming = Incoming(header)
        try:
            record = self._writable(caller, header.run_id)
            incoming.refusal = self.scheduler.checks.refusal(record, header)
            if incoming.refusal is None:
                incoming.occupy(self.scheduler.usage(record.owner))
        except ServiceError as error:
            incoming.rejection = error
        return incoming

    def submit(self, caller: Caller, incoming: Incoming) -> asyncio.Future[pb.SubmitAck]:
        """Accept an operation whose payload has been received. The future resolves once the operation is durable.

        Raises:
            ServiceError: The operation was not accepted; its number stays free. The future can fail in the same way.
        """
        incoming.end()
        if incoming.rejection is not None:
            raise incoming.rejection
        self._writable(caller, incoming.header.run_id)  # the run may have been deleted meanwhile
        incoming.check_digest()
        refusal = incoming.refusal or check_rows(incoming.header, incoming.chunks, self.config.limits)
        return self.scheduler.admission.submit(incoming.header, incoming.chunks, refusal, patient=incoming.patient)

    def has_result(self, run_id: str, seq: int) -> bool:
        """Whether an accepted operation of a run and all before it have results, which its readers get."""
        record = self.storage.records.find(run_id)
        return record is not None and seq <= record.applied_seq

    def awaits_number(self, caller: Caller, run_id: str, seq: int) -> bool:
        """Whether a submitted operation is not journaled because an earlier number has not been submitted.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED.
        """
        return seq in self.scheduler.queue(self._writable(caller, run_id)).window

    def epoch_of(self, caller: Caller, run_id: str, writer: str) -> int:
        """The run's epoch if its present writer has this name; else 0, with which operations are refused.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED.
        """
        record = self._writable(caller, run_id)
        return record.epoch if record.writer == writer else 0

    async def results(self, caller: Caller, run_id: str, from_seq: int = 0) -> AsyncGenerator[list[StoredResult]]:
        """Yield the run's results in order of number as they become durable, without end.

        Args:
            from_seq: First number to yield; 0 for the first that is not released.

        Raises:
            ServiceError: UNKNOWN_RUN, RESULT_RELEASED; REWOUND, UNKNOWN_RUN or SHUTTING_DOWN if the run is rewound or
                closed, or no longer shared with the caller, while it is read.
        """
        queue = self.scheduler.queue(self.storage.records.get(run_id, caller))
        turn = partial(self.calls.slice, caller.name)
        async with aclosing(self.scheduler.results.results(queue, from_seq, turn)) as stream:
            async for results in stream:
                self.storage.records.get(run_id, caller)  # fails if the run is no longer shared with the caller
                yield results

    async def release_results(self, caller: Caller, run_id: str, up_to_seq: int, epoch: int) -> None:
        """Delete results that the current writer has received.

        An older writer is refused, so that it cannot delete results that the current one has not fetched yet.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, STALE_EPOCH.
        """
        queue = self.scheduler.queue(self._writable(caller, run_id))
        queue.check_epoch(epoch)
        await self.scheduler.results.release(queue, up_to_seq)

    async def cancel(
        self, caller: Caller, run_id: str, seq: int, epoch: int, *, if_expired: bool = False
    ) -> pb.CancelResponse:
        """Cancel an operation, also one that is executed if its kind can be stopped.

        Args:
            if_expired: Only if its deadline has passed and it has not begun; it then fails with DEADLINE_EXCEEDED.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, UNKNOWN_OPERATION, STALE_EPOCH.
        """
        queue = self.scheduler.queue(self._writable(caller, run_id))
        if if_expired:
            return await self.scheduler.admission.expire(queue, seq, epoch)
        return await self.scheduler.admission.cancel(queue, seq, epoch)

    async def discard_pending(self, caller: Caller, run_id: str, epoch: int) -> int:
        """Cancel every operation of a parked run that has no result, and let the run go on; return their number.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, STALE_EPOCH; UNSUPPORTED for a run that is not parked.
        """
        queue = self.scheduler.queue(self._writable(caller, run_id))
        return await self.scheduler.admission.discard(queue, epoch)

    def accept_changes(self, caller: Caller, run_id: str) -> pb.Run:
        """Let a run go on that is parked because what it is computed with has changed.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; UNSUPPORTED for a run that is not parked for that.
        """
        record = self._writable(caller, run_id)
        self.scheduler.accept_changes(record, caller.name)
        return self.runs.described(record)

    # ---- engines ----

    async def move_run(self, caller: Caller, run_id: str, engine: int | None = None) -> pb.Run:
        """Move a run to another engine, by number, or to the one that suits best.

        Raises:
            ServiceError: PERMISSION_DENIED for a key that is no admin's; UNKNOWN_RUN; INVALID_ARGUMENT or UNSUPPORTED
                if the run cannot be there.
        """
        _check_admin(caller)
        record = self._writable(caller, run_id)
        await self.scheduler.move(record, engine)
        return self.runs.described(record)

    async def drain_engine(self, caller: Caller, engine: int, *, undo: bool = False) -> int:
        """Place nothing more on an engine and move its runs to others, or let it take runs again; see
        :meth:`.Scheduler.drain_engine`.

        Raises:
            ServiceError: PERMISSION_DENIED for a key that is no admin's; INVALID_ARGUMENT, UNSUPPORTED.
        """
        _check_admin(caller)
        return await self.scheduler.drain_engine(engine, undo=undo)

    # ---- sampling outside a run ----

    async def sample(
        self,
        caller: Caller,
        request: pb.SampleRequest,
        label: str = "",
        on_start: Callable[[], object] | None = None,
    ) -> StoredResult:
        """Sample from a model, a checkpoint or a run's current weights that the caller may read.

        Args:
            label: The label under which it is counted in the key's usage; the run's name if empty.
            on_start: Called when an engine begins, and again later.

        Raises:
            ServiceError: The request is invalid; ENGINE_UNAVAILABLE if engines died while they sampled.
        """
        return await self._sampling.sample(caller, request, label, on_start)

    def stream_sample(
        self, caller: Caller, request: pb.SampleRequest, on_start: Callable[[], object] | None = None
    ) -> AsyncGenerator[pb.SampleFrame]:
        """Sample token by token; see :meth:`.sampling.Sampling.stream`."""
        return self._sampling.stream(caller, request, on_start)

    def _writable(self, caller: Caller, run_id: str) -> RunRecord:
        return self.storage.records.get(run_id, caller, write=True)

    def _start_tracing(self) -> None:
        try:
            if self._given_tracing is not None:
                self._tracing = self._given_tracing
            elif self.config.traces:
                self._tracing = Tracing.to(self.config.traces, "gradwire-front")
        except RuntimeError as error:
            raise SystemExit(f"gradwire: {error}") from error


def _check_admin(caller: Caller) -> None:
    """Check that a caller may decide about everybody's runs: an admin, or anybody on a server without keys."""
    if caller.role != "admin" and caller != ANYONE:
        message = "only an admin's key decides on which engine runs are: `gradwire keys create NAME --admin`"
        raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)


def _found_tokenizers(models: Mapping[str, str]) -> dict[str, str]:
    """The tokenizer files that this machine has, by model, for a server whose engines are all elsewhere."""
    return {name: str(file) for name, path in models.items() if (file := find_tokenizer(path))}
