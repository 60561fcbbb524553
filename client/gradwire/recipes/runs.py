"""The server and the run of a training, as its settings describe them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import gradwire
from gradwire.errors import UnknownModelError
from gradwire.recipes.folder import server_folder, trained
from gradwire.recipes.launch import Launch
from gradwire.recipes.settings import ServiceSettings, Settings, SettingsError


@asynccontextmanager
async def open_service(settings: ServiceSettings, launch: Launch) -> AsyncIterator[tuple[Any, gradwire.ModelInfo]]:
    """Use the connection that is shared, or connect to the server that the settings name, or start one of their own."""
    own = {} if settings.address else {"models": [settings.model], "state_dir": server_folder(settings, launch)}
    async with AsyncExitStack() as opened:
        service = launch.service
        if service is None:
            service = await opened.enter_async_context(gradwire.connect(settings.address or None, **own))  # type: ignore[arg-type]
        if own:
            (model, *_) = await service.list_models()
        else:
            try:
                (model,) = await service.list_models(settings.model)
            except UnknownModelError as error:
                raise SettingsError(f"{settings.address}: {error}") from error
        yield service, model


async def new_run(
    settings: Settings,
    service: Any,
    model: gradwire.ModelInfo,
    head: Any = None,
    *,
    kind: str = "",
    num_labels: int = 0,
) -> Any:
    """Create the run of a training: on the base model, or from the checkpoint that ``init_from`` names."""
    name, noise = settings.folder.rstrip("/").rpartition("/")[2], getattr(settings, "neftune_noise_alpha", 0.0)
    tags, recorded = {key: str(value) for key, value in settings.tags.items()}, settings.record_batches
    exact = settings.deterministic or None
    if settings.init_from:
        start = trained(settings.init_from)
        return await service.fork_run(
            start.checkpoint, head=head or "", seed=settings.seed, name=name, num_labels=num_labels,
            dropout=settings.lora_dropout or settings.dropout, neftune_noise_alpha=noise, tags=tags,
            record_batches=recorded,
            deterministic=exact,
        )  # fmt: skip
    return await service.create_run(
        model.name,
        lora=_lora(settings),
        head=head,
        seed=settings.seed,
        dropout=settings.dropout,
        kind=kind,
        name=name,
        num_labels=num_labels,
        neftune_noise_alpha=noise,
        tags=tags,
        record_batches=recorded,
        deterministic=exact,
    )


def start_reference(settings: Settings, wanted: str = "start") -> str:
    """Return the reference model that ``wanted`` means; ``"start"`` is the policy as the training began."""
    if wanted != "start":
        return wanted
    if settings.init_from:
        return trained(settings.init_from).checkpoint
    return "base" if settings.lora_rank else settings.model


def _lora(settings: Settings) -> dict[str, Any] | None:
    rank = settings.lora_rank
    if not rank:
        return None
    alpha = settings.lora_alpha or 2.0 * rank
    if settings.rslora:  # scale alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)
        alpha *= math.sqrt(rank)
    given: dict[str, Any] = {"rank": rank, "alpha": alpha, "target_modules": settings.lora_targets}
    return given | ({"dropout": settings.lora_dropout} if settings.lora_dropout else {})
