"""A program that trains a little, then has one ``forward_backward`` recorded: see ``sitecustomize.py``.

``python one_call.py ADDRESS``
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import gradwire

BATCH = {"input_ids": [[4, 5, 6, 7], [5, 6, 7, 8]]}
PROCESSES = 3
"""This program, the front and the engine."""


async def there(folder: Path, pattern: str) -> None:
    while len(list(folder.glob(pattern))) < PROCESSES:  # noqa: ASYNC110, ASYNC240  other processes write them
        await asyncio.sleep(0.01)


async def main(address: str) -> None:
    folder = Path(os.environ["GRADWIRE_WALK"])
    async with gradwire.connect(address) as service:
        run = await service.create_run("tiny", lora={"rank": 4})
        for _ in range(2):
            await run.forward_backward(BATCH, "causal_lm")
            await run.optim_step(learning_rate=1e-3)
        await asyncio.sleep(0.5)  # until the results so far are acknowledged
        (folder / "on").touch()
        await there(folder, "started-*")
        await run.forward_backward(BATCH, "causal_lm")
        (folder / "on").unlink()
        await there(folder, "files-*")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
