"""The initial weights of a training: a model of the server, or a policy that an earlier training left there."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradwire.descriptions import RunInfo
from gradwire.errors import NotFoundError, UnknownModelError
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient

logger = logging.getLogger("gradwire.rlhf")

POLICY_FILE = "gradwire_policy.json"
ADAPTER = "adapter"


@dataclass(frozen=True)
class Origin:
    """The origin of weights.

    Attributes:
        model: The server's model; it determines the tokenizer.
        context_tokens: Maximum row length of the model.
        checkpoint: ``"RUN_ID/NAME"`` of an earlier policy on that model; empty for the model itself.
    """

    model: str
    context_tokens: int
    checkpoint: str = ""

    def reference(self, run: RunInfo) -> str:
        """The reference of the KL: the weights that this run started from."""
        if self.checkpoint:
            return self.checkpoint
        return "base" if run.lora is not None else self.model


def served_name(model: str) -> str:
    """Return a folder's absolute path, under which the trainer's own server serves it; any other name unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()).replace("=", "_") if folder.is_dir() else model


def served_models(models: Iterable[str]) -> list[str]:
    """Return the ``models`` argument of ``connect``: each once, folders under their :func:`served_name`."""
    return list(
        dict.fromkeys(
            f"{served_name(model)}={Path(model).expanduser().resolve()}" if Path(model).expanduser().is_dir() else model
            for model in models
        )
    )


async def find_origin(service: ServiceClient, base_model: str) -> Origin:
    """Find the model of this name, or the checkpoint that a policy's folder was made from.

    Raises:
        UnknownModelError: The server knows neither.
    """
    models = {model.name: model for model in await service.list_models()}
    for name in (base_model, served_name(base_model)):
        if name in models:
            return Origin(name, models[name].context_length)
    written = _left_there(base_model)
    if written is not None:
        if written["model"] in models and await _is_there(service, written["checkpoint"]):
            return Origin(written["model"], models[written["model"]].context_length, written["checkpoint"])
        reason = f", nor the checkpoint {written['checkpoint']!r} that the folder was made from"
    else:
        reason = ""
    raise UnknownModelError(
        f"the server at {service.address} does not hold the model {base_model!r}{reason}; it holds "
        f"{', '.join(models)}. Start it with --model {base_model}, or pass no address",
        field="base_model",
    )


def _left_there(base_model: str) -> dict[str, Any] | None:
    """Read the checkpoint from which a policy's folder was made."""
    file = Path(base_model).expanduser() / POLICY_FILE
    if not file.is_file():
        return None
    written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return written


async def _is_there(service: ServiceClient, checkpoint: str) -> bool:
    run_id, _, name = checkpoint.partition("/")
    try:
        return any(each.name == name for each in await service.get_training_client(run_id).list_checkpoints())
    except NotFoundError:
        return False


async def start_run(
    service: ServiceClient,
    origin: Origin,
    *,
    lora: dict[str, Any] | None,
    head: Literal["value", "reward"],
    seed: int,
    name: str,
) -> TrainingClient:
    """Create a run on these weights. A run that continues from a checkpoint keeps its LoRA settings, which is
    logged."""
    if not origin.checkpoint:
        return await service.create_run(origin.model, lora=lora, head=head, seed=seed, name=name)
    earlier = await service.get_training_client(origin.checkpoint.partition("/")[0]).info()
    kept = None if earlier.head == head else head
    run = await service.fork_run(origin.checkpoint, head=kept, seed=seed, name=name)
    theirs = (await run.info()).lora
    ours = None if lora is None else {**lora, "target_modules": []}
    if theirs != ours:
        logger.warning("%s continues from %s and keeps its LoRA settings, %s", name, origin.checkpoint, theirs)
    return run


async def export_run(run: TrainingClient, folder: Path) -> None:
    """Export a run's weights as a Hugging Face folder with the adapter merged; the adapter itself goes to
    ``adapter`` below."""
    if (await run.info()).lora is None:
        await run.export(folder, format="hf")
        return
    await run.export(folder, format="merged")
    await run.export(folder / ADAPTER, format="peft")
