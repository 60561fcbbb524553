"""Settings that only the engine's process can check, because it has torch."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

import torch
from gradwire_losses.registry import load_loss_file
from gradwire_proto.v1 import training_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.cpu_kernels import cpu_kernels


def check_settings(settings: EngineSettings) -> None:
    """Register the losses of the files, and look for the device.

    Raises:
        OperationError: INVALID_ARGUMENT or UNSUPPORTED, naming the flag.
    """
    if settings.device:
        _check_device(settings.device)
    if settings.deterministic:
        _check_deterministic(settings)
    if settings.num_ranks > 1 or settings.shard == "on":
        _check_ranks(settings)
    for file in settings.losses:
        try:
            load_loss_file(file)
        except Exception as error:  # a user's file may raise anything
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"--losses {file}{_line(error, file)}: {type(error).__name__}: {error}",
            ) from error


def _check_device(name: str) -> None:
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or (device.type != "cuda" and name != "cpu"):  # torch knows more kinds, the engine does not
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"--device {name}: there is no such device; give cpu, cuda or cuda:N",
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        devices = "no CUDA device" if count == 0 else f"{count} CUDA devices, numbered from 0"
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"--device {name}: torch {torch.__version__} finds {devices} here; `gradwire doctor` looks for the reason,"
            " and --device cpu trains without one",
        )


def _check_deterministic(settings: EngineSettings) -> None:
    on_gpu = settings.device.startswith("cuda") or (not settings.device and torch.cuda.is_available())
    if on_gpu:
        reason = "no kernels of a GPU have the same bits in sampling and training yet; give --device cpu"
    elif settings.dtype not in (None, "float32", "bfloat16"):
        reason = f"--dtype {settings.dtype} is not computed so; give float32 or bfloat16"
    elif settings.kernels == "plain" or settings.compile or settings.quantize or settings.shard == "on":
        reason = "leave out --kernels plain, --compile, --quantize and --shard on, which compute in other ways"
    elif settings.sampler != "local":
        reason = "vLLM computes in other ways; leave out --sampler"
    elif cpu_kernels() is None:
        reason = "it needs a C compiler (install gcc or clang, or name one by CC)"
    else:
        return
    raise OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, f"--deterministic: {reason}")


def _check_ranks(settings: EngineSettings) -> None:
    count = torch.cuda.device_count() if settings.device in ("", "cuda") else 0
    if settings.num_ranks & (settings.num_ranks - 1):
        reason = "the work is divided in halves; give a power of two"
    elif settings.device not in ("", "cpu", "cuda"):
        reason = f"--device {settings.device}: with several ranks, each has a GPU of its own; give cuda or cpu"
    elif settings.device != "cpu" and 0 < count < settings.num_ranks:
        reason = f"torch finds {count} CUDA devices here; give at most as many ranks, or --device cpu"
    elif settings.sampler != "local":
        reason = "--sampler vllm works with one rank only; leave one of the two out"
    elif settings.shard == "on" and settings.quantize:
        reason = f"weights held as {settings.quantize} cannot be divided among ranks; leave out --shard or --quantize"
    elif settings.shard == "on" and settings.ranks == 1:
        reason = "--shard on divides weights among several ranks; give more of them, or leave it out"
    else:
        return
    raise OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, f"--ranks {settings.ranks}: {reason}")


def _line(error: Exception, file: Path) -> str:
    """The line of the file at which it failed, as ", line N"."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""
