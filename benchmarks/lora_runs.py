"""Eight LoRA runs of one base model at once: their tokens a second against one's, and what the eighth adds to memory.

Each client has a connection of its own and sends its operations pipelined. Memory is what is resident in the engine's
process, before the eighth run is created and after it has trained as the others have; it is held against the adapter's
weights and AdamW's two moments, 12 bytes a parameter.
"""

from __future__ import annotations

import asyncio
import statistics
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


async def together(size: Size) -> list[Figure]:
    source = Draw.of(7, smoke=size.smoke)
    turns = Turns("eight", "one")
    grown: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(gradwire.connect(models=[f"m={model}"]))
            engine = engine_process()
            warm = [KINDS["sft"].batch(source.rows(ROWS)) for _ in range(2)]
            runs: list[gradwire.TrainingClient] = []
            for seed in range(CLIENTS):
                client = await stack.enter_async_context(gradwire.connect(service.address))
                before = memory_bytes(engine, "VmRSS")
                runs.append(await client.create_run("m", lora={"rank": size.pick(128, 8)}, seed=seed))
                await train(runs[-1], KINDS["sft"], warm)
                grown.append(memory_bytes(engine, "VmRSS") - before)
            info: Any = await runs[-1].info()
            for _ in range(size.repeats + 1):
                shares = [[source.rows(ROWS)] for _ in runs]
                tokens = sum(num_tokens(rows) for share in shares for rows in share)
                batches = [[KINDS["sft"].batch(rows) for rows in share] for share in shares]
                with turns.turn("one", tokens):
                    await train(runs[0], KINDS["sft"], [batch for share in batches for batch in share])
                with turns.turn("eight", tokens):
                    await asyncio.gather(
                        *(train(run, KINDS["sft"], share) for run, share in zip(runs, batches, strict=True))
                    )
    turns.drop_first()
    held = BYTES_A_PARAMETER * info.num_trainable_parameters
    added = grown[-1]
    each = ", ".join(f"{value / MIB:.1f}" for value in grown[1:])
    detail = (
        f"the eighth adds {added / MIB:.1f} MiB, adapter and optimizer are {held / MIB:.1f}; the second to eighth "
        f"added {each} (median {statistics.median(grown[1:]) / held:.2f} x)"
    )
    return [
        Figure(
            "eight LoRA runs at once against one", turns.ratio(), "x", 0.9, detail=turns.said("tokens"),
            samples=turns.rates,
        ),
        Figure("memory of the eighth run", added / held, "x", 1.1, at_least=False, detail=detail),
    ]  # fmt: skip


def measure(size: Size) -> list[Figure]:
    return asyncio.run(together(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
