"""Checks that a restored run is the run that it was: computed with the same, and with the same results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.segments import Buffer

TOLERANCE = 1e-3
"""Relative difference of losses and gradient norms that counts as rounding, where results are not exact: on a GPU, and
where an operation was cut into other micro-batches or computed together with other runs."""
_DIGEST_BYTES = 16


class RunChanged(Exception):
    """A run would go on with something other than what it was computed with; the message says what."""


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs, in words. A loss that is not there any more is told to whoever uses it, a new fact to nobody."""
    return [
        f"{name} was {value}, is {now.get(name, 'unknown')}"
        for name, value in sorted(before.items())
        if value != now.get(name) and not (name.startswith("loss ") and name not in now)
    ]


def outcome(result: pb.OperationResult, payload: Sequence[Buffer]) -> journal_pb2.Outcome:
    """What repeating an operation must give again."""
    kept = pb.OperationResult()
    kept.CopyFrom(result)
    for name in ("timings", "tensors", "payload_bytes"):
        kept.ClearField(name)
    if kept.HasField("loss"):
        kept.loss.ClearField("warnings")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for buffer in payload:
        digest.update(buffer)
    return journal_pb2.Outcome(result=kept, payload_digest=digest.digest())


def outcome_of(result: pb.OperationResult, payload: Sequence[Buffer]) -> bytes:
    """The bytes of an outcome, with a digest of them."""
    content = outcome(result, payload).SerializeToString(deterministic=True)
    return _digest(content) + content


def parse_outcome(raw: bytes | None) -> journal_pb2.Outcome | None:
    """An outcome made by :func:`outcome_of`; None if there is none, or its bytes are not what was written."""
    if not raw or _digest(raw[_DIGEST_BYTES:]) != raw[:_DIGEST_BYTES]:
        return None
    return journal_pb2.Outcome.FromString(raw[_DIGEST_BYTES:])


def is_comparable(before: journal_pb2.Outcome, now: journal_pb2.Outcome) -> bool:
    """Whether both were computed in the same pieces, so that a CPU gives the same bits."""
    one, two = before.result.loss, now.result.loss
    pieces = one.num_microbatches == two.num_microbatches and one.recomputed == two.recomputed
    return pieces and max(one.grouped_runs, two.grouped_runs) <= 1


def divergence(before: journal_pb2.Outcome, now: journal_pb2.Outcome, *, exact: bool) -> str:
    """How two outcomes of an operation differ, in words; empty if they are the same.

    Args:
        exact: Whether bits are compared, and not losses and gradient norms within :data:`TOLERANCE`.
    """
    one, two = before.result, now.result
    for name, was, is_now in (
        ("loss", one.loss.loss, two.loss.loss),
        ("gradient norm", one.optim_step.grad_norm, two.optim_step.grad_norm),
    ):
        both_nan = math.isnan(was) and math.isnan(is_now)
        if not both_nan and not (was == is_now if exact else math.isclose(was, is_now, rel_tol=TOLERANCE)):
            return f"its {name} was {was!r} and is {is_now!r}"
    if not exact:
        return ""
    if before.payload_digest != now.payload_digest:
        return "its tensors are others"
    same = one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)
    return "" if same else f"its result was {_short(one)} and is {_short(two)}"


def _short(result: pb.OperationResult) -> str:
    return " ".join(str(result).split())[:300]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
