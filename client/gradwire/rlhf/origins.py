"""What a training starts from: a model that the server holds, or the policy that an earlier training left there."""

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
    """Where weights come from.

    Attributes:
        model: the model that the server holds: it names the tokenizer.
        context_tokens: its longest row.
        checkpoint: ``"RUN_ID/NAME"`` of an earlier policy on that model; empty for the model itself.
    """

    model: str
    context_tokens: int
    checkpoint: str = ""

    def reference(self, run: RunInfo) -> str:
        """What KL is measured against: the weights that this run started from."""
        if self.checkpoint:
            return self.checkpoint
        return "base" if run.lora is not None else self.model


def served_name(model: str) -> str:
    """A folder's whole path, by which the trainer's own server calls it; any other name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()).replace("=", "_") if folder.is_dir() else model


def served_models(models: Iterable[str]) -> list[str]:
    """``models`` of ``connect``: each once, folders under their :func:`served_name`."""
    return list(
        dict.fromkeys(
            f"{served_name(model)}={Path(model).expanduser().resolve()}" if Path(model).expanduser().is_dir() else model
            for model in models
        )
    )


async def find_origin(service: ServiceClient, base_model: str) -> Origin:
    """The model of this name, or the checkpoint that a policy's folder was made from.

    Raises:
        UnknownModelError: when the server knows neither.
    """
    models = {model.name: model for model in await service.list_models()}
    for name in (base_model, served_name(base_model)):
        if name in models:
            return Origin(name, models[name].context_length)
    written = _left_there(base_model)
    if written is not None:
        if written["model"] in models and await _is_there(service, written["checkpoint"]):
            return Origin(written["model"], models[written["model"]].context_length, written["checkpoint"])
        reason = f", nor has it the checkpoint {written['checkpoint']!r} that the folder was made from"
    else:
        reason = ""
    raise UnknownModelError(
        f"the server at {service.address} does not hold the model {base_model!r}{reason}; it holds "
        f"{', '.join(models)}. Start it with --model {base_model}, or give no address",
        field="base_model",
    )


def _left_there(base_model: str) -> dict[str, Any] | None:
    """What a policy's folder says of the checkpoint that it was made from."""
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
    """A new run on these weights. One that goes on from a checkpoint has its LoRA settings; that is logged."""
    if not origin.checkpoint:
        return await service.create_run(origin.model, lora=lora, head=head, seed=seed, name=name)
    earlier = await service.get_training_client(origin.checkpoint.partition("/")[0]).info()
    kept = None if earlier.head == head else head
    run = await service.fork_run(origin.checkpoint, head=kept, seed=seed, name=name)
    theirs = (await run.info()).lora
    ours = None if lora is None else {**lora, "target_modules": []}
    if theirs != ours:
        logger.warning("%s goes on from %s and keeps its LoRA settings, %s", name, origin.checkpoint, theirs)
    return run


async def export_run(run: TrainingClient, folder: Path) -> None:
    """A run's weights as a Hugging Face folder, an adapter merged; the adapter itself in ``adapter`` below it."""
    if (await run.info()).lora is None:
        await run.export(folder, format="hf")
        return
    await run.export(folder, format="merged")
    await run.export(folder / ADAPTER, format="peft")
