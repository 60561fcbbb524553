"""Usage of the server by each key, checked against its quota."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import Quota
from gradwire_server.errors import ServiceError
from gradwire_server.grammar_forms import NAMES
from gradwire_server.limits import Limits
from gradwire_server.operation_kinds import kind_of

IDS = ("input_ids", "prompt_ids", "response_ids")
PIXELS_OF_TOKEN = 1024
"""Pixels of an image that count as a token: about what a model makes one of."""


@dataclass(eq=False)
class Usage:
    """Resources held by the runs of one key.

    Attributes:
        owner: Name of the key.
        limits: The server's limits, used where the quota sets none.
        quota_of: Returns the present quota of a name.
        operations: Operations without a result.
        bytes: Bytes of their payloads.
        incoming_bytes: Bytes of payloads that are being received or journaled.
        part_bytes: Bytes of the parts of batches that wait for their last ones, in queues and engines.
        spent_tokens: Tokens counted against the rate limit; decreases with time.
        spent_at: Monotonic time in seconds at which ``spent_tokens`` was last updated.
    """

    owner: str
    limits: Limits
    quota_of: Callable[[str], Quota]
    operations: int = 0
    bytes: int = 0
    incoming_bytes: int = 0
    part_bytes: int = 0
    spent_tokens: float = 0.0
    spent_at: float = 0.0

    def check(self, size: int, tokens: int) -> None:
        """Check that another operation fits, and count its tokens.

        An operation that is larger than a quota of bytes or tokens by itself passes if nothing else is counted.

        Raises:
            ServiceError: LIMIT_EXCEEDED; its message says what to wait for.
        """
        quota, limits = self.quota_of(self.owner), self.limits
        operations = quota.queued_operations or limits.key_queued_operations
        if self.operations >= operations:
            raise _exceeded(f"has {self.operations} operations without a result", "queued_operations", operations)
        queued_bytes = quota.queued_bytes or limits.key_queued_bytes
        if self.bytes and self.bytes + size > queued_bytes:
            raise _exceeded(
                f"has {self.bytes} bytes queued, and this operation brings {size}", "queued_bytes", queued_bytes
            )
        rate = quota.tokens_per_minute or limits.key_tokens_per_minute
        if rate and self._tokens(rate) > 0 and self.spent_tokens + tokens > rate:
            wait = min(self.spent_tokens, self.spent_tokens + tokens - rate) * 60 / rate
            raise _exceeded(f"used its tokens of this minute; this fits in {wait:.0f} s", "tokens_per_minute", rate)
        self.spent_tokens += tokens if rate else 0

    def receive(self, size: int) -> None:
        """Count a payload that is about to be received."""
        limit = self.limits.max_incoming_bytes
        if self.incoming_bytes and self.incoming_bytes + size > limit:
            raise ServiceError(
                pb.ERROR_CODE_LIMIT_EXCEEDED,
                f"this key is sending {self.incoming_bytes} bytes already, and {size} more would pass {limit}"
                " (--limit max_incoming_bytes=N); send this operation again when those have arrived",
                rule=f"max_incoming_bytes = {limit}",
            )
        self.incoming_bytes += size

    def _tokens(self, rate: int) -> float:
        now = time.monotonic()
        self.spent_tokens = max(0.0, self.spent_tokens - (now - self.spent_at) * rate / 60)
        self.spent_at = now
        return self.spent_tokens


def check_runs(count: int, quota: Quota, limits: Limits) -> None:
    """Check that a key with ``count`` runs may create another.

    Raises:
        ServiceError: LIMIT_EXCEEDED if it may not.
    """
    most = limits.key_runs if quota.runs is None else quota.runs
    if count >= most:
        raise _exceeded(f"has {count} runs", "runs", most, "delete one, then make this one")


def check_uploads(size: int, more: int, quota: Quota, limits: Limits) -> None:
    """Check that a key whose uploads have ``size`` bytes may add ``more``.

    Raises:
        ServiceError: LIMIT_EXCEEDED if it may not.
    """
    most = limits.key_upload_bytes if quota.upload_bytes is None else quota.upload_bytes
    if size + more > most:
        what = f"has uploads of {size} bytes, and this one brings {more}"
        raise _exceeded(what, "upload_bytes", most, "delete one with delete_upload, then send this one again")


def check_files(size: int, more: int, quota: Quota, limits: Limits) -> None:
    """Check that a key whose files have ``size`` bytes may add ``more``, which it is sending.

    Raises:
        ServiceError: LIMIT_EXCEEDED if it may not.
    """
    most = limits.key_file_bytes if quota.file_bytes is None else quota.file_bytes
    if size + more > most:
        what = f"has files of {size} bytes, and is sending {more}"
        raise _exceeded(what, "file_bytes", most, "delete one, then send this one again")


def tokens_of(
    operation: pb.Operation, tensors: Sequence[pb.TensorSpec], pixels: int = 0, *, sampled: bool = True
) -> int:
    """Count an operation's tokens: its batch, images and grammar; if ``sampled``, also those that it may sample."""
    prompt_tokens = (
        sum(spec.shape[0] for spec in tensors if spec.name.endswith(IDS) and spec.shape) + pixels // PIXELS_OF_TOKEN
    )
    if not kind_of(operation).samples:
        return prompt_tokens
    call = operation.sample
    prompt_tokens += grammar_tokens(call)
    if not sampled:
        return prompt_tokens
    prompts = len(call.prompts) or next((spec.level_sizes[0] for spec in tensors if spec.level_sizes), 0)
    return prompt_tokens + prompts * (call.n or 1) * call.max_tokens


def grammar_tokens(call: pb.SampleCall) -> int:
    """Count a call's grammar in tokens: one for each character, as all of them have to be compiled."""
    return sum(len(getattr(call, form)) for form in NAMES)


def _exceeded(
    what: str, name: str, value: int, todo: str = "await some results, then submit this one again"
) -> ServiceError:
    flag = f"--{name.replace('_', '-')}"
    return ServiceError(
        pb.ERROR_CODE_LIMIT_EXCEEDED,
        f"this key {what}; its quota is {value} ({flag} of `gradwire keys create`, --limit key_{name}=N); {todo}",
        rule=f"{name} = {value}",
    )
