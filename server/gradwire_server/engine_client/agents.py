"""The agents of a server: which engines on other machines it takes, and what it has them do."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import ValidationError

from gradwire_server.config import MAX_ENGINES, EngineSettings, ServerConfig
from gradwire_server.engine_client.pool import EnginePool
from gradwire_server.engine_client.process import EngineProcess
from gradwire_server.engine_client.remote import RemoteLauncher, RemoteLife, give_up
from gradwire_server.engine_link.code import code_version
from gradwire_server.errors import ServiceError, invalid, shutting_down

STAGING = "engines"
"""Folder in the state folder, with a folder for each engine on another machine, through which it writes."""
OWN = frozenset(
    {"models", "device", "ranks", "shard", "threads", "run_memory", "run_host_memory", "sampling_cache",
     "reference_cache_gib", "activation_budget_gib", "log_level", "log_format"}
)  # fmt: skip
"""The settings that an engine on another machine may have of its own; all others are the server's."""
GRACE_S = 2.0


class Agents:
    """Takes the engines that agents offer into the pool.

    An engine keeps its number while its agent is away, and the next process of the same agent takes it over. A server
    without engines of its own has one from the start, of no machine yet: the first agent's.
    """

    def __init__(self, config: ServerConfig, pool: EnginePool) -> None:
        self._config, self._pool = config, pool
        self._started: list[EngineProcess] = []
        self._vacant: RemoteLauncher | None = None
        self._launchers: dict[str, RemoteLauncher] = {}
        self._lives: set[RemoteLife] = set()
        self._number = 0
        self._open = False

    async def start(self) -> None:
        """Give up the engines that an earlier process of this server had, and let agents come."""
        folders = [self._config.state_dir / STAGING]
        await asyncio.to_thread(give_up, folders)
        if not self._pool.engines:
            self._vacant = RemoteLauncher("", self._config.engine_lease)
            self._add(self._vacant)
        self._open = True

    def _add(self, launcher: RemoteLauncher) -> EngineProcess:
        engine = EngineProcess(launcher, len(self._pool.engines), self._config.heartbeat_timeout)
        self._started.append(engine)
        self._pool.add(engine)
        engine.begin()
        return engine

    async def stop(self) -> None:
        """Give up all engines. A second call does nothing."""
        self.let_go()
        engines, self._started = self._started, []
        await asyncio.gather(*(engine.stop(GRACE_S) for engine in engines))

    def let_go(self) -> None:
        """End the agents' calls, and take no more."""
        self._open = False
        for engine in self._started:
            engine.is_stopping = True
        for life in self._lives:
            life.gone("the server stops")

    async def attach(self, offer: engine_pb2.EngineOffer) -> RemoteLife:
        """Take an engine that an agent offers; its order is the first chunk to the agent.

        Raises:
            ServiceError: UNSUPPORTED, INVALID_ARGUMENT or UNKNOWN_MODEL if it does not fit this server;
                ENGINE_UNAVAILABLE or SHUTTING_DOWN if it does not for now.
        """
        ours = await asyncio.to_thread(code_version)
        if not self._open:
            raise shutting_down()
        if offer.code != ours:
            message = f"the engine has gradwire {offer.code[:100]}, and this server {ours}: install the same on both"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message)
        settings = self._settings(offer)
        known = self._launchers.get(offer.machine)
        if known is not None and not known.is_away:
            message = (
                f"there is an engine {offer.machine}, or was less than {self._config.engine_lease:g} s ago;"
                " each agent needs a --name of its own"
            )
            raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, message)
        launcher = known or self._vacant or RemoteLauncher("", self._config.engine_lease)
        is_new = launcher is not known and launcher is not self._vacant
        if is_new and len(self._pool.engines) >= MAX_ENGINES:
            raise ServiceError(pb.ERROR_CODE_LIMIT_EXCEEDED, f"a server has {MAX_ENGINES} engines at most")
        if launcher is self._vacant:
            self._vacant = None
        launcher.machine, self._launchers[offer.machine] = offer.machine, launcher
        number, lease_s = self._next_number(), self._config.engine_lease
        state = self._config.state_dir
        folders: list[Path] = []
        if settings.store:  # then it needs nothing of the state folder
            launcher.folder = f"{offer.machine}:{offer.folder}"
            settings = settings.model_copy(update={"state_dir": Path(offer.folder)})
        else:
            staging = state / STAGING / f"{number}-{secrets.token_hex(8)}"
            staging.mkdir(parents=True)
            folders = [staging, state / "shared_weights" / str(number), *_spilled(state, number, settings.num_ranks)]
        life = RemoteLife(lease_s, folders, self._check_hello)
        order = engine_pb2.EngineOrder(
            settings=settings.model_dump_json(), number=number, lease_s=lease_s, staging="".join(map(str, folders[:1]))
        )
        life.reply(engine_pb2.EngineChunk(order=order))
        self._lives.add(life)
        launcher.offer(life, settings.allow_models.keys() | settings.models.keys())
        if is_new:
            self._add(launcher)
        return life

    def detach(self, life: RemoteLife, how: str) -> None:
        """Take note of the end of an agent's call."""
        life.gone(how)
        self._lives.discard(life)

    def _next_number(self) -> int:
        """A number that no process of an engine had; also none of an earlier server, which may still live."""
        self._number = max(self._number + 1, int(time.time()))
        return self._number

    def _settings(self, offer: engine_pb2.EngineOffer) -> EngineSettings:
        own = _object(offer.settings)
        if refused := sorted(own.keys() - OWN):
            message = f"{refused[0]} is the server's to set, or no setting; an engine may have {', '.join(sorted(OWN))}"
            raise invalid(message, refused[0])
        alike = self._config.engine_settings or [self._config.engine]
        models = own.pop("models", None) or {}
        for name in models:
            if name not in self._config.all_models:
                message = f"this server has no model {name[:100]!r}: it has {', '.join(self._config.all_models)}"
                raise ServiceError(pb.ERROR_CODE_UNKNOWN_MODEL, message, field="models")
        base = next((each for each in alike if models.keys() <= each.models.keys() | each.allow_models.keys()), None)
        if base is None:
            message = f"no engine of this server has all of {', '.join(models)}: offer an engine for each"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="models")
        served = {name: path or (base.models | base.allow_models)[name] for name, path in models.items()}
        if served:
            own |= {"models": served, "allow_models": {}}
        try:
            return EngineSettings.model_validate(base.model_dump() | own)
        except ValidationError as error:
            fault = error.errors()[0]
            message = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, message) from None

    def _check_hello(self, hello: engine_pb2.EngineHello) -> None:
        """Check that runs can come from the other engines that serve its models, and compute the same bits."""
        if self._config.accept_changes:
            return
        served = {model.name for model in hello.models}
        for engine in self._pool.engines:
            if not served & {model.name for model in engine.hello.models}:
                continue
            for name, value in hello.computed_with.items():
                here = engine.hello.computed_with.get(name, value)
                if here != value:
                    advice = f": start it with --threads {here}" if name == "threads" else ""
                    message = f"the engine computes with {name} {value}, and engine {engine.number} with {here}{advice}"
                    raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, f"{message}; runs could not move between them")


def _spilled(state: Path, number: int, ranks: int) -> list[Path]:
    return [state / "spilled" / (f"{number}-{rank}" if rank else str(number)) for rank in range(ranks)]


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text or "{}")
    except ValueError:
        document = None
    models = document.get("models", {}) if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(models, Mapping):
        raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "the engine's settings are not a JSON object")
    return document
