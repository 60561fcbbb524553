"""The choice of how many ranks an engine has, and whether they divide the weights, by the estimate of what fits."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire_server.config import EngineSettings
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.machine import Share
from gradwire_server.engine.model.meta_device import DeviceKind
from gradwire_server.engine.sizing.estimate import Device, Estimate, Workload, fewest_ranks, meta_model, on_ranks
from gradwire_server.engine.sizing.parts import readable

TOKENS = 8192
"""Tokens of the rows that are to fit, if the model's context is not shorter."""
FEW = 5
"""Weights of less than this part of a device fit without an estimate, which takes seconds."""


def chosen(settings: EngineSettings, share: Share) -> tuple[EngineSettings, str]:
    """Settings with a number of ranks, and whether models are divided among them, of which neither is ``auto``.

    Args:
        share: The machine's share of one rank, of as many as the settings give.

    Returns:
        They, and a sentence that says why there are several ranks or divided models; empty otherwise.
    """
    kind: DeviceKind = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count() if settings.device in ("", "cuda") and settings.sampler == "local" else 0
    device = Device(kind, share.device_memory(torch.device(kind)))
    return choice(settings, device, gpus if share.engines == 1 else 0)


def choice(settings: EngineSettings, device: Device, gpus: int) -> tuple[EngineSettings, str]:
    """See :func:`chosen`.

    Args:
        gpus: Number of GPUs that the engine may use; 0 on a CPU, where several ranks make nothing fit.
    """
    asked = settings.ranks
    if (asked == "auto" and gpus < 2) or (settings.num_ranks > 1 and settings.shard != "auto"):
        shard = settings.shard if settings.num_ranks > 1 else "off"
        return settings.model_copy(update={"ranks": settings.num_ranks, "shard": shard}), ""
    if asked == 1:
        return settings.model_copy(update={"shard": "off"}), ""
    most = 1 << (gpus.bit_length() - 1) if asked == "auto" else settings.num_ranks
    needs = [each for path in settings.models.values() if (each := _estimate(settings, path, device, most)) is not None]
    ranks = max([need.workload.ranks for need in needs], default=1) if asked == "auto" else settings.num_ranks
    divided = [need for need in needs if need.workload.divided]
    shard = settings.shard if settings.shard != "auto" else "on" if divided and ranks > 1 else "off"
    note = ""
    if divided:
        worst = max(divided, key=lambda need: need.num_parameters)
        whole = "its weights" if asked == "auto" else "a whole copy of its weights"
        note = (
            f"{ranks} ranks, among which the weights are divided: {worst.workload.model} does not fit with {whole} on"
            f" one device of {readable(device.bytes)} by the estimate"
            + ("" if worst.fits else f", and not on {ranks} either: expect shorter rows than {worst.workload.tokens:,}")
        )
    return settings.model_copy(update={"ranks": ranks, "shard": shard}), note


def _estimate(settings: EngineSettings, path: str, device: Device, most: int) -> Estimate | None:
    """Estimate a LoRA run on the fewest ranks that hold it; None if it surely fits, or is unusable."""
    widths = {"float32": torch.float32, "mixed": torch.float32, "float64": torch.float64}
    dtype = widths.get(settings.dtype or ("bfloat16" if device.kind == "cuda" else "float32"), torch.bfloat16)
    workload = Workload(path, dtype=dtype, quantize=settings.quantize, tokens=TOKENS)
    try:
        model = meta_model(workload, device.kind)
        if FEW * model.num_parameters * dtype.itemsize < device.bytes:
            return None
        workload = replace(workload, tokens=min(TOKENS, model.context_length))
        if settings.ranks != "auto":
            return on_ranks(workload, device, most, model)
        return fewest_ranks(workload, device, most, model) or on_ranks(workload, device, most, model)
    except OperationError:  # the engine's start says what is wrong with it
        return None
