"""Ids and paths of the protocol, and the names that checkpoints have in the core.

A model is ``SESSION:train:N`` and a sampler ``SESSION:sample:N``; clients make up the former themselves. A promise is a
model's or a sampler's id with a number and the kind of operation, so that it means the same after a restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.checkpoint_files import NAME
from gradwire_server.errors import ServiceError, invalid

PathKind = Literal["weights", "sampler_weights", "external_weights"]
PATH_KINDS: tuple[PathKind, ...] = ("weights", "sampler_weights", "external_weights")
MODEL_ID = re.compile(r"([0-9a-f-]{8,64}):train:(\d{1,18})")
REQUEST_ID = re.compile(r"([0-9a-f-]{8,64}:(?:train|sample):\d{1,18}):(\d{1,19}):([a-z_]{1,30})")


@dataclass(frozen=True)
class TinkerPath:
    """``tinker://MODEL_ID/KIND/NAME``: a checkpoint of a model. Each kind has names of its own."""

    model_id: str
    kind: PathKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """``KIND/NAME``."""
        return f"{self.kind}/{self.name}"

    @property
    def stored_name(self) -> str:
        """The checkpoint's name in the core, where a run has one space of names."""
        return f"{self.kind}.{self.name}"

    @classmethod
    def read(cls, text: str) -> TinkerPath:
        """Parse a path."""
        scheme, _, rest = text.partition("://")
        model_id, _, checkpoint_id = rest.partition("/")
        if scheme != "tinker" or not checkpoint_id:
            raise invalid(f"{text[:200]!r} is not a path; it is tinker://MODEL_ID/weights/NAME", "path")
        return cls.of(model_id, checkpoint_id)

    @classmethod
    def of(cls, model_id: str, checkpoint_id: str) -> TinkerPath:
        """The path of a model's checkpoint ``KIND/NAME``."""
        kind, _, name = checkpoint_id.partition("/")
        for known in PATH_KINDS:
            if kind == known:
                check_name(name, known)
                return cls(model_id, known, name)
        raise invalid(f"{kind[:50]!r} is no kind of checkpoint; there are {', '.join(PATH_KINDS)}", "path")

    @classmethod
    def stored(cls, model_id: str, stored_name: str) -> TinkerPath | None:
        """The path of a checkpoint by its name in the core; None if it is not one of this protocol's."""
        for kind in PATH_KINDS:
            if stored_name.startswith(kind + "."):
                return cls(model_id, kind, stored_name.removeprefix(kind + "."))
        return None


def check_name(name: str, kind: PathKind) -> None:
    """Check the name of a checkpoint."""
    if not NAME.fullmatch(f"{kind}.{name}") or not name:
        most = 99 - len(kind)
        message = f"{name[:100]!r} is not a name: letters, digits, '.', '_', '-', {most} at most"
        raise invalid(message, "path")


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a session's model, which the client makes up in the same way."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    """The id of a session's sampler."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def request_id_of(owner_id: str, seq: int, kind: str) -> str:
    """The id of a promise: of a model or sampler, a number, and the kind of its result."""
    return f"{owner_id}:{seq}:{kind}"


def read_request_id(request_id: str) -> tuple[str, int, str]:
    """Split a promise's id into the model or sampler, the number and the kind.

    Raises:
        ServiceError: UNKNOWN_OPERATION for an id that this server cannot have given.
    """
    match = REQUEST_ID.fullmatch(request_id)
    if match is None:
        message = f"there is no request {request_id[:200]!r}"
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_OPERATION, message, field="request_id")
    return match[1], int(match[2]), match[3]
