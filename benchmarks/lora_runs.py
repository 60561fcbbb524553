"""Eight concurrent LoRA runs of one base model: their tokens per second relative to one run, and the eighth run's
memory.

Each client has a connection of its own and sends its operations pipelined. Memory is what is resident in the engine's
process, before the eighth run is created and after it has trained as the others have, in a server whose allocator gives
back at once what is freed; it is held against the adapter's weights and AdamW's two moments, 12 bytes a parameter.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import gradwire

from benchmarks.machine import engine_process, memory_bytes
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.turns import Turns
from benchmarks.workload import Draw, num_tokens, standard_model

CLIENTS = 8
BYTES_A_PARAMETER = 3 * 4
MIB = 2**20
ROWS = 4
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


async def connect_all(
    stack: AsyncExitStack, model: Path, size: Size, warm: list[dict[str, Any]]
) -> tuple[list[gradwire.TrainingClient], list[float]]:
    """Open one client per run, each trained on ``warm``; return the engine's resident memory after each."""
    service = await stack.enter_async_context(gradwire.connect(models=[f"m={model}"]))
    engine = engine_process()
    runs: list[gradwire.TrainingClient] = []
    resident: list[float] = []
    for seed in range(CLIENTS):
        client = await stack.enter_async_context(gradwire.connect(service.address, api_key=service.api_key))
        runs.append(await client.create_run("m", lora={"rank": size.pick(128, 8)}, seed=seed))
        await train(runs[-1], KINDS["sft"], warm)
        resident.append(memory_bytes(engine, "VmRSS"))
    return runs, resident


async def memory_of_a_run(model: Path, source: Draw, size: Size) -> Figure:
    warm = [KINDS["sft"].batch(source.rows(ROWS)) for _ in range(2)]
    async with AsyncExitStack() as stack:
        os.environ.update(GIVES_BACK)  # read by the server that is started now
        stack.callback(lambda: [os.environ.pop(name) for name in GIVES_BACK])
        runs, resident = await connect_all(stack, model, size, warm)
        info: Any = await runs[-1].info()
    held = BYTES_A_PARAMETER * info.num_trainable_parameters
    grown = [after - before for before, after in itertools.pairwise(resident)]
    each = ", ".join(f"{value / MIB:.1f}" for value in grown)
    detail = f"adapter and optimizer are {held / MIB:.1f} MiB; the second to eighth run added {each} MiB"
    return Figure("memory of the eighth run", grown[-1] / held, "x", 1.1, at_least=False, detail=detail)


async def together(size: Size) -> list[Figure]:
    source = Draw.of(7, smoke=size.smoke)
    turns = Turns("eight", "one")
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        memory = await memory_of_a_run(model, source, size)
        async with AsyncExitStack() as stack:
            runs, _ = await connect_all(stack, model, size, [KINDS["sft"].batch(source.rows(ROWS))])
            for _ in range(size.repeats + 1):
                shares = [source.rows(ROWS) for _ in runs]
                tokens = sum(map(num_tokens, shares))
                batches = [KINDS["sft"].batch(rows) for rows in shares]
                with turns.turn("one", tokens):
                    await train(runs[0], KINDS["sft"], batches)
                with turns.turn("eight", tokens):
                    await asyncio.gather(
                        *(train(run, KINDS["sft"], [batch]) for run, batch in zip(runs, batches, strict=True))
                    )
    turns.drop_first()
    name = "eight LoRA runs at once against one"
    return [Figure(name, turns.ratio(), "x", 0.9, detail=turns.said("tokens"), samples=turns.rates), memory]


def measure(size: Size) -> list[Figure]:
    return asyncio.run(together(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
