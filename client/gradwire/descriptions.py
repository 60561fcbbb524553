"""Descriptions that a server returns: itself, its runs, models and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from google.protobuf.message import Message
from gradwire_proto.v1 import training_pb2 as pb

T = TypeVar("T")


def described(kind: type[T], *messages: Message, **converted: Any) -> T:
    """Make a dataclass of what a server returned.

    Args:
        kind: The dataclass.
        messages: Each field that is not given is the field of this name in the first message that has one: a map as a
            dict, a repeated field as a tuple, an optional field that is not set as None.
        converted: Fields of another form than the message's.
    """
    for name in (each.name for each in fields(kind) if each.name not in converted):  # type: ignore[arg-type]
        message = next(each for each in messages if name in each.DESCRIPTOR.fields_by_name)
        converted[name] = _value(message, name)
    return kind(**converted)


def _value(message: Message, name: str) -> Any:
    declared = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if declared.message_type is not None and declared.message_type.GetOptions().map_entry:
        return dict(value)
    if declared.is_repeated:
        return tuple(value)
    return value if not declared.has_presence or message.HasField(name) else None


@dataclass(frozen=True)
class RunChange:
    """A change of what a run is computed with.

    Attributes:
        seq: The operation after whose state the run went on with it.
        time: Unix time in seconds.
        note: The change, and who accepted it.
    """

    seq: int
    time: float
    note: str


@dataclass(frozen=True)
class RunInfo:
    """A run as the server knows it.

    Attributes:
        run_id: The run's id.
        base_model: The model that the run trains.
        lora: ``rank``, ``alpha``, ``dropout`` and ``target_modules``; None if all weights are trained.
        head: ``""``, ``"value"``, ``"reward"`` or ``"classification"``.
        seed: Seed of the run's random generators.
        name: A label for people.
        tags: Key-value labels for people.
        gradient_checkpointing: Whether activations are recomputed in the backward pass; None: where they do not fit.
        step: Number of optimizer steps taken.
        accepted_seq: Operations up to this number are durable.
        applied_seq: Operations up to this number have results.
        latest_checkpoint: Path of the newest checkpoint; empty if there is none.
        created_at: Unix time in seconds.
        num_trainable_parameters: Parameters of the adapter or of the whole model, including heads.
        forked_from: Path of the checkpoint that the run was forked from; empty if it was not forked.
        owner: Name of the key that created the run; empty on a server without keys.
        readers: Names of the keys that the run is shared with.
        num_labels: Number of classes of a classification head; 0 for any other head.
        dropout: Dropout rate of the model during training.
        kind: ``"rl"`` or ``""``; selects the default learning rate.
        num_tokens: Tokens computed and sampled, also of samples from its checkpoints, as :class:`Usage` counts them.
        parked: Why the run cannot go on for now; empty if it can. Its accepted operations wait. After a start of the
            server a run without waiting operations is restored with its next one, and this is empty until then.
        recovery_s: Seconds that bringing the run back after a crash of the engine or the server would take now:
            loading its newest checkpoint and repeating the operations behind it, as measured.
        waits_for: The obstacle to its next operation, besides its turn: room on the server's disk, or its engine, which
            starts or whose machine is away; empty if there is none.
        from_upload: Id of the upload that the run started from; empty if none.
        router_aux_loss_coef: Coefficient of the experts' load-balancing loss; None: as the model's configuration says.
        changes: Accepted changes under the run (``accept_changes``, ``--accept-changes``), oldest first.
        engine: Number of the engine that the run is on.
        lanes: Number of ranks that can share its work.
        engine_s: Seconds that engines have computed for it; of what is computed together, its share.
        record_batches: Share of its batches that the server records.
        neftune_noise_alpha: Size of the noise that training adds to its embeddings; 0 for none.
        deterministic: Whether its log-probabilities have the same bits in sampling, scoring and training; None: as the
            server's ``--deterministic`` says.
    """

    run_id: str
    base_model: str
    lora: Mapping[str, Any] | None
    head: str
    seed: int
    name: str
    tags: Mapping[str, str]
    gradient_checkpointing: bool | None
    step: int
    accepted_seq: int
    applied_seq: int
    latest_checkpoint: str
    created_at: float
    num_trainable_parameters: int
    forked_from: str
    owner: str = ""
    readers: tuple[str, ...] = ()
    num_labels: int = 0
    dropout: float = 0.0
    kind: str = ""
    num_tokens: int = 0
    parked: str = ""
    recovery_s: float = 0.0
    waits_for: str = ""
    from_upload: str = ""
    router_aux_loss_coef: float | None = None
    changes: tuple[RunChange, ...] = ()
    engine: int = 0
    lanes: int = 1
    engine_s: float = 0.0
    record_batches: float = 0.0
    neftune_noise_alpha: float = 0.0
    deterministic: bool | None = None

    @staticmethod
    def from_message(run: pb.Run) -> RunInfo:
        config, lora = run.config, None
        if config.HasField("lora"):
            lora = {
                "rank": config.lora.rank,
                "alpha": config.lora.alpha or 2 * config.lora.rank,
                "dropout": config.lora.dropout,
                "target_modules": list(config.lora.target_modules),
            }
        changes = tuple(described(RunChange, change) for change in run.changes)
        return described(
            RunInfo, run, config, lora=lora, lanes=max(1, config.lanes), parked=run.parked.message, changes=changes
        )


@dataclass(frozen=True)
class RunsHeld:
    """The runs in one place.

    Attributes:
        runs: Number of runs.
        nbytes: Bytes of their weights, moments and accumulated gradients.
    """

    runs: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class RankInfo:
    """A rank of an engine: one of the processes that share the work of its runs.

    Attributes:
        device: For example ``"cpu"`` or ``"cuda:1"``.
        busy: Share of the time between the engine's last two heartbeats spent computing, 0 to 1.
        waits: Share of the same time spent waiting for the other ranks.
        memory_bytes: Memory of the process.
        device_memory_used_bytes: Memory in use on the device, by all processes; 0 without a device.
        device_memory_total_bytes: Memory of the device.
        heartbeat_age_s: Seconds since it gave a sign of life.
    """

    device: str = ""
    busy: float = 0.0
    waits: float = 0.0
    memory_bytes: int = 0
    device_memory_used_bytes: int = 0
    device_memory_total_bytes: int = 0
    heartbeat_age_s: float = 0.0


@dataclass(frozen=True)
class EngineInfo:
    """An engine, a process of the server with models.

    Attributes:
        restarts: Number of restarts since the server started.
        heartbeat_age_s: Seconds since the last heartbeat; negative before the first one.
        busy: Share of the time between the last two heartbeats spent computing, 0 to 1.
        memory_bytes: Memory of the process.
        device_memory_used_bytes: Memory in use on the device, by all processes; 0 without a device.
        device_memory_total_bytes: Memory of the device.
        device_utilization: Utilization of the device, 0 to 1; None where it is unknown.
        start_s: Seconds that the process took to start and load its models.
        memory_by_owner: Bytes of ``"base"`` models, ``"references"``, ``"runs"`` (weights, gradients, moments),
            ``"cache"`` (log-probabilities of references) and ``"activations"`` (all else, keys and values included).
        runs: The runs that it holds, by the place of their weights and moments: ``"device"``, ``"host"`` (memory beside
            the device's), ``"disk"``. A run that was not used since the start is in none.
        number: Its number, from 0.
        device: For example ``"cpu"`` or ``"cuda:0 (NVIDIA H200)"``.
        ready: Whether its process gives signs of life.
        placed_runs: Number of runs that are on it, or will be when they are used next.
        drains: Whether it gets no more runs; see :meth:`gradwire.ServiceClient.drain_engine`.
        models: Names of the models that it has loaded.
        ranks: The processes of an engine that has several, by number; empty for an engine of one process.
        machine: Name of the machine that it is on; empty for the server's own.
    """

    restarts: int = 0
    heartbeat_age_s: float = -1.0
    busy: float = 0.0
    memory_bytes: int = 0
    device_memory_used_bytes: int = 0
    device_memory_total_bytes: int = 0
    device_utilization: float | None = None
    start_s: float = 0.0
    memory_by_owner: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, RunsHeld] = field(default_factory=dict)
    number: int = 0
    device: str = ""
    ready: bool = True
    placed_runs: int = 0
    drains: bool = False
    models: tuple[str, ...] = ()
    ranks: tuple[RankInfo, ...] = ()
    machine: str = ""

    @staticmethod
    def from_message(engine: pb.EngineStatus) -> EngineInfo:
        runs = {place: RunsHeld(held.runs, held.bytes) for place, held in sorted(engine.runs.items())}
        ranks = tuple(described(RankInfo, rank) for rank in engine.ranks)
        return described(EngineInfo, engine, runs=runs, ranks=ranks)


@dataclass(frozen=True)
class ServerInfo:
    """The server.

    Attributes:
        version: Version of the server's package.
        device: For example ``"cpu"`` or ``"cuda:0 (NVIDIA H200)"``.
        engine_ready: Whether an engine is up.
        uptime_s: Seconds since the server started.
        durability: ``"journal"`` (every operation is on disk before it is acknowledged) or ``"checkpoint"``.
        limits: Limits by name, for example ``max_payload_bytes``.
        engines: State of each engine, by number.
        key_name: Name of your key; empty on a server without keys.
        role: Its role: ``"admin"``, ``"user"`` or ``"viewer"``; empty on a server without keys.
        price_per_hour: Price of one engine, as set on the server; 0 if it is not set.
    """

    version: str
    device: str
    engine_ready: bool
    uptime_s: float
    durability: str
    limits: Mapping[str, int]
    engines: tuple[EngineInfo, ...] = ()
    key_name: str = ""
    role: str = ""
    price_per_hour: float = 0.0

    @staticmethod
    def from_message(info: pb.ServerInfo) -> ServerInfo:
        return described(ServerInfo, info, engines=tuple(map(EngineInfo.from_message, info.engines)))

    def cost(self, engine_s: float) -> float:
        """Return the price of so many seconds of an engine, in the currency of ``price_per_hour``."""
        return engine_s / 3600 * self.price_per_hour


@dataclass(frozen=True)
class Usage:
    """Usage within an hour or a day, by key, run, model or session; a field that was not grouped by is empty.

    Attributes:
        start: Unix time at which the hour or the day (of UTC) begins.
        owner: Name of the key.
        run_id: The run; empty for what was sampled from base models.
        label: The run's name.
        base_model: The model.
        training_tokens: Tokens computed for training and scoring; one that several rows share counts once.
        prompt_tokens: Tokens computed of prompts that were sampled from: all but cached ones.
        sampled_tokens: Tokens of their samples.
        engine_s: Seconds that an engine computed. Of what is computed together, each has its share.
        operations: Number of operations and of requests that sampled.
        checkpoints: Number of checkpoints and exports that were written.
        session_id: The rollout session that sampled; empty for what none did, or one that was deleted long ago.
    """

    start: float
    owner: str
    run_id: str
    label: str
    base_model: str
    training_tokens: int
    prompt_tokens: int
    sampled_tokens: int
    engine_s: float
    operations: int
    checkpoints: int
    session_id: str

    @staticmethod
    def from_message(entry: pb.UsageEntry) -> Usage:
        return described(Usage, entry)


@dataclass(frozen=True)
class ModelInfo:
    """A model that runs can be created on."""

    name: str
    architecture: str
    num_parameters: int
    vocab_size: int
    context_length: int
    hidden_size: int
    num_layers: int
    dtype: str
    has_tokenizer: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    takes_images: bool = False

    @staticmethod
    def from_message(model: pb.ModelInfo) -> ModelInfo:
        return described(ModelInfo, model)


@dataclass(frozen=True)
class TokenizerInfo:
    """A model's tokenizer.

    Attributes:
        model: its name.
        vocab_size: token ids are below it; added tokens are counted.
        special_tokens: role -> text: ``"bos_token"``, ``"eos_token"``, ``"pad_token"`` and others it has.
        special_token_ids: text -> id of every special token.
        chat_template: Jinja source; empty where the model has none.
        chat_template_names: of further templates, for ``render(..., chat_template=NAME)``.
    """

    model: str
    vocab_size: int
    special_tokens: Mapping[str, str]
    special_token_ids: Mapping[str, int] = field(repr=False)
    chat_template: str = field(repr=False)
    chat_template_names: tuple[str, ...] = ()

    @staticmethod
    def from_message(info: pb.TokenizerInfo) -> TokenizerInfo:
        return described(TokenizerInfo, info)


@dataclass(frozen=True)
class LossField:
    """A batch field of a loss (see :class:`LossInfo`).

    Attributes:
        name: The field's key in a batch.
        dtype: ``"int"``, ``"float"`` or ``"bool"``.
        shapes: The accepted shapes, for example ``("[rows]", "[rows, tokens]")``.
        required: Whether a batch must have the field.
        description: One sentence.
        aligned_with: The ids field to whose tokens this field's entries belong.
        padding_mask: For an ids field: the name of the mask field that marks padding.
    """

    name: str
    dtype: str
    shapes: tuple[str, ...]
    required: bool = False
    description: str = ""
    aligned_with: str = ""
    padding_mask: str = ""

    @staticmethod
    def from_message(message: pb.LossField) -> LossField:
        return described(LossField, message)


@dataclass(frozen=True)
class LossInfo:
    """The declaration of a loss.

    Attributes:
        name: The value to pass as ``loss_fn``.
        summary: A sentence on what the loss computes.
        formula: The formula in one line.
        reference: The paper or source of the formula.
        fields: The batch fields.
        kwargs_schema: JSON schema of ``loss_kwargs``.
        metrics: Metric name -> description.
        layout: ``"rows"``, ``"pairs"`` or ``"groups"``.
        head: The head that a run needs: ``""``, ``"value"``, ``"reward"`` or ``"classification"``.
        whole_batch: Which statistic of its batch the loss takes, and when; then several calls before a step are not one
            batch, except with ``accumulate=True``. Empty: none, ever.
    """

    name: str
    summary: str
    formula: str
    reference: str
    fields: tuple[LossField, ...]
    kwargs_schema: Mapping[str, Any] = field(repr=False)
    metrics: Mapping[str, str]
    layout: str
    head: str
    whole_batch: str = ""

    @staticmethod
    def from_message(loss: pb.LossInfo) -> LossInfo:
        return described(
            LossInfo,
            loss,
            fields=tuple(map(LossField.from_message, loss.fields)),
            kwargs_schema=json.loads(loss.config_schema_json or "{}"),
            metrics=dict(sorted(loss.metrics.items())),
        )
