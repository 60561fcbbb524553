"""The client's channel over a simulated network: messages take time, connections break, answers get lost."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire import errors
from gradwire.errors import ConnectionLostError
from gradwire.wire.streams import SubmitStream, results_of
from gradwire.wire.transport import Transport
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import ANYONE
from gradwire_server.doors.grpc.interceptors import CALLER
from gradwire_server.errors import ServiceError

if TYPE_CHECKING:
    from support.simulation.world import World

ADDRESS = "the simulated server"


def lost(why: str) -> ConnectionLostError:
    return ConnectionLostError(f"no answer from {ADDRESS}: {why}")


def copied(message: Any) -> Any:
    """Copy a message as serialization would."""
    return type(message).FromString(message.SerializeToString())


class Network:
    """Network that schedules deliveries outside any process, so that a message outlives its sender."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.break_probability = 0.0
        self._outside = contextvars.Context()

    def after(self, delay_s: float, deliver: Callable[[], None]) -> None:
        self.world.loop.call_later(delay_s, deliver, context=self._outside.copy())

    def at(self, when: float, deliver: Callable[[], None]) -> None:
        self.world.loop.call_at(when, deliver, context=self._outside.copy())

    def latency(self) -> float:
        rng = self.world.rng
        return rng.expovariate(1 / 0.003) if rng.random() < 0.97 else rng.uniform(0.1, 1.5)

    def breaks(self) -> bool:
        return self.world.rng.random() < self.break_probability


class Call:
    """A call whose requests and answers may be streams; stand-in for the client's call object of grpc."""

    def __init__(self, network: Network, handler: Callable[[Any, AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        self._network = network
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()
        self._to_server: asyncio.Queue[Any] = asyncio.Queue()
        self._times = {"client": 0.0, "server": 0.0}
        self._over = False
        self._task: asyncio.Task[Any] | None = None
        self.number = network.world.numbered()
        self.answers = self._answers
        """What iterating over the call gives."""
        self._server = network.world.server
        if self._server is None:
            network.after(network.latency(), lambda: self.broken("nobody listens"))
        else:
            self._server.calls.add(self)
            server = self._server
            network.after(network.latency(), lambda: self._begin(server, handler))

    # ---- the client's side

    async def write(self, message: Any) -> None:
        if self._over:
            raise asyncio.InvalidStateError("the call is over")
        self._send("server", copied(message))

    async def done_writing(self) -> None:
        self._send("server", None)

    def cancel(self) -> bool:
        self._end()
        return True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.answers()

    async def _answers(self) -> AsyncIterator[Any]:
        while True:
            item = await self._to_client.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    # ---- the wire

    def broken(self, why: str) -> None:
        """End the call on both sides; messages in transit are lost."""
        if not self._over:
            self._end()
            self._to_client.put_nowait(lost(why))

    def _end(self) -> None:
        self._over = True
        server = self._server
        if server is not None:
            server.calls.discard(self)
            if server.process.alive and self._task is not None:
                self._task.cancel()

    def _send(self, to: str, item: Any) -> None:
        """Deliver in order, after a delay."""
        loop, network = self._network.world.loop, self._network
        self._times[to] = when = max(self._times[to] + 1e-6, loop.time() + network.latency())

        network.at(when, partial(self._deliver, to, item))

    def _deliver(self, to: str, item: Any) -> None:
        if self._over:
            return
        if self._network.breaks():
            self.broken("the connection broke")
            return
        queue = self._to_server if to == "server" else self._to_client
        queue.put_nowait(item)
        if to == "client" and (item is None or isinstance(item, Exception)):
            self._end()

    def server_died(self) -> None:
        """Tell the client after a while."""
        self._network.after(self._network.latency(), partial(self.broken, "the server died"))

    # ---- the server's side

    def _begin(self, server: Any, handler: Callable[[Any, AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        if not self._over and server.process.alive:
            self._task = server.process.spawn(self._serve(server, handler))

    async def _requests(self) -> AsyncIterator[Any]:
        while (item := await self._to_server.get()) is not None:
            yield item

    async def _serve(self, server: Any, handler: Callable[[Any, AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        CALLER.set(ANYONE)
        try:
            async for answer in handler(server.service, self._requests()):
                self._send("client", copied(answer))
        except ServiceError as error:
            self._send("client", self._failure(error))
        except Exception as error:  # the real door answers INTERNAL; here it is a defect that was found
            self._network.world.defects.append(f"the server raised {error!r}")
            self._send("client", errors.InternalServerError(repr(error)))
        else:
            self._send("client", None)

    def _failure(self, error: ServiceError) -> Exception:
        """What the client raises for an error of the server."""
        return errors.from_wire(error.error)


class _Names:
    """Stand-in for the stub, whose methods are known by name."""

    def __getattr__(self, name: str) -> str:
        return name


class SimulatedTransport(Transport):
    """The SDK's transport: its retries, backoff and streams, on simulated calls."""

    def __init__(self, network: Network, patience_s: float) -> None:
        self._network = network
        self.address = ADDRESS
        self.patience_s = patience_s
        self.check_alive = lambda: None
        self._warned = {}
        self._stub: Any = _Names()

    async def close(self) -> None:
        return

    async def _once(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        sent = copied(request)

        async def handler(service: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
            yield await getattr(service, method)(sent, None)

        call = Call(self._network, handler)
        try:
            async for answer in call:
                return answer
        finally:
            call.cancel()
        raise lost("it ended without an answer")

    def submit(self) -> SubmitStream:
        call: Any = self._network.world.watched(Call(self._network, lambda service, sent: service.Submit(sent, None)))
        return SubmitStream(call, ADDRESS)

    def results(self, run_id: str, from_seq: int) -> AsyncGenerator[tuple[pb.OperationResult, bytes]]:
        request = pb.ResultsRequest(run_id=run_id, from_seq=from_seq, batched=True)
        call: Any = Call(self._network, lambda service, sent: service.Results(request, None))
        return results_of(call, ADDRESS)
