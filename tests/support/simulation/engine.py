"""An engine that takes time and dies, on the server's machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gradwire_proto.v1 import engine_pb2
from gradwire_server.engine_client.client import EngineDied

from support.fake_engine import FakeEngine
from support.simulation.checker import ident

if TYPE_CHECKING:
    from support.simulation.world import World


class SimulatedEngine(FakeEngine):
    """Engine that takes time, dies now and then, and records what it executed."""

    file_bytes = 10

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.disk.state_dir, number)
        self._world = world
        self.death_probability = 0.0

    async def work(self, request: engine_pb2.EngineRequest) -> None:
        rng = self._world.rng
        await asyncio.sleep(rng.expovariate(1 / 0.005))
        if rng.random() < self.death_probability:
            self.die()
            raise EngineDied(suspect=False)

    def _operation(self, asked: engine_pb2.EngineOperation, payload: bytes, reply: engine_pb2.EngineReply) -> Any:
        operation, before = asked.operation, len(self.seen)
        kind = operation.WhichOneof("kind")
        if kind == "forward_backward" and not payload.endswith(ident(operation).encode()):
            self._world.defects.append(f"{ident(operation)} came with the payload {payload[:40]!r}")
        try:
            return super()._operation(asked, payload, reply)[0], b""
        finally:
            if len(self.seen) > before and kind != "zero_grad" and operation.save_checkpoint.note != "automatic":
                self._log(asked.run_id, asked.seq, ident(operation))

    def _log(self, run_id: str, seq: int, name: str) -> None:
        self._world.logs[run_id].executed[seq] = name
