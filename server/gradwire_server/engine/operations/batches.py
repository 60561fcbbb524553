"""Operations on a batch: ``forward_backward``, ``forward``, and the two halves of a loss that the client computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from gradwire_losses.batch import Batch, segment_sum
from gradwire_losses.causal_lm import causal_lm
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS
from gradwire_losses.layouts import read_batch
from gradwire_losses.padding import Padding
from gradwire_losses.registry import (
    DivergenceConfig,
    FieldSpec,
    HeldReference,
    LossConfig,
    LossSpec,
    ReferenceConfig,
    get_loss,
)
from gradwire_losses.tinker import MASK, TARGET_TOKENS
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.failures import read_config
from gradwire_server.engine.model.layers.routers import balance_hint
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.images import check_without_images, images_of_rows, with_images
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.scoring.score_types import SEQUENCE_SCORES
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.references import OFFLOADED
from gradwire_server.engine.state.references import Reference as FrozenReference
from gradwire_server.engine.training import forward_backward as training_pass
from gradwire_server.engine.training import forward_only as evaluate
from gradwire_server.engine.training.forward_backward import Training
from gradwire_server.engine.training.loss_call import Reference, needs_added_head
from gradwire_server.engine.training.loss_report import LossEvaluation

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


def forward_backward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns
) -> Outcome:
    """Compute a loss and add its gradient to the run's accumulation."""
    training = prepare(context, run, call, columns)
    return trained(run, call, training, lambda: training_pass.forward_backward(training))


def prepare(context: EngineContext, run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> Training:
    """Read and check a ``forward_backward``, within the engine's current budget.

    A run without a head gets a value head here if the loss needs one; whoever drops the operation undoes that.

    Raises:
        OperationError: The call or its batch is invalid.
    """
    loss, config = _loss(call)
    if call.model:
        raise invalid("forward_backward trains the run's own weights; model is for forward", "model")
    batch = _read(loss, columns, run.policy, call.maybe_padded)
    if needs_added_head(loss, config, batch, run.policy):
        run.add_value_head()
    return Training(
        run.policy,
        batch,
        loss,
        config,
        run.accumulator,
        reference=_reference(context, run, config),
        teacher=_teacher(context, run, config),
        outputs=call.outputs,
        budget=context.budget,
        dropout_seed=run.dropout_seed,
    )


def trained(
    run: EngineRun,
    call: training_pb2.LossCall,
    training: Training,
    evaluation: Callable[[], LossEvaluation],
) -> Outcome:
    """Run an evaluation and make the operation's outcome.

    Raises:
        OperationError: The evaluation's error, except NON_FINITE if the call has ``skip_nonfinite``.
    """
    first = run.step == 0 and run.accumulator.empty
    try:
        found = evaluation()
    except OperationError as error:
        if error.code != training_pb2.ERROR_CODE_NON_FINITE or not call.skip_nonfinite:
            raise
        return _left_out(run, training.loss, training.batch, error)
    loss = training.loss
    hints = run.advisor.hints(loss.name, loss.hints, found.metrics, run.step)
    if first and (said := balance_hint(run.policy.model, run.config, run.policy.router_aux_loss_coef)):
        hints = [*hints, said]
    return evaluated(replace(found, warnings=[*found.warnings, *hints]) if hints else found)


def _left_out(run: EngineRun, loss: LossSpec, batch: Batch, error: OperationError) -> Outcome:
    """Outcome of a skipped batch with non-finite results: it counts 0, and a step may still follow."""
    run.accumulator.merge({}, {(loss.name, "skipped"): 0.0})
    result = training_pb2.LossResult(
        loss=math.nan,
        metrics={"loss": math.nan},
        num_sequences=batch.num_sequences,
        num_tokens=len(batch.input_ids),
        num_loss_tokens=batch.num_scored,
        warnings=[f"left out (on_nonfinite='skip'): {error.message}"],
    )
    return Outcome(training_pb2.OperationResult(loss=result))


def forward(context: EngineContext, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns) -> Outcome:
    """Compute scores, and a loss if one is named, without gradients."""
    policy = context.references.resolve(call.model, run, field="model").policy if call.model else run.policy
    loss, config = _loss(call) if call.loss_fn else (None, None)
    found = evaluate.forward(
        policy,
        _read(loss or PLAIN, columns, policy, call.maybe_padded),
        loss,
        config,
        reference=_reference(context, run, config),
        teacher=_teacher(context, run, config),
        outputs=call.outputs,
        temperature=_temperature(call.temperature),
        budget=context.budget,
    )
    return evaluated(found)


def kept_forward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.KeptForward, columns: Columns
) -> Outcome:
    """Compute scores and keep their graph for :func:`backward`: the first half of a loss on the client."""
    run.kept[seq], found = evaluate.kept_forward(
        run.policy,
        _read(PLAIN, columns, run.policy, call.maybe_padded),
        list(call.scores) or ["logprobs"],
        temperature=_temperature(call.temperature),
        budget=context.budget,
        dropout_seed=run.dropout_seed,
    )
    return evaluated(found)


def backward(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.Backward, columns: Columns
) -> Outcome:
    """Apply the client's gradients to kept scores: the second half of a loss on the client."""
    kept = run.kept.pop(call.forward_seq, None)
    if call.abandoned:
        raise OperationError(
            training_pb2.ERROR_CODE_ABANDONED, f"the client gave up its half of the operation: {call.abandoned}"
        )
    if kept is None:
        raise invalid(
            f"forward {call.forward_seq} has no scores that wait for gradients: they take them once, and before the "
            "run's next operation",
            "forward_seq",
        )
    gradients: dict[str, Tensor] = {}
    for name, column in columns.items():
        score = name.removeprefix("grad_")
        lengths = kept.batch.row_lengths.numpy()
        if column.levels and not np.array_equal(column.levels[-1], lengths):
            raise invalid(f"{name} has other row lengths than the scores of forward {call.forward_seq}", name)
        gradients[score] = torch.from_numpy(column.values.astype(np.float32))
    metrics = evaluate.custom_backward(kept, gradients, call.weight, run.accumulator)
    result = training_pb2.LossResult(
        loss=call.loss,
        metrics={"loss": call.loss} | metrics,
        num_sequences=kept.batch.num_sequences,
        num_tokens=len(kept.batch.input_ids),
        num_loss_tokens=kept.batch.num_scored,
        num_microbatches=kept.num_microbatches,
        recomputed=kept.recomputed,
        activations=kept.activations,
    )
    return Outcome(training_pb2.OperationResult(loss=result))


def evaluated(found: LossEvaluation) -> Outcome:
    """The outcome of an evaluation, with the scores asked for."""
    result = training_pb2.LossResult(
        metrics=found.metrics,
        num_sequences=found.num_sequences,
        num_tokens=found.num_tokens,
        num_loss_tokens=found.num_loss_tokens,
        warnings=found.warnings,
        num_microbatches=found.num_microbatches,
        recomputed=found.recomputed,
        activations=found.activations,
    )
    if found.loss is not None:
        result.loss = found.loss
    lengths = found.row_lengths.numpy().astype(np.uint32)
    columns = {
        name: Column(values.numpy(), () if name in SEQUENCE_SCORES else (lengths,))
        for name, values in found.outputs.items()
    }
    return Outcome(training_pb2.OperationResult(loss=result), columns)


def _loss(call: training_pb2.LossCall) -> tuple[LossSpec, LossConfig]:
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


def _read(loss: LossSpec, columns: Columns, policy: Policy, maybe_padded: Collection[str]) -> Batch:
    facts = policy.facts
    batch = read_batch(
        loss,
        {name: column for name, column in columns.items() if name not in (IMAGES, IMAGE_BYTES)},
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        padding=Padding(frozenset(maybe_padded), facts.pad_token_id, facts.eos_token_ids),
    )
    if IMAGES in columns or IMAGE_BYTES in columns:
        return with_images(batch, images_of_rows(policy, columns))
    if policy.split_model.vision is not None:
        rows = segment_sum(batch.lengths, batch.group_sizes)
        check_without_images(policy, batch.input_ids.split(rows.tolist()))
    return batch


def _reference(context: EngineContext, run: EngineRun, config: LossConfig | None) -> Reference | None:
    if not isinstance(config, ReferenceConfig) or config.reference_model is None:
        return None
    reference = _resolved(context, run, config)
    return lambda batch, temperature: context.references.logprobs(reference, batch, temperature, context.budget)


def _teacher(context: EngineContext, run: EngineRun, config: LossConfig | None) -> Policy | None:
    if not isinstance(config, DivergenceConfig) or config.reference_model is None:
        return None
    return _resolved(context, run, config).policy


def _resolved(context: EngineContext, run: EngineRun, config: ReferenceConfig) -> FrozenReference:
    asked = config.reference_model
    if isinstance(asked, HeldReference):
        held = OFFLOADED if asked.offload else asked.quantize
        return context.references.resolve(asked.name, run, dtype=config.reference_dtype, held=held)
    return context.references.resolve(asked or "", run, dtype=config.reference_dtype)


def _temperature(given: float) -> float:
    if not 0 <= given < float("inf"):
        raise invalid(f"temperature is {given}; it divides the logits, and is positive", "temperature")
    return given or 1.0
