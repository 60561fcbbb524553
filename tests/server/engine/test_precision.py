"""What models compute in: float32, bfloat16 with float32 masters, bfloat16 over float32 weights; compiled or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.loading.compilation import KINDS
from gradwire_server.engine.model.packing import Packing
from support.engine import LocalEngine, token_rows
from torch import nn
from torch._dynamo.utils import counters

ROWS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60, 61], [1, 2, 3, 4]])
CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs", "entropy"])
STEP = pb.OptimStep(learning_rate=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)


def engine_of(path: Path, state_dir: Path, **settings: Any) -> LocalEngine:
    return LocalEngine({"tiny": path}, state_dir, **settings)


def trained(engine: LocalEngine, **config: Any) -> tuple[list[float], np.ndarray, list[float]]:
    """Losses of a few steps, the first one's log-probabilities, and the gradients' norms."""
    engine.create("run-a", seed=3, **config)
    losses, norms, first = [], [], None
    for _ in range(6):
        result = engine.do("run-a", ROWS, forward_backward=CAUSAL)
        first = result.columns["logprobs"].values if first is None else first
        losses.append(result.proto.loss.loss)
        norms.append(engine.do("run-a", optim_step=STEP).proto.optim_step.grad_norm)
    assert first is not None and first.dtype == np.float32
    return losses, first, norms


@pytest.mark.parametrize("config", [{}, {"lora": 4}, {"gradient_checkpointing": True}], ids=["full", "lora", "again"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "mixed"])
def test_bfloat16_trains_as_float32_does_but_for_rounding(
    tiny_model_path: Path, tmp_path: Path, dtype: Any, config: dict[str, Any]
) -> None:
    exact = trained(engine_of(tiny_model_path, tmp_path / "a"), **config)
    engine = engine_of(tiny_model_path, tmp_path / "b", dtype=dtype)
    losses, logprobs, norms = trained(engine, **config)
    assert losses == pytest.approx(exact[0], rel=0.02) and losses[-1] < losses[0]
    np.testing.assert_allclose(logprobs, exact[1], atol=0.05)
    assert not np.array_equal(logprobs, exact[1])  # it was not float32 after all
    assert norms == pytest.approx(exact[2], rel=0.1)
    policy = engine.context.runs["run-a"].policy
    assert policy.split_model.packing is not Packing.PADDED
    assert {master.dtype for master in policy.masters().values()} == {torch.float32}
    weights = {parameter.dtype for parameter in policy.trainable_parameters().values()}
    assert weights == {torch.float32 if dtype == "mixed" else torch.bfloat16}
    gradients = engine.do("run-a", ROWS, forward_backward=CAUSAL) and engine.context.runs["run-a"].accumulator
    assert {tensor.dtype for name, tensor in gradients.state_tensors().items() if not name.endswith("|")} == {
        torch.float32
    }


def test_a_model_says_what_it_computes_in(tiny_model_path: Path, tmp_path: Path) -> None:
    (model,) = engine_of(tiny_model_path, tmp_path, dtype="mixed").engine.hello().models
    assert model.dtype == "mixed"


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=KINDS)  # restores what the engine sets
def test_compiled_layers_compile_nothing_for_a_new_shape_or_another_run(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo traces as ever; what it found is run as it is, which spares the test the C++ compiler."""
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compile_module(self, backend="eager", **how))
    torch._dynamo.reset()
    expected = trained(engine_of(tiny_model_path, tmp_path / "a"), lora=4)
    engine = engine_of(tiny_model_path, tmp_path / "b", compile=True)
    counters.clear()
    found = trained(engine, lora=4)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for rows in (ROWS, token_rows([[1, 2, 3]])):  # attention gives a row alone in another layout
        engine.do("run-a", rows, forward_backward=CAUSAL)
        engine.logprobs("run-a", rows)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    # A layer is one graph but for what depends on more than shapes.
    assert all("packed_attention" in reason or "SpanLinear" in reason for reason in counters["graph_break"])
    for number, lengths in enumerate([(9, 9, 2), (3,), (20, 1, 17, 5), (2, 2)]):
        rows = token_rows([range(10, 10 + length) for length in lengths])
        engine.create(f"run-{number}", seed=number, lora=4)
        for run_id in ("run-a", f"run-{number}"):
            engine.do(run_id, rows, forward_backward=CAUSAL)
            engine.logprobs(run_id, rows)
    assert counters["stats"]["unique_graphs"] == compiled
    torch._dynamo.reset()
