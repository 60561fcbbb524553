"""The engines of a server: several processes, each with models of its own, as one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.config import ServerConfig
from gradwire_server.engine_client.client import EngineClient
from gradwire_server.engine_client.process import EngineProcess
from gradwire_server.errors import ServiceError

GPUS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver has an entry a GPU."""


class EnginePool:
    """The engines behind one front; which of them does what is decided in ``scheduling/who_is_next.py``.

    Attributes:
        engines: By number.
    """

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self.watch(self._wake)

    def add(self, engine: EngineClient) -> None:
        """Add an engine, whose number is the number of those before it."""
        self.engines += (engine,)
        for watcher in self._watchers:
            engine.watch(watcher)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call this whenever the process of an engine, or whether the engine is ready, may have changed."""
        self._watchers.append(changed)
        for engine in self.engines:
            engine.watch(changed)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Event set at the next change of an engine; take it before you look, or you can miss a change."""
        return self._changed

    @property
    def is_ready(self) -> bool:
        """Whether an engine is ready."""
        return any(engine.is_ready for engine in self.engines)

    @property
    def is_known(self) -> bool:
        """Whether an engine has said what it has, at any time."""
        return any(engine.hello.device for engine in self.engines)

    def check_known(self) -> None:
        """Check that an engine has said what it has; later it is known, also while there is none."""
        if not self.is_known:
            message = "this server has no engine of its own (--engines 0), and none of another machine has come so far"
            raise ServiceError(pb.ERROR_CODE_ENGINE_UNAVAILABLE, f"{message}: start `gradwire engine --front` there")

    @property
    def hello(self) -> engine_pb2.EngineHello:
        """The engines' first messages combined: devices, models, losses and tokenizer files."""
        known = [engine.hello for engine in self.engines if engine.hello.device]
        if not known:
            return engine_pb2.EngineHello()
        first, *others = known
        if not others:
            return first
        whole = engine_pb2.EngineHello()
        whole.CopyFrom(first)
        models, losses = {model.name for model in first.models}, {loss.name for loss in first.losses}
        for hello in others:
            whole.models.extend(model for model in hello.models if model.name not in models)
            whole.losses.extend(loss for loss in hello.losses if loss.name not in losses)
            whole.tokenizer_files.update(hello.tokenizer_files)
            models |= {model.name for model in hello.models}
            losses |= {loss.name for loss in hello.losses}
        devices = [hello.device for hello in (first, *others)]
        whole.device = f"{len(devices)} x {first.device}" if len(set(devices)) == 1 else ", ".join(devices)
        return whole

    def ranks_for(self, model: str) -> int:
        """The most ranks of an engine that serves a model; they say how many they have when they start.

        Raises:
            ServiceError: ENGINE_UNAVAILABLE: no engine has come so far.
        """
        self.check_known()
        return max((engine.hello.ranks for engine in self.engines if model in engine.models), default=1) or 1


def own_engines(config: ServerConfig) -> list[EngineProcess]:
    """The engines that a server's settings ask for, as processes on this machine that are yet to be started."""
    gpus = visible_gpus()
    settings = config.engine_settings
    if not settings:
        settings = [config.engine] * (max(gpus, 1) if config.engines == "auto" else config.engines)
    count = len(settings)
    if gpus and count > 1:
        settings = [
            each.model_copy(update={"device": f"cuda:{n % gpus}"}) if each.device in ("", "cuda") else each
            for n, each in enumerate(settings)
        ]
    return [EngineProcess.here(each, number, count, config.heartbeat_timeout) for number, each in enumerate(settings)]


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that a process started here may use, found without torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(os.listdir(GPUS)) if GPUS.is_dir() else 0
