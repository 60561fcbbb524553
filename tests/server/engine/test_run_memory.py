"""A run that would take too much memory is refused by arithmetic, before anything is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine import machine
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.state import run_memory
from gradwire_server.engine.state.run_memory import FLOOR_BYTES, TRAINED_BYTES, check_memory
from support.mixtures import CONFIGS, mixture


@pytest.fixture(scope="module")
def pool(tiny_model_path: Path) -> ModelPool:
    return ModelPool({"tiny": str(tiny_model_path)})


def create(share: int = 100, held: int = 0, **config: Any) -> engine_pb2.EngineCreateRun:
    settings = pb.RunConfig(base_model="tiny", **config)
    return engine_pb2.EngineCreateRun(run_id="run-a", config=settings, share_percent=share, held_bytes=held)


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]], ids=str)
def test_the_arithmetic_is_that_of_the_adapter_that_is_made(pool: ModelPool, targets: list[str]) -> None:
    lora = pb.LoraSettings(rank=3, target_modules=targets)
    policy = make_policy(pool, pb.RunConfig(base_model="tiny", lora=lora), "counted")
    of_rank = run_memory._parameters_of_rank(pool, pb.RunConfig(base_model="tiny", lora=lora))
    assert 3 * of_rank == policy.num_trainable_parameters > 0
    policy.close()


@pytest.mark.parametrize("targets", [[], ["q_proj"], ["gate"]], ids=str)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_arithmetic_counts_the_adapters_of_experts(
    tmp_path: Path, name: str, targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ["o_proj"] if name == "DeepSeek" and targets == ["q_proj"] else targets
    pool = ModelPool({"tiny": str(mixture(tmp_path / "model", name))})
    lora = pb.LoraSettings(rank=3, target_modules=targets)
    of_rank = run_memory._parameters_of_rank(pool, pb.RunConfig(base_model="tiny", lora=lora))
    policy = make_policy(pool, pb.RunConfig(base_model="tiny", lora=lora), "counted")
    assert 3 * of_rank == policy.num_trainable_parameters > 0
    policy.close()
    needed = TRAINED_BYTES * 3 * of_rank
    monkeypatch.setattr(machine, "free_memory", lambda device: needed)
    check_memory(pool, create(lora=lora), Agreement())
    monkeypatch.setattr(machine, "free_memory", lambda device: needed - 1)
    with pytest.raises(OperationError, match="are free on cpu"):
        check_memory(pool, create(lora=lora), Agreement())


def test_a_rank_that_no_memory_would_justify_is_refused_at_once(pool: ModelPool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OperationError, match=r"lora.rank is 400,000: .* GiB to train.* at most [\d,]+ here") as caught:
        check_memory(pool, create(lora=pb.LoraSettings(rank=400_000)), Agreement())
    error = caught.value
    assert error.code == pb.ERROR_CODE_LIMIT_EXCEEDED and error.field == "lora.rank"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    most = int(error.rule.rpartition(" ")[2])
    check_memory(pool, create(lora=pb.LoraSettings(rank=most)), Agreement())
    with pytest.raises(OperationError):
        check_memory(pool, create(lora=pb.LoraSettings(rank=most + 1)), Agreement())


def test_a_head_with_too_many_labels_is_refused(pool: ModelPool) -> None:
    with pytest.raises(OperationError, match=r"num_labels is 4,000,000,000: .* or use fewer labels") as caught:
        check_memory(pool, create(head="classification", num_labels=4_000_000_000), Agreement())
    assert caught.value.field == "num_labels"
    check_memory(pool, create(head="classification", num_labels=1000, lora=pb.LoraSettings(rank=8)), Agreement())


def test_what_does_not_fit_at_present_says_what_there_is(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 1 << 20)
    says = r"needs [\d.]+ MiB of memory( and its base model [\d.]+ MiB)?, and 1.0 MiB are free on cpu"
    with pytest.raises(OperationError, match=says) as caught:
        check_memory(pool, create(lora=pb.LoraSettings(rank=500)), Agreement())
    assert caught.value.code == pb.ERROR_CODE_OUT_OF_MEMORY
    check_memory(pool, create(lora=pb.LoraSettings(rank=1)), Agreement())
    recovery = create(share=0, lora=pb.LoraSettings(rank=400_000))
    check_memory(pool, recovery, Agreement())  # it was accepted before


def test_the_runs_of_a_key_have_a_part_of_the_memory(pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "total_memory", lambda device: 10 << 20)
    check_memory(pool, create(share=50, held=4 << 20, lora=pb.LoraSettings(rank=1)), Agreement())
    with pytest.raises(OperationError, match=r"other runs of this key 5.0 MiB; this key may take 5.0 MiB") as caught:
        check_memory(pool, create(share=50, held=5 << 20, lora=pb.LoraSettings(rank=1)), Agreement())
    assert caught.value.rule == "key_memory_percent = 50" and "--limit key_memory_percent=N" in caught.value.message
    check_memory(pool, create(share=100, held=5 << 20, lora=pb.LoraSettings(rank=1)), Agreement())


def test_free_memory_is_what_the_system_says(pool: ModelPool) -> None:
    assert 0 < machine.free_memory(pool.device) < machine.total_memory(pool.device)
    facts = pool.facts("tiny")
    assert TRAINED_BYTES * facts.num_parameters < FLOOR_BYTES  # of a tiny model, which may have adapters all the same
