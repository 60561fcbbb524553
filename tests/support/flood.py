"""A tenant that floods every RPC of the service through the SDK, as a process of its own.

``python flood.py ADDRESS MODEL`` with the key in GRADWIRE_API_KEY; downloads go to its working folder. It reads lines:
``go`` begins the flood, ``pause`` ends it and prints how many calls of each kind were made since the start, and how
many of them failed how, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gradwire

AT_ONCE = 8
"""Calls of each kind that are always under way."""
BOOK = "One tenant writes a book of many words, and has it tokenized again and again. " * 2000
MESSAGES = [{"role": "user", "content": "hello there " * 20}, {"role": "assistant", "content": "well " * 20}]
ROWS = [list(range(3, 35))] * 8
CONNECTIONS = 3


class Flood:
    """The flood of one key."""

    def __init__(self, services: list[gradwire.ServiceClient], run: gradwire.TrainingClient, spare: str, model: str):
        self._services, self._run, self._spare, self._model = itertools.cycle(services), run, spare, model
        self._names = itertools.count()
        self.counts: Counter[str] = Counter()

    @property
    def service(self) -> gradwire.ServiceClient:
        return next(self._services)

    async def _create(self) -> None:
        made = await self.service.create_run(self._model, lora={"rank": 1})
        await self.service.delete_run(made.run_id)

    async def _huge(self) -> None:
        await self.service.create_run(self._model, lora={"rank": 400_000})

    async def _fork(self) -> None:
        made = await self.service.fork_run(f"{self._run.run_id}/kept")
        await self.service.delete_run(made.run_id)

    async def _open(self) -> None:
        await self.service.get_training_client(self._spare)

    async def _train(self) -> None:
        run = self._run
        await gradwire.gather(
            *(run.forward_backward({"input_ids": ROWS}, "causal_lm") for _ in range(8)), run.optim_step()
        )

    async def _cancel(self) -> None:
        futures = [self._run.zero_grad() for _ in range(4)]
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    async def _save(self) -> None:
        name = f"flood-{next(self._names)}"
        saved = await self._run.save_checkpoint(name)
        await self._run.delete_checkpoint(saved)

    async def _accept(self) -> None:
        await self._run.accept_changes()  # refused: the run is not parked

    async def _upload(self) -> None:
        made = await self.service.upload_adapter("adapter", self._model)
        await self.service.delete_upload(made.upload_id)

    async def _stream(self) -> None:
        async for _ in self.service.sampling_client(self._model).stream([5, 6, 7], max_tokens=8):
            pass

    async def _download(self) -> None:
        folder = Path(f"download-{next(self._names)}")
        await self._run.download_checkpoint("kept", folder)
        await asyncio.to_thread(shutil.rmtree, folder)

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """A call of the SDK for each RPC, by the RPC's name; some of the RPCs have a common one."""
        model = self._model
        ids = [list(range(3, 60)) * 1000] * 8
        prompts = [[5, 6, 7]] * 4
        return {
            "GetServerInfo": lambda: self.service.server_info(),
            "ListModels": lambda: self.service.list_models(),
            "ListLosses": lambda: self.service.list_losses(),
            "Encode": lambda: self.service.encode(model, [BOOK] * 16),
            "Decode": lambda: self.service.decode(model, ids),
            "Render": lambda: self.service.render(model, [MESSAGES] * 64),
            "GetTokenizerInfo": lambda: self.service.tokenizer_info(model),
            "CreateRun": self._create,
            "GetRun": lambda: self._run.info(),
            "ListRuns": lambda: self.service.list_runs(),
            "DeleteRun": self._create,
            "ForkRun": self._fork,
            "ShareRun": lambda: self._run.share("root"),
            "GetHistory": lambda: self._run.history(),
            "OpenRun": self._open,
            "Submit": self._train,
            "Results": self._train,
            "AckResults": self._train,
            "Cancel": self._cancel,
            "DiscardPending": lambda: self._run.discard_pending(),
            "AcceptChanges": self._accept,
            "BeginUpload": self._upload,
            "WriteUpload": self._upload,
            "FinishUpload": self._upload,
            "ListUploads": lambda: self.service.list_uploads(),
            "DeleteUpload": self._upload,
            "Sample": lambda: self.service.sampling_client(model).sample(prompts, max_tokens=8),
            "StreamSample": self._stream,
            "ListCheckpoints": lambda: self._run.list_checkpoints(),
            "DeleteCheckpoint": self._save,
            "Download": self._download,
            "CreateRun, too large": self._huge,
        }

    async def keep_calling(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        while True:
            self.counts[name] += 1
            try:
                await call()
            except gradwire.GradwireError as error:
                self.counts[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.01)


async def main(address: str, model: str) -> None:
    logging.disable(logging.WARNING)
    key = os.environ["GRADWIRE_API_KEY"]
    async with AsyncExitStack() as stack:
        services = [await stack.enter_async_context(gradwire.connect(address, api_key=key)) for _ in range(CONNECTIONS)]
        run = await services[0].create_run(model, lora={"rank": 2})
        await run.save_checkpoint("kept")
        await run.export("adapter")
        spare = await services[0].create_run(model, lora={"rank": 1})
        flood = Flood(services, run, spare.run_id, model)
        print("ready", flush=True)
        tasks: list[asyncio.Task[None]] = []
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if command == "go":
                tasks = [
                    asyncio.create_task(flood.keep_calling(name, call))
                    for name, call in flood.calls().items()
                    for _ in range(AT_ONCE)
                ]
                continue
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    flood.counts[f"{type(ended).__name__}: {ended}"[:300]] += 1
            print(json.dumps(flood.counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
