"""A tenant that floods every RPC of the service with valid calls, as a process of its own.

``python flood.py ADDRESS MODEL READER`` with the key in GRADWIRE_API_KEY; READER is the name of another key, and files
go to the working folder. It reads lines: ``go`` begins the flood, ``pause`` ends it and prints as JSON how many calls
of each RPC were answered since the start, how many were refused how, and the seconds of the engine that each training
step took.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import gradwire
from gradwire.wire.transport import Transport
from gradwire_proto.v1 import training_pb2 as pb

AT_ONCE = 8
"""Calls of each kind that are always under way: as many callers make one of each at a time."""
CONNECTIONS = 3
BOOK = "One tenant writes a book of many words, and has it tokenized again and again. " * 400
IDS = [list(range(3, 60)) * 200] * 4
ROWS = [list(range(3, 35))] * 8
REFUSED = {
    "DiscardPending": "UnsupportedError",
    "AcceptChanges": "UnsupportedError",
    "MoveRun": "PermissionDeniedError",
    "DrainEngine": "PermissionDeniedError",
}
"""How RPCs are refused that are answered for a parked run only: no tenant can park one."""
UPLOADING = ("BeginUpload", "WriteUpload", "FinishUpload", "DeleteUpload")
TOO_LARGE = "CreateRun, too large"
TOO_LARGE_REFUSED = f"{TOO_LARGE}: LimitExceededError"


class _Run:
    """A run whose operations are submitted by hand: each costs one Submit, one Results and one AckResults."""

    def __init__(self, transport: Transport, run_id: str) -> None:
        self._transport, self.run_id = transport, run_id
        self._epoch = self._seq = 0

    async def open(self) -> None:
        request = pb.OpenRunRequest(run_id=self.run_id, takeover=True, writer="flood")
        opened = await self._transport.unary(lambda stub: stub.OpenRun, request)
        self._epoch, self._seq = opened.epoch, opened.run.accepted_seq

    async def submit(self) -> None:
        """Submit an operation, and wait until it is acknowledged."""
        if not self._epoch:
            await self.open()
        self._seq += 1
        operation = pb.Operation(zero_grad=pb.ZeroGrad())
        header = pb.OperationHeader(run_id=self.run_id, epoch=self._epoch, seq=self._seq, operation=operation)
        stream = self._transport.submit()
        try:
            await stream.send([(header, b"")])
            await stream.end()
            async for ack in stream.acknowledgements():
                if ack.HasField("error"):
                    raise gradwire.GradwireError(ack.error.message)
        except BaseException:
            self._epoch = 0  # the number may be taken or not: the next call opens the run again
            raise

    async def result(self) -> None:
        """Wait for the newest operation's result."""
        async with aclosing(self._transport.results(self.run_id, self._seq)) as results:
            await anext(results)

    async def release(self) -> None:
        """Acknowledge the newest operation's result."""
        request = pb.AckResultsRequest(run_id=self.run_id, up_to_seq=self._seq, epoch=self._epoch)
        await self._transport.unary(lambda stub: stub.AckResults, request)

    async def cancel(self) -> None:
        """Cancel the newest operation."""
        request = pb.CancelRequest(run_id=self.run_id, seq=self._seq, epoch=self._epoch)
        await self._transport.unary(lambda stub: stub.Cancel, request)

    async def discard(self) -> None:
        if not self._epoch:
            await self.open()
        request = pb.DiscardPendingRequest(run_id=self.run_id, epoch=self._epoch)
        await self._transport.unary(lambda stub: stub.DiscardPending, request)


class Caller:
    """One of those who call at the same time, with runs and adapters of its own.

    Args:
        adapter: An adapter's folder, of which the caller uploads copies.
        kept: A run with the checkpoint ``kept``.

    Attributes:
        steps_s: Seconds of the engine that each training step took.
    """

    def __init__(
        self,
        number: int,
        service: gradwire.ServiceClient,
        transport: Transport,
        model: str,
        reader: str,
        adapter: Path,
        kept: gradwire.TrainingClient,
    ) -> None:
        self._number, self._names = number, itertools.count()
        self._service, self._transport, self._model, self._reader = service, transport, model, reader
        self._adapter, self._kept = adapter, kept
        self.steps_s: list[float] = []

    async def start(self) -> None:
        """Create the runs and adapters."""
        self._trained, self._saved = [await self._made() for _ in range(2)]
        self._submitted, self._read, self._released, self._cancelled, self._opened, self._discarded = [
            _Run(self._transport, (await self._made()).run_id) for _ in range(6)
        ]
        settings = json.loads((self._adapter / "adapter_config.json").read_text())
        for rpc in UPLOADING:  # the same content again would be the same upload
            copy = shutil.copytree(self._adapter, self._copy(rpc))
            (copy / "adapter_config.json").write_text(json.dumps(settings | {"revision": copy.name}))

    def _copy(self, rpc: str) -> Path:
        return Path(f"adapter-{self._number}-{rpc}")

    async def _made(self) -> gradwire.TrainingClient:
        return await self._service.create_run(self._model, lora={"rank": 1})

    async def _create(self) -> None:
        await self._service.delete_run((await self._made()).run_id)

    async def _fork(self) -> None:
        made = await self._service.fork_run(f"{self._kept.run_id}/kept")
        await self._service.delete_run(made.run_id)

    async def _train(self) -> None:
        stepped = await self._trained.train_step({"input_ids": ROWS}, "causal_lm")
        self.steps_s.append(stepped.timings.engine_s)

    async def _operation(self, run: _Run) -> None:
        await run.submit()
        await run.result()
        await run.release()

    async def _cancel(self) -> None:
        await self._cancelled.submit()
        await self._cancelled.cancel()

    async def _save(self) -> None:
        saved = await self._saved.save_checkpoint(f"flood-{next(self._names)}")
        await self._saved.delete_checkpoint(saved)

    async def _upload(self, rpc: str) -> None:
        made = await self._service.upload_adapter(self._copy(rpc), self._model)
        await self._service.delete_upload(made.upload_id)

    async def _render(self) -> None:
        said = f"{self._number} {next(self._names)} " + "hello there " * 20  # another one each time: they are cached
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "well " * 20}]
        await self._service.render([messages] * 16, model=self._model)

    async def _stream(self) -> None:
        async for _ in self._service.sampling_client(self._model).stream([5, 6, 7], max_tokens=8):
            pass

    async def _download(self) -> None:
        folder = Path(f"download-{self._number}-{next(self._names)}")
        await self._kept.download_checkpoint("kept", folder)
        await asyncio.to_thread(shutil.rmtree, folder)

    async def _watch(self) -> None:
        async with aclosing(self._service.watch(with_points=True)) as updates:
            await anext(updates)

    async def _recorded(self) -> None:
        await self._kept.record_rollouts(self._number, [{"said": "hello there " * 100}] * 8)
        await self._kept.recorded_rollouts(self._number)

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """A call for each RPC, by the RPC's name; a call makes other RPCs too where it needs them."""
        service, model = self._service, self._model
        return {
            "GetServerInfo": lambda: service.server_info(),
            "ListModels": lambda: service.list_models(),
            "ListLosses": lambda: service.list_losses(),
            "Encode": lambda: service.encode(model, [BOOK] * 4),
            "Decode": lambda: service.decode(model, IDS),
            "Render": self._render,
            "GetTokenizerInfo": lambda: service.tokenizer_info(model),
            "CreateRun": self._create,
            "GetRun": lambda: self._kept.info(),
            "ListRuns": lambda: service.list_runs(),
            "WatchRuns": self._watch,
            "ListOperations": lambda: self._kept.activity(),
            "ListQueues": lambda: service.list_queues(),
            "ListKeys": lambda: service.list_keys(),
            "GetUsage": lambda: service.usage(by=["run"]),
            "ListRecordings": lambda: self._kept.list_recordings(),
            "ReadRecording": self._recorded,
            "RecordRollouts": self._recorded,
            "DeleteRun": self._create,
            "ForkRun": self._fork,
            "ShareRun": lambda: self._kept.share(self._reader),
            "GetHistory": lambda: self._trained.history(),
            "OpenRun": lambda: self._opened.open(),
            "Submit": lambda: self._operation(self._submitted),
            "Submit, train_step": self._train,
            "Results": lambda: self._operation(self._read),
            "AckResults": lambda: self._operation(self._released),
            "Cancel": self._cancel,
            "DiscardPending": lambda: self._discarded.discard(),
            "AcceptChanges": lambda: self._kept.accept_changes(),
            "MoveRun": lambda: service.move_run(self._kept.run_id),
            "DrainEngine": lambda: service.drain_engine(0),
            **{rpc: functools.partial(self._upload, rpc) for rpc in UPLOADING},
            "ListUploads": lambda: service.list_uploads(),
            "Sample": lambda: service.sampling_client(model).sample([[5, 6, 7]] * 4, max_tokens=8),
            "StreamSample": self._stream,
            "ListCheckpoints": lambda: self._kept.list_checkpoints(),
            "DeleteCheckpoint": self._save,
            "Download": self._download,
            TOO_LARGE: lambda: service.create_run(model, lora={"rank": 400_000}),
        }


async def keep_calling(
    rpc: str, call: Callable[[], Awaitable[Any]], answered: Counter[str], refused: Counter[str]
) -> None:
    """Make a call again and again until cancelled, and count how it ends."""
    while True:
        try:
            await call()
        except gradwire.GradwireError as error:
            refused[f"{rpc}: {type(error).__name__}"] += 1
            await asyncio.sleep(0.01)
        else:
            answered[rpc] += 1


async def started(address: str, model: str, reader: str, key: str, stack: AsyncExitStack) -> list[Caller]:
    """The callers, ready to call."""
    services = [await stack.enter_async_context(gradwire.connect(address, api_key=key)) for _ in range(CONNECTIONS)]
    transports = [Transport(address, api_key=key) for _ in range(CONNECTIONS)]
    for transport in transports:
        stack.push_async_callback(transport.close)
    kept = await services[0].create_run(model, lora={"rank": 2})
    await kept.save_checkpoint("kept")
    adapter = await kept.export("adapter")
    pairs = itertools.cycle(zip(services, transports, strict=True))
    callers = [
        Caller(number, *next(pairs), model=model, reader=reader, adapter=adapter, kept=kept)
        for number in range(AT_ONCE)
    ]
    for caller in callers:
        await caller.start()
    return callers


async def main(address: str, model: str, reader: str) -> None:
    logging.disable(logging.WARNING)
    async with AsyncExitStack() as stack:
        callers = await started(address, model, reader, os.environ["GRADWIRE_API_KEY"], stack)
        print("ready", flush=True)
        answered, refused, tasks = Counter[str](), Counter[str](), list[asyncio.Task[None]]()
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if command == "go":
                tasks = [
                    asyncio.create_task(keep_calling(rpc, call, answered, refused))
                    for caller in callers
                    for rpc, call in caller.calls().items()
                ]
                continue
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    refused[f"{type(ended).__name__}: {ended}"[:300]] += 1
            steps_s = [seconds for caller in callers for seconds in caller.steps_s]
            print(json.dumps({"answered": answered, "refused": refused, "steps_s": steps_s}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
