"""Recordings of a run (batches as their losses saw them, and rollouts), and its current operations.

``B`` rows of a batch, ``T`` tokens of one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gradwire_proto import codec
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import described
from gradwire.results import Array

SAMPLER_FIELDS = ("sampler_log_probs", "logprobs", "old_log_probs")
SIDES = ("chosen", "rejected", "gold")
NOTHING: Array = np.zeros(0)


@dataclass(frozen=True)
class Recording:
    """Something that was recorded of a run.

    Attributes:
        kind: ``"batch"`` or ``"rollouts"``.
        number: Number of the operation, or iteration of the rollouts.
        step: Optimizer steps of the run before it.
        time: Unix time in seconds.
        size_bytes: Size on the server's disk.
        operation, loss_fn: The operation and loss of a batch.
        loss: The loss's value on a batch; None if it has none.
        rows: Sequences, or rollouts.
        tokens: Tokens that went through the model.
    """

    kind: str
    number: int
    step: int
    time: float
    size_bytes: int
    operation: str
    loss_fn: str
    loss: float | None
    rows: int
    tokens: int

    @staticmethod
    def from_message(message: pb.Recording) -> Recording:
        return described(Recording, message)


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One sequence of a recorded batch. What a token or the batch has not is NaN.

    Attributes:
        row: Number of its row in the batch.
        part: ``""``, ``"chosen"``, ``"rejected"``, or ``"sample 2"`` of its row.
        token_ids: ``[T]`` int.
        scored: ``[T]`` bool, whether the loss scores the token.
        logprobs: ``[T]`` log-probability under the trained weights, as the loss saw it, in nats.
        sampler_logprobs: ``[T]`` the same as the batch says of the policy that wrote the token.
        advantages: ``[T]`` as the loss used them, or as the batch has them.
        reward: Reward of the sequence; NaN without.
    """

    row: int
    part: str
    token_ids: Array
    scored: Array
    logprobs: Array
    sampler_logprobs: Array
    advantages: Array
    reward: float

    @property
    def ratios(self) -> Array:
        """``[T]`` probability of each token under the trainer divided by that under the sampler."""
        return np.asarray(np.exp(self.logprobs - self.sampler_logprobs))


@dataclass(frozen=True, eq=False)
class RecordedBatch:
    """A batch as its loss saw it.

    Attributes:
        recording: What it is.
        loss_kwargs: Arguments of the loss.
        fields: The batch's fields as they were submitted: arrays of ``[B]``, or lists of a row's values.
        sequences: Its sequences with what is known of each token, in the order of the loss.
    """

    recording: Recording
    loss_kwargs: Mapping[str, Any]
    fields: Mapping[str, Any]
    sequences: tuple[RecordedSequence, ...]

    @staticmethod
    def from_wire(message: pb.Recording, content: bytes) -> RecordedBatch:
        """Read a recording's content: the batch's tensors, then the outputs'."""
        size = sum(codec.spec_bytes(spec) for spec in message.tensors)
        columns = codec.decode(message.tensors, content[:size])
        outputs = codec.decode(message.outputs, content[size:])
        logprobs, advantages = (outputs[name].rows() if name in outputs else [] for name in ("logprobs", "advantages"))
        fields = {name: _nested(column) for name, column in columns.items()}
        return RecordedBatch(
            recording=Recording.from_message(message),
            loss_kwargs=json.loads(message.loss_kwargs_json or "{}"),
            fields=fields,
            sequences=tuple(
                _sequence(each, *(rows[number] if number < len(rows) else NOTHING for rows in (logprobs, advantages)))
                for number, each in enumerate(_sequences(fields))
            ),
        )


@dataclass(frozen=True)
class OperationInfo:
    """An operation of a run.

    Attributes:
        seq: Its number.
        operation: ``"forward_backward"``, ``"optim_step"`` and so on.
        loss_fn: Its loss, if it has one.
        state: ``"waiting"`` (for a missing number), ``"queued"``, ``"executing"``, ``"succeeded"``, ``"failed"`` or
            ``"cancelled"``.
        accepted_at: Unix time in seconds.
        front_s: Seconds beside queue and engine: the journal, the front, the way to the engine.
        queue_s: Seconds in the queue; so far, if it has no result.
        engine_s: Seconds of computing.
        deaths: Engines that died while they executed it.
        retried: Whether it was sent to an engine more than once.
        error: Why it failed.
        payload_bytes: Size of its tensors.
    """

    seq: int
    operation: str
    loss_fn: str
    state: str
    accepted_at: float
    front_s: float
    queue_s: float
    engine_s: float
    deaths: int
    retried: bool
    error: str
    payload_bytes: int

    @staticmethod
    def from_message(message: pb.OperationEntry) -> OperationInfo:
        return described(OperationInfo, message, error=message.error.message)


@dataclass(frozen=True)
class RunActivity:
    """A run's newest operations and its recovery, if one is in progress.

    Attributes:
        operations: The newest, newest first: those without a result, and those that have one since the server started.
        recoveries: How often the run was brought back into an engine since the server started.
        loading_s: Seconds in which a recovery now would load the newest checkpoint.
        replay_s: Seconds in which a recovery now would repeat the operations after that checkpoint.
    """

    operations: tuple[OperationInfo, ...]
    recoveries: int
    loading_s: float
    replay_s: float

    @staticmethod
    def from_message(message: pb.ListOperationsResponse) -> RunActivity:
        operations = tuple(map(OperationInfo.from_message, message.operations))
        return described(RunActivity, message, operations=operations)


@dataclass(frozen=True)
class QueuedRun:
    """A run that has operations without a result.

    Attributes:
        run_id, name, owner: Empty for a run that your key may not read.
        engine: Number of the engine that it is on. Runs of one engine wait for each other.
        executing: Operations at the engine.
        waiting: Operations that wait for their turn.
        oldest_s: Seconds since the oldest was accepted.
        operation: Kind of the oldest.
        bytes: Size of their tensors.
        parked: Whether the run cannot go on.
    """

    run_id: str
    name: str
    owner: str
    engine: int
    executing: int
    waiting: int
    oldest_s: float
    operation: str
    bytes: int
    parked: bool

    @staticmethod
    def from_message(message: pb.QueuedRun) -> QueuedRun:
        return described(QueuedRun, message)


@dataclass(frozen=True)
class KeyInfo:
    """A key of a server, without its secret.

    Attributes:
        name: Name of its owner, to whom runs belong.
        role: ``"admin"``, ``"user"``, ``"viewer"`` or ``"engine"``.
        created_at: Unix time.
        revoked_at: Unix time; 0 for a valid key.
        quota: Its limits by name, those that are not the server's.
    """

    name: str
    role: str
    created_at: float
    revoked_at: float
    quota: Mapping[str, int]

    @staticmethod
    def from_message(message: pb.KeyInfo) -> KeyInfo:
        return described(KeyInfo, message)


@dataclass
class _Sequence:
    """A sequence with the fields that belong to its tokens; ``first`` is the place of their first token."""

    row: int
    part: str
    ids: Array
    mask: Array | None
    first: int
    fields: Mapping[str, Any]


def _sequences(fields: Mapping[str, Any]) -> Iterator[_Sequence]:
    if "response_ids" in fields:
        for row, prompt in enumerate(fields["prompt_ids"]):
            prompt = _kept(prompt, _at(fields.get("prompt_masks"), row))
            for number, response in enumerate(fields["response_ids"][row]):
                own = {name: _at(_at(values, row), number) for name, values in fields.items()}
                ids = np.concatenate([prompt, response])
                yield _Sequence(row, f"sample {number + 1}", ids, own.get("response_masks"), len(prompt), own)
    elif "chosen_input_ids" in fields:
        for row in range(len(fields["chosen_input_ids"])):
            for side in SIDES:
                if f"{side}_input_ids" in fields:
                    own = _side(fields, side, row)
                    yield _rows(row, side, own["input_ids"], own)
    elif "input_ids" in fields:
        name = "target_tokens" if "target_tokens" in fields else "input_ids"
        for row, ids in enumerate(fields[name]):
            own = {key: _at(values, row) for key, values in fields.items()}
            yield _rows(row, "", ids, own, shifted=name == "input_ids")


def _side(fields: Mapping[str, Any], side: str, row: int) -> dict[str, Any]:
    """The fields of one sequence of a pair, without the side in their names."""
    shared = {name: _at(values, row) for name, values in fields.items() if name.partition("_")[0] not in SIDES}
    own = {
        name.removeprefix(f"{side}_"): _at(values, row)
        for name, values in fields.items()
        if name.startswith(f"{side}_")
    }
    return shared | own


def _rows(row: int, part: str, ids: Array, own: Mapping[str, Any], *, shifted: bool = True) -> _Sequence:
    mask = own.get("loss_mask", own.get("mask"))
    if mask is None:
        mask = np.ones(len(ids), bool)
        if own.get("labels") is not None and len(own["labels"]) == len(ids):
            mask = np.asarray(own["labels"]) != -100
        if own.get("prompt_lengths") is not None:
            mask[: int(own["prompt_lengths"])] = False
    mask = np.array(mask, bool)
    if shifted and len(mask):
        mask[0] = False  # nothing is read before the first token
    real = own.get("attention_mask")
    if real is not None and len(real) == len(ids):
        keep = np.asarray(real, bool)
        own = {name: values[keep] if np.shape(values) == keep.shape else values for name, values in own.items()}
        ids, mask = ids[keep], mask[keep] if len(mask) == len(keep) else mask
    return _Sequence(row, part, ids, mask, 0, own)


def _sequence(sequence: _Sequence, logprobs: Array, advantages: Array) -> RecordedSequence:
    count, own = len(sequence.ids), len(sequence.ids) - sequence.first
    scored = np.zeros(count, bool)
    mask = np.ones(own, bool) if sequence.mask is None else np.asarray(sequence.mask, bool)
    if len(mask) == own:
        scored[sequence.first :] = mask
    places = np.flatnonzero(scored)
    if 0 < len(logprobs) < len(places):  # the server takes runs of the pad token at the end for padding
        places = places[: len(logprobs)]
        scored[places[-1] + 1 :] = False

    def placed(values: Any) -> Array:
        of_tokens = np.full(count, np.nan)
        values = np.asarray(values if values is not None else [], np.float64)
        if values.ndim == 0 or len(values) == len(places):
            of_tokens[places] = values
        elif len(values) == own:
            of_tokens[sequence.first :] = values
            of_tokens[~scored] = np.nan
        return of_tokens

    sampler = next((sequence.fields[name] for name in SAMPLER_FIELDS if sequence.fields.get(name) is not None), None)
    reward = sequence.fields.get("rewards")
    return RecordedSequence(
        row=sequence.row,
        part=sequence.part,
        token_ids=np.asarray(sequence.ids),
        scored=scored,
        logprobs=placed(logprobs),
        sampler_logprobs=placed(sampler),
        advantages=placed(advantages if len(advantages) else sequence.fields.get("advantages")),
        reward=float(reward) if isinstance(reward, np.number | float | int) else float("nan"),
    )


def _at(values: Any, place: int) -> Any:
    several = isinstance(values, list) or (isinstance(values, np.ndarray) and values.ndim > 0)
    return values[place] if several and place < len(values) else None


def _kept(ids: Array, mask: Any) -> Array:
    return ids if mask is None or len(mask) != len(ids) else ids[np.asarray(mask, bool)]


def _nested(column: codec.Column) -> Any:
    nested: Any = column.values
    for lengths in reversed(column.levels):
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = ends - lengths
        nested = [nested[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    return nested


def rollouts_json(rollouts: Sequence[Mapping[str, Any]], most_bytes: int) -> tuple[bytes, int]:
    """The first rollouts that fit, as JSON, and their number."""
    texts, size = [], 2
    for each in rollouts:
        text = json.dumps(each)
        size += len(text.encode()) + 1
        if size > most_bytes:
            break
        texts.append(text)
    return f"[{','.join(texts)}]".encode(), len(texts)
