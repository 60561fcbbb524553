"""The record of a run, and the row of the database that stores it."""

from __future__ import annotations

import base64
import logging
import secrets
import sqlite3
import time
from dataclasses import dataclass, field

from gradwire_proto.v1 import engine_pb2, journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.errors import ServiceError
from gradwire_server.journal.schema import RUN

log = logging.getLogger(__name__)


@dataclass
class RunRecord:
    """A run as stored in its row, with its checkpoints and readers.

    Attributes:
        owner: Name of the key that owns it.
        created_at: Unix time in seconds.
        origin: Request that creates the run in an engine in its first state.
        forked_from: Path of the checkpoint from which it was forked; empty if it was not.
        idempotency_key: Key of the request that created it.
        request: That request, serialized; tells whether a repeated key repeats the same request.
        ready: Whether its creation has finished.
        epoch: Epoch of the present writer; rises with every open and rewind.
        writer: Name of the present writer; empty for none.
        accepted_seq: Highest number in the journal.
        applied_seq: Every operation up to this number has a durable result.
        released_seq: Results up to this number are deleted.
        trimmed_seq: The journal starts after this number.
        step: Number of optimizer steps.
        failure_seq: Failed operation because of which later ones are aborted, unless their writer has seen the failure;
            0 for none.
        rewound_to_seq: Last number that the newest rewind kept.
        rewound_epoch: Epoch before the newest rewind.
        num_trainable_parameters: Number of parameters that its optimizer updates.
        num_tokens: Tokens computed and sampled; :mod:`.usage` stores them.
        engine_s: Seconds of the engine; :mod:`.usage` stores them.
        checkpoints: Its checkpoints by name.
        read_back: Those that were read back since the server began, by name.
        readers: Names of other keys that may read it.
        changes: Accepted changes under it, oldest first.
    """

    run_id: str
    owner: str
    config: pb.RunConfig
    created_at: float
    origin: engine_pb2.EngineCreateRun
    forked_from: str = ""
    idempotency_key: str = ""
    request: bytes = b""
    ready: bool = False
    epoch: int = 0
    writer: str = ""
    accepted_seq: int = 0
    applied_seq: int = 0
    released_seq: int = 0
    trimmed_seq: int = 0
    step: int = 0
    failure_seq: int = 0
    failure: str = ""
    rewound_to_seq: int = 0
    rewound_epoch: int = 0
    num_trainable_parameters: int = 0
    num_tokens: int = 0
    engine_s: float = 0.0
    checkpoints: dict[str, pb.Checkpoint] = field(default_factory=dict)
    read_back: dict[str, pb.Checkpoint] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    changes: list[pb.RunChange] = field(default_factory=list)

    def writable(self, caller: Caller) -> bool:
        """Whether a caller may change the run."""
        return caller.role == "admin" or caller.name == self.owner

    def readable(self, caller: Caller) -> bool:
        """Whether a caller may read the run."""
        return caller.sees_all or self.writable(caller) or caller.name in self.readers

    def check_writable(self, caller: Caller) -> None:
        """Check that a caller, who may read the run, may also change it.

        Raises:
            ServiceError: PERMISSION_DENIED.
        """
        if not self.writable(caller):
            raise ServiceError(
                pb.ERROR_CODE_PERMISSION_DENIED,
                f"the run {self.run_id} is shared with this key to read; fork a checkpoint of it to go on from there",
                field="run_id",
            )

    def trim(self, up_to_seq: int) -> None:
        """Record that the journal starts after this number."""
        self.trimmed_seq = max(self.trimmed_seq, up_to_seq)

    @property
    def complete_checkpoints(self) -> list[pb.Checkpoint]:
        """The checkpoints from which the run could be restored."""
        return [saved for saved in self.checkpoints.values() if not saved.weights_only]

    @property
    def newest_checkpoint(self) -> pb.Checkpoint | None:
        """The one of those that contains the most operations; None if there is none."""
        return max(self.complete_checkpoints, key=lambda checkpoint: checkpoint.seq, default=None)

    def description(self) -> journal_pb2.RunDescription:
        """The values of the row that do not follow from the run's operations."""
        return journal_pb2.RunDescription(
            run_id=self.run_id,
            owner=self.owner,
            config=self.config,
            created_at=self.created_at,
            origin=self.origin,
            forked_from=self.forked_from,
            idempotency_key=self.idempotency_key,
            request=self.request,
            num_trainable_parameters=self.num_trainable_parameters,
            readers=sorted(self.readers),
        )

    def to_proto(self) -> pb.Run:
        """The run as clients see it."""
        newest = self.newest_checkpoint
        return pb.Run(
            run_id=self.run_id,
            config=self.config,
            epoch=self.epoch,
            accepted_seq=self.accepted_seq,
            applied_seq=self.applied_seq,
            released_seq=self.released_seq,
            step=self.step,
            latest_checkpoint=newest.path if newest else "",
            created_at=self.created_at,
            rewound_to_seq=self.rewound_to_seq,
            num_trainable_parameters=self.num_trainable_parameters,
            num_tokens=self.num_tokens,
            engine_s=self.engine_s,
            forked_from=self.forked_from,
            owner=self.owner,
            readers=sorted(self.readers),
            changes=self.changes,
        )


def new_run_id() -> str:
    """A random run id."""
    return "run-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()


def new_record(owner: str, config: pb.RunConfig, key: str, request: bytes) -> RunRecord:
    """The record of a run that is still to be created."""
    run_id = new_run_id()
    origin = engine_pb2.EngineCreateRun(run_id=run_id, config=config)
    return RunRecord(run_id, owner, config, time.time(), origin, idempotency_key=key, request=request)


COLUMNS = (
    "run_id", "owner", "config", "created_at", "origin", "forked_from", "idempotency_key", "request", "ready", "epoch",
    "writer", "accepted_seq", "applied_seq", "released_seq", "trimmed_seq", "step", "failure_seq", "failure",
    "rewound_to_seq", "rewound_epoch", "num_trainable_parameters",
)  # fmt: skip
"""Columns of the row, named as the attributes."""


def read_rows(connection: sqlite3.Connection) -> list[RunRecord]:
    """Every run's row, oldest first; those that are damaged are left out and logged."""
    records = []
    for whole, *row in connection.execute(f"SELECT digest = {RUN}, {', '.join(COLUMNS)} FROM runs ORDER BY created_at"):
        if not whole:
            log.error("run %r is left out: its row in the database is not what was written", row[0])
            continue
        values = dict(zip(COLUMNS, row, strict=True))
        values["config"] = pb.RunConfig.FromString(values["config"])
        values["origin"] = engine_pb2.EngineCreateRun.FromString(values["origin"])
        records.append(RunRecord(**values))
    return records


def insert(connection: sqlite3.Connection, record: RunRecord, ready: bool = False) -> None:
    """Store a run's row, in place of an earlier one of that run."""
    values = {name: getattr(record, name) for name in COLUMNS}
    values |= {"config": record.config.SerializeToString(), "origin": record.origin.SerializeToString(), "ready": ready}
    replaced = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS)
    connection.execute(
        f"INSERT INTO runs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
        f" ON CONFLICT (run_id) DO UPDATE SET {replaced}",
        tuple(values.values()),
    )
