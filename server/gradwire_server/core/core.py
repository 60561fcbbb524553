"""The core: every use case of the server, for callers that a door has authenticated.

Messages of ``training.proto`` serve as its data types; they do not depend on a transport. Every method that acts for a
caller takes a :class:`.keys.Caller` first and accesses only what that caller may access.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import Calls
from gradwire_server.access.keys import Caller, Keys
from gradwire_server.access.model_names import ModelNames
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.core.incoming import Incoming
from gradwire_server.core.run_creation import RunCreation
from gradwire_server.core.sampling import Sampling
from gradwire_server.core.session import Session
from gradwire_server.core.startable import Startable
from gradwire_server.core.texts import Texts
from gradwire_server.core.uploads import Uploads
from gradwire_server.durable_files import make_folder
from gradwire_server.engine_client.process import EngineClient, EngineDied, EngineProcess
from gradwire_server.errors import ServiceError, check_length, limit_exceeded, unknown_checkpoint
from gradwire_server.journal import state_folder
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.entries import StoredResult
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.mirror import reconcile
from gradwire_server.journal.run_records import RunRecord, RunRecords
from gradwire_server.journal.state_folder import StateFolderError
from gradwire_server.observability.metrics import Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.checks import check_rows
from gradwire_server.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the protocol, reported to clients."""
ENGINE_GRACE_S = 5.0
SLICE_RUNS = 20
"""Runs of a page that are listed before others are served."""


class Core(Startable):
    """A server on one state folder, without doors.

    Args:
        config: The settings.
        engine: An engine to use instead of the child process that the settings describe; the caller stops it.
        tracing: Tracing to use instead of what the settings describe; the caller closes it.
        on_engine_ready: Called with True when an engine is ready, with False when it is lost.
        own_key: Key that callers must present; see :class:`.keys.Keys`.
        on_parked: Called with the number of parked runs when it may have changed.

    Attributes:
        keys: The API keys.
        metrics: The server's metrics.
        calls: Turns of the keys' calls; a door takes one before it reads a call's body.
        texts: Conversions between text and token ids.
        uploads: Uploaded weights that runs can start from; available after :meth:`start`.
        left: Number of operations without a result, by run id; set by :meth:`drain`.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient | None = None,
        tracing: Tracing | None = None,
        on_engine_ready: Callable[[bool], None] = lambda ready: None,
        own_key: str = "",
        on_parked: Callable[[int], object] = bool,
    ) -> None:
        self.config = config
        self.keys = Keys(config.state_dir, open_door=config.loopback or config.insecure_bind, own_key=own_key)
        self.metrics = Metrics(per_run=config.metrics_runs)
        self.calls = Calls(config.limits)
        self.left: dict[str, int] = {}
        self._models = ModelNames(config.all_models, tuple(config.models))
        self.texts = Texts(lambda: self.engine.hello.tokenizer_files, self._models, config)
        self._given_engine, self._on_engine_ready, self._on_parked = engine, on_engine_ready, on_parked
        self._own_engine: EngineProcess | None = None
        self._given_tracing, self._tracing = tracing, Tracing()
        self._journal: Journal | None = None
        self._locks: list[int] = []
        self._running = False
        self._began = time.monotonic()

    # ---- lifecycle ----

    async def start(self) -> None:
        """Lock the state folder, start the engine, and load every run with its queued operations.

        Raises:
            ServiceError: The engine did not start.
            SystemExit: The state folder is in use or cannot be read, or OpenTelemetry is not installed; with a message.
        """
        config = self.config
        make_folder(config.state_dir, 0o700)
        try:
            self._locks.append(state_folder.lock(config.state_dir))
            if config.mirror is not None:
                make_folder(config.mirror, 0o700)
                self._locks.append(state_folder.lock(config.mirror))
                await asyncio.to_thread(reconcile, config.state_dir, config.mirror)
            await asyncio.to_thread(state_folder.check, config.state_dir)
            self._journal = journal = Journal(
                config.state_dir,
                keep_payloads=config.durability == "journal",
                history_points=config.limits.max_history_points,
                mirror=config.mirror,
                accept_changes=config.accept_changes,
            )
            self.runs = RunRecords(journal.store, config.state_dir, config.limits.max_runs)
            self.checkpoints = CheckpointRecords(self.runs, journal.store, config.state_dir)
            records = await self.runs.load()
        except StateFolderError as error:
            raise SystemExit(f"gradwire: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite3 can fail to decode its own message
            raise SystemExit(
                f"gradwire: {config.state_dir / 'gradwire.db'} cannot be read ({error}); restore a backup, or build it"
                f" again from what the folder holds: gradwire repair --state-dir {config.state_dir}"
            ) from error
        if self._given_engine is None:
            self._own_engine = EngineProcess(config, self._on_engine_ready)
            await self._own_engine.start()
        engine = self.engine
        self.metrics.know(engine.hello.losses)
        journal.store.on_commit = self.metrics.committed
        self._start_tracing()
        self.scheduler = Scheduler(
            engine,
            journal,
            self.runs,
            self.checkpoints,
            config,
            self.keys.quota,
            self.metrics,
            self._tracing,
            self._on_parked,
        )
        self.uploads = Uploads(config, self._models, self.keys.quota, self.scheduler.ask)
        await asyncio.to_thread(self.uploads.load)
        self._creation = RunCreation(
            self.scheduler, self.runs, self.checkpoints, config.limits, self._models, self.uploads
        )
        self._sampling = Sampling(config, self.runs, self.checkpoints, self._models, self.scheduler)
        await self.scheduler.start(records)
        self._running = True

    async def drain(self) -> None:
        """Accept nothing more, wait for the operations that are being executed, and set :attr:`left`.

        A second call does nothing.
        """
        running, self._running = self._running, False
        if running:
            self.left = await self.scheduler.drain(self.config.grace)

    async def stop(self) -> None:
        """Drain, stop the engine, close the journal, and unlock the state folder. A second call does nothing."""
        await self.drain()
        await self.texts.close()
        engine, self._own_engine = self._own_engine, None
        journal, self._journal = self._journal, None
        if engine is not None:
            await engine.stop(ENGINE_GRACE_S)
        if journal is not None:
            await journal.close()
        tracing, self._tracing = self._tracing, Tracing()
        if tracing is not self._given_tracing:
            await asyncio.to_thread(tracing.close)
        while self._locks:
            os.close(self._locks.pop())

    @property
    def engine(self) -> EngineClient:
        """The engine; available after :meth:`start`."""
        engine = self._given_engine or self._own_engine
        if engine is None:
            raise RuntimeError("the core is not started")
        return engine

    # ---- the server ----

    def info(self) -> pb.ServerInfo:
        """Version, device, status and limits of the server."""
        return pb.ServerInfo(
            version=version("gradwire"),
            protocol=PROTOCOL,
            device=self.engine.hello.device,
            engine_ready=self.engine.is_ready,
            uptime_s=time.monotonic() - self._began,
            durability=self.config.durability,
            limits=self.config.limits.model_dump() | {"max_chunk_bytes": CHUNK_BYTES},
            engine=self.engine.vitals.to_proto(),
        )

    def models(self) -> Sequence[pb.ModelInfo]:
        """The models from which runs can be created."""
        return self.engine.hello.models

    def model_name(self, name: str) -> str:
        """The name of the model with this name or path.

        Raises:
            ServiceError: UNKNOWN_MODEL.
        """
        return self._models.find(name, "base_model")

    def losses(self) -> Sequence[pb.LossInfo]:
        """The available losses, with their fields, arguments and metrics."""
        return self.engine.hello.losses

    # ---- runs ----

    async def create_run(self, caller: Caller, config: pb.RunConfig, idempotency_key: str = "") -> pb.Run:
        """Create a run, or return the one that this idempotency key has already created.

        Raises:
            ServiceError: The settings are invalid; ALREADY_EXISTS if the key created a run with other settings.
        """
        return (await self._creation.create(caller, config, idempotency_key)).to_proto()

    async def fork_run(self, caller: Caller, request: pb.ForkRunRequest) -> pb.Run:
        """Create a run from a checkpoint of a run that the caller may read.

        Raises:
            ServiceError: As for :meth:`create_run`; UNKNOWN_CHECKPOINT.
        """
        return (await self._creation.fork(caller, request)).to_proto()

    def get_run(self, caller: Caller, run_id: str) -> pb.Run:
        """Return a run.

        Raises:
            ServiceError: UNKNOWN_RUN, also for a run that the caller may not read.
        """
        return self._described(self.runs.get(run_id, caller))

    async def list_runs(self, caller: Caller, page_size: int = 0, page_token: str = "") -> tuple[list[pb.Run], str]:
        """List a page of the runs that the caller may read, oldest first, and the next page's token, "" at the end."""
        page, token = self.runs.page(caller, page_size, page_token)
        found: list[pb.Run] = []
        for start in range(0, len(page), SLICE_RUNS):
            found += [self._described(record) for record in page[start : start + SLICE_RUNS]]
            await asyncio.sleep(0)
        return found, token

    async def delete_run(self, caller: Caller, run_id: str) -> None:
        """Delete a run with its operations, results, checkpoints and files.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; UNSUPPORTED while another run needs a checkpoint of it.
        """
        await self.scheduler.delete(self._own(caller, run_id))

    async def share_run(self, caller: Caller, run_id: str, reader: str, *, revoke: bool = False) -> pb.Run:
        """Allow another key to read a run, or revoke that.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; INVALID_ARGUMENT for a name without a key.
        """
        record = self._own(caller, run_id)
        if not revoke and (not self.keys.has(reader) or reader == record.owner):
            message = f"{reader[:100]!r} is not the name of another key of this server"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="reader")
        await self.runs.share(record, reader, revoke)
        return record.to_proto()

    async def history(self, caller: Caller, run_id: str) -> AsyncIterator[list[pb.HistoryPoint]]:
        """Yield the points of a run's record in order, in lists of at least one.

        Raises:
            ServiceError: UNKNOWN_RUN.
        """
        pages = self.scheduler.history(self.runs.get(run_id, caller))
        while True:
            async with self.calls.slice(caller.name):
                points = await anext(pages, None)
            if points is None:
                return
            yield points

    def _own(self, caller: Caller, run_id: str) -> RunRecord:
        return self.runs.get(run_id, caller, write=True)

    # ---- operations ----

    async def open_run(self, caller: Caller, run_id: str, writer: str = "", *, takeover: bool = False) -> pb.Run:
        """Make a writer the run's only one; the returned run holds its epoch.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; RUN_BUSY if another writer holds the run and ``takeover`` is
                not set.
        """
        record = self._own(caller, run_id)
        check_length(writer, "max_name_chars", self.config.limits.max_name_chars, "writer")
        epoch = await self.scheduler.open(record, takeover, writer)
        run = self._described(record)
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
            record = self._own(caller, header.run_id)
            incoming.refusal = self.scheduler.admission.refusal(record, header)
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
        self._own(caller, incoming.header.run_id)  # the run may have been deleted meanwhile
        incoming.check_digest()
        refusal = incoming.refusal or check_rows(incoming.header, incoming.chunks, self.config.limits)
        return self.scheduler.admission.submit(incoming.header, incoming.chunks, refusal)

    def awaits_number(self, caller: Caller, run_id: str, seq: int) -> bool:
        """Whether a submitted operation is not journaled because an earlier number has not been submitted.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED.
        """
        return seq in self.scheduler.queue(self._own(caller, run_id)).window

    def epoch_of(self, caller: Caller, run_id: str, writer: str) -> int:
        """The run's epoch if its present writer has this name; else 0, with which operations are refused.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED.
        """
        record = self._own(caller, run_id)
        return record.epoch if record.writer == writer else 0

    async def results(self, caller: Caller, run_id: str, from_seq: int = 0) -> AsyncIterator[list[StoredResult]]:
        """Yield the run's results in order of number as they become durable, without end.

        Args:
            from_seq: First number to yield; 0 for the first that is not released.

        Raises:
            ServiceError: UNKNOWN_RUN, RESULT_RELEASED; REWOUND, UNKNOWN_RUN or SHUTTING_DOWN if the run is rewound or
                closed, or no longer shared with the caller, while it is read.
        """
        queue = self.scheduler.queue(self.runs.get(run_id, caller))
        turn = partial(self.calls.slice, caller.name)
        async for results in self.scheduler.results.results(queue, from_seq, turn):
            self.runs.get(run_id, caller)  # fails if the run is no longer shared with the caller
            yield results

    async def release_results(self, caller: Caller, run_id: str, up_to_seq: int, epoch: int) -> None:
        """Delete results that the current writer has received.

        An older writer is refused, so that it cannot delete results that the current one has not fetched yet.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, STALE_EPOCH.
        """
        queue = self.scheduler.queue(self._own(caller, run_id))
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
        queue = self.scheduler.queue(self._own(caller, run_id))
        if if_expired:
            return self.scheduler.admission.expire(queue, seq, epoch)
        return await self.scheduler.admission.cancel(queue, seq, epoch)

    async def discard_pending(self, caller: Caller, run_id: str, epoch: int) -> int:
        """Cancel every operation of a parked run that has no result, and let the run go on; return their number.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, STALE_EPOCH; UNSUPPORTED for a run that is not parked.
        """
        queue = self.scheduler.queue(self._own(caller, run_id))
        return await self.scheduler.admission.discard(queue, epoch)

    # ---- sampling outside a run ----

    async def sample(self, caller: Caller, request: pb.SampleRequest) -> StoredResult:
        """Sample from a model, a checkpoint or a run's current weights that the caller may read.

        Raises:
            ServiceError: The request is invalid; ENGINE_UNAVAILABLE if the engine died while it sampled.
        """
        return await self._sampling.sample(caller, request)

    def stream_sample(self, caller: Caller, request: pb.SampleRequest) -> AsyncGenerator[pb.SampleFrame]:
        """Sample token by token; see :meth:`.sampling.Sampling.stream`."""
        return self._sampling.stream(caller, request)

    async def score(self, caller: Caller, model: str, rows: Sequence[Sequence[int]]) -> StoredResult:
        """Log-probabilities of rows of token ids under a model, or under a checkpoint that the caller may read.

        Returns:
            A result with the tensor ``logprobs``: one of each token but a row's first.

        Raises:
            ServiceError: The request is invalid; ENGINE_UNAVAILABLE if the engine died meanwhile.
        """
        limits = self.config.limits
        for value, name, limit in (
            (len(rows), "max_rows", limits.max_rows),
            (max(map(len, rows), default=0), "max_row_tokens", limits.max_row_tokens),
            (sum(map(len, rows)), "max_batch_tokens", limits.max_batch_tokens),
        ):
            if value > limit:
                raise limit_exceeded(f"{value} in a request for log-probabilities", name, limit, "rows")
        source, _ = self._source(caller, model)
        asked = engine_pb2.EngineScore(model=source, rows=[pb.TokenIds(ids=row) for row in rows])
        try:
            reply, payload = await self.scheduler.dispatcher.score(asked, self.scheduler.usage(caller.name))
        except EngineDied as error:
            message = "the engine ended while it computed this; it is being started again, try again"
            raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message) from error
        return StoredResult(reply.result, payload)

    def _source(self, caller: Caller, model: str) -> tuple[str, str]:
        """What the engine knows a model or a checkpoint by, and its base model's name."""
        if model in self.config.all_models or "/" not in model:
            name = self._models.find(model, "model")
            return name, name
        return model, self.checkpoints.get(model, caller)[0].config.base_model

    # ---- checkpoints and exports ----

    def list_checkpoints(self, caller: Caller, run_id: str) -> list[pb.Checkpoint]:
        """A run's checkpoints, ordered by the number of the last operation that each contains."""
        checkpoints = self.runs.get(run_id, caller).checkpoints.values()
        return sorted(checkpoints, key=lambda saved: (saved.seq, saved.name))

    async def delete_checkpoint(self, caller: Caller, path: str) -> None:
        """Delete the checkpoint ``"RUN_ID/NAME"``.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, PERMISSION_DENIED; UNSUPPORTED while a recovery could need it.
        """
        record, checkpoint = self.checkpoints.get(path, caller, write=True)
        await self.scheduler.delete_checkpoint(record, checkpoint.name)

    async def folder(self, caller: Caller, *, checkpoint: str = "", export: str = "") -> Path:
        """Return the folder of a checkpoint or of an export, given as ``"RUN_ID/NAME"``, for a door to read.

        Raises:
            ServiceError: UNKNOWN_RUN, UNKNOWN_CHECKPOINT; INVALID_ARGUMENT for a name that is none.
        """
        if export:
            run_id, _, name = export.partition("/")
            folder = self.checkpoints.folder(self.runs.get(run_id, caller).run_id, "exports", name)
        else:
            record, found = self.checkpoints.get(checkpoint, caller)
            folder = self.checkpoints.folder(record.run_id, "checkpoints", found.name)
        if not await asyncio.to_thread(folder.is_dir):
            raise unknown_checkpoint(export or checkpoint)
        return folder

    # ---- internals ----

    def _described(self, record: RunRecord) -> pb.Run:
        run = record.to_proto()
        reason = self.scheduler.parked(record.run_id)
        if reason is not None:
            run.parked.CopyFrom(reason)
        run.recovery_s = self.scheduler.recovery_s(record.run_id)
        return run

    def _start_tracing(self) -> None:
        try:
            if self._given_tracing is not None:
                self._tracing = self._given_tracing
            elif self.config.traces:
                self._tracing = Tracing.to(self.config.traces, "gradwire-front")
        except RuntimeError as error:
            raise SystemExit(f"gradwire: {error}") from error
