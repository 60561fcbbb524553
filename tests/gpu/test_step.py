"""The step on a CUDA device, in this process: nothing is waited for, memory is found out, precision is by choice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses import host
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.machine import free_memory
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.decisions import Decisions
from gradwire_server.engine.scoring.memory import MOST, Memory
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from support.training import train_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

load_builtin_losses()
VOCAB = 96
WHOLE = Budget(1 << 20, activation_bytes=1 << 40)


def run_on(path: Path, device: str, dtype: Any = None, *, compiled: bool = False, **config: Any) -> EngineRun:
    lora = config.pop("lora", None)
    settings = pb.RunConfig(base_model="small", seed=1, **config)
    if lora:
        settings.lora.rank = lora
    return EngineRun(ModelPool({"small": str(path)}, device, dtype, compiled=compiled), "run-a", settings)


def evaluated(run: EngineRun, columns: dict[str, Column], loss_fn: str, budget: Budget = WHOLE, **kwargs: Any) -> Any:
    loss = get_loss(loss_fn)
    batch = read_batch(loss, columns, vocab_size=VOCAB, context_length=256)
    return train_on(
        run.policy, batch, loss, loss.config(**kwargs), run.accumulator, outputs=["logprobs"], budget=budget
    )


def rows(count: int, length: int) -> dict[str, Column]:
    rng = np.random.default_rng(7)
    return {"input_ids": Column.from_rows([rng.integers(3, VOCAB, length).astype(np.int32) for _ in range(count)])}


def groups(prompts: int, samples: int) -> dict[str, Column]:
    rng = np.random.default_rng(8)
    each = np.full(prompts, samples, np.uint32)
    lengths = rng.integers(3, 40, prompts * samples).astype(np.uint32)
    return {
        "prompt_ids": Column.from_rows([rng.integers(3, VOCAB, 33).astype(np.int32) for _ in range(prompts)]),
        "response_ids": Column(rng.integers(3, VOCAB, int(lengths.sum())).astype(np.int32), (each, lengths)),
        "rewards": Column(rng.normal(size=prompts * samples).astype(np.float32), (each,)),
    }


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A wait for the device raises, until an operation asks for its figures. How often one did."""
    real, asked = host.fetched, []

    def fetched(tensors: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        asked.append(1)
        return real(tensors)

    monkeypatch.setattr(host, "fetched", fetched)
    yield asked
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lora", [None, 8], ids=["full", "lora"])
@pytest.mark.parametrize("budget", [WHOLE, Budget(200, activation_bytes=1 << 40), Budget(200, activation_bytes=0)])
@pytest.mark.parametrize(
    ("loss_fn", "kwargs"), [("causal_lm", {}), ("grpo", {}), ("grpo", {"whiten_advantages": True})]
)
def test_nothing_waits_for_the_device_before_the_end(
    model_path: Path, nobody_waits: list[int], loss_fn: str, kwargs: Any, budget: Budget, lora: int | None
) -> None:
    run = run_on(model_path, "cuda", lora=lora)
    columns = rows(16, 50) if loss_fn == "causal_lm" else groups(4, 4)
    expected = evaluated(run, columns, loss_fn, budget, **kwargs).loss
    run.accumulator.clear()
    torch.cuda.set_sync_debug_mode("error")
    assert evaluated(run, columns, loss_fn, budget, **kwargs).loss == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert len(nobody_waits) == 2


@pytest.mark.parametrize("lora", [None, 8], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "mixed"])
def test_each_precision_agrees_with_float32_on_the_cpu(model_path: Path, dtype: Any, lora: int | None) -> None:
    columns = groups(4, 4)
    exact = evaluated(run_on(model_path, "cpu", lora=lora), columns, "grpo")
    run = run_on(model_path, "cuda", dtype, lora=lora)
    found = evaluated(run, columns, "grpo")
    close = 1e-3 if dtype == torch.float32 else 0.1
    np.testing.assert_allclose(found.outputs["logprobs"], exact.outputs["logprobs"], atol=close)
    gradients = [t for name, t in run.accumulator.state_tensors().items() if not name.endswith("|")]
    assert all(gradient.is_cuda and gradient.dtype == torch.float32 for gradient in gradients)


def test_the_budget_follows_the_memory_that_is_free(model_path: Path) -> None:
    run = run_on(model_path, "cuda")
    device = torch.device("cuda")
    tokens = Memory(device).budget(run, free_bytes=free_memory(device)).microbatch_tokens
    assert tokens == MOST["cuda"].microbatch_tokens
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(int(free * 0.97), dtype=torch.uint8, device=device)
    tokens = Memory(device).budget(run, free_bytes=free_memory(device)).microbatch_tokens
    assert tokens < MOST["cuda"].microbatch_tokens
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("lora", [None, 8], ids=["full", "lora"])
def test_a_batch_that_is_too_large_goes_through_in_pieces(model_path: Path, lora: int | None) -> None:
    columns = rows(512, 200)
    run = run_on(model_path, "cuda", torch.float32, lora=lora)
    whole = evaluated(run, columns, "causal_lm", Budget(8192))
    run.accumulator.clear()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + (1 << 30)) / total))
    try:
        agreement, budget = Agreement(), WHOLE
        decisions = Decisions(Memory(torch.device("cuda")), {}, agreement)
        while (found := agreement.unless_out_of_memory(partial(evaluated, run, columns, "causal_lm", budget))) is None:
            smaller = decisions.after_out_of_memory(run, columns, budget)
            assert smaller is not None
            budget = smaller
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert budget != WHOLE and found.num_microbatches > 1
    assert found.loss == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.slow
def test_compiled_layers_agree(model_path: Path) -> None:
    columns = rows(8, 60)
    plain = evaluated(run_on(model_path, "cuda", torch.float32), columns, "causal_lm")
    compiled = evaluated(run_on(model_path, "cuda", torch.float32, compiled=True), columns, "causal_lm")
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4)


def test_what_is_sent_is_pinned(model_path: Path) -> None:
    batch = read_batch(get_loss("causal_lm"), rows(4, 20), vocab_size=VOCAB, context_length=256)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.input_ids.is_cuda and not moved.lengths.is_cuda and moved.host is batch
    assert torch.equal(moved.input_ids.cpu(), batch.input_ids)
    assert isinstance(run_on(model_path, "cuda").policy, Policy)
