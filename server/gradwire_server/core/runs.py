"""Runs as callers see them: creation, listing, sharing, deletion, their record, their checkpoints and exports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.calls import Calls
from gradwire_server.access.keys import Caller, Keys
from gradwire_server.access.model_names import ModelNames
from gradwire_server.checkpoint_files import ORIGIN
from gradwire_server.config import ServerConfig
from gradwire_server.core.uploads import Uploads
from gradwire_server.errors import ServiceError, check_length, invalid, key_reused, limit_exceeded
from gradwire_server.journal.run_row import RunRecord, new_record
from gradwire_server.journal.storage import Storage
from gradwire_server.limits import Limits
from gradwire_server.scheduling.results import Changes
from gradwire_server.scheduling.scheduler import Scheduler
from gradwire_server.stores.store import CHECKPOINTS, EXPORTS, Place, upload_checkpoint

MAX_LANES = 64
HEADS = ("", "value", "reward", "classification")


def check_settings(config: pb.RunConfig, key: str, limits: Limits, durability: str) -> None:
    """Check the settings of a run that is to be created by a request with this idempotency key."""
    if config.head not in HEADS:
        raise invalid(f'head is {config.head[:50]!r}; it is "", "value", "reward" or "classification"', "head")
    if config.head == "classification" and config.num_labels < 2:
        raise invalid(f"num_labels is {config.num_labels}; a classification head has 2 at least", "num_labels")
    if config.head != "classification" and config.num_labels:
        raise invalid('num_labels goes with head="classification"', "num_labels")
    if not 0.0 <= config.dropout < 1.0:
        raise invalid(f"dropout is {config.dropout}; 0 <= dropout < 1", "dropout")
    if not 0.0 <= config.neftune_noise_alpha < float("inf"):
        message = f"neftune_noise_alpha is {config.neftune_noise_alpha}; it is a finite number of at least 0"
        raise invalid(message, "neftune_noise_alpha")
    if not 0.0 <= config.router_aux_loss_coef < float("inf"):
        raise invalid(
            f"router_aux_loss_coef is {config.router_aux_loss_coef}; it is a finite number of at least 0",
            "router_aux_loss_coef",
        )
    if config.lanes > MAX_LANES or config.lanes & (config.lanes - 1):
        raise invalid(f"lanes is {config.lanes}; it is a power of two, up to {MAX_LANES}", "lanes")
    if config.keep_journal and durability != "journal":
        raise invalid("keep_journal: the server keeps no journal (--durability checkpoint)", "keep_journal")
    if not 0.0 <= config.record_batches <= 1.0:
        raise invalid(f"record_batches is {config.record_batches}; it is a share from 0 to 1", "record_batches")
    if config.kind not in ("", "rl"):
        raise invalid(f'kind is {config.kind[:50]!r}; it is "" or "rl"', "kind")
    if config.HasField("lora"):
        if not config.lora.rank:
            raise invalid("lora needs a rank of at least 1; leave lora out to train all weights", "lora.rank")
        if not 0.0 <= config.lora.dropout < 1.0:
            raise invalid(f"lora.dropout is {config.lora.dropout}; 0 <= dropout < 1", "lora.dropout")
        if not 0.0 <= config.lora.alpha < float("inf"):
            raise invalid(f"lora.alpha is {config.lora.alpha}; it is a finite number, 0 for 2 * rank", "lora.alpha")
    modules = config.lora.target_modules
    texts = [
        ("name", config.name),
        ("idempotency_key", key),
        *(("tags", text) for pair in config.tags.items() for text in pair),
    ]
    texts += [("lora.target_modules", module) for module in modules]
    for field, count in (("tags", len(config.tags)), ("lora.target_modules", len(modules))):
        if count > limits.max_tags:
            raise limit_exceeded(f"{count} {field}", "max_tags", limits.max_tags, field)
    for field, text in texts:
        check_length(text, "max_name_chars", limits.max_name_chars, field)


def take_settings(config: pb.RunConfig, upload: pb.Upload) -> None:
    """Complete a run's settings with those of the upload that it starts from.

    Raises:
        ServiceError: INVALID_ARGUMENT for a setting that differs from the upload's.
    """
    if config.base_model and config.base_model != upload.base_model:
        raise _differs("base_model", config.base_model, upload.base_model)
    config.base_model = upload.base_model
    if upload.kind == "model":
        if config.HasField("lora"):
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                "LoRA runs share the server's copy of the base model, so they cannot start from an uploaded whole"
                " model: leave lora out to train all weights, or serve the folder itself with `gradwire serve --model`",
                field="lora",
            )
        return
    asked, own = config.lora, upload.lora
    for name in ("rank", "alpha"):
        if getattr(asked, name) and getattr(asked, name) != getattr(own, name):
            raise _differs(f"lora.{name}", getattr(asked, name), getattr(own, name))
    if asked.target_modules and sorted(asked.target_modules) != list(own.target_modules):
        raise _differs("lora.target_modules", list(asked.target_modules), list(own.target_modules) or "all-linear")
    dropout = asked.dropout or own.dropout  # a setting of the training, not of the weights
    config.lora.CopyFrom(own)
    config.lora.dropout = dropout


def _differs(field: str, given: object, own: object) -> ServiceError:
    return invalid(f"{field} is {given!r}, and the uploaded adapter's is {own!r}: leave it out", field)


WATCH_PAUSE_S = 0.2
"""Seconds between two messages to one who watches: changes in between are sent together."""
SLICE_RUNS = 20
"""Runs of a page that are listed before others are served."""


class Runs:
    """The runs of a server.

    A run is created in a task of the server, so that a client that disconnects midway leaves no incomplete one.

    Args:
        ranks_for: Number of ranks for a model: the lanes of a run that is created without.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        storage: Storage,
        keys: Keys,
        calls: Calls,
        models: ModelNames,
        uploads: Uploads,
        config: ServerConfig,
        ranks_for: Callable[[str], int],
    ) -> None:
        self._scheduler, self._records, self._checkpoints = scheduler, storage.records, storage.checkpoints
        self._keys, self._calls, self._models, self._uploads = keys, calls, models, uploads
        self._limits, self._ranks_for, self._durability = config.limits, ranks_for, config.durability
        self._deterministic = config.deterministic
        self._creating: dict[str, tuple[RunRecord, asyncio.Task[None]]] = {}

    async def create(self, caller: Caller, requested: pb.RunConfig, idempotency_key: str = "") -> pb.Run:
        """Create a run from a model or an upload, or return the one that this idempotency key has already created.

        Raises:
            ServiceError: The settings are invalid, or differ from the upload's; UNKNOWN_CHECKPOINT for the upload;
                ALREADY_EXISTS if the key created a run with other settings.
        """
        config, upload = pb.RunConfig(), None
        config.CopyFrom(requested)
        if config.base_model or not config.from_upload:
            config.base_model = self._models.find(config.base_model, "base_model")
        if config.from_upload:
            upload = self._uploads.ready(caller, config.from_upload)
            take_settings(config, upload)
        check_settings(config, idempotency_key, self._limits, self._durability)
        config.lanes = config.lanes or self._ranks_for(config.base_model)
        if not config.HasField("deterministic"):
            config.deterministic = self._deterministic
        request = pb.CreateRunRequest(config=requested, idempotency_key=idempotency_key)
        record = new_record(caller.name, config, idempotency_key, _content(request))
        if upload is None:
            return await self._once(record)
        record.origin.checkpoint = f"{record.run_id}/{ORIGIN}"
        record.origin.weights_only = record.origin.fresh_head = True
        return await self._once(record, upload_checkpoint(upload.upload_id))

    async def fork(self, caller: Caller, request: pb.ForkRunRequest) -> pb.Run:
        """Create a run from a checkpoint of a run that the caller may read.

        Raises:
            ServiceError: As for :meth:`create`; UNKNOWN_CHECKPOINT.
        """
        source, checkpoint = self._checkpoints.get(request.checkpoint, caller)
        config = pb.RunConfig()
        config.CopyFrom(source.config)
        config.ClearField("from_upload")
        if request.HasField("head"):
            config.head, config.num_labels = request.head, request.num_labels
        config.seed, config.name = request.seed, request.name
        if request.HasField("dropout"):
            config.dropout = request.dropout
            if config.HasField("lora"):
                config.lora.dropout = request.dropout
        if request.HasField("neftune_noise_alpha"):
            config.neftune_noise_alpha = request.neftune_noise_alpha
        if request.HasField("record_batches"):
            config.record_batches = request.record_batches
        config.tags.update(request.tags)
        if request.HasField("deterministic"):
            config.deterministic = request.deterministic
        config.lanes = self._ranks_for(config.base_model)
        check_settings(config, request.idempotency_key, self._limits, self._durability)
        record = new_record(caller.name, config, request.idempotency_key, _content(request))
        record.origin = engine_pb2.EngineCreateRun(
            run_id=record.run_id,
            config=config,
            checkpoint=f"{record.run_id}/{ORIGIN}",
            weights_only=not request.with_optimizer,
            fresh_head=request.HasField("head"),
        )
        record.forked_from = checkpoint.path
        return await self._once(record, self._checkpoints.place(source.run_id, CHECKPOINTS, checkpoint.name))

    def get(self, caller: Caller, run_id: str) -> pb.Run:
        """Return a run.

        Raises:
            ServiceError: UNKNOWN_RUN, also for a run that the caller may not read.
        """
        return self.described(self._records.get(run_id, caller))

    async def page(self, caller: Caller, page_size: int = 0, page_token: str = "") -> tuple[list[pb.Run], str]:
        """List a page of the runs that the caller may read, oldest first, and the next page's token, "" at the end."""
        page, token = self._records.page(caller, page_size, page_token)
        runs: list[pb.Run] = []
        for start in range(0, len(page), SLICE_RUNS):
            runs += [self.described(record) for record in page[start : start + SLICE_RUNS]]
            await asyncio.sleep(0)
        return runs, token

    async def watch(
        self, caller: Caller, cursor: str = "", *, with_points: bool = False
    ) -> AsyncGenerator[pb.RunUpdates]:
        """Yield the runs that the caller may read, then their changes, without end; several a message where they are
        quick.

        Args:
            cursor: Cursor of the message to go on after; "" for the beginning.

        Raises:
            ServiceError: SHUTTING_DOWN.
        """
        feed = self._scheduler.feed
        revision = feed.revision_at(cursor)
        while True:
            changed = feed.changed
            changes = feed.since(revision) if revision is not None else None
            if changes is None:
                revision = feed.revision
                async with aclosing(self._all(caller, feed.cursor(revision))) as pages:
                    async for page in pages:
                        yield page
                continue
            revision = changes.revision
            async with self._calls.slice(caller.name):
                update = self._update(caller, changes, with_points)
            if update.runs or update.gone or update.points or update.jobs_changed:
                update.cursor = feed.cursor(revision)
                yield update
                await asyncio.sleep(WATCH_PAUSE_S)
            await changed.wait()

    async def _all(self, caller: Caller, cursor: str) -> AsyncGenerator[pb.RunUpdates]:
        token, whole = "", True
        while True:
            async with self._calls.slice(caller.name):
                runs, token = await self.page(caller, 0, token)
            yield pb.RunUpdates(runs=runs, whole=whole, cursor="" if token else cursor)
            if not token:
                return
            whole = False

    def _update(self, caller: Caller, changes: Changes, with_points: bool) -> pb.RunUpdates:
        jobs_changed = any(caller.sees_all or owner == caller.name for owner in changes.job_owners)
        update = pb.RunUpdates(jobs_changed=jobs_changed)
        records = {run_id: self._records.find(run_id) for run_id in changes.run_ids}
        update.runs.extend(
            self.described(record)
            for record in records.values()
            if record is not None and record.ready and record.readable(caller)
        )
        for run_id, names in changes.gone:
            record = self._records.find(run_id)
            if (caller.name in names or caller.sees_all) and (record is None or not record.readable(caller)):
                update.gone.append(run_id)
        if with_points:
            for run_id, point in changes.points:
                record = self._records.find(run_id)
                if record is not None and record.readable(caller):
                    update.points.append(point)
        return update

    async def delete(self, caller: Caller, run_id: str) -> None:
        """Delete a run with its operations, results, checkpoints and files.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; UNSUPPORTED while another run needs a checkpoint of it.
        """
        await self._scheduler.delete(self._records.get(run_id, caller, write=True))

    async def share(self, caller: Caller, run_id: str, reader: str, *, revoke: bool = False) -> pb.Run:
        """Allow another key to read a run, or revoke that.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; INVALID_ARGUMENT for a name without a key.
        """
        record = self._records.get(run_id, caller, write=True)
        if not revoke and (not self._keys.has(reader) or reader == record.owner):
            raise invalid(f"{reader[:100]!r} is not the name of another key of this server", "reader")
        await self._records.share(record, reader, revoke)
        if revoke:
            self._scheduler.feed.gone(run_id, {reader}, deleted=False)
        self._scheduler.feed.touch(run_id)
        return record.to_proto()

    async def history(self, caller: Caller, run_id: str, at_most: int = 0) -> AsyncGenerator[list[pb.HistoryPoint]]:
        """Yield the points of a run's record in order, in lists of at least one.

        Args:
            at_most: About so many points of a longer record, evenly thinned; 0 for all.

        Raises:
            ServiceError: UNKNOWN_RUN.
        """
        pages = self._scheduler.history(self._records.get(run_id, caller), at_most)
        while True:
            async with self._calls.slice(caller.name):
                points = await anext(pages, None)
            if points is None:
                return
            yield points

    def list_checkpoints(self, caller: Caller, run_id: str) -> list[pb.Checkpoint]:
        """A run's checkpoints, ordered by the number of the last operation that each contains."""
        checkpoints = self._records.get(run_id, caller).checkpoints.values()
        return sorted(checkpoints, key=lambda saved: (saved.seq, saved.name))

    async def delete_checkpoint(self, caller: Caller, path: str) -> None:
        """Delete the checkpoint ``"RUN_ID/NAME"``.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, PERMISSION_DENIED; UNSUPPORTED while a recovery could need it.
        """
        record, checkpoint = self._checkpoints.get(path, caller, write=True)
        await self._scheduler.delete_checkpoint(record, checkpoint.name)

    async def publish(self, caller: Caller, path: str, public: bool) -> None:
        """Let every key read the checkpoint ``"RUN_ID/NAME"``, or no longer. Runs that started from it stay.

        Raises:
            ServiceError: UNKNOWN_CHECKPOINT, PERMISSION_DENIED.
        """
        record, checkpoint = self._checkpoints.get(path, caller, write=True)
        changed = pb.Checkpoint()
        changed.CopyFrom(checkpoint)
        changed.public = public
        await self._checkpoints.add(record, changed)

    async def delete_export(self, caller: Caller, path: str) -> None:
        """Delete the export ``"RUN_ID/NAME"``, if it is there.

        Raises:
            ServiceError: UNKNOWN_RUN, PERMISSION_DENIED; INVALID_ARGUMENT for an invalid name.
        """
        run_id, _, name = path.partition("/")
        record = self._records.get(run_id, caller, write=True)
        await self._checkpoints.delete_folder(self._checkpoints.place(record.run_id, EXPORTS, name))

    async def change_export(self, caller: Caller, path: str, write: Callable[[Path, Path], None]) -> None:
        """Replace the export ``"RUN_ID/NAME"`` by another form of it.

        Args:
            write: Writes the new form into an empty folder, its second argument, from the old one, its first; called in
                a thread.

        Raises:
            ServiceError: UNKNOWN_RUN, UNKNOWN_CHECKPOINT; or the store cannot be used.
        """
        run_id, _, name = path.partition("/")
        place = self._checkpoints.place(self._records.get(run_id, caller).run_id, EXPORTS, name)
        await self._checkpoints.change(place, write)

    @asynccontextmanager
    async def folder(
        self, caller: Caller, *, checkpoint: str = "", export: str = "", check: str | None = ""
    ) -> AsyncGenerator[Path]:
        """Provide the folder of a checkpoint or of an export, given as ``"RUN_ID/NAME"``, for a door to read.

        Args:
            check: The file that will be read, and is compared with its checksum; "": all files, None: none.

        Raises:
            ServiceError: UNKNOWN_RUN, UNKNOWN_CHECKPOINT; INVALID_ARGUMENT for an invalid name; CHECKPOINT_CORRUPT.
        """
        if export:
            run_id, _, name = export.partition("/")
            place = self._checkpoints.place(self._records.get(run_id, caller).run_id, EXPORTS, name)
        else:
            record, found = self._checkpoints.get(checkpoint, caller)
            place = self._checkpoints.place(record.run_id, CHECKPOINTS, found.name)
        async with self._checkpoints.reading(place, named=export or checkpoint, check=check) as folder:
            yield folder

    def described(self, record: RunRecord) -> pb.Run:
        """A run with what only its queue knows: why it is parked, what it waits for, how long a recovery would take."""
        run = record.to_proto()
        reason = self._scheduler.parked(record.run_id)
        if reason is not None:
            run.parked.CopyFrom(reason)
        run.waits_for = self._scheduler.waits_for(record.run_id)
        run.recovery_s = self._scheduler.recovery_s(record.run_id)
        run.engine = self._scheduler.placement.of(record.run_id).engine.number
        return run

    async def _once(self, record: RunRecord, origin: Place | None = None) -> pb.Run:
        known = self._known(record)
        if known is None:
            known = record
            task = asyncio.create_task(self._scheduler.create(record, origin))
            self._creating[record.run_id] = record, task
            task.add_done_callback(lambda done: self._created(record.run_id, done))
        if known.run_id in self._creating:
            await asyncio.shield(self._creating[known.run_id][1])
        return known.to_proto()

    def _created(self, run_id: str, task: asyncio.Task[Any]) -> None:
        del self._creating[run_id]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: a caller that still waits gets it, and asyncio logs no warning

    def _known(self, record: RunRecord) -> RunRecord | None:
        known = self._records.by_key(record.owner, record.idempotency_key)
        if known is None and record.idempotency_key:  # its task may not have inserted the record yet
            sought = record.owner, record.idempotency_key
            making = (other for other, _ in self._creating.values())
            known = next((other for other in making if (other.owner, other.idempotency_key) == sought), None)
        if known is not None and known.request != record.request:
            raise key_reused(f"the run {known.run_id}", "settings")
        return known


def _content(request: pb.CreateRunRequest | pb.ForkRunRequest) -> bytes:
    return request.SerializeToString(deterministic=True)
