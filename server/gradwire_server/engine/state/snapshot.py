"""Conversion of a run's whole state to files of tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.checkpoint_files import Manifest
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import HEAD_PREFIX
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.engine_run import EngineRun

WEIGHTS = "weights.safetensors"
MOMENTS = "optimizer.safetensors"
ACCUMULATED = "accumulated.safetensors"
EMA = "ema.safetensors"
RNG = "rng.safetensors"


def capture(run: EngineRun, *, weights_only: bool = False) -> dict[str, Mapping[str, Tensor]]:
    """File name -> tensors: weights and head, moments, accumulated gradients, moving average, random generators.

    Call it outside :meth:`EngineRun.rng`; inside, the run's generators are still those of the operation before.

    Args:
        weights_only: Leave out all but weights and head.
    """
    if weights_only:
        return {WEIGHTS: run.policy.state_tensors()}
    return {
        WEIGHTS: run.policy.state_tensors(),
        MOMENTS: run.optimizer.state_tensors(),
        ACCUMULATED: run.accumulator.state_tensors(),
        EMA: run.ema.state_tensors() if run.ema is not None else {},
        RNG: run.rng_tensors(),
    }


def restore(
    run: EngineRun, store: CheckpointStore, path: str, *, weights_only: bool = False, fresh_head: bool = False
) -> Manifest:
    """Restore a checkpoint's state into a run.

    Args:
        path: ``"RUN_ID/NAME"``. A checkpoint of this run from before it was given its value head puts the head back to
            zero.
        weights_only: Restore only the weights, reset the optimizer and accumulation, and keep the rest of the run.
        fresh_head: Keep the run's head and reset its moments.

    Raises:
        OperationError: UNKNOWN_CHECKPOINT, CHECKPOINT_CORRUPT, or INVALID_ARGUMENT for a run of another kind; the run
            is then unchanged.
    """

    def read(manifest: Manifest) -> Manifest:
        return _restore(run, store, path, manifest, weights_only=weights_only, fresh_head=fresh_head)

    return store.read(path, read)


def _restore(
    run: EngineRun, store: CheckpointStore, path: str, manifest: Manifest, *, weights_only: bool, fresh_head: bool
) -> Manifest:
    """Restore from ``path``, which for a fork is its own copy of the checkpoint that the manifest names."""
    if manifest.weights_only and not weights_only:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"{path!r} holds weights alone, without the optimizer: load it with weights_only=True, or fork from it"
            " without with_optimizer",
            field="checkpoint",
            rule="a checkpoint of the whole state",
        )
    headless = not fresh_head and _is_from_before_the_head(run, manifest)
    fresh_head = fresh_head or headless
    _check_kind(run, manifest, fresh_head)
    names = (WEIGHTS,) if weights_only else (WEIGHTS, MOMENTS, ACCUMULATED, EMA, RNG)
    files = {name: store.load(path, name, manifest) for name in names}
    run.policy.load_state_tensors(files[WEIGHTS], head=not fresh_head)
    if headless and run.policy.head is not None:
        run.policy.head.zero()
    run.kept.clear()
    if weights_only:
        run.optimizer.load_state_tensors({})
        run.accumulator.clear()
        return manifest
    for name in (MOMENTS, ACCUMULATED):
        if fresh_head:
            files[name] = {
                key: tensor for key, tensor in files[name].items() if not key.rpartition("|")[2].startswith(HEAD_PREFIX)
            }
    run.optimizer.load_state_tensors(files[MOMENTS])
    run.accumulator.load_state_tensors(files[ACCUMULATED], run.policy.masters())
    run.drop_ema()
    if files[EMA]:
        run.ensure_ema().load_state_tensors(files[EMA])
    run.load_rng_tensors(files[RNG])
    run.step = manifest.step
    if manifest.run_id == run.run_id:
        run.seq = manifest.seq
    return manifest


def _is_from_before_the_head(run: EngineRun, manifest: Manifest) -> bool:
    return manifest.run_id == run.run_id and run.config.head == "value" and not manifest.config.head


def _check_kind(run: EngineRun, manifest: Manifest, fresh_head: bool) -> None:
    mine, theirs = run.config, manifest.config
    if mine.HasField("lora") != theirs.HasField("lora"):
        kinds = ("a LoRA adapter", "all weights") if theirs.HasField("lora") else ("all weights", "a LoRA adapter")
        message = "the checkpoint holds {} and the run trains {}".format(*kinds)
    elif mine.HasField("lora") and mine.base_model != theirs.base_model:
        message = f"the checkpoint's adapter belongs to {theirs.base_model!r} and the run's base is {mine.base_model!r}"
    elif mine.HasField("lora") and _scale(mine.lora) != _scale(theirs.lora):
        message = f"the checkpoint's LoRA scale is {_scale(theirs.lora):g} and the run's is {_scale(mine.lora):g}"
    elif (mine.head, mine.num_labels) != (theirs.head, theirs.num_labels) and not fresh_head:
        message = (
            f"the checkpoint has {_head(theirs)} and the run has {_head(mine)}; fork_run with head= gives its weights "
            "a fresh one"
        )
    else:
        return
    raise OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
        f"{manifest.path!r} does not fit this run: {message}",
        field="checkpoint",
        rule="same kind of run",
    )


def _head(config: training_pb2.RunConfig) -> str:
    labels = f" of {config.num_labels} labels" if config.num_labels else ""
    return f"a {config.head} head{labels}" if config.head else "no head"


def _scale(settings: training_pb2.LoraSettings) -> float:
    return settings.alpha / settings.rank if settings.alpha else 2.0
