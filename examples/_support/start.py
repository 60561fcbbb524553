"""Common start of the short examples: arguments, a service, and a model of the service."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import gradwire

from _support.small_model import small_model
from _support.tasks import ARITHMETIC_CHARACTERS


def arguments(description: str | None, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--model", help="Hugging Face name or folder; by default a small model is created")
    parser.add_argument("--address", help="HOST:PORT of a running server; --model is then a name that it holds")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def model_folder(folder: Path, seed: int) -> Path:
    """Create a small Llama that can read and write sums."""
    return small_model(folder / "small", characters=ARITHMETIC_CHARACTERS, context_length=64, seed=seed)


@asynccontextmanager
async def open_service(args: argparse.Namespace) -> AsyncIterator[tuple[gradwire.ServiceClient, gradwire.ModelInfo]]:
    """Open a service with a model: the running server's, or an embedded one with the requested model."""
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        own = () if args.address else (args.model or str(model_folder(Path(folder), args.seed)),)
        async with gradwire.connect(args.address, models=own) as service:
            models = await service.list_models()
            yield service, next(model for model in models if not args.address or model.name == args.model)
