"""The service against the same engine driven by a plain Python loop in one process, on the same rows in turns.

Remote is the SDK over gRPC on loopback with the journal on, pipelined; the difference is the total cost of moving the
loop to another process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradwire
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine, token_rows
from torch.profiler import record_function

from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import KINDS, LEARNING_RATE, train
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, Rows, num_tokens, standard_model

RUN = "run"


class InProcess:
    """The engine in this process, with one run, which trains all weights or an adapter of rank ``lora``."""

    def __init__(self, model: Path, state_dir: Path, *, lora: int | None = None, **settings: Any) -> None:
        self._engine = LocalEngine({"m": model}, state_dir, **settings)
        self._engine.create(RUN, base_model="m", lora=lora)

    def train(self, batches: Sequence[Rows]) -> list[float]:
        """Take one step per batch; return the losses."""
        losses = []
        call = pb.LossCall(loss_fn="causal_lm")
        step = pb.OptimStep(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
        for rows in batches:
            columns: Any = token_rows(rows)
            losses.append(self._engine.do(RUN, columns, forward_backward=call).proto.loss.loss)
            with record_function("optimizer"):
                self._engine.do(RUN, optim_step=step)
        return losses


async def compare(size: Size) -> list[Figure]:
    steps = size.pick(4, 2)
    draw = Draw.of(1, smoke=size.smoke)
    turns = Turns("remote", "in process")
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        local = InProcess(model, Path(folder) / "state")
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            for turn in range(size.repeats + 1):
                batches = [draw.rows() for _ in range(steps)]
                tokens = sum(map(num_tokens, batches))

                async def remotely(batches: Sequence[Rows] = batches, tokens: int = tokens) -> list[float]:
                    with turns.turn("remote", tokens):
                        return await train(run, KINDS["sft"], [KINDS["sft"].batch(rows) for rows in batches])

                def locally(batches: Sequence[Rows] = batches, tokens: int = tokens) -> list[float]:
                    with turns.turn("in process", tokens):
                        return local.train(batches)

                if turn % 2:
                    theirs = locally()
                    ours = await remotely()
                else:
                    ours = await remotely()
                    theirs = locally()
                check_losses(ours, theirs, rtol=0, atol=0)
    turns.drop_first()
    detail = f"{turns.said('tokens')}; losses the same to the last bit"
    return [Figure("remote against in-process", turns.ratio(), "x", 0.97, detail=detail, samples=turns.rates)]


def measure(size: Size) -> list[Figure]:
    return asyncio.run(compare(size))


if __name__ == "__main__":
    run_alone(measure, __doc__)
