"""Operations that do not fit into memory: tried in smaller pieces, refused alone where one row does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.policy import Policy
from support.engine import LocalEngine, token_rows

ROWS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60, 61], [1, 2, 3, 4]])
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8)
CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])


class SmallDevice:
    """Runs out of memory with more than so many sequences in one forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
        self.sequences, self.refused = sequences, 0
        real = Policy.hidden

        def hidden(policy: Policy, ids: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
            if len(lengths) > self.sequences:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return real(policy, ids, lengths, *args, **kwargs)

        monkeypatch.setattr(Policy, "hidden", hidden)


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def trained(engine: LocalEngine, run_id: str) -> tuple[Any, np.ndarray]:
    """What a forward and backward behind another one gives, and the policy after the step."""
    engine.create(run_id, seed=3)
    engine.do(run_id, token_rows([[1, 5, 6]]), forward_backward=CAUSAL)  # gradients that must stay as they are
    result = engine.do(run_id, ROWS, forward_backward=CAUSAL)
    engine.do(run_id, optim_step=STEP)
    return result, engine.logprobs(run_id, ROWS)


def test_an_operation_out_of_memory_succeeds_in_smaller_pieces(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected = trained(engine, "run-whole")
    device = SmallDevice(monkeypatch, 2)
    budget = engine.engine.budget
    pieces, found = trained(engine, "run-pieces")
    assert device.refused > 0 and whole.proto.loss.num_microbatches == 1 < pieces.proto.loss.num_microbatches
    assert pieces.proto.loss.loss == pytest.approx(whole.proto.loss.loss, rel=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert engine.engine.budget == budget  # the next operation is tried as a whole again


def test_a_row_that_does_not_fit_fails_alone_and_leaves_the_gradients(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a", seed=3, lora=4)
    engine.do("run-a", ROWS, forward_backward=CAUSAL)
    run = engine.engine.runs["run-a"]
    before = {name: tensor.clone() for name, tensor in run.accumulator.state_tensors().items()}
    states = {name: state.clone() for name, state in run.rng_tensors().items()}
    with monkeypatch.context() as small:
        SmallDevice(small, 0)
        failed = engine.op("run-a", ROWS, forward_backward=CAUSAL)
    assert failed.proto.error.code == pb.ERROR_CODE_OUT_OF_MEMORY and "as it was" in failed.proto.error.message
    after = run.accumulator.state_tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(states[name], state) for name, state in run.rng_tensors().items())
    engine.do("run-a", optim_step=STEP)


@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_a_step_that_would_divide_zero_by_zero_is_refused(engine: LocalEngine, eps: float) -> None:
    engine.create("run-a")
    engine.do("run-a", ROWS, forward_backward=CAUSAL)
    failed = engine.op("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=eps))
    assert (failed.proto.error.code, failed.proto.error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "eps")
    engine.do("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-30))
    assert np.isfinite(engine.logprobs("run-a", ROWS)).all()
