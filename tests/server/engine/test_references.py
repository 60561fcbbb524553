"""Reference models: what a name means, what is computed once only, and how much is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.logprob_cache import LogprobCache
from support.engine import LocalEngine, token_rows

ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]]
BATCH = token_rows(ROWS)
PAIRS = token_rows(ROWS, "chosen_input_ids") | token_rows([[1, 3], [1, 4, 5], [1, 6, 7]], "rejected_input_ids")


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def dpo(engine: LocalEngine, run: str, reference: str, kind: str = "forward_backward") -> dict[str, float]:
    kwargs = json.dumps({"reference_model": reference})
    result = engine.do(run, PAIRS, **{kind: pb.LossCall(loss_fn="dpo", loss_kwargs_json=kwargs)})
    return dict(result.proto.loss.metrics)


@pytest.mark.parametrize("lora", [None, 4], ids=["full", "lora"])
def test_a_second_epoch_computes_no_reference(engine: LocalEngine, lora: int | None) -> None:
    engine.create("run-a", lora=lora)
    references = engine.context.references
    assert dpo(engine, "run-a", "base")["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert references.computed_sequences == 6
    engine.do("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8))
    assert abs(dpo(engine, "run-a", "base")["reward_margin"]) > 1e-4
    assert references.computed_sequences == 6


def test_new_weights_of_another_engines_run_go_into_the_prepared_adapter(
    engine: LocalEngine, tiny_model_path: Path, tmp_path: Path
) -> None:
    """An adapter is created and probed for the first of them, not for each."""
    there = LocalEngine({"tiny": tiny_model_path}, tmp_path / "there")
    engine.create("run-a", lora=4)
    references, weights = there.context.references, engine.context.runs["run-a"].policy
    adapters: list[Policy] = []
    for number in range(3):
        engine.train("run-a", BATCH)
        share = engine_pb2.EngineShareWeights(run_id="run-a", name=f"run-a.{number}")
        reply, _ = engine.exchange(engine_pb2.EngineRequest(share_weights=share), {})
        adapters.append(references.shared(reply.shared_weights).policy)
        here, there_now = weights.state_tensors(), adapters[-1].state_tensors()
        assert here.keys() == there_now.keys()
        assert all(torch.equal(tensor, there_now[name]) for name, tensor in here.items())
    assert adapters[0] is adapters[1] is adapters[2]
    assert len(references.loaded) == 1


SOME_NEW = PAIRS | token_rows([*ROWS[:2], [1, 61]], "chosen_input_ids")
DPO = pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps({"reference_model": "base"}))


def test_only_what_is_new_is_computed_where_rounding_does_not_matter(engine: LocalEngine) -> None:
    references = engine.context.references
    references.same_bits = False
    engine.create("run-a")
    dpo(engine, "run-a", "base")
    engine.do("run-a", SOME_NEW, forward_backward=DPO)
    assert (references.computed_sequences, references.found_sequences) == (7, 5)


def test_what_was_kept_changes_no_bit_on_a_cpu(tiny_model_path: Path, tmp_path: Path) -> None:
    sums = []
    for name, before in (("fresh", []), ("used", [PAIRS, PAIRS])):
        engine = LocalEngine({"tiny": tiny_model_path}, tmp_path / name)
        engine.create("run-a")
        engine.create("run-other", lora=4)
        for columns in before:
            engine.do("run-other", columns, forward_backward=DPO)
        engine.do("run-a", SOME_NEW, forward_backward=DPO)
        engine.do("run-a", SOME_NEW, forward_backward=DPO)  # nothing of it is computed again
        assert engine.context.references.found_sequences == (12 if before else 6)
        sums.append(engine.context.runs["run-a"].accumulator.state_tensors())
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


@pytest.mark.parametrize("lora", [None, 4], ids=["full", "lora"])
def test_names_mean_the_weights_they_say(engine: LocalEngine, lora: int | None) -> None:
    engine.create("run-a", lora=lora, seed=1)
    base = engine.logprobs("run-a", BATCH)
    for _ in range(2):
        engine.train("run-a", BATCH)
    early = engine.logprobs("run-a", BATCH)
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="early"))
    engine.train("run-a", BATCH)
    late = engine.logprobs("run-a", BATCH)
    assert not np.allclose(early, late, atol=1e-3)
    assert np.allclose(engine.logprobs("run-a", BATCH, model="base"), base, atol=1e-6)
    assert np.allclose(engine.logprobs("run-a", BATCH, model="tiny"), base, atol=1e-6)
    assert np.array_equal(engine.logprobs("run-a", BATCH, model="run-a/early"), early)
    engine.create("run-b", lora=8, seed=2)
    assert np.array_equal(engine.logprobs("run-b", BATCH, model="run-a/early"), early)
    assert np.array_equal(engine.logprobs("run-a", BATCH), late)
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="early", overwrite=True))
    assert np.array_equal(engine.logprobs("run-b", BATCH, model="run-a/early"), late)


def test_the_base_of_a_forked_adapter_is_still_the_base_model(engine: LocalEngine) -> None:
    engine.create("run-a", lora=4, seed=1)
    base = engine.logprobs("run-a", BATCH)
    engine.train("run-a", BATCH)
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="sft"))
    trained = engine.logprobs("run-a", BATCH)
    engine.create("run-fork", lora=4, seed=9, checkpoint="run-a/sft", weights_only=True)
    assert np.array_equal(engine.logprobs("run-fork", BATCH), trained)
    assert np.allclose(engine.logprobs("run-fork", BATCH, model="base"), base, atol=1e-6)


def test_a_reward_head_travels_with_its_checkpoint(engine: LocalEngine) -> None:
    for run, lora in (("run-lora", 4), ("run-full", None)):
        engine.create(run, lora=lora, head="reward", seed=3)
        rewards = engine.do(run, BATCH, forward=pb.LossCall(outputs=["rewards"])).columns["rewards"]
        engine.do(run, save_checkpoint=pb.SaveCheckpoint(name="rm"))
        engine.create("run-policy", lora=4)
        asked = pb.LossCall(outputs=["rewards"], model=f"{run}/rm")
        found = engine.do("run-policy", BATCH, forward=asked).columns["rewards"]
        assert rewards.values.shape == (3,) and np.array_equal(found.values, rewards.values)


@pytest.mark.parametrize("lora", [None, 4], ids=["full", "lora"])
def test_the_moving_average_moves_and_its_old_scores_are_forgotten(engine: LocalEngine, lora: int | None) -> None:
    engine.create("run-a", lora=lora, seed=1, head="value")
    run = engine.context.runs["run-a"]
    start = {name: tensor.clone() for name, tensor in run.policy.state_tensors().items()}
    assert dpo(engine, "run-a", "ema", "forward")["reward_margin"] == pytest.approx(0, abs=1e-6)
    engine.train("run-a", BATCH)
    moved = dpo(engine, "run-a", "ema", "forward")["reward_margin"]
    assert abs(moved) > 1e-5
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0.75))
    assert run.ema is not None
    for name, tensor in run.ema.state_tensors().items():
        assert torch.allclose(tensor, 0.75 * start[name] + 0.25 * run.policy.state_tensors()[name], atol=1e-6)
    assert 0 < abs(dpo(engine, "run-a", "ema", "forward")["reward_margin"]) < abs(moved)
    engine.do("run-a", update_reference=pb.UpdateReference(ema=0))
    assert dpo(engine, "run-a", "ema", "forward")["reward_margin"] == pytest.approx(0, abs=1e-6)


def test_weights_are_kept_within_so_many_bytes(tiny_model_path: Path, tmp_path: Path) -> None:
    sizing = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    size = 4 * sizing.context.pool.facts("tiny").num_parameters
    models = dict.fromkeys(("tiny", "second", "third"), tiny_model_path)
    engine = LocalEngine(models, tmp_path, reference_cache_gib=2 * size / 2**30)
    engine.create("run-full")
    engine.do("run-full", save_checkpoint=pb.SaveCheckpoint(name="start"))
    expected = engine.logprobs("run-full", BATCH)
    references = engine.context.references
    for name in ("tiny", "second", "run-full/start", "second", "third"):
        assert np.allclose(engine.logprobs("run-full", BATCH, model=name), expected, atol=1e-6)
        assert len(references.loaded) <= 2
    assert references.loaded == ["model second", "model third"]
    assert not engine.context.pool.is_loaded("tiny")
    # What a run stands on is not dropped, costs the cache nothing, and is the cache's again when the run has gone.
    engine.create("run-lora", lora=4)
    for name in ("base", "second", "third"):
        engine.logprobs("run-lora", BATCH, model=name)
    assert len(references.loaded) == 3 and engine.context.pool.is_loaded("tiny")
    engine.request(drop_run=engine_pb2.EngineDropRun(run_id="run-lora"))
    assert len(references.loaded) == 2


def test_logprobs_are_kept_within_so_many_bytes() -> None:
    entry = 100 * 4 + LogprobCache.OVERHEAD
    cache = LogprobCache(3 * entry)
    for number in range(4):
        cache.put(bytes([number]), torch.full((100,), float(number)))
        cache.get(bytes([0]))
    assert [cache.get(bytes([number])) is not None for number in range(4)] == [True, False, True, True]
    cache.put(b"huge", torch.zeros(10_000))
    assert len(cache) == 0


@pytest.mark.parametrize("name", ["base", "tiny", "run-full/one", "run-lora/one"])
def test_a_reference_is_of_the_dtype_that_was_asked_for(engine: LocalEngine, name: str) -> None:
    for run_id, lora in (("run-full", None), ("run-lora", 4)):
        engine.create(run_id, lora=lora)
        engine.train(run_id, BATCH)
        engine.do(run_id, save_checkpoint=pb.SaveCheckpoint(name="one"))
    engine.create("run-a")
    engine.train("run-a", BATCH)

    def rewards(dtype: str | None) -> tuple[float, int]:
        kwargs = json.dumps({"reference_model": name, "reference_dtype": dtype})
        call = pb.LossCall(loss_fn="dpo", loss_kwargs_json=kwargs)
        metrics = engine.do("run-a", PAIRS, forward_backward=call).proto.loss.metrics
        return metrics["reward_margin"], engine.context.references.computed_sequences

    (whole, first), (same, second), (rounded, third), (again, fourth) = map(
        rewards, (None, "float32", "bfloat16", "bfloat16")
    )
    assert whole == same and first == second  # the server's own: nothing is computed or copied
    assert third == fourth == second + 6
    assert rounded == again == pytest.approx(whole, abs=0.02) and rounded != whole
    assert engine.context.references.loaded[-1].endswith("torch.bfloat16")


def test_the_moving_average_is_of_the_runs_dtype(engine: LocalEngine) -> None:
    engine.create("run-a")
    call = pb.LossCall(loss_fn="dpo", loss_kwargs_json='{"reference_model": "ema", "reference_dtype": "bfloat16"}')
    failed = engine.op("run-a", PAIRS, forward_backward=call)
    assert (failed.proto.error.code, failed.proto.error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "reference_dtype")
