"""Checks of operations that need no model: limits, names, tensor layouts."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from gradwire_http.json_bounds import JsonBounds, UnboundedJsonError
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.quotas import IDS
from gradwire_server.checkpoint_files import AUTOMATIC, NAME, ORIGIN, SNAPSHOT
from gradwire_server.image_sizes import MAX_PIXELS, pixels
from gradwire_server.journal.checkpoint_records import CheckpointRecords
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer
from gradwire_server.limits import Limits
from gradwire_server.operation_kinds import UNKNOWN, kind_of, loss_call, step_call

UNKNOWN_LENGTH = 1 << 62
"""Context length of a model that is not loaded yet."""
SCHEMA_LEVELS = 64
"""Lists and objects inside each other in a JSON schema."""
SAMPLED_BYTES = 8
"""Bytes of a sampled token in a result, and of each of its top_logprobs: an id and a log-probability."""


class Checks:
    """The checks of operations, with what they are checked against."""

    def __init__(self, limits: Limits, checkpoints: CheckpointRecords) -> None:
        self._limits, self._checkpoints = limits, checkpoints
        self._context_lengths: dict[str, int] = {}

    def refusal(self, record: RunRecord, header: pb.OperationHeader) -> pb.Error | None:
        """Return the error of an operation that breaks a rule that can be checked without a model; None if valid."""
        context_length = self.context_length(record.config.base_model)
        return check(header, self._limits, context_length) or self._checkpoints.check_uses(record, header.operation)

    def know(self, models: Iterable[pb.ModelInfo]) -> None:
        """Take note of how much each of these models can hold."""
        self._context_lengths |= {model.name: model.context_length for model in models if model.context_length}

    def context_length(self, model: str) -> int:
        """Tokens that a model can hold."""
        return self._context_lengths.get(model, UNKNOWN_LENGTH)


def check(header: pb.OperationHeader, limits: Limits, context_length: int = UNKNOWN_LENGTH) -> pb.Error | None:
    """Return the error of an operation that breaks a rule; None if it is valid.

    The error becomes the operation's result, so that operations with higher numbers do not wait for it forever.

    Args:
        context_length: Tokens that the run's model can hold.
    """
    kind = kind_of(header.operation)
    if kind is UNKNOWN:
        return _invalid(
            "the operation is of a kind that this server does not know; is it older than the client?", "operation"
        )
    if not 0 <= header.timeout_s < float("inf"):
        return _invalid(
            f"timeout_s is {header.timeout_s}; it is a number of seconds, 0 for no limit", "timeout", ">= 0"
        )
    if header.payload_bytes > limits.max_payload_bytes:
        return _limit(f"a payload of {header.payload_bytes} bytes", "max_payload_bytes", limits.max_payload_bytes)
    if len(header.tensors) > limits.max_tensors:
        return _limit(f"{len(header.tensors)} tensors", "max_tensors", limits.max_tensors)
    try:
        codec.check(header.tensors, header.payload_bytes)
    except codec.CodecError as error:
        return pb.Error(code=pb.ERROR_CODE_INVALID_BATCH, message=str(error), field=error.field, rule=error.rule)
    for spec in header.tensors:
        rows = spec.level_sizes[0] if spec.level_sizes else spec.shape[0]
        if spec.name == codec.IMAGE_BYTES and rows > limits.max_images:
            return _limit(f"{rows} distinct images", "max_images", limits.max_images, codec.IMAGES)
        if rows > limits.max_rows:
            return _limit(f"{rows} rows in {spec.name!r}", "max_rows", limits.max_rows, spec.name)
        if spec.name.endswith(IDS) and spec.shape[0] > limits.max_batch_tokens:
            return _limit(
                f"{spec.shape[0]} tokens in {spec.name!r}", "max_batch_tokens", limits.max_batch_tokens, spec.name
            )
    wrong = _check_momentum(header.operation)
    if wrong is not None:
        return wrong
    loss = loss_call(header.operation)
    if loss is not None:
        return check_loss(loss, limits) or _check_strings(header.operation.train_step.optim_step, limits)
    if kind.samples:
        per_row = [spec for spec in header.tensors if spec.level_sizes and spec.name != codec.IMAGE_BYTES]
        rows = max((spec.level_sizes[0] for spec in per_row), default=0)
        call = header.operation.sample
        return check_sample(call, rows, limits) or check_sampled_bytes(call, rows, limits, context_length)
    asked = getattr(header.operation, kind.name)
    wrong = _check_strings(asked, limits)
    if wrong is not None:
        return wrong
    if kind.writes_files:
        name = asked.name
        if name and not NAME.fullmatch(name):
            return _invalid(
                f"{name[:100]!r} is not a name: letters, digits, '.', '_', '-', 100 at most", "name", NAME.pattern
            )
        if kind.gives_checkpoint and name.startswith(SNAPSHOT) and not asked.weights_only:
            return _invalid(f"{name[:100]!r}: names that begin with {SNAPSHOT} are those of snapshots", "name")
        if kind.gives_checkpoint and (name == ORIGIN or name.startswith(AUTOMATIC)):
            return _invalid(f"{name[:100]!r} is the server's own name for a checkpoint; choose another", "name")
    return None


def _check_momentum(operation: pb.Operation) -> pb.Error | None:
    """Return the error of a step with a momentum that its optimizer does not have; None if there is none.

    Checked here and not in the engine, which repeats what older journals hold.
    """
    step = step_call(operation)
    if step is None or not step.HasField("momentum") or step.optimizer not in ("", "adamw", "adamw8bit"):
        return None
    return _invalid(
        f"momentum is {step.momentum:g}, and {step.optimizer or 'adamw'} has none: its moments are set by betas; leave "
        'momentum out, or step with optimizer="sgd" or "muon"',
        "momentum",
        "only with sgd or muon",
    )


def check_loss(call: pb.LossCall, limits: Limits) -> pb.Error | None:
    """Return the error of a loss call that can be found without knowing the loss; None if there is none."""
    if len(call.loss_kwargs_json) > limits.max_kwargs_chars:
        what = f"{len(call.loss_kwargs_json)} characters of loss_kwargs"
        return _limit(what, "max_kwargs_chars", limits.max_kwargs_chars, "loss_kwargs")
    for field, text in [
        ("loss_fn", call.loss_fn),
        ("model", call.model),
        *(("outputs", name) for name in call.outputs),
    ]:
        if len(text) > limits.max_string_chars:
            return _limit(f"{len(text)} characters in {field}", "max_string_chars", limits.max_string_chars, field)
    try:
        json.loads(call.loss_kwargs_json or "{}")
    except (ValueError, RecursionError) as error:
        return _invalid(f"loss_kwargs is not JSON: {error}", "loss_kwargs")
    return None


FORMS = ("json_schema", "regex", "grammar")


def check_sample(call: pb.SampleCall, rows: int, limits: Limits) -> pb.Error | None:
    """Return the error of a sample call that exceeds a limit; None if it exceeds none.

    Args:
        rows: Number of prompts given as token ids.
    """
    rows = max(rows, len(call.prompts))
    counts = (
        ("prompts", rows, "max_rows", limits.max_rows),
        ("max_tokens", call.max_tokens, "max_sample_tokens", limits.max_sample_tokens),
        ("stop", max(len(call.stop), len(call.stop_token_ids)), "max_stops", limits.max_stops),
        ("stop", max(map(len, call.stop), default=0), "max_stop_chars", limits.max_stop_chars),
        ("prompts", max(map(len, call.prompts), default=0), "max_text_chars", limits.max_text_chars),
        *((form, len(getattr(call, form)), "max_kwargs_chars", limits.max_kwargs_chars) for form in FORMS),
        ("logit_bias", len(call.logit_bias), "max_logit_biases", limits.max_logit_biases),
        ("top_logprobs", call.top_logprobs, "max_top_logprobs", limits.max_top_logprobs),
        ("top_prompt_logprobs", call.top_prompt_logprobs, "max_top_logprobs", limits.max_top_logprobs),
    )
    for field, value, name, limit in counts:
        if value > limit:
            return _limit(f"sample: {value} in {field}", name, limit, field)
    if (samples := rows * (call.n or 1)) > limits.max_samples:
        what = f"n is {call.n}" if rows == 1 else f"n is {call.n or 1} and there are {rows} prompts: {samples} samples"
        return _limit(what, "max_samples", limits.max_samples, "n")
    return _check_schema(call.json_schema, limits)


def _check_schema(schema: str, limits: Limits) -> pb.Error | None:
    """Return the error of a JSON schema that would take long to compile; None for one that would not."""
    most = limits.max_schema_entries
    try:
        for _ in JsonBounds(limits.max_kwargs_chars, most, SCHEMA_LEVELS).counted(schema.encode(errors="replace")):
            pass
    except UnboundedJsonError as error:
        if error.what == "containers":
            what = "a JSON schema with more lists, objects and keys"
            return _limit(what, "max_schema_entries", most, "json_schema")
        return _invalid(f"json_schema cannot be read: {error}", "json_schema")
    return None


def _check_pixels(counts: Sequence[int], limits: Limits) -> pb.Error | None:
    largest = max(counts, default=0)
    if largest > MAX_PIXELS:
        message = f"an image has {largest:,} pixels, and may have {MAX_PIXELS:,}; make it smaller before sending"
        return pb.Error(
            code=pb.ERROR_CODE_LIMIT_EXCEEDED, message=message, field=codec.IMAGES, rule=f"pixels <= {MAX_PIXELS}"
        )
    if sum(counts) > limits.max_pixels:
        return _limit(f"{sum(counts):,} pixels in images", "max_pixels", limits.max_pixels, codec.IMAGES)
    return None


def check_sampled_bytes(call: pb.SampleCall, rows: int, limits: Limits, context_length: int) -> pb.Error | None:
    """Return the error of a sample call whose result might be larger than a payload may be; None if it cannot be.

    Args:
        rows: Number of prompts given as token ids.
        context_length: Tokens that the model can hold, which end every sample.
    """
    samples, tokens = max(rows, len(call.prompts)) * (call.n or 1), min(call.max_tokens, context_length)
    token_bytes = SAMPLED_BYTES * (1 + call.top_logprobs)
    needed, most = samples * tokens * token_bytes, limits.max_payload_bytes
    if needed <= most:
        return None
    message = (
        f"sample: {samples:,} samples of up to {tokens:,} tokens may take {needed:,} bytes as ids and"
        f" log-probabilities, and a result has {most:,} at most (--limit max_payload_bytes=N); ask for"
        f" {most // (tokens * token_bytes):,} samples at a time, or for"
        f" max_tokens={most // (samples * token_bytes)}"
    )
    rule = f"max_payload_bytes = {most}"
    return pb.Error(code=pb.ERROR_CODE_LIMIT_EXCEEDED, message=message, field="max_tokens", rule=rule)


def check_sample_request(request: pb.SampleRequest, limits: Limits) -> pb.Error | None:
    """Return the error of a sample request outside a run that exceeds a limit; see :func:`check_sample`."""
    longest = max((len(prompt.ids) for prompt in request.prompt_ids), default=0)
    if longest > limits.max_row_tokens:
        return _limit(f"{longest} tokens in a prompt", "max_row_tokens", limits.max_row_tokens, "prompt_ids")
    tokens = sum(len(prompt.ids) for prompt in request.prompt_ids)
    if request.call.prompt_logprobs and tokens > limits.max_batch_tokens:
        what = f"{tokens} tokens to score"
        return _limit(what, "max_batch_tokens", limits.max_batch_tokens, "prompt_ids")
    cells = sum(len(candidates.ids) for candidates in request.prompt_candidates)
    if cells > limits.max_batch_tokens:
        return _limit(f"{cells} ids to score", "max_batch_tokens", limits.max_batch_tokens, "prompt_candidates")
    if request.prompt_draws > limits.max_top_logprobs:
        what = f"{request.prompt_draws} tokens to draw in each place of a prompt"
        return _limit(what, "max_top_logprobs", limits.max_top_logprobs, "prompt_draws")
    if len(request.images) > limits.max_images:
        return _limit(f"{len(request.images)} distinct images", "max_images", limits.max_images, codec.IMAGES)
    largest = max(map(len, request.images), default=0)
    if largest > limits.max_image_bytes:
        return _limit(f"an image of {largest} bytes", "max_image_bytes", limits.max_image_bytes, codec.IMAGES)
    if (error := _check_pixels(pixels_of_images(request.images), limits)) is not None:
        return error
    if len(request.model) > limits.max_string_chars:
        what = f"{len(request.model)} characters in model"
        return _limit(what, "max_string_chars", limits.max_string_chars, "model")
    return check_sample(request.call, len(request.prompt_ids), limits)


def check_rows(header: pb.OperationHeader, chunks: Sequence[bytes], limits: Limits) -> pb.Error | None:
    """Return an error if a row of token ids or an image is too long; reads only the lengths from the payload."""
    if (error := _check_pixels(pixels_of_batch(header, chunks), limits)) is not None:
        return error
    offset = 0
    for spec in header.tensors:
        sizes = spec.level_sizes
        if spec.name == codec.IMAGE_BYTES and len(sizes) == 1:
            lengths = np.frombuffer(cut(chunks, offset, offset + 4 * sizes[0]), "<u4")
            if lengths.size and (largest := int(lengths.max())) > limits.max_image_bytes:
                return _limit(f"an image of {largest} bytes", "max_image_bytes", limits.max_image_bytes, codec.IMAGES)
        if sizes and spec.name.endswith(IDS):
            begin = offset + 4 * sum(sizes[:-1])
            lengths = np.frombuffer(cut(chunks, begin, begin + 4 * sizes[-1]), "<u4")
            if lengths.size and (longest := int(lengths.max())) > limits.max_row_tokens:
                row = int(lengths.argmax())
                error = _limit(
                    f"{longest} tokens in row {row} of {spec.name!r}",
                    "max_row_tokens",
                    limits.max_row_tokens,
                    spec.name,
                )
                if len(sizes) == 1:
                    error.row = row
                return error
        offset += codec.spec_bytes(spec)
    return None


def check_room(save: pb.SaveCheckpoint, checkpoints: Mapping[str, pb.Checkpoint], limits: Limits) -> pb.Error | None:
    """Return an error if a run may not keep another checkpoint.

    Snapshots count apart from other checkpoints, against limits of the same size. The size of the new checkpoint is not
    known yet, so only the bytes of those already kept are counted.
    """
    kept = [one for one in checkpoints.values() if not (save.overwrite and one.name == save.name)]
    snapshot = save.name.startswith(SNAPSHOT)
    kept = [one for one in kept if one.name != ORIGIN and not one.name.startswith(AUTOMATIC)]
    kept = [one for one in kept if one.name.startswith(SNAPSHOT) == snapshot]
    if len(kept) >= limits.max_checkpoints:
        return _limit(f"the run keeps {len(kept)} checkpoints already", "max_checkpoints", limits.max_checkpoints)
    size = sum(one.size_bytes for one in kept)
    if size >= limits.max_checkpoint_bytes:
        what = f"the run's checkpoints hold {size} bytes already"
        return _limit(what, "max_checkpoint_bytes", limits.max_checkpoint_bytes)
    return None


def _check_strings(message: Any, limits: Limits) -> pb.Error | None:
    for field, text in _strings(message):
        if len(text) > limits.max_string_chars:
            return _limit(f"{len(text)} characters in {field}", "max_string_chars", limits.max_string_chars, field)
    return None


def _strings(message: Any) -> Iterator[tuple[str, str]]:
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            for text in [value] if isinstance(value, str) else value:
                yield field.name, text


def _invalid(message: str, field: str, rule: str = "") -> pb.Error:
    return pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message, field=field, rule=rule)


def _limit(what: str, name: str, limit: int, field: str = "") -> pb.Error:
    message = f"{what}: the limit is {limit} (--limit {name}=N)"
    return pb.Error(code=pb.ERROR_CODE_LIMIT_EXCEEDED, message=message, field=field, rule=f"{name} = {limit}")


CHUNKS_OF_HEADER = 3
"""Chunks in which an image's header is; chunks are larger than headers, but for the last one of a frame."""


def pixels_of_batch(header: pb.OperationHeader, chunks: Sequence[Buffer]) -> list[int]:
    """Pixels of each image of a batch, by the headers of the images."""
    offset = 0
    for spec in header.tensors:
        sizes = spec.level_sizes
        if spec.name == codec.IMAGE_BYTES and len(sizes) == 1:
            lengths = np.frombuffer(cut(chunks, offset, offset + 4 * sizes[0]), "<u4")
            return _pixels(chunks, offset + 4 * sizes[0], lengths.tolist())
        offset += codec.spec_bytes(spec)
    return []


def pixels_of_images(images: Iterable[bytes]) -> list[int]:
    """Pixels of each image by its header."""
    return [pixels(partial(_beginning, [image], 0, len(image))) for image in images]


def _pixels(chunks: Sequence[Buffer], begin: int, lengths: Sequence[int]) -> list[int]:
    """Pixels of images whose contents follow each other in a payload from ``begin`` on."""
    starts = [0, *accumulate(map(len, chunks))]
    counts = []
    for length in lengths:
        first = bisect_right(starts, begin) - 1
        near, at = chunks[first : first + CHUNKS_OF_HEADER], begin - starts[first]
        counts.append(pixels(partial(_beginning, near, at, length)))
        begin += length
    return counts


def _beginning(chunks: Sequence[Buffer], begin: int, length: int, size: int) -> bytes:
    return cut(chunks, begin, begin + min(length, size))


def cut(chunks: Sequence[Buffer], begin: int, end: int) -> bytes:
    """These bytes of a payload."""
    parts, at = list[Buffer](), 0
    for chunk in chunks:
        if at >= end:
            break
        parts.append(chunk[max(begin - at, 0) : max(end - at, 0)])
        at += len(chunk)
    return b"".join(parts)
