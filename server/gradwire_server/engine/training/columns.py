"""From the columns of calls to a batch: a call's loss, its columns, and those of the parts that came before it.

All parts of a batch but the last come with ``forward_backward(accumulate=True)``. They are joined as columns, before
anything is read from them, so the loss gets the batch that a single call would have sent, and nothing of the
computation knows of parts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from gradwire_losses.batch import Batch, segment_sum
from gradwire_losses.causal_lm import causal_lm
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS
from gradwire_losses.layouts import read_batch
from gradwire_losses.padding import Padding, cut_padding
from gradwire_losses.registry import FieldSpec, LossConfig, LossSpec, get_loss
from gradwire_losses.tinker import MASK, TARGET_TOKENS
from gradwire_proto import codec
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2
from numpy.typing import NDArray
from torch import Tensor

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.failures import read_config
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.vision.row_images import check_without_images, images_of_rows, with_images

Columns = Mapping[str, Column]

CANDIDATES = FieldSpec(
    "candidates",
    "int",
    ("[rows, tokens, candidates]",),
    "Token ids in each token's place, whose log-probabilities are the score candidate_logprobs.",
    aligned_with="input_ids",
    ids=True,
)
PLAIN = LossSpec(
    name="forward",
    function=causal_lm,
    config=LossConfig,
    layout="rows",
    fields=(INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS, replace(TARGET_TOKENS, required=False), MASK, CANDIDATES),
    scores=lambda config, present: frozenset({"logprobs"}),
    metrics={},
    reference="",
    formula="",
    streams=lambda config, present: True,
)
"""The fields of a batch whose call names no loss."""
_PREFIX = "part:"


def read_loss(call: training_pb2.LossCall) -> tuple[LossSpec, LossConfig]:
    """The loss that a call names, and its arguments.

    Raises:
        OperationError: UNKNOWN_LOSS, or INVALID_ARGUMENT with the argument.
    """
    try:
        loss = get_loss(call.loss_fn)
    except KeyError as error:
        raise OperationError(
            training_pb2.ERROR_CODE_UNKNOWN_LOSS, str(error.args[0]), field="loss_fn", rule="a registered loss"
        ) from None
    try:
        return loss, _valid_config(loss.config, call.loss_kwargs_json or "{}")
    except (ValueError, RecursionError):
        pass  # what is wrong with them is said below
    try:
        kwargs = json.loads(call.loss_kwargs_json or "{}")
    except ValueError as error:
        raise invalid(f"loss_kwargs is not JSON: {error}", "loss_kwargs") from None
    if not isinstance(kwargs, dict):
        raise invalid("loss_kwargs is not an object of arguments by name", "loss_kwargs")
    return loss, read_config(loss, kwargs)


@lru_cache(maxsize=64)
def _valid_config(config: type[LossConfig], kwargs_json: str) -> LossConfig:
    """The arguments of a loss, which cannot be changed; most calls have those of an earlier one."""
    return config.model_validate(json.loads(kwargs_json))


def read_columns(loss: LossSpec, columns: Columns, policy: Policy, maybe_padded: Collection[str]) -> Batch:
    """Check the columns of a whole batch, and read it.

    Raises:
        BatchError, OperationError: The batch is invalid.
    """
    facts = policy.facts
    batch = read_batch(
        loss,
        {name: column for name, column in columns.items() if name not in (IMAGES, IMAGE_BYTES)},
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        padding=_padding(policy, maybe_padded),
    )
    if IMAGES in columns or IMAGE_BYTES in columns:
        return with_images(batch, images_of_rows(policy, columns))
    if policy.split_model.vision is not None:
        rows = segment_sum(batch.lengths, batch.group_sizes)
        check_without_images(policy, batch.input_ids.split(rows.tolist()))
    return batch


def refuse_part(call: training_pb2.LossCall) -> None:
    """Refuse a part of a batch where a whole one is read."""
    if call.accumulate:
        raise invalid("accumulate is for forward_backward, and for all parts of a batch but the last", "accumulate")


class BatchParts:
    """The parts received so far, in order; false while there are none.

    Attributes:
        nbytes: Bytes of their columns.
    """

    def __init__(self) -> None:
        self._call = training_pb2.LossCall()
        self._parts: list[Columns] = []
        self._lengths: list[dict[str, NDArray[np.uint32]]] = []  # also while others keep the parts
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def loss_fn(self) -> str:
        """The loss that the parts are for."""
        return self._call.loss_fn

    def hold(self, call: training_pb2.LossCall, columns: Columns, policy: Policy) -> list[str]:
        """Check a part, and hold it until the last one comes; returns warnings.

        Raises:
            OperationError: The part is invalid, or belongs to another batch than those before it.
        """
        loss, _ = read_loss(call)
        if call.outputs:
            raise invalid("outputs are those of the whole batch: ask for them with its last part", "outputs")
        columns, guesses = _unpadded(loss, columns, policy, call.maybe_padded)
        self._check(call, columns)
        batch = read_columns(loss, columns, policy, ())
        self._add(call, columns)
        return [*guesses, *batch.warnings]

    def read_last(self, loss: LossSpec, call: training_pb2.LossCall, columns: Columns, policy: Policy) -> Batch:
        """Read the batch whose last part these columns are.

        Raises:
            OperationError: The batch is invalid, or not that of the parts before it.
        """
        columns, _ = _unpadded(loss, columns, policy, call.maybe_padded)
        self._check(call, columns)
        return read_columns(loss, joined([*self._parts, columns]), policy, ())

    def _check(self, call: training_pb2.LossCall, columns: Columns) -> None:
        """Check that a call may bring a further part, or the last one."""
        if not self._parts:
            return
        for field in ("loss_fn", "loss_kwargs"):
            mine, theirs = (_argument(each, field) for each in (self._call, call))
            if mine != theirs:
                raise OperationError(
                    training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    f"{field} is {theirs!r}, and {len(self)} parts of a batch wait for their last one, whose {field} is"
                    f" {mine!r}: send that without accumulate, or drop the parts with zero_grad",
                    field=field,
                    rule="the same for all parts of a batch",
                )
        _check_alike(self._parts[0], columns, len(self) + 1)

    def _add(self, call: training_pb2.LossCall, columns: Columns) -> None:
        """Hold a checked part; the front bounds the bytes of all of them."""
        self._call.CopyFrom(call)
        self._parts.append(columns)
        self._lengths.append({name: each.levels[-1].copy() for name, each in columns.items() if each.levels})
        self.nbytes += sum(each.nbytes for column in columns.values() for each in (column.values, *column.levels))

    def row_lengths(self, name: str) -> Sequence[NDArray[np.uint32]]:
        """The innermost lengths of a column, for each part; also while others keep the parts."""
        return [lengths[name] for lengths in self._lengths if name in lengths]

    def release(self) -> None:
        """Give up the columns of :meth:`state_tensors`, which somebody else keeps until :meth:`put`."""
        self._parts.clear()

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the columns."""
        self._parts = self.of_state_tensors(tensors)._parts

    def state_tensors(self) -> dict[str, Tensor]:
        """The parts as uint8 tensors: each part's call and columns as on the wire, and their payload."""
        state = {}
        for number, part in enumerate(self._parts):
            specs, buffers = codec.encode(part)
            call = training_pb2.Operation(forward_backward=self._call)
            header = training_pb2.OperationHeader(operation=call, tensors=specs).SerializeToString()
            for name, content in (("header", header), ("payload", b"".join(buffers))):
                state[f"{_PREFIX}{number}:{name}"] = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        return state

    @classmethod
    def of_state_tensors(cls, tensors: Mapping[str, Tensor]) -> BatchParts:
        """The parts of :meth:`state_tensors`; other entries are ignored."""
        parts = cls()
        while f"{_PREFIX}{len(parts)}:header" in tensors:
            raw, payload = (tensors[f"{_PREFIX}{len(parts)}:{name}"].numpy() for name in ("header", "payload"))
            header = training_pb2.OperationHeader.FromString(raw.tobytes())
            parts._add(header.operation.forward_backward, codec.decode(header.tensors, payload.tobytes()))
        return parts


def is_part(path: str) -> bool:
    """Whether a name is of :meth:`BatchParts.state_tensors`."""
    return path.startswith(_PREFIX)


def joined(parts: Sequence[Columns]) -> dict[str, Column]:
    """One batch of several with the same fields, row after row."""
    if any(IMAGES in part for part in parts):
        parts = _with_images(parts)
    columns_by_name = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        columns_by_name[name] = Column(
            np.concatenate([each.values for each in columns]),
            tuple(np.concatenate(levels) for levels in zip(*(each.levels for each in columns), strict=True)),
        )
    return columns_by_name


def _check_alike(first: Columns, part: Columns, number: int) -> None:
    odd = (part.keys() ^ first.keys()) - {IMAGES, IMAGE_BYTES}
    if odd:
        name = min(odd)
        has, lacks = ("the first part", f"part {number}") if name in first else (f"part {number}", "the first part")
        raise _refused(f"{has} of this batch has the field {name}, and {lacks} has not", name)
    for name in part.keys() & first.keys():
        mine, theirs = first[name], part[name]
        if (len(mine.levels), mine.values.shape[1:]) != (len(theirs.levels), theirs.values.shape[1:]):
            raise _refused(
                f"{name} is {_shape(theirs)} in part {number} of this batch and {_shape(mine)} in the first", name
            )


def _with_images(parts: Sequence[Columns]) -> list[Columns]:
    """Number the images over all parts, and give parts without images empty rows of them."""
    numbered: list[Columns] = []
    count = 0
    for part in parts:
        rows = max((column.num_rows for name, column in part.items() if name != IMAGE_BYTES), default=0)
        numbers = part.get(IMAGES, Column(np.zeros(0, np.int64), (np.zeros(rows, np.uint32),)))
        contents = part.get(IMAGE_BYTES, Column(np.zeros(0, np.uint8), (np.zeros(0, np.uint32),)))
        shifted = Column(numbers.values.astype(np.int64) + count, numbers.levels)
        numbered.append({**part, IMAGES: shifted, IMAGE_BYTES: contents})
        count += contents.num_rows
    return numbered


def _padding(policy: Policy, maybe_padded: Collection[str]) -> Padding:
    return Padding(frozenset(maybe_padded), policy.facts.pad_token_id, policy.facts.eos_token_ids)


def _unpadded(
    loss: LossSpec, columns: Columns, policy: Policy, maybe_padded: Collection[str]
) -> tuple[Columns, list[str]]:
    """A part's columns without padding, which is told by the rows that came together; and warnings."""
    found, guesses = cut_padding(loss, columns, _padding(policy, maybe_padded))
    return {name: Column(column.values, column.levels) for name, column in found.items()}, guesses


def _argument(call: training_pb2.LossCall, name: str) -> object:
    return call.loss_fn if name == "loss_fn" else json.loads(call.loss_kwargs_json or "{}")


def _shape(column: Column) -> str:
    names = ["rows", "tokens"] if len(column.levels) < 2 else ["rows", "samples", "tokens"]
    return f"[{', '.join([*names[: len(column.levels) + 1], *map(str, column.values.shape[1:])])}]"


def _refused(message: str, field: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_BATCH, message, field=field, rule="the same fields in all parts of a batch"
    )
