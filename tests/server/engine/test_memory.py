"""Operations that do not fit into memory: tried in smaller pieces, refused alone where one row does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses import registry
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.machine import _group_limits, machine_memory
from gradwire_server.engine.model.layers.activations import ALL
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.scoring.activation_choice import Costs
from gradwire_server.engine.scoring.memory import (
    MOST,
    ActivationMeter,
    Memory,
    token_bytes,
)
from gradwire_server.engine.scoring.planner import Budget
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
    budget = engine.context.budget
    pieces, found = trained(engine, "run-pieces")
    assert device.refused > 0 and whole.proto.loss.num_microbatches == 1 < pieces.proto.loss.num_microbatches
    assert pieces.proto.loss.loss == pytest.approx(whole.proto.loss.loss, rel=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert engine.context.budget == budget  # the next operation is tried as a whole again


def test_a_row_that_does_not_fit_fails_alone_and_leaves_the_gradients(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a", seed=3, lora=4)
    engine.do("run-a", ROWS, forward_backward=CAUSAL)
    run = engine.context.runs["run-a"]
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


class OnceFull:
    """Runs out of memory in one forward, the so-and-so-manieth, and counts the sequences that went through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.calls, self.sequences = 0, 0
        real = Policy.hidden

        def hidden(policy: Policy, ids: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == number:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            self.sequences += len(lengths)
            return real(policy, ids, lengths, *args, **kwargs)

        monkeypatch.setattr(Policy, "hidden", hidden)


@pytest.mark.parametrize("together", [False, True], ids=["streams", "whole-batch"])
def test_a_forward_out_of_memory_is_repeated_within_smaller_limits(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    rows = token_rows(
        [[30 + number, *range(20, 20 + length)] for number, length in enumerate((9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7))]
    )
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path, microbatch_tokens=40)
    if together:
        spec = registry.get_loss("causal_lm")
        monkeypatch.setitem(registry._REGISTRY, "causal_lm", replace(spec, streams=lambda config, present: False))
    engine.create("run-a", seed=3)
    engine.create("run-b", seed=3)
    plain = engine.do("run-a", rows, forward_backward=CAUSAL)
    full = OnceFull(monkeypatch, 2)  # the second of three micro-batches
    found = engine.do("run-b", rows, forward_backward=CAUSAL)
    assert (plain.proto.loss.num_microbatches, found.proto.loss.num_microbatches) == (3, 6)
    # No graph is kept any more: that is memory, too. A streaming loss needs none but the one in use.
    assert (full.sequences, found.proto.loss.recomputed) == (4 + 12 * (1 + together), together)
    assert found.proto.loss.loss == pytest.approx(plain.proto.loss.loss, rel=1e-6)
    np.testing.assert_allclose(found.columns["logprobs"].values, plain.columns["logprobs"].values, atol=1e-5)
    theirs = engine.context.runs["run-a"].accumulator.state_tensors()
    for name, gradient in engine.context.runs["run-b"].accumulator.state_tensors().items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-4)


def test_a_decision_is_complete(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its execution asks nothing that another process would have to be told."""
    engine.create("run-a", seed=3)
    engine.create("run-b", seed=3)
    found = []
    for run_id in ("run-a", "run-b"):
        asked = engine_pb2.EngineOperation(run_id=run_id, seq=1, operation=pb.Operation(forward_backward=CAUSAL))
        request = Request(engine_pb2.EngineRequest(id=1, operation=asked), ROWS, None)
        decision = engine.context.decisions.execute([request])
        assert list(decision.budgets) == [engine.context.memory.budget(engine.context.runs[run_id])]
        if run_id == "run-b":
            monkeypatch.setattr(Memory, "budget", lambda *args: pytest.fail("decided again"))
        (answer,) = engine.engine.execute(replace(decision, budgets=[Budget(12)]))
        found.append(answer.reply.result.loss)
    assert found[0].num_microbatches == found[1].num_microbatches == 2
    assert found[0].loss == found[1].loss


def test_limits_get_smaller_until_nothing_is_left_to_give_up(engine: LocalEngine) -> None:
    engine.create("run-a")
    run, decisions = engine.context.runs["run-a"], engine.context.decisions
    tokens, budget = [], Budget()
    while (smaller := decisions.after_out_of_memory(run, ROWS, budget)) is not None:
        budget = smaller
        tokens.append(budget.microbatch_tokens)
        assert budget.activation_bytes == 0
    assert tokens == [14, 7, 7, 7]  # of 4 rows of at most 7 tokens; one row at a time, recomputed in chunks, is the end
    assert budget.kept_tokens == budget.whole_tokens == 0
    graphs_given_up = decisions.after_out_of_memory(run, ROWS, Budget(7))
    assert graphs_given_up is not None and graphs_given_up.activation_bytes == 0


class FullInBackward:
    """Runs out of memory in one backward, when nearly all of its gradient is added to what there was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.calls = 0
        real = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self.calls += 1
            real(*args, **kwargs)
            if self.calls == number:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        monkeypatch.setattr(torch.autograd, "backward", backward)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.2}], ids=["full", "lora"])
@pytest.mark.parametrize("together", [False, True], ids=["streams", "whole-batch"])
def test_a_backward_out_of_memory_leaves_nothing_of_what_it_had_added(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool, lora: dict[str, Any] | None
) -> None:
    rows = token_rows(
        [[30 + number, *range(20, 20 + length)] for number, length in enumerate((9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7))]
    )
    if together:
        spec = registry.get_loss("causal_lm")
        monkeypatch.setitem(registry._REGISTRY, "causal_lm", replace(spec, streams=lambda config, present: False))
    sums, pieces = [], 12 if lora else 6  # with dropout each row goes through the model by itself
    for tokens in (40, 20):
        engine = LocalEngine({"tiny": tiny_model_path}, tmp_path / str(tokens), microbatch_tokens=tokens)
        engine.create("run-a", seed=3, lora=lora)
        engine.do("run-a", token_rows([[1, 5, 6], [1, 7]]), forward_backward=CAUSAL)  # to be there afterwards
        with monkeypatch.context() as patch:
            full = FullInBackward(patch, 2 if tokens == 40 else 0)
            found = engine.do("run-a", rows, forward_backward=CAUSAL)
        assert full.calls == (2 + pieces if tokens == 40 else pieces)  # the operation is repeated, in smaller pieces
        assert found.proto.loss.num_microbatches == pieces
        sums.append(engine.context.runs["run-a"].accumulator.state_tensors())
    repeated, expected = sums
    assert repeated.keys() == expected.keys()
    assert all(torch.equal(repeated[name], expected[name]) for name in expected)


def test_a_cpu_gets_what_its_memory_allows_and_never_what_is_free(engine: LocalEngine) -> None:
    engine.create("run-a")
    run, cpu = engine.context.runs["run-a"], torch.device("cpu")
    budget, needed = Memory(cpu).budget(run), token_bytes(run.policy)
    assert budget.kept_tokens >= budget.microbatch_tokens
    # 2,048 tokens of so small a model fit everywhere
    assert replace(budget, kept_tokens=ALL, whole_tokens=ALL) == MOST["cpu"]
    assert Memory(cpu, machine_bytes=int(6 * 100.5 * needed)).budget(run).microbatch_tokens == 100
    assert Memory(cpu, machine_bytes=1).budget(run).microbatch_tokens == 1
    assert Memory(cpu, 77, 5, machine_bytes=1).budget(run).microbatch_tokens == 77
    assert Memory(cpu, 77, 5).budget(run).activation_bytes == 5


def test_a_gpu_gets_what_is_free_and_less_after_it_was_too_much(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a")
    run = engine.context.runs["run-a"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Memory, "_measured_costs", lambda memory, run: Costs(1.0, 1.0))
    memory = Memory(torch.device("cuda"))
    weights = 4.0 * run.policy.num_trainable_parameters
    room = (0.9 * (3 << 20) - 4 * weights) / 3  # gradients, those accumulated and two moments are still to come
    first = memory.budget(run, free_bytes=3 << 20)
    assert first.microbatch_tokens == int(room / token_bytes(run.policy)) and first.activation_bytes == int(room)
    memory.ran_out(run)
    assert memory.budget(run, free_bytes=3 << 20).microbatch_tokens == pytest.approx(first.microbatch_tokens / 2, abs=1)
    wide = memory.budget(run, free_bytes=1 << 50)
    assert wide.microbatch_tokens == MOST["cuda"].microbatch_tokens
    assert wide.logits_elements == MOST["cuda"].logits_elements
    run.step = 1
    assert memory.budget(run, free_bytes=3 << 20).activation_bytes == int((0.9 * (3 << 20) - weights) / 6)


def test_what_a_token_takes_is_what_a_batch_of_them_takes(engine: LocalEngine) -> None:
    engine.create("run-a")
    engine.create("run-b", gradient_checkpointing=True)
    whole, checkpointed = (engine.context.runs[name].policy for name in ("run-a", "run-b"))
    meter = ActivationMeter(whole)
    with meter:
        whole.hidden(torch.zeros(600, dtype=torch.int64), torch.full((6,), 100), training=True)
    assert token_bytes(whole) == pytest.approx(meter.bytes / 600, rel=0.5)
    assert token_bytes(checkpointed) < token_bytes(whole)


def test_the_limit_of_a_container_is_found(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/pod/one\n3:cpuset:/\n0::/pod/two\n")
    for name, text in {
        "memory/pod/one/memory.limit_in_bytes": "1000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "pod/two/memory.max": "max",
        "pod/memory.max": "2000",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert sorted(_group_limits(groups, tmp_path)) == [1000, 2000, 9223372036854771712]
    assert machine_memory() > 1 << 20


@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_a_step_that_would_divide_zero_by_zero_is_refused(engine: LocalEngine, eps: float) -> None:
    engine.create("run-a")
    engine.do("run-a", ROWS, forward_backward=CAUSAL)
    failed = engine.op("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=eps))
    assert (failed.proto.error.code, failed.proto.error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "eps")
    engine.do("run-a", ROWS, forward_backward=CAUSAL)  # the refused step dropped what was accumulated for it
    engine.do("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-30))
    assert np.isfinite(engine.logprobs("run-a", ROWS)).all()
