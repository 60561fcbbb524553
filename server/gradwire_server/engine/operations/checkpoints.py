"""Operations that write or read folders: ``save_checkpoint``, ``load_checkpoint``, ``export``."""

from __future__ import annotations

import torch
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.model.placement import whole_on_host
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.exports import export_run, whole_weights
from gradwire_server.engine.state.snapshot import capture, restore


def save_checkpoint(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.SaveCheckpoint, columns: Columns
) -> Outcome:
    """Save the run's state, or its weights alone, as a checkpoint."""
    context.agreement.alike(f"weights of {run.run_id}", run.digest)
    keep = context.agreement.rank == 0
    state = capture(run, weights_only=call.weights_only)
    files = {file: whole_on_host(tensors, keep=keep) for file, tensors in state.items()}

    def save() -> training_pb2.Checkpoint:
        manifest = context.store.save(
            run.run_id,
            call.name or f"step-{run.step}",
            files,
            config=run.config,
            step=run.step,
            seq=seq,
            note=call.note,
            overwrite=call.overwrite,
            weights_only=call.weights_only,
        )
        return manifest.to_proto()

    return Outcome(training_pb2.OperationResult(checkpoint=context.agreement.once(save)))


def load_checkpoint(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.LoadCheckpoint, columns: Columns
) -> Outcome:
    """Load a checkpoint's state into the run."""
    path = call.checkpoint if "/" in call.checkpoint else f"{run.run_id}/{call.checkpoint}"
    manifest = restore(run, context.store, path, weights_only=call.weights_only)
    return Outcome(training_pb2.OperationResult(checkpoint=manifest.to_proto()))


def export(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.ExportModel, columns: Columns
) -> Outcome:
    """Export the run as a folder that plain transformers or peft can load."""
    name = call.name or f"step-{run.step}"
    weights = whole_weights(run, keep=context.agreement.rank == 0)

    def write() -> training_pb2.ExportResult:
        with context.store.exporting(run.run_id, name) as folder:
            written = export_run(context.pool, run, folder, call.format or "auto", weights)
            size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return training_pb2.ExportResult(
            name=name,
            format=written.format,
            size_bytes=size_bytes,
            logprob_difference=written.logprob_difference,
        )

    result = context.agreement.once(write)
    if context.pool.device.type == "cuda":
        torch.cuda.empty_cache()  # the export may be for a sampler that is about to wake on this GPU
    return Outcome(training_pb2.OperationResult(export=result))
