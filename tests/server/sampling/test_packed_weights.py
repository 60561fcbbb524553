"""Sampling with copies of the weights in the order of a CPU's kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _support.small_model import small_model
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.model.layers import packed_linear
from gradwire_server.engine.model.layers.cpu_kernels import CpuKernels
from gradwire_server.engine.model.layers.packed_linear import PackedWeights
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import FullPolicy, LoraPolicy, Policy
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams

ROWS = 16
MANY, FEW = 80, 8
"""Tokens of a sample that are worth a copy of the weights, and that are not."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    path = small_model(tmp_path_factory.mktemp("wide"), hidden_size=256, num_layers=2)
    return ModelPool({"wide": str(path)}, dtype=torch.float32)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeights]:
    """The copies that are made."""
    made: list[PackedWeights] = []
    copy = PackedWeights._copy
    monkeypatch.setattr(PackedWeights, "_copy", lambda self: made.append(self) or copy(self))  # type: ignore[func-returns-value]
    return made


def policy_of(pool: ModelPool, kind: str) -> Policy:
    if kind == "full":
        return FullPolicy(pool.load("wide"))
    if kind == "base":
        return Policy(pool.get("wide"))
    policy = LoraPolicy(pool.get("wide"), "adapter", training_pb2.LoraSettings(rank=4), seed=1)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.normal_(std=0.05)
    return policy


def sampled(policy: Policy, tokens: int, *, rows: int = ROWS, then: int | None = None) -> Samples:
    """Samples; after ``then`` of their tokens, the weights change."""
    sampler = LocalSampler()
    prompts = [[4 + row, 5, 6, 7] for row in range(rows)]
    job = sampler.begin(policy, prompts, SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True))
    step = 0
    while sampler.turn():
        sampler.step()
        step += 1
        if step == then:
            with torch.no_grad():
                for parameter in policy.trainable_parameters().values():
                    parameter.mul_(1.5)
            policy.sync()
    return job.samples()


def check_same(found: Samples, expected: Samples) -> None:
    """Compare log-probabilities; rounding may decide a token, and then the rest of its row is another."""
    same = (found.token_ids == expected.token_ids).reshape(-1, MANY).cumprod(axis=1) == 1
    assert same.mean() > 0.5
    assert abs(found.logprobs - expected.logprobs).reshape(-1, MANY)[same].max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("kind", ["base", "adapter", "full"])
def test_samples_are_those_of_the_weights(pool: ModelPool, kind: str, copies: list[PackedWeights]) -> None:
    policy = policy_of(pool, kind)
    assert policy.split_model.packs
    found = sampled(policy, MANY)
    assert len(copies) == 1
    assert not any("forward" in vars(module) for module in policy.model.modules() if type(module) is torch.nn.Linear)
    policy.split_model.packs = False
    expected = sampled(policy, MANY)
    policy.split_model.packs = True
    policy.close()
    assert len(copies) == 1
    check_same(found, expected)


@pytest.mark.long
def test_weights_that_change_are_copied_again(pool: ModelPool, copies: list[PackedWeights]) -> None:
    found = sampled(policy_of(pool, "full"), MANY, then=2)
    assert len(copies) == 2
    plain = policy_of(pool, "full")
    plain.split_model.packs = False
    expected = sampled(plain, MANY, then=2)
    check_same(found, expected)


@pytest.mark.parametrize(("kind", "made"), [("base", 1), ("adapter", 1), ("full", 2)])
def test_copies_of_frozen_weights_last(pool: ModelPool, kind: str, made: int, copies: list[PackedWeights]) -> None:
    policy, sampler = policy_of(pool, kind), LocalSampler()
    for _ in range(2):
        sampler.begin(policy, [[4, 5]], SamplingParams(max_tokens=MANY, seed=1, ignore_eos=True))
        while sampler.turn():
            sampler.step()
    policy.close()
    assert len(copies) == made


def test_few_tokens_are_computed_without_a_copy(pool: ModelPool, copies: list[PackedWeights]) -> None:
    sampled(policy_of(pool, "base"), FEW)
    assert not copies


def test_a_row_alone_has_a_copy(pool: ModelPool, copies: list[PackedWeights]) -> None:
    sampled(policy_of(pool, "base"), MANY, rows=1)
    assert len(copies) == 1


def test_rows_have_the_same_bits_whatever_is_beside_them(pool: ModelPool) -> None:
    policy = policy_of(pool, "base")
    together, first = sampled(policy, MANY), sampled(policy, MANY, rows=1)
    assert together.token_ids[:MANY].tolist() == first.token_ids.tolist()
    assert together.logprobs[:MANY].tolist() == first.logprobs.tolist()


@pytest.mark.long
@pytest.mark.parametrize("found", [None, "wrong"])
def test_without_right_products_torch_computes(
    pool: ModelPool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, or where the compiled products are not torch's."""
    policy = policy_of(pool, "base")
    expected = sampled(policy, MANY)
    wrong = CpuKernels.product
    if found is None:
        monkeypatch.setattr(packed_linear, "cpu_kernels", lambda: None)
    packed_linear.has_right_products.cache_clear()
    monkeypatch.setattr(CpuKernels, "product", lambda *given: wrong(*given) + 1e-3)
    without = ModelPool({"wide": policy.facts.path}, dtype=torch.float32)
    packed_linear.has_right_products.cache_clear()
    check_same(sampled(policy_of(without, "base"), MANY), expected)


def test_only_plain_layers_have_copies() -> None:
    layer = torch.nn.Linear(256, 256)
    vars(layer)["forward"] = own = layer.forward
    with PackedWeights(torch.nn.Sequential(layer, torch.nn.Linear(2, 2))).in_use():
        assert vars(layer)["forward"] is own
    assert vars(layer)["forward"] is own


def test_small_weights_are_copied_once(tmp_path: Path, copies: list[PackedWeights]) -> None:
    pool = ModelPool({"wide": str(small_model(tmp_path, hidden_size=32, num_layers=1))}, dtype=torch.float32)
    sampled(policy_of(pool, "base"), MANY)
    assert len(copies) == 1
