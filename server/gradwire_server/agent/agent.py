"""The agent of an engine: it starts the engine's process, carries its frames to the server, and ends it.

The agent has what the server has of an engine on its own machine: the process, the socket pair to it and the page of
marks. When the engine dies it says what the engine had begun. When the server is not heard of for the time of the lease
it ends the engine; should the agent not be able to, the engine ends itself (:mod:`.lease`). What the engine has
computed by then is lost, and the server has it done again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.agent.front import Front, Lending
from gradwire_server.config import EngineSettings
from gradwire_server.engine_client.launcher import LocalLauncher, LocalLife, launch
from gradwire_server.engine_link import lease
from gradwire_server.engine_link.code import code_version
from gradwire_server.engine_link.frames import LinkClosed
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

FOR_NOW = (pb.ERROR_CODE_ENGINE_UNAVAILABLE, pb.ERROR_CODE_SHUTTING_DOWN, pb.ERROR_CODE_INTERNAL)
"""Refusals after which the agent tries again."""
BEATS = 5
"""Signs of life in the time of a lease."""
ANSWER_S = 30.0
"""Patience in seconds for the server's first answer."""
FAREWELL_S = 10.0
LEFT = ("spilled", "shared_weights")
"""Folders of an engine's state folder that are of no use to the next one."""
LONGEST_PAUSE_S = 5.0
"""Longest pause in seconds before a server is called again that did not answer."""


class Agent:
    """Lends an engine to a server until it is cancelled.

    Args:
        machine: The agent's name, which no other has.
        settings: Settings that differ from the server's.
        folder: The agent's own folder, for a server whose checkpoints are in a store.
    """

    def __init__(self, front: Front, machine: str, settings: Mapping[str, Any], folder: Path) -> None:
        self._front = front
        self._offer = engine_pb2.EngineOffer(
            machine=machine, code=code_version(), settings=json.dumps(dict(settings)), folder=str(folder.absolute())
        )

    async def run(self) -> None:
        """Lend an engine, and the next one when it ends.

        Raises:
            ServiceError: The server refuses it for good, or the engine cannot start with these settings.
            OSError: The process cannot be started, or a file of a certificate cannot be read.
        """
        failures, pauses_s = 0, LocalLauncher.pauses_s
        while True:
            visit = Visit(self._front, self._offer)
            try:
                await visit.last()
            except LinkClosed as error:
                log.warning("the server at %s: %s", self._front.address, error)
            except ServiceError as error:
                if error.code not in FOR_NOW:
                    raise
                log.warning("the server at %s refuses the engine for now: %s", self._front.address, error)
            failures = 1 if visit.worked else failures + 1
            pause_s = pauses_s[min(failures, len(pauses_s) - 1)]
            await asyncio.sleep(pause_s if visit.began else min(pause_s, LONGEST_PAUSE_S))


class Visit:
    """One engine at a server, from the offer to its end.

    Attributes:
        began: Whether a process was started.
        worked: Whether it answered a request.
    """

    def __init__(self, front: Front, offer: engine_pb2.EngineOffer) -> None:
        self._front, self._offer = front, offer
        self._unanswered: dict[int, None] = {}
        self._sent: dict[int, int] = {}
        self._lease_ns = self._ends_ns = 0
        self._life: LocalLife | None = None
        self._refusal: pb.Error | None = None
        self.began = self.worked = False

    async def last(self) -> None:
        """Offer the engine, start it as the server orders, and carry its frames until one of the two ends.

        Raises:
            ServiceError: The server refuses it, or the engine its settings.
            LinkClosed: The server is gone.
            OSError: The process cannot be started.
        """
        channel = self._front.channel()
        lending = Lending(channel, self._front, self._offer, self._extend)
        try:
            offered_ns = lease.now_ns()
            first = await asyncio.wait_for(lending.read(), ANSWER_S)
            if first is None or not first.HasField("order"):
                raise LinkClosed("it gave no order")
            await self._follow(first.order, offered_ns, lending)
        except TimeoutError:
            raise LinkClosed(f"no answer in {ANSWER_S:g} s") from None
        finally:
            await lending.cancel()
            await channel.close()

    async def _follow(self, order: engine_pb2.EngineOrder, offered_ns: int, lending: Lending) -> None:
        settings = EngineSettings.model_validate_json(order.settings)
        staging = Path(order.staging) if order.staging else None
        if staging is None:
            await asyncio.to_thread(_make_clean, Path(self._offer.folder))
        elif not await asyncio.to_thread(staging.is_dir):
            message = (
                f"the server's state folder {settings.state_dir} is not here: mount it at the same path, or start the"
                " server with --store, which needs no common folder"
            )
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message)
        self._lease_ns = int(order.lease_s * 1e9)
        self._ends_ns = offered_ns + self._lease_ns
        life = self._life = await launch(settings, order.number, 1, staging, self._ends_ns)
        self.began = True
        carrying = [
            asyncio.create_task(work(life, lending))
            for work in (self._carry_replies, self._carry_requests, self._beat, self._carry_pulses)
        ]
        try:
            done, _ = await asyncio.wait(carrying[:3], return_when=asyncio.FIRST_COMPLETED)
            if carrying[0] in done:
                await self._report(life, lending, carrying[1:3])
            else:
                done.pop().result()
        finally:
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
            await life.end()
            life.close()
        if self._refusal is not None:
            raise ServiceError.of(self._refusal)

    async def _carry_replies(self, life: LocalLife, lending: Lending) -> None:
        """Carry the engine's frames to the server, until it has no more."""
        while True:
            try:
                reply, payload = await life.receive()
            except LinkClosed:
                return
            if reply.id and not reply.HasField("sample_frame"):
                life.answered(reply.id)
                self._unanswered.pop(reply.id, None)
                self.worked = True
            elif reply.HasField("error"):
                self._refusal = reply.error
            lending.link.send(reply, [payload])

    async def _carry_requests(self, life: LocalLife, lending: Lending) -> None:
        """Carry the server's requests to the engine, and answer those that are the agent's own."""
        while True:
            request, payload = await lending.link.receive(engine_pb2.EngineRequest)
            if request.HasField("withdraw"):
                asked = request.withdraw.request
                done = asked in self._unanswered and await life.withdraw(asked)
                withdrawn = engine_pb2.EngineWithdrawn(done=done)
                lending.link.send(engine_pb2.EngineReply(id=asked, withdrawn=withdrawn))
            elif request.HasField("stop"):
                if request.stop.request in self._unanswered:
                    life.stop(request.stop.request)
            else:
                self._unanswered[request.id] = None
                life.send(request, [payload])

    async def _carry_pulses(self, life: LocalLife, lending: Lending) -> None:
        """Carry the pulses of the engine's ranks, if it has several, to the server, which watches over them."""
        while (pulse := await life.pulse()) is not None:
            lending.link.send(engine_pb2.EngineReply(pulse=pulse))

    async def _beat(self, life: LocalLife, lending: Lending) -> None:
        """Ask for the lease to be extended, until it ends."""
        number = 0
        while (left_ns := self._ends_ns - (now_ns := lease.now_ns())) > 0:
            number += 1
            self._sent[number] = now_ns
            lending.link.send_first(engine_pb2.EngineChunk(lease=number))
            await asyncio.sleep(min(left_ns, self._lease_ns / BEATS) / 1e9)
        raise LinkClosed(f"it was not heard of for {self._lease_ns / 1e9:g} s, so the engine ends")

    def _extend(self, number: int) -> None:
        """The server had not given the engine up at a time after the one at which this number was sent."""
        sent_ns = self._sent.get(number)
        self._sent = {later: at for later, at in self._sent.items() if later > number}
        if sent_ns is not None and self._life is not None:
            self._ends_ns = self._life.marks.lease_ns = sent_ns + self._lease_ns

    async def _report(self, life: LocalLife, lending: Lending, others: list[asyncio.Task[None]]) -> None:
        """Say how the engine ended, and what it had begun."""
        how = await life.end()
        suspects = life.suspects(list(self._unanswered))
        log.warning("engine: %s", how)
        ended = engine_pb2.EngineEnded(suspects=suspects, reason=f"{self._offer.machine}: {how}")
        lending.link.send(engine_pb2.EngineReply(ended=ended))
        lending.link.end()
        with contextlib.suppress(LinkClosed, ServiceError):
            await asyncio.wait(others, timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)


def _make_clean(folder: Path) -> None:
    """Make the agent's own folder, and delete what an engine has left in it that was killed."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in LEFT:
        shutil.rmtree(folder / left, ignore_errors=True)
