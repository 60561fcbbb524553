"""What each kind of operation does to a run. One that raises leaves the run as it was, but for an ``optim_step``, which
drops what was accumulated for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.operations.loss_operations import LOSS_OPERATIONS
from gradwire_server.engine.operations.outcome import Columns, Outcome
from gradwire_server.engine.operations.samples import begin_in_run
from gradwire_server.engine.scoring.memory import in_smaller_pieces
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.exports import export_run
from gradwire_server.engine.state.folders import folder_bytes
from gradwire_server.engine.state.snapshot import capture, restore
from gradwire_server.engine.threads import STEP_TOKENS, suited_threads

if TYPE_CHECKING:
    from gradwire_server.engine.process.engine import Engine


LEARNING_RATE, RL_LEARNING_RATE = 1e-4, 1e-5
"""Of a step that names none."""


def for_rl(config: training_pb2.RunConfig) -> bool:
    """Whether a run was made for reinforcement learning."""
    return config.kind == "rl" or config.head == "value"


def carry_out(engine: Engine, run: EngineRun, seq: int, operation: training_pb2.Operation, columns: Columns) -> Outcome:
    """Carries out one operation.

    Raises:
        Exception: whatever went wrong; the run, its generators included, is then as it was.
    """
    kind = operation.WhichOneof("kind")
    if kind is None:
        raise invalid("this server does not know this kind of operation; it may be older than the client", "kind")
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


# ------------------------------------------------------------------ steps


def _optim_step(engine: Engine, run: EngineRun, seq: int, call: training_pb2.OptimStep, columns: Columns) -> Outcome:
    threads = suited_threads(engine.pool.device, STEP_TOKENS, run.policy.num_trainable_parameters)
    if call.default_learning_rate:
        settings = training_pb2.OptimStep()
        settings.CopyFrom(call)
        settings.learning_rate = RL_LEARNING_RATE if for_rl(run.config) else LEARNING_RATE
        call = settings
    with engine.tracing.span("gradwire.optimizer.step"), threads:
        done = run.optimizer.step(run.accumulator, call)
    run.step += not done.skipped
    result = training_pb2.OptimStepResult(
        grad_norm=done.grad_norm,
        learning_rate=call.learning_rate,
        step=run.step,
        skipped=done.skipped,
        num_accumulated=done.num_accumulated,
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
    written = export_run(engine.pool, run, place, call.format or "auto")
    result = training_pb2.ExportResult(name=name, format=written, size_bytes=folder_bytes(place))
    return Outcome(training_pb2.OperationResult(export=result))


def _empty() -> Outcome:
    return Outcome(training_pb2.OperationResult(empty=training_pb2.Empty()))


_OPERATIONS: Mapping[str, Callable[[Engine, EngineRun, int, Any, Columns], Outcome]] = {
    **LOSS_OPERATIONS,
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
