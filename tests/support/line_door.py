"""A door for the tests: JSON lines over a Unix socket, over a core in this process. It shares nothing with gRPC.

``python -m support.line_door SOCKET STATE_DIR MODEL``: each line asks for one thing, and is answered by one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import Caller
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.core.session import Session
from gradwire_server.doors.door import Door
from gradwire_server.errors import ServiceError

ANN = Caller("ann")
Answer = dict[str, Any]


class LineDoor(Door):
    """Translates lines to calls on the core, and back."""

    def __init__(self, core: Core, address: str) -> None:
        self._core, self.address = core, address
        self._server: asyncio.Server | None = None
        self._sessions: dict[str, Session] = {}
        self._calls: dict[str, Callable[..., Awaitable[Answer]]] = {
            "create": self.create,
            "open": self.open_run,
            "train": self.train,
            "accept": self.accept,
            "result": self.result,
            "sample": self.sample,
            "modules": self.modules,
        }

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self.serve, self.address)

    async def announce_end(self) -> None:
        """Nobody asks this door whether the server is about to stop."""

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                answer = await self._answer(line)
            except ServiceError as error:
                answer = {"error": pb.ErrorCode.Name(error.code), "message": str(error), "field": error.error.field}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            asked = json.loads(line)
            call = self._calls[asked.pop("do")]
            inspect.signature(call).bind(**asked)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            code, known = pb.ERROR_CODE_INVALID_ARGUMENT, ", ".join(self._calls)
            message = f'a line is a JSON object with "do", one of {known}, and its arguments ({error})'
            raise ServiceError(code, message, field="do") from error
        return await call(**asked)

    async def create(self, model: str, rank: int) -> Answer:
        run = await self._core.runs.create(ANN, pb.RunConfig(base_model=model, lora=pb.LoraSettings(rank=rank), seed=1))
        return await self.open_run(run.run_id)

    async def open_run(self, run_id: str) -> Answer:
        self._sessions[run_id] = await self._core.open_session(ANN, run_id, takeover=True, keep_results=True)
        return {"run_id": run_id, "step": self._core.runs.get(ANN, run_id).step}

    async def train(self, run_id: str, rows: list[list[int]]) -> Answer:
        session = self._sessions[run_id]
        loss = session.submit(_forward_backward(), _batch(rows))
        step = session.submit(pb.Operation(optim_step=_STEP))
        return {"loss": (await loss).result.loss.loss, "step": (await step).result.optim_step.step}

    async def accept(self, run_id: str, rows: list[list[int]]) -> Answer:
        """Returns once both are acknowledged, whatever becomes of them then."""
        session = self._sessions[run_id]
        futures = session.submit(_forward_backward(), _batch(rows)), session.submit(pb.Operation(optim_step=_STEP))
        for future in futures:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        while self._core.runs.get(ANN, run_id).accepted_seq < session.next_seq - 1:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0.01)
        return {"seq": session.next_seq - 1}

    async def result(self, run_id: str, seq: int) -> Answer:
        return {"step": (await self._sessions[run_id].result(seq)).result.optim_step.step}

    async def sample(self, run_id: str, prompt: list[int]) -> Answer:
        call = pb.SampleCall(max_tokens=4, temperature=1.0, seed=3)
        batch = {"prompt_ids": Column.from_rows([np.array(prompt, np.int32)])}
        sampled = await self._sessions[run_id].submit(pb.Operation(sample=call), batch)
        return {"tokens": sampled.columns["token_ids"].values.tolist()}

    async def modules(self) -> Answer:
        return {"modules": sorted({name.partition(".")[0] for name in sys.modules} & {"grpc", "torch"})}


_STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)


def _forward_backward() -> pb.Operation:
    return pb.Operation(forward_backward=pb.LossCall(loss_fn="causal_lm"))


def _batch(rows: list[list[int]]) -> dict[str, Column]:
    return {"input_ids": Column.from_rows([np.array(row, np.int32) for row in rows])}


async def main(socket: str, state_dir: str, model: str) -> None:
    config = ServerConfig(state_dir=Path(state_dir), models={"tiny": model}, device="cpu", threads=1)
    async with Core(config) as core:
        await LineDoor(core, socket).open()
        print("open", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
