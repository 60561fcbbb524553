"""What each kind of operation does to a run. An operation that raises leaves the run as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.causal_lm import causal_lm
from gradwire_losses.fields import INPUT_IDS, LOSS_MASK, PROMPT_LENGTHS
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import DivergenceConfig, FieldSpec, LossConfig, LossSpec, get_loss
from gradwire_losses.tinker import MASK, TARGET_TOKENS
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine import evaluate
from gradwire_server.engine.checkpoints import folder_bytes
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.exports import export_run
from gradwire_server.engine.failures import read_config
from gradwire_server.engine.forward import SEQUENCE_SCORES
from gradwire_server.engine.memory import in_smaller_pieces
from gradwire_server.engine.outcome import Columns, Outcome
from gradwire_server.engine.policy import Policy
from gradwire_server.engine.run import EngineRun
from gradwire_server.engine.run_state import capture, restore
from gradwire_server.engine.samples import begin_in_run

if TYPE_CHECKING:
    from gradwire_server.engine.engine import Engine

CANDIDATES = FieldSpec(
    "candidates",
    "int",
    ("[rows, tokens, candidates]",),
    "Token ids in each token's place, whose log-probabilities are the score candidate_logprobs.",
    aligned_with="input_ids",
    ids=True,
)

# What is read of a batch that no loss is named for.
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


def carry_out(engine: Engine, run: EngineRun, seq: int, operation: training_pb2.Operation, columns: Columns) -> Outcome:
    """Carries out one operation.

    Raises:
        Exception: whatever went wrong; the run, its generators included, is then as it was.
    """
    kind = operation.WhichOneof("kind")
    if kind is None:
        raise _invalid("this server does not know this kind of operation; it may be older than the client", "kind")
    run.forget_kept(seq)
    carried = _OPERATIONS[kind]
    call = getattr(operation, kind)
    had_ema = run.ema is not None
    try:
        if kind in _OUTSIDE_RNG:
            return carried(engine, run, seq, call, columns)

        def attempt() -> Outcome:
            with run.rng():
                return carried(engine, run, seq, call, columns)

        return in_smaller_pieces(engine, run, columns, attempt) if kind in _DIVISIBLE else attempt()
    except Exception:
        if not had_ema:
            run.drop_ema()
        raise


# ------------------------------------------------------------------ losses and scores


def _forward_backward(
    engine: Engine, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns
) -> Outcome:
    training = prepare(engine, run, call, columns)
    return trained(engine, run, call, training, lambda: evaluate.forward_backward(training))


def prepare(engine: Engine, run: EngineRun, call: training_pb2.LossCall, columns: Columns) -> evaluate.Training:
    """A ``forward_backward``, read and checked, within the engine's budget.

    Raises:
        OperationError: for what is wrong with it.
    """
    loss, config = _loss(call)
    if call.model:
        raise _invalid("forward_backward trains the run's own weights; model is for forward", "model")
    return evaluate.Training(
        run.policy,
        _read(loss, columns, run.policy),
        loss,
        config,
        run.accumulator,
        reference=_reference(engine, run, config),
        teacher=_teacher(engine, run, config),
        outputs=call.outputs,
        budget=engine.budget,
    )


def trained(
    engine: Engine,
    run: EngineRun,
    call: training_pb2.LossCall,
    training: evaluate.Training,
    evaluation: Callable[[], evaluate.LossEvaluation],
) -> Outcome:
    """What comes of an evaluation.

    Raises:
        OperationError: that of the evaluation, unless it is one to go on after.
    """
    try:
        found = evaluation()
    except OperationError as error:
        if error.code != training_pb2.ERROR_CODE_NON_FINITE or not call.skip_nonfinite:
            raise
        return _left_out(run, training.loss, training.batch, error)
    if found.out_of_memory:
        engine.memory.ran_out(run)
    return _evaluated(found)


def _left_out(run: EngineRun, loss: LossSpec, batch: Batch, error: OperationError) -> Outcome:
    """A batch that gave no finite gradient and was to be skipped: it counts for nothing, and a step may follow."""
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


def _forward(engine: Engine, run: EngineRun, seq: int, call: training_pb2.LossCall, columns: Columns) -> Outcome:
    policy = engine.references.resolve(call.model, run, field="model").policy if call.model else run.policy
    loss, config = _loss(call) if call.loss_fn else (None, None)
    found = evaluate.forward(
        policy,
        _read(loss or PLAIN, columns, policy),
        loss,
        config,
        reference=_reference(engine, run, config),
        teacher=_teacher(engine, run, config),
        outputs=call.outputs,
        temperature=_temperature(call.temperature),
        budget=engine.budget,
    )
    return _evaluated(found)


def _kept_forward(
    engine: Engine, run: EngineRun, seq: int, call: training_pb2.KeptForward, columns: Columns
) -> Outcome:
    run.kept[seq], found = evaluate.kept_forward(
        run.policy,
        _read(PLAIN, columns, run.policy),
        list(call.scores) or ["logprobs"],
        temperature=_temperature(call.temperature),
        budget=engine.budget,
    )
    return _evaluated(found)


def _backward(engine: Engine, run: EngineRun, seq: int, call: training_pb2.Backward, columns: Columns) -> Outcome:
    kept = run.kept.pop(call.forward_seq, None)
    if call.abandoned:
        raise OperationError(
            training_pb2.ERROR_CODE_ABANDONED, f"the client gave up its half of the operation: {call.abandoned}"
        )
    if kept is None:
        raise _invalid(f"there is no forward {call.forward_seq} that waits for its gradients", "forward_seq")
    gradients: dict[str, Tensor] = {}
    for name, column in columns.items():
        score = name.removeprefix("grad_")
        lengths = kept.batch.row_lengths.numpy()
        if column.levels and not np.array_equal(column.levels[-1], lengths):
            raise _invalid(f"{name} has other row lengths than the scores of forward {call.forward_seq}", name)
        gradients[score] = torch.from_numpy(column.values.astype(np.float32))
    evaluate.custom_backward(kept, gradients, call.weight, run.accumulator)
    result = training_pb2.LossResult(
        loss=call.loss,
        metrics={"loss": call.loss},
        num_sequences=kept.batch.num_sequences,
        num_tokens=len(kept.batch.input_ids),
        num_loss_tokens=kept.batch.num_scored,
        num_microbatches=kept.num_microbatches,
        recomputed=kept.recomputed,
    )
    return Outcome(training_pb2.OperationResult(loss=result))


def _evaluated(found: evaluate.LossEvaluation) -> Outcome:
    result = training_pb2.LossResult(
        metrics=found.metrics,
        num_sequences=found.num_sequences,
        num_tokens=found.num_tokens,
        num_loss_tokens=found.num_loss_tokens,
        warnings=found.warnings,
        num_microbatches=found.num_microbatches,
        recomputed=found.recomputed,
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
        kwargs = json.loads(call.loss_kwargs_json or "{}")
    except ValueError as error:
        raise _invalid(f"loss_kwargs is not JSON: {error}", "loss_kwargs") from None
    if not isinstance(kwargs, dict):
        raise _invalid("loss_kwargs is not an object of arguments by name", "loss_kwargs")
    return loss, read_config(loss, kwargs)


def _read(loss: LossSpec, columns: Columns, policy: Policy) -> Batch:
    facts = policy.facts
    return read_batch(loss, columns, vocab_size=facts.vocab_size, context_length=facts.context_length)


def _reference(engine: Engine, run: EngineRun, config: LossConfig | None) -> evaluate.Reference | None:
    name = getattr(config, "reference_model", None)
    if name is None:
        return None
    reference = engine.references.resolve(name, run, dtype=getattr(config, "reference_dtype", None))
    return lambda batch, temperature: engine.references.logprobs(reference, batch, temperature, engine.budget)


def _teacher(engine: Engine, run: EngineRun, config: LossConfig | None) -> Policy | None:
    if not isinstance(config, DivergenceConfig) or config.reference_model is None:
        return None
    return engine.references.resolve(config.reference_model, run, dtype=config.reference_dtype).policy


def _temperature(given: float) -> float:
    if not 0 <= given < float("inf"):
        raise _invalid(f"temperature is {given}; it divides the logits, and is positive", "temperature")
    return given or 1.0


# ------------------------------------------------------------------ steps


def _optim_step(engine: Engine, run: EngineRun, seq: int, call: training_pb2.OptimStep, columns: Columns) -> Outcome:
    with engine.tracing.span("gradwire.optimizer.step"):
        done = run.optimizer.step(run.accumulator, call)
    run.step += not done.skipped
    result = training_pb2.OptimStepResult(
        grad_norm=done.grad_norm, learning_rate=call.learning_rate, step=run.step, skipped=done.skipped
    )
    return Outcome(training_pb2.OperationResult(optim_step=result))


def _zero_grad(engine: Engine, run: EngineRun, seq: int, call: training_pb2.ZeroGrad, columns: Columns) -> Outcome:
    run.accumulator.clear()
    return _empty()


def _update_reference(
    engine: Engine, run: EngineRun, seq: int, call: training_pb2.UpdateReference, columns: Columns
) -> Outcome:
    if not 0 <= call.ema <= 1:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"ema is {call.ema}; it is the share of the old reference that stays, from 0 to 1",
            field="ema",
            rule="0 <= ema <= 1",
        )
    run.move_ema(call.ema)
    return _empty()


# ------------------------------------------------------------------ samples


def _sample(engine: Engine, run: EngineRun, seq: int, call: training_pb2.SampleCall, columns: Columns) -> Outcome:
    started = begin_in_run(engine, run, call, columns)
    while not started.job.done:
        engine.sampler.step()
    return started.outcome()


# ------------------------------------------------------------------ checkpoints and exports


def _save_checkpoint(
    engine: Engine, run: EngineRun, seq: int, call: training_pb2.SaveCheckpoint, columns: Columns
) -> Outcome:
    manifest = engine.store.save(
        run.run_id,
        call.name or f"step-{run.step}",
        capture(run),
        config=run.config,
        step=run.step,
        seq=seq,
        note=call.note,
        overwrite=call.overwrite,
    )
    return Outcome(training_pb2.OperationResult(checkpoint=manifest.to_proto()))


def _load_checkpoint(
    engine: Engine, run: EngineRun, seq: int, call: training_pb2.LoadCheckpoint, columns: Columns
) -> Outcome:
    path = call.checkpoint if "/" in call.checkpoint else f"{run.run_id}/{call.checkpoint}"
    manifest = restore(run, engine.store, path, weights_only=call.weights_only)
    return Outcome(training_pb2.OperationResult(checkpoint=manifest.to_proto()))


def _export(engine: Engine, run: EngineRun, seq: int, call: training_pb2.ExportModel, columns: Columns) -> Outcome:
    name = call.name or f"step-{run.step}"
    place = engine.store.export_folder(run.run_id, name)
    written = export_run(engine.host, run, place, call.format or "auto")
    result = training_pb2.ExportResult(name=name, format=written, size_bytes=folder_bytes(place))
    return Outcome(training_pb2.OperationResult(export=result))


def _empty() -> Outcome:
    return Outcome(training_pb2.OperationResult(empty=training_pb2.Empty()))


def _invalid(message: str, argument: str) -> OperationError:
    return OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=argument)


_OPERATIONS: Mapping[str, Callable[[Engine, EngineRun, int, Any, Columns], Outcome]] = {
    "forward_backward": _forward_backward,
    "forward": _forward,
    "kept_forward": _kept_forward,
    "backward": _backward,
    "optim_step": _optim_step,
    "zero_grad": _zero_grad,
    "sample": _sample,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "update_reference": _update_reference,
    "export": _export,
}
_DIVISIBLE = frozenset({"forward_backward", "forward", "kept_forward"})
_OUTSIDE_RNG = frozenset({"save_checkpoint", "load_checkpoint"})  # they read or replace the generators' state itself
