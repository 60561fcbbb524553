"""The core: every use case of the server, for callers that a door has let in.

Messages of ``training.proto`` serve as its data types; they are data and know no transport. Every method that acts for
somebody takes a :class:`.keys.Caller` first and sees only what that caller may see.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller, Keys
from gradwire_server.config import CHUNK_BYTES, ServerConfig
from gradwire_server.core.incoming import Incoming
from gradwire_server.core.run_creation import RunCreation
from gradwire_server.core.session import Session
from gradwire_server.core.tokenizing import Tokenizers
from gradwire_server.engine_client.process import EngineClient, EngineDied, EngineProcess
from gradwire_server.errors import ServiceError, check_length, limit_exceeded, unknown_checkpoint
from gradwire_server.journal.journal import Journal, StoredResult
from gradwire_server.journal.run_records import RunRecord, RunRecords
from gradwire_server.observability.metrics import Metrics
from gradwire_server.observability.tracing import Tracing
from gradwire_server.scheduling.checks import check_rows, check_sample_request
from gradwire_server.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the protocol, as clients see it."""
ENGINE_GRACE_S = 5.0


class Core:
    """One server over one state folder, without any door.

    Args:
        config: its settings.
        engine: another engine than the child process that the settings describe; it is the caller's to stop.
        tracing: another destination of traces than the settings describe; it is the caller's to close.
        on_engine_ready: called with True when an engine is ready, with False when it is lost.

    Attributes:
        keys: the API keys.
        metrics: counters of everything that happens here.
        left: operations without a result by run id, once :meth:`drain` has returned.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient | None = None,
        tracing: Tracing | None = None,
        on_engine_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self.config = config
        self.keys = Keys(config.state_dir, open_door=config.loopback or config.insecure_bind)
        self.metrics = Metrics(per_run=config.metrics_runs)
        self.left: dict[str, int] = {}
        self._given_engine, self._on_engine_ready = engine, on_engine_ready
        self._own_engine: EngineProcess | None = None
        self._given_tracing, self._tracing = tracing, Tracing()
        self._journal: Journal | None = None
        self._lock = -1
        self._began = time.monotonic()

    # ---- life ----

    async def start(self) -> None:
        """Locks the state folder, starts the engine, and takes every run up where it was left.

        Raises:
            ServiceError: the engine did not start, and why.
            SystemExit: the state folder cannot be had; with a sentence.
        """
        config = self.config
        config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_state()
        try:
            self._journal = journal = Journal(config.state_dir, keep_payloads=config.durability == "journal")
            self.runs = RunRecords(journal.store, config.state_dir, config.limits.max_runs)
            records = await self.runs.load()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter from sqlite3's own message
            raise SystemExit(
                f"gradwire: {config.state_dir / 'gradwire.db'} cannot be read ({error}); put a copy of the folder in"
                " its place. Checkpoints below runs/ are files of their own, and may be whole"
            ) from error
        if self._given_engine is None:
            self._own_engine = EngineProcess(config, self._on_engine_ready)
            await self._own_engine.start()
        engine = self.engine
        self.metrics.know(engine.hello.losses)
        journal.store.on_commit = self.metrics.committed
        self._start_tracing()
        self.scheduler = Scheduler(engine, journal, self.runs, config, self.keys.quota, self.metrics, self._tracing)
        self._creation = RunCreation(self.scheduler, self.runs, config.limits, config.all_models)
        self._tokenizers = Tokenizers(engine.hello.tokenizer_files)
        await self.scheduler.start(records)

    async def drain(self) -> None:
        """Accepts no more, and waits for what is being carried out; fills :attr:`left`."""
        self.left = await self.scheduler.drain(self.config.grace_s)

    async def stop(self) -> None:
        """Ends the engine, then the journal, and gives the state folder back. Stopping twice is fine."""
        engine, self._own_engine = self._own_engine, None
        journal, self._journal = self._journal, None
        if engine is not None:
            await engine.stop(ENGINE_GRACE_S)
        if journal is not None:
            await journal.close()
        tracing, self._tracing = self._tracing, Tracing()
        if tracing is not self._given_tracing:
            await asyncio.to_thread(tracing.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def __aenter__(self) -> Core:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain()
        await self.stop()

    @property
    def engine(self) -> EngineClient:
        """The engine, once :meth:`start` has started or taken it."""
        engine = self._given_engine or self._own_engine
        if engine is None:
            raise RuntimeError("the core is not started")
        return engine

    # ---- the server ----

    def info(self) -> pb.ServerInfo:
        """What the server is, how it fares, and its limits."""
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
        """The models that runs can be made from."""
        return self.engine.hello.models

    def losses(self) -> Sequence[pb.LossInfo]:
        """The losses, with their fields, arguments and metrics."""
        return self.engine.hello.losses

    async def encode(self, model: str, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, by the model's own tokenizer.

        Raises:
            ServiceError: LIMIT_EXCEEDED, UNKNOWN_MODEL; UNSUPPORTED for a model without a tokenizer.
        """
        limits = self.config.limits
        if len(texts) > limits.max_encode_texts:
            raise limit_exceeded(f"{len(texts)} texts", "max_encode_texts", limits.max_encode_texts, "texts")
        for text in texts:
            check_length(text, "max_text_chars", limits.max_text_chars, "texts")
        name = self._creation.model(model, "model")
        return await self._tokenizers.encode(name, texts, add_special_tokens)

    async def decode(
        self, model: str, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each sequence of token ids.

        Raises:
            ServiceError: as of :meth:`encode`.
        """
        limit = self.config.limits.max_encode_texts
        if len(sequences) > limit:
            raise limit_exceeded(f"{len(sequences)} sequences", "max_encode_texts", limit, "sequences")
        return await self._tokenizers.decode(self._creation.model(model, "model"), sequences, skip_special_tokens)

    # ---- runs ----

    async def create_run(self, caller: Caller, config: pb.RunConfig, idempotency_key: str = "") -> pb.Run:
        """Makes a run; the same one again for a key that has made it.

        Raises:
            ServiceError: what is wrong with the settings; ALREADY_EXISTS for a key that made another run.
        """
        return (await self._creation.create(caller, config, idempotency_key)).to_proto()

    async def fork_run(self, caller: Caller, request: pb.ForkRunRequest) -> pb.Run:
        """Makes a run from a checkpoint of one that the caller may read.

        Raises:
            ServiceError: as of :meth:`create_run`; UNKNOWN_CHECKPOINT.
        """
        return (await self._creation.fork(caller, request)).to_proto()

    def get_run(self, caller: Caller, run_id: str) -> pb.Run:
        """
        Raises:
            ServiceError: UNKNOWN_RUN, also for a run that the caller may not read.
        """
        return self.runs.get(run_id, caller).to_proto()

    def list_runs(self, caller: Caller, page_size: int = 0, page_token: str = "") -> tuple[list[pb.Run], str]:
        """A page of the runs that the caller may read, oldest first, and the next page's token; "" at the end."""
        page, token = self.runs.page(caller, page_size, page_token)
        return [record.to_proto() for record in page], token

    async def delete_run(self, caller: Caller, run_id: str) -> None:
        """Forgets a run and everything of it.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; UNSUPPORTED while another run needs a checkpoint of it.
        """
        await self.scheduler.delete(self._own(caller, run_id))

    async def share_run(self, caller: Caller, run_id: str, reader: str, *, revoke: bool = False) -> pb.Run:
        """Lets another key read a run, or no longer.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; INVALID_ARGUMENT for a name without a key.
        """
        record = self._own(caller, run_id)
        if not revoke and (not self.keys.has(reader) or reader == record.owner):
            message = f"{reader[:100]!r} is not the name of another key of this server"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message, field="reader")
        await self.runs.share(record, reader, revoke)
        return record.to_proto()

    def _own(self, caller: Caller, run_id: str) -> RunRecord:
        return self.runs.get(run_id, caller, write=True)

    # ---- operations ----

    async def open_run(self, caller: Caller, run_id: str, writer: str = "", *, takeover: bool = False) -> pb.Run:
        """Makes a writer the run's only one; its epoch is in the answer.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; RUN_BUSY while another writer holds it.
        """
        record = self._own(caller, run_id)
        check_length(writer, "max_name_chars", self.config.limits.max_name_chars, "writer")
        await self.scheduler.open(record, takeover, writer)
        return record.to_proto()

    async def open_session(
        self, caller: Caller, run_id: str, writer: str = "in-process", *, takeover: bool = False
    ) -> Session:
        """A run opened for a caller in this process, which leaves numbers, digests and results to the session.

        Raises:
            ServiceError: as of :meth:`open_run`.
        """
        return Session(self, caller, await self.open_run(caller, run_id, writer, takeover=takeover))

    def receive(self, caller: Caller, header: pb.OperationHeader) -> Incoming:
        """An operation whose payload is about to come in. What is wrong with it is held until it is submitted."""
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
        """Takes over an operation whose payload is there. The future is done once it is durable.

        Raises:
            ServiceError: it was refused and its number is free; the same may come of the future.
        """
        incoming.end()
        if incoming.rejection is not None:
            raise incoming.rejection
        self._own(caller, incoming.header.run_id)  # it may have been deleted, or be another's, by now
        incoming.check_digest()
        refusal = incoming.refusal or check_rows(incoming.header, incoming.chunks, self.config.limits)
        return self.scheduler.admission.submit(incoming.header, incoming.chunks, refusal)

    async def results(self, caller: Caller, run_id: str, from_seq: int = 0) -> AsyncIterator[list[StoredResult]]:
        """The run's results in order of number from one on (0: the first that is kept), as they come, without end.

        Raises:
            ServiceError: RESULT_RELEASED; REWOUND, UNKNOWN_RUN or SHUTTING_DOWN when the run ends under the reader.
        """
        queue = self.scheduler.queue(self.runs.get(run_id, caller))
        async for results in self.scheduler.results.results(queue, from_seq):
            self.runs.get(run_id, caller)  # it may be shared no longer
            yield results

    async def release_results(self, caller: Caller, run_id: str, up_to_seq: int, epoch: int) -> None:
        """Forgets results that a writer has taken. An older writer forgets nothing that the newer one has to fetch.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, STALE_EPOCH.
        """
        queue = self.scheduler.queue(self._own(caller, run_id))
        queue.check_epoch(epoch)
        await self.scheduler.results.release(queue, up_to_seq)

    async def cancel(self, caller: Caller, run_id: str, seq: int, epoch: int) -> bool:
        """Cancels an operation that has not started; whether it was still to be had.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED, UNKNOWN_OPERATION, STALE_EPOCH.
        """
        queue = self.scheduler.queue(self._own(caller, run_id))
        return await self.scheduler.admission.cancel(queue, seq, epoch)

    # ---- sampling outside a run ----

    async def sample(self, caller: Caller, request: pb.SampleRequest) -> StoredResult:
        """Samples of a model, or of a checkpoint that the caller may read.

        Raises:
            ServiceError: what is wrong with the request; ENGINE_UNAVAILABLE when the engine ended meanwhile.
        """
        refusal = check_sample_request(request, self.config.limits)
        if refusal is not None:
            raise ServiceError.of(refusal)
        asked = pb.SampleRequest()
        asked.CopyFrom(request)
        if request.model in self.config.all_models or "/" not in request.model:
            asked.model = self._creation.model(request.model, "model")
        else:
            self.runs.checkpoint(request.model, caller)
        try:
            reply, payload = await self.scheduler.dispatcher.sample(asked, self.scheduler.usage(caller.name))
        except EngineDied as error:
            message = "the engine ended while it sampled; it is being started again, try again"
            raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message) from error
        return StoredResult(reply.result, payload)

    # ---- checkpoints and exports ----

    def list_checkpoints(self, caller: Caller, run_id: str) -> list[pb.Checkpoint]:
        """A run's checkpoints in order of the operations that they hold."""
        checkpoints = self.runs.get(run_id, caller).checkpoints.values()
        return sorted(checkpoints, key=lambda saved: (saved.seq, saved.name))

    async def delete_checkpoint(self, caller: Caller, path: str) -> None:
        """Deletes the checkpoint ``"RUN_ID/NAME"``.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, PERMISSION_DENIED; UNSUPPORTED while a recovery could need it.
        """
        record, checkpoint = self.runs.checkpoint(path, caller, write=True)
        await self.scheduler.delete_checkpoint(record, checkpoint.name)

    async def folder(self, caller: Caller, *, checkpoint: str = "", export: str = "") -> Path:
        """The folder of a checkpoint or of an export, ``"RUN_ID/NAME"``, to be read by a door.

        Raises:
            ServiceError: UNKNOWN_RUN, UNKNOWN_CHECKPOINT.
        """
        if export:
            run_id, _, name = export.partition("/")
            folder = self.runs.folder(self.runs.get(run_id, caller).run_id, "exports", name)
        else:
            record, found = self.runs.checkpoint(checkpoint, caller)
            folder = self.runs.folder(record.run_id, "checkpoints", found.name)
        if not await asyncio.to_thread(folder.is_dir):
            raise unknown_checkpoint(export or checkpoint)
        return folder

    # ---- within ----

    def _start_tracing(self) -> None:
        try:
            if self._given_tracing is not None:
                self._tracing = self._given_tracing
            elif self.config.traces:
                self._tracing = Tracing.to(self.config.traces, "gradwire-front")
        except RuntimeError as error:
            raise SystemExit(f"gradwire: {error}") from error

    def _lock_state(self) -> None:
        lock = os.open(self.config.state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode() or "another process"
            os.close(lock)
            raise SystemExit(
                f"gradwire: the state folder {self.config.state_dir} is in use by process {holder}"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock
