"""Reading of a call of a loss and of its batch, which may come in parts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from gradwire_losses.batch import Batch, segment_sum
from gradwire_losses.causal_lm import causal_lm
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS
from gradwire_losses.layouts import read_batch
from gradwire_losses.padding import Padding, cut_padding
from gradwire_losses.registry import FieldSpec, LossConfig, LossSpec, get_loss
from gradwire_losses.tinker import MASK, TARGET_TOKENS
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.failures import read_config
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.images import check_without_images, images_of_rows, with_images
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.batch_parts import BatchParts

CANDIDATES = FieldSpec(
    "candidates",
    "int",
    ("[rows, tokens, candidates]",),
    "Token ids in each token's place, whose log-probabilities are the score candidate_logprobs.",
    aligned_with="input_ids",
    ids=True,
)

# Fields read from a batch when the call names no loss.
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


def read(loss: LossSpec, columns: Columns, policy: Policy, maybe_padded: Collection[str]) -> Batch:
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


def hold(run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> Outcome:
    """Check a part of a batch, and hold it until the last one comes.

    Raises:
        OperationError: The part is invalid, or belongs to another batch than those before it.
    """
    loss, _ = read_loss(call)
    if call.outputs:
        raise invalid("outputs are those of the whole batch: ask for them with its last part", "outputs")
    columns, guesses = _unpadded(loss, columns, run.policy, call.maybe_padded)
    parts = run.accumulator.parts or BatchParts()
    parts.check(call, columns)
    batch = read(loss, columns, run.policy, ())
    parts.add(call, columns)
    run.accumulator.parts = parts
    return Outcome(training_pb2.OperationResult(loss=training_pb2.LossResult(warnings=[*guesses, *batch.warnings])))


def read_whole(run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> Batch:
    """Read a batch of a run; if parts of it came before, these columns are the last.

    Raises:
        OperationError: The batch is invalid, or not that of the parts before it.
    """
    (loss, _), parts = read_loss(call), run.accumulator.parts
    refuse_part(call)
    if parts is None:
        return read(loss, columns, run.policy, call.maybe_padded)
    columns, _ = _unpadded(loss, columns, run.policy, call.maybe_padded)
    parts.check(call, columns)
    return read(loss, parts.whole(columns), run.policy, ())


def refuse_part(call: training_pb2.LossCall) -> None:
    """Refuse a part of a batch where a whole one is read."""
    if call.accumulate:
        raise invalid("accumulate is for forward_backward, and for all parts of a batch but the last", "accumulate")


def _padding(policy: Policy, maybe_padded: Collection[str]) -> Padding:
    return Padding(frozenset(maybe_padded), policy.facts.pad_token_id, policy.facts.eos_token_ids)


def _unpadded(
    loss: LossSpec, columns: Columns, policy: Policy, maybe_padded: Collection[str]
) -> tuple[Columns, list[str]]:
    """A part's columns without padding, which is told by the rows that came together; and warnings."""
    found, guesses = cut_padding(loss, columns, _padding(policy, maybe_padded))
    return {name: Column(column.values, column.levels) for name, column in found.items()}, guesses
