"""The gain of three parts that exist for speed: each compared with the plain way, by turns in one run.

``journal``: an operation begins in the engine while it is written to the journal, or after. The same awaited steps on a
tiny model through the core, in this process; milliseconds of a step that are not the engine's computing.
``crash marks``: the engine marks a request as begun in shared memory and the front frees the mark, or the engine sends
the front a message. Microseconds of processor time for both ends, and switches between them.
``slots``: sampled rows join between two tokens (keys and values in slots), or wait until all rows have ended.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import Caller
from gradwire_server.config import ServerConfig
from gradwire_server.core.core import Core
from gradwire_server.core.session import Session
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.frames import AsyncEngineLink, EngineLink
from gradwire_server.scheduling import admission

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns
from benchmarks.workload import Draw, small_model, standard_model

STEP = pb.OptimStep(learning_rate=1e-5, beta1=0.9, beta2=0.999, eps=1e-8)
TOKENS = 32


async def step(session: Session, batch: dict[str, Column]) -> float:
    """Measure the seconds of an awaited forward_backward and optim_step, minus the engine's compute time."""
    began = time.perf_counter()
    loss = await session.submit(pb.Operation(forward_backward=pb.LossCall(loss_fn="causal_lm")), batch)
    done = await session.submit(pb.Operation(optim_step=STEP))
    return time.perf_counter() - began - loss.result.timings.engine_s - done.result.timings.engine_s


async def journal(size: Size) -> Figure:
    steps, rng = size.pick(20, 2), np.random.default_rng(3)
    sides: dict[str, list[float]] = {"while": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model", hidden_size=32, num_layers=2)
        config = ServerConfig(state_dir=Path(folder) / "state", models={"m": str(model)}, device="cpu", threads=1)
        async with Core(config) as core:
            caller = Caller("bench")
            run = await core.runs.create(caller, pb.RunConfig(base_model="m", seed=1))
            session = await core.open_session(caller, run.run_id)
            batch = {"input_ids": Column.from_rows([rng.integers(4, 60, TOKENS).astype(np.int32)])}
            await step(session, batch)
            for _ in range(4 * size.repeats):
                for side, early in (("while", admission.may_begin_early), ("after", lambda operation: False)):
                    with mock.patch.object(admission, "may_begin_early", early):
                        sides[side] += [1e3 * await step(session, batch) for _ in range(steps)]
    medians = {side: statistics.median(values) for side, values in sides.items()}
    return Figure(
        "beginning while the journal writes", medians["after"] / medians["while"], "x",
        detail=f"{medians['while']:.2f} ms a step beside computing, {medians['after']:.2f} ms if it begins after",
        samples=sides,
    )  # fmt: skip


class Cost:
    """CPU time and voluntary context switches of this process per request."""

    def __init__(self) -> None:
        self.micros: list[float] = []
        self.switches: list[float] = []

    @contextmanager
    def of(self, requests: int) -> Iterator[None]:
        cpu, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        yield
        self.micros.append(1e6 * (time.process_time() - cpu) / requests)
        self.switches.append((resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / requests)

    def __str__(self) -> str:
        return f"{statistics.median(self.micros):.1f} us and {statistics.median(self.switches):.1f} switches a request"


async def messages(ours: AsyncEngineLink, count: int) -> None:
    for _ in range(count):
        await ours.receive(engine_pb2.EngineReply)


async def crash_marks(size: Size) -> Figure:
    count = size.pick(2000, 20)
    front = CrashMarks()
    engine = CrashMarks(os.dup(front.fd))
    ours, theirs = (make(each) for make, each in zip((AsyncEngineLink, EngineLink), socket.socketpair(), strict=True))
    marks, sent = Cost(), Cost()

    def send() -> None:
        for request_id in range(1, count + 1):
            theirs.send(engine_pb2.EngineReply(id=request_id))
            time.sleep(0)  # as between two requests, so that the front reads one by one

    for _ in range(4 * size.repeats):
        with marks.of(count):
            for request_id in range(1, count + 1):
                engine.begin([request_id])
                front.answered(request_id)
        with sent.of(count):
            sender = threading.Thread(target=send)
            sender.start()
            await messages(ours, count)
            sender.join()
    engine.close()
    front.close()
    theirs.close()
    ours.close()
    return Figure(
        "marking a request as begun", statistics.median(sent.micros) / statistics.median(marks.micros), "x",
        detail=f"in shared memory {marks}; by a message {sent}",
        samples={"marks": marks.micros, "messages": sent.micros},
    )  # fmt: skip


def slots(size: Size) -> Figure:
    """Measure rows of unequal lengths, with a new one every few tokens."""
    turns, count = Turns("slots", "together"), size.pick(24, 3)
    with tempfile.TemporaryDirectory() as folder:
        model = standard_model(Path(folder) / "model", smoke=size.smoke)
        policy = Policy(ModelPool({"m": str(model)}).get("m"))
        samplers = {"slots": LocalSampler(), "together": LocalSampler()}
        samplers["together"]._token_bytes[policy.split_model] = 0
        for turn in range(size.repeats + 1):
            draw = Draw.of(turn, smoke=size.smoke)
            prompts = [draw.tokens(int(length)) for length in draw.rng.integers(4, 64, count)]
            wanted = np.clip(draw.rng.lognormal(np.log(24), 1.0, count), 2, size.pick(128, 4)).astype(int).tolist()
            for side, sampler in samplers.items():
                with turns.turn(side, sum(wanted)):
                    arrive(sampler, policy, prompts, wanted)
    turns.drop_first()
    return Figure("joining between two tokens", turns.ratio(), "x", detail=turns.said("tokens"), samples=turns.rates)


def arrive(sampler: LocalSampler, policy: Policy, prompts: list[list[int]], wanted: list[int]) -> None:
    waiting: list[Any] = list(zip(prompts, wanted, strict=True))
    steps = 0
    while waiting or sampler.turn():
        if waiting and steps % 4 == 0:
            prompt, tokens = waiting.pop()
            sampler.begin(policy, [prompt], SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True))
        if sampler.turn():
            sampler.step()
        steps += 1


def measure(size: Size) -> list[Figure]:
    figures = []
    if size.wants("journal"):
        figures.append(asyncio.run(journal(size)))
    if size.wants("crash marks"):
        figures.append(asyncio.run(crash_marks(size)))
    if size.wants("slots"):
        figures.append(slots(size))
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
