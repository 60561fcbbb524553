"""A tenant with few and small calls, as a process of its own: nothing but the server and the processors delays it.

``python small_calls.py ADDRESS MODEL`` with the key in GRADWIRE_API_KEY reads numbers, one a line, makes each call so
often, one after the other, and prints the seconds that each took as JSON, by call.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import gradwire


def small_calls(
    service: gradwire.ServiceClient, run: gradwire.TrainingClient, model: str
) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "encode": lambda: service.encode(model, ["hi"]),
        "decode": lambda: service.decode(model, [[5, 6]]),
        "tokenizer_info": lambda: service.tokenizer_info(model),
        "server_info": service.server_info,
        "list_models": service.list_models,
        "list_runs": service.list_runs,
        "info": run.info,
        "list_checkpoints": run.list_checkpoints,
        "history": run.history,
        "zero_grad": run.zero_grad,
        "sample": lambda: service.sampling_client(model).sample([[5, 6]], max_tokens=1),
    }


async def main(address: str, model: str) -> None:
    async with gradwire.connect(address, api_key=os.environ["GRADWIRE_API_KEY"]) as service:
        run = await service.create_run(model, lora={"rank": 1})
        calls = small_calls(service, run, model)
        while times := (await asyncio.to_thread(sys.stdin.readline)).strip():
            found = defaultdict(list)
            for _ in range(int(times)):
                for name, call in calls.items():
                    began = time.perf_counter()
                    await call()
                    found[name].append(time.perf_counter() - began)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
