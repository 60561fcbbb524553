"""Routes of a vLLM server beside OpenAI's API (``VLLM_SERVER_DEV_MODE=1``): loading all weights, and sleep."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.errors import UnsupportedError
from gradwire.rl.inference.weights import WeightFolder, has_tied_head


class NotFoundError(ValueError):
    """The endpoint knows no such model, or no such route."""


class VLLMRoutes(WeightFolder):
    """Adds vLLM's own routes to the client of an endpoint; requests take their turns while they are in flight."""

    _base_url: str
    _turns: asyncio.Semaphore
    _concurrency: int
    _asleep: contextlib.AsyncExitStack | None = None

    @abstractmethod
    async def _command(self, url: str, body: Mapping[str, Any]) -> None:
        """Send a ``POST`` once.

        Raises:
            NotFoundError: There is no such route.
            ValueError: The endpoint refused the request.
        """

    @abstractmethod
    async def _question(self, url: str) -> Any:
        """The answer to a ``GET``, decoded."""

    async def _load_all_weights(self, folder: Path, version: int) -> None:
        if has_tied_head(folder) and await self._device() == "cpu":
            raise UnsupportedError(
                f"vLLM at {self._base_url} runs on a CPU, where it keeps the old output head of a model that shares it "
                'with the embedding. Train with lora={...} and weights="adapter", or sample with VLLMInference'
            )
        async with await self._all_turns():
            # Other clients' requests end with the weights that they began with, or begin when all weights are new.
            try:
                await self._of_vllm("pause?mode=wait")
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await self._of_vllm("collective_rpc", reload)
                await self._of_vllm("reset_prefix_cache")
                await self._of_vllm("update_weight_version", {"new_version": str(version)})
                self.version = version
            finally:
                await self._of_vllm("resume")

    async def _all_turns(self) -> contextlib.AsyncExitStack:
        """Wait until no request is in flight, whose tokens would be of two versions; others wait until the exit."""
        async with contextlib.AsyncExitStack() as turns:
            for _ in range(self._concurrency):
                await turns.enter_async_context(self._turns)
            return turns.pop_all()

    async def sleep(self) -> None:
        """Let vLLM give its memory to the trainer, with its weights in host memory; requests wait until it wakes."""
        async with await self._all_turns() as turns:
            await self._of_vllm("sleep?level=1&mode=wait")
            self._asleep = turns.pop_all()

    async def wake(self) -> None:
        """Undo :meth:`sleep`; nothing if it is awake."""
        if self._asleep is not None:
            await self._of_vllm("wake_up")
            turns, self._asleep = self._asleep, None
            await turns.aclose()

    async def _of_vllm(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a request of vLLM's that is beside its API of OpenAI's."""
        try:
            await self._command(f"{self._root}/{route}", body or {})
        except NotFoundError as error:
            raise UnsupportedError(
                f"{error}: it is no vLLM of 0.32 or newer with VLLM_SERVER_DEV_MODE=1, which new weights for the whole "
                "model and sleeping need"
            ) from None

    @property
    def _root(self) -> str:
        return self._base_url.removesuffix("/v1")

    async def _device(self) -> str:
        """The type of device that vLLM runs on; empty if the endpoint does not tell."""
        try:
            told = await self._question(f"{self._root}/server_info?config_format=json")
        except ValueError:
            return ""
        return str(told.get("vllm_config", {}).get("device_config", {}).get("device", ""))
