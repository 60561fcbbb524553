"""A real front over an engine that computes nothing, as a process: python load_server.py FOLDER. Prints its address.

It answers a forward_backward with nothing and a forward with the bytes it was sent; while FOLDER/hold exists it does
not answer at all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import ServerConfig
from gradwire_server.engine_client.client import EngineAnswer
from gradwire_server.limits import Limits
from gradwire_server.server import Server

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.fake_engine import FakeEngine

LOSS = pb.LossInfo(
    name="nothing",
    layout="rows",
    config_schema_json="{}",
    fields=[pb.LossField(name="input_ids", dtype="int", shapes=["[rows, tokens]"], required=True)],
)


class LoadEngine(FakeEngine):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hello.losses.append(LOSS)
        self._hold = folder / "hold"

    async def work(self, request: engine_pb2.EngineRequest) -> None:
        while self._hold.exists():  # noqa: ASYNC110  a file sets no event
            await asyncio.sleep(0.05)

    def _carry_out(self, request: engine_pb2.EngineRequest, payload: bytes) -> EngineAnswer:
        reply, data = super()._carry_out(request, payload)
        return reply, data if request.operation.operation.HasField("forward") else b""


async def main(folder: Path) -> None:
    limits = Limits(max_row_tokens=1 << 30, max_batch_tokens=1 << 30)
    config = ServerConfig(address="127.0.0.1:0", state_dir=folder, models={"tiny": "x"}, limits=limits)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Server(config, [LoadEngine(folder)]) as server:
        print(server.address, flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
