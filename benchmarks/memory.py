"""Peak memory of a step whose output head is most of the model: a vocabulary of 128k tokens, a batch of 8k tokens.

The engine's process is measured by the kernel (``VmHWM``, the most that was ever resident) after one forward_backward
and one optim_step of full fine-tuning in float32, twice: in the second the moments are there from the start. It is held
against what the step cannot do without: weights, gradients and AdamW's two moments, 16 bytes a parameter. Python, torch
and transformers are there before any model is loaded; the figure leaves that out and says how much it is, and what the
ratio is with it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import gradwire

from benchmarks.machine import engine_process, memory_bytes
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, train
from benchmarks.workload import Draw, standard_model

BYTES_A_PARAMETER = 4 * 4
GIB = 2**30


async def peak(size: Size) -> Figure:
    vocabulary, tokens = size.pick(128 * 1024, 4096), size.pick(8192, 256)
    source = Draw.of(4)
    row = min(512, tokens)
    batch = KINDS["sft"].batch([source.tokens(row) for _ in range(tokens // row)])
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(
            Path(folder) / "model",
            characters="".join(chr(0x10000 + index) for index in range(vocabulary - 4)),
            hidden_size=size.pick(512, 32),
            num_layers=1,
        )
        async with gradwire.connect(models=[f"m={model}"]) as service:
            engine = engine_process()
            base = memory_bytes(engine, "VmRSS")
            parameters = (await service.list_models())[0].num_parameters
            run = await service.create_run("m")
            loaded = memory_bytes(engine, "VmHWM")
            await train(run, KINDS["sft"], [batch])
            first = memory_bytes(engine, "VmHWM")
            await train(run, KINDS["sft"], [batch])
            most = memory_bytes(engine, "VmHWM")
    state = BYTES_A_PARAMETER * parameters
    logits = 4 * tokens * vocabulary
    detail = (
        f"peak {most / GIB:.2f} GiB, of which {base / GIB:.2f} before the model was loaded; loaded {loaded / GIB:.2f}, "
        f"after a first step {first / GIB:.2f}; "
        f"weights, gradients and moments of {parameters / 1e6:.0f} M parameters {state / GIB:.2f}; with Python and "
        f"torch {most / state:.2f} x; the logits alone would be {logits / GIB:.2f}"
    )
    return Figure("peak memory of a step", (most - base) / state, "x", 1.3, at_least=False, detail=detail)


def measure(size: Size) -> list[Figure]:
    return [asyncio.run(peak(size))]


if __name__ == "__main__":
    run_alone(measure, __doc__)
