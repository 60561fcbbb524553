"""The scheduler's interface to an engine, wherever that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.engine_link.frames import Buffer
from gradwire_server.engine_link.vitals import Vitals

EngineAnswer = tuple[engine_pb2.EngineReply, Buffer]


class EngineDied(Exception):
    """The engine ended before it answered. `suspect`: it was carrying out this request, among others perhaps."""

    def __init__(self, suspect: bool) -> None:
        super().__init__("the engine died")
        self.suspect = suspect


@dataclass(eq=False)
class Holder:
    """One process of an engine, which holds runs until it ends; its successor holds none of them.

    Attributes:
        alive: Whether it has not ended.
    """

    alive: bool = True


class EngineLife(Protocol):
    """One process of an engine, from its start to its end, and the way to it."""

    def send(self, request: engine_pb2.EngineRequest, payload: Sequence[Buffer]) -> None:
        """Sends a request without waiting."""

    async def receive(self) -> EngineAnswer:
        """The next reply. The first one says hello, or what stopped the start.

        Raises:
            LinkClosed: The process has ended, or cannot be reached.
        """

    def answered(self, request_id: int) -> None:
        """Takes note that the answer to a request was received."""

    async def withdraw(self, request_id: int) -> bool:
        """Takes a request back that has no answer yet; False when it was begun already."""

    def stop(self, request_id: int) -> bool:
        """Ask for a request to be stopped between two micro-batches or tokens; False if that cannot be asked."""

    def suspects(self, unanswered: Sequence[int]) -> Collection[int]:
        """The requests that it was carrying out when it ended.

        Args:
            unanswered: The requests without an answer, oldest first.
        """

    async def pulse(self) -> engine_pb2.EnginePulse | None:
        """The next pulse of one of its ranks; None once no more will come. An engine of one process has none."""

    def kill(self) -> None:
        """End it soon."""

    async def exited(self) -> None:
        """Wait until it has ended."""

    async def end(self) -> str:
        """End it, and return how it ended: from now on it can change nothing that others find."""

    def close(self) -> None:
        """Forget it."""


class Located(Protocol):
    """Engines of one place."""

    @property
    def models(self) -> Collection[str]:
        """Names of the models that it may hold."""

    @property
    def machine(self) -> str:
        """Name of the machine that it is on; empty for this one."""

    @property
    def folder(self) -> str:
        """Its machine's own folder; empty if it has the server's state folder."""

    @property
    def is_away(self) -> bool:
        """Whether there is nobody who could start a process: no agent of its machine is connected."""


class Launcher(Located, Protocol):
    """Provides an engine's processes, one after another."""

    @property
    def pauses_s(self) -> Sequence[float]:
        """Seconds before a process: the first one, that after one failure, after two and so on."""

    @property
    def num_ways(self) -> int:
        """Number of ways in which a process may start, of which another one is tried after each that failed."""

    async def launch(self, failed_starts: int) -> EngineLife:
        """Provide a process.

        Args:
            failed_starts: Number of processes that did not start since the newest one that did.

        Raises:
            Away: There is none for now.
            OSError: It cannot be started.
        """


class Away(Exception):
    """There is nobody who could start an engine."""


class Interruptible(Protocol):
    """An engine whose requests in progress can be taken back or stopped."""

    async def withdraw(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """Takes a request back: its answer is ``not_started``. False when it was begun already."""

    def interrupt(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """Ask for a request to be stopped between two micro-batches or tokens; False if that cannot be asked.

        The answer says whether it was stopped: its result is then cancelled.
        """


class EngineClient(Interruptible, Located, Protocol):
    """An engine that executes one ordered stream of requests."""

    @property
    def number(self) -> int:
        """Its number among the engines of the server, from 0."""

    @property
    def holder(self) -> Holder:
        """The engine's present process; one that is not alive while there is none."""

    @property
    def fails_to_start(self) -> bool:
        """Whether there is no process because the newest attempt to start one failed."""

    @property
    def hello(self) -> engine_pb2.EngineHello:
        """The first message of the newest process."""

    @property
    def vitals(self) -> Vitals:
        """Its heartbeats."""

    @property
    def is_ready(self) -> bool:
        """Whether there is a process that gives signs of life."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call this whenever :attr:`holder` or :attr:`is_ready` may have changed."""

    def request(
        self,
        request: engine_pb2.EngineRequest,
        payload: Sequence[Buffer] = (),
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
    ) -> asyncio.Future[EngineAnswer]:
        """Sends a request, in the order of the calls; ``on_frame`` takes the new tokens of a sample that streams.

        Raises (through the future):
            EngineDied: it may or may not have been carried out.
            ServiceError: the engine refused it.
        """
