"""The connection to the gradwire server, or to an embedded one if no address was given."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from pathlib import Path

import gradwire
from gradwire.embedded import EmbeddedServer
from gradwire.rlhf import discard_training

from gradwire_feedback.settings import Settings
from gradwire_feedback.store.problems import UnprocessableError

log = logging.getLogger(__name__)

WATCH_S = 1.0
ANSWER_S = 10.0
"""A server that takes longer to describe itself is away."""
START_TIMEOUT_S = 600.0
RECONNECT_TIMEOUT_S = 600.0


class TrainingServer:
    """Connects to the gradwire server, and restarts an embedded one that ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._embedded: EmbeddedServer | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._service: gradwire.ServiceClient | None = None
        self.address = settings.service or ""
        # kept across restarts of an embedded server, so that its clients find it again
        self._key = secrets.token_urlsafe(32) if settings.service is None else None

    async def start(self) -> None:
        """Start or connect.

        Raises:
            gradwire.GradwireError: The server cannot be started or reached.
        """
        if self._settings.service is None:
            self.address = f"127.0.0.1:{_free_port()}"  # kept, so that callers waiting for a lost server find it again
            await self._embed()
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._service = await self.connection()

    async def _embed(self) -> None:
        self._embedded = EmbeddedServer(
            [self._settings.embedded_model],
            self._settings.models_dir / ".gradwire-state",
            ["--address", self.address, *self._settings.server_args],
            self._key or "",
        )
        await self._embedded.listening(START_TIMEOUT_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            assert self._embedded is not None
            try:
                self._embedded.check_alive()
                continue
            except gradwire.ConnectionLostError as error:
                log.error("%s; restarting it", error)
            await self._embedded.close()
            try:
                await self._embed()
            except gradwire.ServerStartError as error:
                log.error("%s; retrying", error)

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._service is not None:
            await self._service.close()
        if self._embedded is not None:
            await self._embedded.close()

    @property
    def service(self) -> gradwire.ServiceClient:
        assert self._service is not None, "the training server was not started"
        return self._service

    def connection(self) -> gradwire.Connection:
        """Open another connection, for another event loop; the key of --service comes from GRADWIRE_API_KEY."""
        return gradwire.connect(
            self.address,
            api_key=self._key,
            ca_cert=self._settings.service_ca_cert,
            reconnect_timeout=RECONNECT_TIMEOUT_S,
        )

    async def trouble(self) -> str:
        """Return why nothing can be trained or answered now, as a sentence; empty if all is well."""
        where = "The training server" if self._settings.service is None else f"The training server at {self.address}"
        try:
            info = await asyncio.wait_for(self.service.server_info(), ANSWER_S)
        except (TimeoutError, gradwire.GradwireError):
            if self._settings.service is None:
                return f"{where} is away and is being restarted. Trainings and answers go on when it is back."
            return f"{where} does not answer. Trainings and answers go on when it is back."
        if not info.engine_ready:
            return f"The engine of {where[0].lower()}{where[1:]} is away. Trainings and answers wait until it is back."
        return ""

    async def complete(
        self,
        model: str,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int | None,
    ) -> str:
        """Continue a prompt.

        Args:
            model: A model of the server, or a checkpoint.
            prompt: The text.
            max_tokens, temperature, top_k, top_p, seed: As for :meth:`gradwire.SamplingClient.sample`.

        Raises:
            gradwire.GradwireError: The server refuses the prompt, or cannot be reached.
        """
        result = await self.service.sampling_client(model).sample(
            [prompt], max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        text = result.samples[0][0].text
        if text is None:
            raise gradwire.UnsupportedError(f"{model} has no tokenizer: the service needs a model with a tokenizer")
        return text.replace("\0", "")

    async def discard(self, folder: Path) -> None:
        """Delete the runs that a training in this folder left on the server."""
        async with self.connection() as service:
            await discard_training(service, folder)

    async def model_info(self, name: str) -> gradwire.ModelInfo:
        """Return the server's description of a model.

        Raises:
            UnprocessableError: The server does not hold the model.
        """
        models = {model.name: model for model in await self.service.list_models()}
        if name not in models:
            raise UnprocessableError(
                f"baseModel: the training server does not hold {name!r}; it has {', '.join(models) or 'none'}",
                field="base_model",
            )
        return models[name]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
