"""The service client: runs, models and losses of one server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import LossInfo, ModelInfo, RunInfo, ServerInfo, Usage
from gradwire.embedded import EmbeddedServer
from gradwire.errors import InvalidArgumentError, ServiceClosedError, UnsupportedError, did_you_mean
from gradwire.files import Files
from gradwire.history import History, RunUpdates
from gradwire.jobs import Jobs
from gradwire.losses import LossCatalogue, model_path
from gradwire.recordings import KeyInfo, QueuedRun
from gradwire.rendering import Texts
from gradwire.results import Checkpoint
from gradwire.sampling import SamplingClient
from gradwire.sessions import RolloutSession, RolloutSessions, SessionOptions
from gradwire.training import TrainingClient
from gradwire.wire.link import RunLink
from gradwire.wire.options import check_options
from gradwire.wire.requests import message
from gradwire.wire.transport import Transport
from gradwire.wire.uploads import Kind, Upload, as_upload_id, upload

WINDOW = 256
MAX_IN_FLIGHT = 1024
PAGE_SIZE = 500

logger = logging.getLogger("gradwire")

PathLike = os.PathLike[str]
Lora = int | Mapping[str, Any]
"""A rank, or ``rank``, ``alpha``, ``dropout`` and ``target_modules``."""


class ServiceClient(Texts):
    """A connection to a server. Created by :func:`connect`; ends with :meth:`close` or its ``async with`` block."""

    def __init__(self, transport: Transport, info: ServerInfo, embedded: EmbeddedServer | None = None) -> None:
        super().__init__(transport, info)
        self._embedded = embedded
        self._loop = asyncio.get_running_loop()
        self._losses = LossCatalogue()
        self._links: list[RunLink] = []
        self._files = Files(transport)
        self._jobs = Jobs(transport, self._files)
        self._sessions = RolloutSessions(transport)

    @property
    def jobs(self) -> Jobs:
        """Trainings that the server runs by itself."""
        return self._jobs

    @property
    def files(self) -> Files:
        """The files that jobs train on."""
        return self._files

    @property
    def sessions(self) -> RolloutSessions:
        """The rollout sessions of agents."""
        return self._sessions

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the server."""
        return self._transport.address

    @property
    def api_key(self) -> str:
        """The key that this connection sends, for other connections to an embedded server; empty if there is none."""
        return self._transport.api_key

    async def server_info(self) -> ServerInfo:
        """Fetch version, device, readiness and limits of the server."""
        return ServerInfo.from_message(
            await self._transport.unary(lambda stub: stub.GetServerInfo, pb.GetServerInfoRequest())
        )

    async def list_models(self, name: str = "") -> list[ModelInfo]:
        """List the models that runs can be created on.

        Args:
            name: List only the one of this name, or of this path on the server.

        Raises:
            UnknownModelError: There is none of that name.
        """
        answer = await self._transport.unary(lambda stub: stub.ListModels, pb.ListModelsRequest(name=name))
        return [ModelInfo.from_message(model) for model in answer.models]

    async def list_losses(self) -> list[LossInfo]:
        """List the losses with their batch fields, arguments and metrics."""
        answer = await self._transport.unary(lambda stub: stub.ListLosses, pb.ListLossesRequest())
        losses = [LossInfo.from_message(loss) for loss in answer.losses]
        self._losses.update(losses)
        return losses

    async def list_queues(self) -> list[QueuedRun]:
        """List the runs that have operations without a result: on one engine, they wait for each other.

        Runs that your key may not read are among them, without their names.
        """
        answer = await self._transport.unary(lambda stub: stub.ListQueues, pb.ListQueuesRequest())
        return [QueuedRun.from_message(each) for each in answer.runs]

    async def list_keys(self) -> list[KeyInfo]:
        """List the server's keys, the newest first: all with an administrator's or a viewer's key, else your own.

        `gradwire keys` creates and revokes them, on the server's machine alone.
        """
        answer = await self._transport.unary(lambda stub: stub.ListKeys, pb.ListKeysRequest())
        return [KeyInfo.from_message(each) for each in answer.keys]

    async def usage(
        self,
        by: Sequence[Literal["hour", "day", "owner", "run", "model", "session"]] = (),
        start: float = 0.0,
        end: float | None = None,
    ) -> list[Usage]:
        """Return the usage of your key; with an administrator's or a viewer's key, of all keys.

        The server keeps it for 400 days, also of deleted runs. ``server_info()`` has the price of an hour.

        Args:
            by: Columns to group by; empty for one sum.
            start: Unix time; counted are the hours that begin from then on.
            end: Unix time until which they begin; now by default.
        """
        request = pb.GetUsageRequest(start=start, end=end or 0.0, by=by)
        answer = await self._transport.unary(lambda stub: stub.GetUsage, request)
        return [Usage.from_message(each) for each in answer.entries]

    async def list_runs(self) -> list[RunInfo]:
        """List the runs that your key owns or may read."""
        runs: list[RunInfo] = []
        token = ""
        while True:
            request = pb.ListRunsRequest(page_size=PAGE_SIZE, page_token=token)
            page = await self._transport.unary(lambda stub: stub.ListRuns, request)
            runs += map(RunInfo.from_message, page.runs)
            token = page.next_page_token
            if not token:
                return runs

    async def watch(self, cursor: str = "", with_points: bool = False) -> AsyncGenerator[RunUpdates]:
        """Follow every run that your key may read, without end: first all of them, then what changes.

        One stream serves all runs. It survives a restart of the server, after which it begins again with all runs.

        Args:
            cursor: :attr:`RunUpdates.cursor` to go on after; "" to begin with all runs.
            with_points: Also deliver what each finished operation measured, as ``RunUpdates.history``.

        Raises:
            ConnectionLostError: The server was away for longer than the connection's patience.

        .. code-block:: python

            async for update in service.watch():
                for run in update.runs:
                    print(run.name, run.step)
        """
        async with contextlib.aclosing(self._transport.watch(cursor, with_points)) as updates:
            async for update in updates:
                yield RunUpdates(
                    runs=tuple(map(RunInfo.from_message, update.runs)),
                    gone=tuple(update.gone),
                    history=History.from_wire([pb.HistoryPage(points=update.points)]),
                    cursor=update.cursor,
                    whole=update.whole,
                    jobs_changed=update.jobs_changed,
                )

    async def create_run(
        self,
        base_model: str = "",
        lora: Lora | None = None,
        head: Literal["value", "reward", "classification"] | None = None,
        seed: int = 0,
        name: str = "",
        gradient_checkpointing: bool | None = None,
        tags: Mapping[str, str] | None = None,
        num_labels: int = 0,
        dropout: float = 0.0,
        kind: Literal["", "rl"] = "",
        from_adapter: str | PathLike | Upload | None = None,
        from_checkpoint: str | PathLike | Upload | None = None,
        router_aux_loss_coef: float | None = None,
        lanes: int | None = None,
        keep_journal: bool = False,
        record_batches: float = 0.0,
        neftune_noise_alpha: float = 0.0,
        deterministic: bool | None = None,
    ) -> TrainingClient:
        """Create a run with its own weights, optimizer state and queue.

        Args:
            base_model: One of ``list_models``; may be left out with an upload, which names its own.
            lora: None trains all weights. A rank, or a mapping of ``rank``, ``alpha`` (default: twice the rank),
                ``dropout`` (default: the run's) and ``target_modules`` (default ``["all-linear"]``: every linear
                layer but the output head, which is ``"lm_head"``, and a vision part, which is ``"vision"``), trains an
                adapter.
            head: ``"value"``: one scalar per token; ``"reward"``: one scalar per sequence; ``"classification"``: logits
                of ``num_labels`` classes per sequence or token.
            seed: Seed of the adapter, the head, dropout and sampling.
            name: A label for people.
            gradient_checkpointing: Whether to recompute activations in the backward pass, always or never, instead of
                keeping them; by default where they do not fit into memory.
            tags: Key-value labels for people.
            num_labels: Number of classes of a classification head, 2 or more.
            dropout: Dropout rate of the model and the adapter during training; 0 by default, whatever the model's
                own configuration says. A row's dropout masks depend on the run's seed, the row's place among the
                run's steps, and the row itself, not on how a batch is split. Rows then go through the model one by one.
            kind: ``"rl"``: ``optim_step`` has a policy's learning rate by default, as with ``head="value"``.
            from_adapter: Start from an adapter: an :class:`Upload`, its id, or a local PEFT folder, which is uploaded
                as by :meth:`upload_adapter`. Rank, alpha and target modules are the adapter's; a value in ``lora``
                that differs is refused. Its dropout is the default of ``lora``'s.
            from_checkpoint: Start from the weights of a whole model: a local Hugging Face folder of the same
                architecture and size as the base model, or an upload of one. Trains all weights. Runs start from a
                checkpoint of another run by :meth:`fork_run`.
            router_aux_loss_coef: For a mixture of experts: coefficient of its load-balancing loss, which is then part
                of everything that the run is trained by, and is not in the ``loss`` that results report. By default
                what transformers does: the coefficient of the model's configuration if this has
                ``output_router_logits``, else 0.
            lanes: Least number of micro-batches that a batch of as many rows is divided into, a power of two: so many
                ranks can share the work of the run, and its bits are the same on any number of ranks. By default as
                many as the server's engine has ranks now.
            keep_journal: Whether the server keeps every operation with its batch until the run is deleted, so that
                ``gradwire record`` has the run from its beginning. They take the batches' size on the server's disk.
            record_batches: Share of the trained batches, 0 to 1, that the server records with the log-probabilities
                that their losses saw, for ``list_recordings`` and the console; the first batch is always among them.
                The oldest go beyond the server's ``max_recorded_bytes`` a run (64 MiB).
            neftune_noise_alpha: Noise that training adds to the embeddings (NEFTune, Jain et al. 2023), uniform in
                ``+-alpha / sqrt(tokens of the row * width)``; the paper takes 5 for supervised fine-tuning. As with
                ``dropout``, rows go through the model one by one, and the noise depends on the row alone.
            deterministic: On a CPU, in float32 or bfloat16: a token's log-probability has the same bits in sampling,
                scoring and training, whatever is beside its row, so that the ratio of a fresh sample is exactly 1. By
                default as the server's ``--deterministic`` says. Other runs of the server are computed as ever.

        Raises:
            UnknownModelError: The server does not hold the model.
            UnknownCheckpointError: There is no such upload.
            InvalidArgumentError: A value is out of range, or the uploaded weights do not fit.
        """
        if from_adapter is not None and from_checkpoint is not None:
            raise InvalidArgumentError(
                "a run starts from one of from_adapter and from_checkpoint", field="from_adapter"
            )
        if from_checkpoint is not None and lora is not None:
            raise UnsupportedError(
                "LoRA runs share the server's copy of the base model, so they cannot start from an uploaded whole"
                " model: leave lora out to train all weights, or serve the folder itself with `gradwire serve --model`",
                field="lora",
            )
        from_upload = ""
        if from_adapter is not None:
            from_upload = await self._uploaded("adapter", from_adapter, base_model)
        elif from_checkpoint is not None:
            from_upload = await self._uploaded("model", from_checkpoint, base_model)
        config = message(
            pb.RunConfig,
            base_model=base_model,
            lora=_lora(lora),
            head=head or "",
            seed=seed,
            name=name,
            gradient_checkpointing=gradient_checkpointing,
            tags=tags,
            num_labels=num_labels,
            dropout=dropout,
            kind=kind,
            from_upload=from_upload,
            router_aux_loss_coef=router_aux_loss_coef,
            lanes=lanes or 0,
            keep_journal=keep_journal,
            record_batches=record_batches,
            neftune_noise_alpha=neftune_noise_alpha,
            deterministic=deterministic,
        )
        request = pb.CreateRunRequest(config=config, idempotency_key=secrets.token_hex(16))
        run = await self._transport.unary(lambda stub: stub.CreateRun, request, timeout_s=None)
        return self.get_training_client(run.run_id)

    async def upload_adapter(self, path: str | PathLike, base_model: str = "") -> Upload:
        """Upload a PEFT adapter, from which runs can be created: ``create_run(from_adapter=...)``.

        The server checks its settings and the shapes of its tensors before they are sent. An interrupted upload
        continues where it stopped when it is called again; a folder that is on the server already is not sent again.

        Args:
            path: A folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
            base_model: One of ``list_models``; by default the one that the adapter says it was trained on.

        Raises:
            InvalidArgumentError: A file is missing, the adapter was trained on a model that the server does not hold,
                or its tensors do not fit the base model.
            UnsupportedError: It is no LoRA adapter, or has settings that runs do not have, such as DoRA.
            LimitExceededError: It is larger than the server or the key's quota allows.
        """
        return await upload(self._transport, "adapter", path, base_model)

    async def list_uploads(self) -> list[Upload]:
        """List the uploads of your key, oldest first."""
        answer = await self._transport.unary(lambda stub: stub.ListUploads, pb.ListUploadsRequest())
        return [Upload.from_message(each) for each in answer.uploads]

    async def delete_upload(self, upload: str | Upload) -> None:
        """Delete an upload; runs that were created from it stay as they are."""
        upload_id = upload.upload_id if isinstance(upload, Upload) else upload
        await self._transport.delete(lambda stub: stub.DeleteUpload, pb.DeleteUploadRequest(upload_id=upload_id))

    async def _uploaded(self, kind: Kind, source: str | PathLike | Upload, base_model: str) -> str:
        upload_id = as_upload_id(source)
        if upload_id is None:
            assert not isinstance(source, Upload)
            upload_id = (await upload(self._transport, kind, source, base_model)).upload_id
        return upload_id

    async def fork_run(
        self,
        checkpoint: str | Checkpoint,
        head: Literal["value", "reward", "classification", ""] | None = None,
        seed: int = 0,
        name: str = "",
        with_optimizer: bool = False,
        num_labels: int = 0,
        dropout: float | None = None,
        neftune_noise_alpha: float | None = None,
        tags: Mapping[str, str] | None = None,
        record_batches: float | None = None,
        deterministic: bool | None = None,
    ) -> TrainingClient:
        """Create a run from a checkpoint's weights.

        Args:
            checkpoint: ``"RUN_ID/NAME"``.
            head: None keeps the checkpoint's head; a name creates a fresh head of that kind, ``""`` removes the head.
            seed: As for ``create_run``.
            name: A label for people.
            with_optimizer: Also copy the optimizer's moments and the step count.
            num_labels: Number of classes, with ``head="classification"``.
            dropout: As for ``create_run``; None: that of the checkpoint's run.
            neftune_noise_alpha: As for ``create_run``; None: that of the checkpoint's run.
            tags: Key-value labels for people, beside those of the checkpoint's run or in their place.
            record_batches: As for ``create_run``; None: that of the checkpoint's run.
            deterministic: As for ``create_run``; None: as the checkpoint's run.
        """
        request = message(
            pb.ForkRunRequest,
            checkpoint=model_path(checkpoint),
            head=head,
            seed=seed,
            name=name,
            with_optimizer=with_optimizer,
            num_labels=num_labels,
            dropout=dropout,
            neftune_noise_alpha=neftune_noise_alpha,
            tags=tags,
            record_batches=record_batches,
            deterministic=deterministic,
            idempotency_key=secrets.token_hex(16),
        )
        run = await self._transport.unary(lambda stub: stub.ForkRun, request, timeout_s=None)
        return self.get_training_client(run.run_id)

    def get_training_client(self, run_id: str, takeover: bool = True) -> TrainingClient:
        """Return a client of an existing run, which continues where it stands.

        The first operation, or awaiting the client, opens the run.

        Args:
            run_id: As in ``TrainingClient.run_id``.
            takeover: Replace the run's current writer; False raises RunBusyError if there is one.
        """
        limits = self._info.limits
        window = min(WINDOW, limits.get("max_window", WINDOW))
        max_in_flight = max(limits.get("max_queued_operations", 2 * MAX_IN_FLIGHT) // 2, 1)
        link = RunLink(
            run_id,
            self._loop,
            self._transport,
            takeover=takeover,
            window=window,
            max_in_flight=min(MAX_IN_FLIGHT, max_in_flight),
            max_payload_bytes=limits.get("max_payload_bytes"),
        )
        self._links.append(link)
        return TrainingClient(self._transport, link, self._losses)

    async def delete_run(self, run_id: str) -> None:
        """Delete a run with its checkpoints."""
        await self._transport.delete(lambda stub: stub.DeleteRun, pb.DeleteRunRequest(run_id=run_id))

    async def move_run(self, run_id: str, engine: int | None = None) -> int:
        """Move a run to another engine of the server; whoever trains it notices a pause.

        Args:
            engine: Number of the engine; None for the one that suits best.

        Returns:
            The number of the engine on which the run is now.

        Raises:
            PermissionDeniedError: The key is no admin's.
            InvalidArgumentError: There is no such engine, or it does not serve the run's model.
            UnsupportedError: The server has no other engine that could take the run.
        """
        request = pb.MoveRunRequest(run_id=run_id, engine=engine)
        return (await self._transport.unary(lambda stub: stub.MoveRun, request)).engine

    async def drain_engine(self, engine: int, undo: bool = False) -> int:
        """Move every run of an engine to others, and give it no more, until the server starts again.

        Args:
            engine: Number of the engine.
            undo: Let it take runs again instead.

        Returns:
            The number of runs that were moved.

        Raises:
            PermissionDeniedError: The key is no admin's.
            UnsupportedError: A run of it can be on no other engine; nothing was changed.
        """
        request = pb.DrainEngineRequest(engine=engine, undo=undo)
        return (await self._transport.unary(lambda stub: stub.DrainEngine, request)).num_moved

    def sampling_client(self, model: str | Checkpoint) -> SamplingClient:
        """Return a client that samples from a model of the server, or from a checkpoint."""
        return SamplingClient(self._transport, self._loop, model)

    async def rollout_session(self, model: str | Checkpoint, **options: Unpack[SessionOptions]) -> RolloutSession:
        """Create a session in which an agent samples from a model, a checkpoint, or a run's current weights.

        Args:
            model: One of ``list_models``, ``"RUN_ID/NAME"`` or ``"RUN_ID"``.
            options: See :class:`gradwire.SessionOptions`.

        Raises:
            UnsupportedError: The server has no HTTP door.
            LimitExceededError: The key has too many sessions.
        """
        check_options(SessionOptions, options, self.rollout_session)
        return await self._sessions.create(model, options)

    async def close(self) -> None:
        """Close the connection, and stop the server if it was embedded.

        Submitted operations still reach the server. A result that has not arrived is lost to this process: its
        future raises ServiceClosedError.
        """
        self._transport.check_loop()
        closed = ServiceClosedError("the service was closed before the result came")
        links, self._links = self._links, []
        await asyncio.gather(*(link.close(closed) for link in links))
        await self._transport.close()
        if self._embedded is not None:
            await self._embedded.close()

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<ServiceClient {self.address}>"


def _lora(lora: Lora | None) -> pb.LoraSettings | None:
    if lora is None:
        return None
    settings: dict[str, Any] = dict(lora) if isinstance(lora, Mapping) else {"rank": lora}
    if isinstance(settings.get("target_modules"), str):  # peft takes "all-linear" so
        settings["target_modules"] = [settings["target_modules"]]
    known = ("rank", "alpha", "dropout", "target_modules")
    for name in settings:
        if name not in known:
            near = {"r": "rank"}.get(name) or name.removeprefix("lora_")
            raise InvalidArgumentError(
                f"lora has no setting {name!r}{did_you_mean(near, known)}; it has {', '.join(known)}",
                field=f"lora.{name}", rule="a known setting",
            )  # fmt: skip
    return message(pb.LoraSettings, **settings)
