"""Names of models: a base model, ``RUN_ID`` for the weights that a run has now, or ``RUN_ID/CHECKPOINT``."""

from __future__ import annotations

from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.errors import ServiceError


def base_model(core: Core, caller: Caller, name: str) -> str:
    """The base model of a model that the caller may read.

    Raises:
        ServiceError: UNKNOWN_MODEL, also for a run or checkpoint that the caller may not read.
    """
    if name in core.config.all_models:
        return name
    run_id = name.partition("/")[0]
    try:
        if "/" in name and run_id.startswith("run-"):
            core.storage.checkpoints.get(name, caller)
        return core.runs.get(caller, run_id).config.base_model
    except ServiceError:
        known = ", ".join(sorted(core.config.all_models))
        message = (
            f"there is no model {name[:200]!r} here; there are {known}, RUN_ID for what a run has learned by now, and"
            " RUN_ID/CHECKPOINT"
        )
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="model") from None


def described(name: str, created: float = 0, owner: str = "gradwire") -> dict[str, Any]:
    """A model in OpenAI's form."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner or "gradwire"}


async def listed(core: Core, caller: Caller) -> list[dict[str, Any]]:
    """The base models; then the caller's runs, each with its newest checkpoint."""
    found = [described(model.name) for model in core.models()]
    token = ""
    while True:
        runs, token = await core.runs.page(caller, 0, token)
        for run in runs:
            found.append(described(run.run_id, run.created_at, run.owner))
            if run.latest_checkpoint:
                found.append(described(run.latest_checkpoint, run.created_at, run.owner))
        if not token:
            return found
