"""A small micro-batch is computed by one thread, a larger one by all; bits depend on the work alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine import threads
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.drawing import kinds
from support.engine import LocalEngine, token_rows

SMALL, LARGE = [[1, 20, 30, 40]], [[1, *range(5, 55)]] * 4
CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)
FIRST_CALLS = """
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.threads import FUNCTIONS

ModelPool({})
numbers = torch.rand(5000) * 0.9 + 0.05
for name in FUNCTIONS:
    found, exact = (getattr(torch, name)(each) for each in (numbers, numbers.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6, msg=name)
print(torch.get_num_threads())
"""


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    parameters = engine.context.pool.facts("tiny").num_parameters
    monkeypatch.setattr(threads, "SMALL", 50 * parameters)  # as if the tiny model were a larger one
    return engine


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads at each forward of the trunk; from the hundredth on memory runs out."""
    seen: list[int] = []
    real = Policy.hidden

    def hidden(policy: Policy, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) >= 100:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(policy, *args, **kwargs)

    monkeypatch.setattr(Policy, "hidden", hidden)
    return seen


def test_the_threads_follow_the_work(two_threads: None, engine: LocalEngine, used: list[int]) -> None:
    engine.create("run-a", lora=4)
    for rows in (SMALL, LARGE, SMALL):
        engine.do("run-a", token_rows(rows), forward_backward=CAUSAL)
    engine.do("run-a", optim_step=STEP)
    assert used[-3:] == [1, 2, 1] and torch.get_num_threads() == 2


@pytest.mark.long
def test_the_threads_are_back_after_an_error(two_threads: None, engine: LocalEngine, used: list[int]) -> None:
    engine.create("run-a", lora=4)
    engine.do("run-a", token_rows(SMALL), forward_backward=CAUSAL)
    used += [0] * (99 - len(used))
    failed = engine.op("run-a", token_rows(SMALL), forward_backward=CAUSAL)
    assert failed.proto.error.code == pb.ERROR_CODE_OUT_OF_MEMORY
    assert torch.get_num_threads() == 2


def test_what_came_between_changes_no_bit(two_threads: None, engine: LocalEngine) -> None:
    found = []
    for run_id, between in (("run-a", False), ("run-b", True)):
        engine.create(run_id, seed=5)
        engine.create(f"{run_id}-other", seed=1)
        for rows in (SMALL, LARGE, SMALL):
            if between:
                engine.do(f"{run_id}-other", token_rows(LARGE), forward_backward=CAUSAL)
                engine.do(f"{run_id}-other", token_rows(SMALL), forward_backward=CAUSAL)
            engine.do(run_id, token_rows(rows), forward_backward=CAUSAL)
            engine.do(run_id, optim_step=STEP)
        found.append(engine.context.runs[run_id].policy.state_tensors())
    assert all(np.array_equal(found[0][name].numpy(), found[1][name].numpy()) for name in found[0])


def test_a_sampler_wakes_no_thread_for_few_tokens(
    two_threads: None, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = kinds.token_logits

    def token_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return real(*args, **kwargs)

    monkeypatch.setattr(kinds, "token_logits", token_logits)
    parameters = engine.context.pool.facts("tiny").num_parameters
    monkeypatch.setattr(threads, "SMALL_SAMPLING", (threads.READ_TOKENS + 20) * parameters)
    engine.create("run-a")
    call = pb.SampleCall(prompts=["hello " * 10], max_tokens=2, ignore_eos=True)
    engine.do("run-a", sample=call)
    assert seen == [2, 1] and torch.get_num_threads() == 2


def test_products_alone_wake_threads_for_fewer_tokens(two_threads: None) -> None:
    tokens, parameters = 32, int(threads.SMALL_PRODUCTS / (threads.READ_TOKENS + 32)) + 1
    for products_only, expected in ((False, 1), (True, 2)):
        with threads.sampling_threads(torch.device("cpu"), tokens, parameters, products_only=products_only):
            assert torch.get_num_threads() == expected


@pytest.mark.slow
def test_the_first_call_of_a_function_by_two_threads_is_exact() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2
