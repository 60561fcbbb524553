"""Adapters by spans of tokens: what peft computes, for one adapter or for several at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_server.engine.model.adapters import layers as adapters
from gradwire_server.engine.model.adapters.products import ByKernels, InBuckets, InTurn, Span, alike, bucketed
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.policy import LoraPolicy, Policy, lora_config
from gradwire_server.engine.model.shared_forward import can_go_together, hidden_together
from gradwire_server.engine.state.engine_run import EngineRun
from peft import PeftModel, set_peft_model_state_dict
from torch import Tensor

SETTINGS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 8, "alpha": 3.0},
    {"rank": 2, "target_modules": ["q_proj", "down_proj"]},
]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def some_batch(seed: int, lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (sum(lengths),), generator=generator)
    return Batch(
        ids, torch.tensor(lengths), torch.ones(len(ids), dtype=torch.bool), torch.ones(len(lengths), dtype=torch.int64)
    )


def perturb(run: EngineRun) -> None:
    """B begins with zeros, which would hide what A does."""
    with torch.no_grad():
        for number, parameter in enumerate(run.policy.trainable_parameters().values()):
            parameter.add_(torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter), alpha=0.1)


def gradients(run: EngineRun) -> dict[str, Tensor]:
    found = {}
    for name, parameter in run.policy.trainable_parameters().items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def make(make_run: Any, model_path: Path, dtype: torch.dtype) -> Any:
    pool = ModelPool({"tiny": str(model_path)}, dtype=dtype)

    def one(settings: dict[str, Any], seed: int = 0, **more: Any) -> EngineRun:
        run: EngineRun = make_run(lora=settings, seed=seed, pool=pool, **more)
        perturb(run)
        return run

    return one


@pytest.mark.parametrize("packing", Packing)
def test_each_run_gets_what_it_gets_alone(make: Any, dtype: torch.dtype, packing: Packing) -> None:
    runs = [make(settings, seed) for seed, settings in enumerate(SETTINGS)]
    batches = [some_batch(seed, lengths) for seed, lengths in enumerate([[5, 1, 8], [3], [8, 8]])]
    positions = [torch.arange(len(batch.input_ids) - 1) for batch in batches]
    policies: list[LoraPolicy] = [run.policy for run in runs]
    policies[0].split_model.packing = min(packing, policies[0].split_model.packing)
    alone = []
    for policy, batch, places in zip(policies, batches, positions, strict=True):
        alone.append(policy.hidden(batch.input_ids, batch.lengths, places, training=True))
        alone[-1].sin().sum().backward()
    expected = [gradients(run) for run in runs]

    together = hidden_together(policies, batches, positions)
    torch.cat(together).sin().sum().backward()

    atol = TOLERANCES[dtype]
    for mine, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=atol)
    for run, by_name in zip(runs, expected, strict=True):
        for name, gradient in gradients(run).items():
            torch.testing.assert_close(gradient, by_name[name], atol=10 * atol, rtol=10 * atol, msg=name)


def test_one_adapter_computes_what_peft_does(make: Any, model_path: Path, dtype: torch.dtype) -> None:
    run = make(SETTINGS[1])
    make(SETTINGS[0], 1)
    batch = some_batch(3, [6, 4])
    ours = run.policy.hidden(batch.input_ids, batch.lengths, training=True)
    ours.sin().sum().backward()
    mine = gradients(run)
    plain = ModelPool({"tiny": str(model_path)}, dtype=dtype).load("tiny")
    theirs_policy = Policy(plain)
    peft_model = PeftModel(plain.model, lora_config(plain.model, run.config.lora), autocast_adapter_dtype=False)
    weights = {f"base_model.model.{name}": value for name, value in run.policy.state_tensors().items()}
    assert not set_peft_model_state_dict(peft_model, weights).unexpected_keys
    theirs = theirs_policy.hidden(batch.input_ids, batch.lengths, training=True)
    theirs.sin().sum().backward()
    atol = TOLERANCES[dtype]
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
    found = {
        name.replace(".default", ""): each.grad for name, each in plain.model.named_parameters() if "lora_" in name
    }
    assert mine.keys() == found.keys()
    for name, expected in found.items():
        torch.testing.assert_close(mine[name], expected, atol=10 * atol, rtol=10 * atol, msg=name)


def test_a_run_on_embeddings_or_with_dropout_goes_alone_as_peft_computes_it(make: Any) -> None:
    plain, other = make({"rank": 4}), make({"rank": 2}, 1)
    dropout, embeddings = make({"rank": 4, "dropout": 0.5}, 2), make({"rank": 4, "target_modules": ["embed_tokens"]}, 3)
    assert can_go_together(plain.policy, other.policy)
    assert not can_go_together(plain.policy, plain.policy)
    assert not can_go_together(plain.policy, dropout.policy)
    assert not can_go_together(embeddings.policy, plain.policy)
    batch = some_batch(0, [9, 4])
    for run in (dropout, plain, embeddings, other, dropout):
        run.policy.hidden(batch.input_ids, batch.lengths, training=True).sin().sum().backward()
        assert any(gradient.any() for gradient in gradients(run).values())
        others = [each for each in (plain, other, dropout, embeddings) if each is not run]
        assert all(p.grad is None for each in others for p in each.policy.trainable_parameters().values())
    drawn = [dropout.policy.hidden(batch.input_ids, batch.lengths, training=True) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_gradient_checkpointing_computes_again_with_the_same_spans(make: Any, dtype: torch.dtype) -> None:
    found = []
    for checkpointing in (False, True):
        runs = [
            make(settings, seed, gradient_checkpointing=checkpointing) for seed, settings in enumerate(SETTINGS[:2])
        ]
        batches = [some_batch(seed, [7, 2]) for seed in range(2)]
        places = [torch.arange(9)] * 2
        states = hidden_together([run.policy for run in runs], batches, places)
        torch.cat(states).sin().sum().backward()
        found.append([gradients(run) for run in runs])
    for plain, again in zip(*found, strict=True):
        for name, gradient in plain.items():
            torch.testing.assert_close(again[name], gradient, msg=name)


SPANS = {
    "equal": [Span("a", 0, 5), Span("b", 5, 10), Span("c", 10, 15)],
    "similar": [Span("a", 0, 3), Span("b", 3, 11), Span("c", 11, 20)],
    "apart": [Span("a", 0, 1), Span("b", 1, 90), Span("c", 90, 180)],
    "with places of others between": [Span("a", 0, 4), Span("b", 10, 14), Span("c", 14, 18)],
}


@pytest.mark.parametrize("ranks", [(4, 4, 4), (4, 2, 7)], ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_products_in_buckets_are_those_in_turn(
    spans: list[Span], ranks: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator
) -> None:
    def some(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=dtype).requires_grad_()

    assert spans[-1].stop is not None
    x, weight = some(1, spans[-1].stop + 3, 16), some(12, 16).detach()
    pairs = [each for rank in ranks for each in (some(rank, 16), some(12, rank))]
    for scales in ([2.0] * 3, [2.0, 0.5, 1.0]):
        found = []
        for products in (InTurn(spans, scales), InBuckets(bucketed(spans, x.device), scales)):
            output = adapters._LoraLinear.apply(x, None, weight, None, products, False, *pairs)  # type: ignore[no-untyped-call]
            found.append([output, *torch.autograd.grad(output.sin().sum(), [x, *pairs])])
        for in_turn, in_buckets in zip(*found, strict=True):
            torch.testing.assert_close(in_buckets, in_turn, atol=10 * TOLERANCES[dtype], rtol=10 * TOLERANCES[dtype])


def test_spans_of_similar_length_share_a_bucket() -> None:
    def members(*lengths: int) -> list[list[int]]:
        stops = list(itertools.accumulate(lengths))
        spans = [Span(str(stop), stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
        return [list(bucket.members) for bucket in bucketed(spans, torch.device("cpu"))]

    assert members(64, 64, 64) == [[0, 1, 2]]
    assert members(20, 64, 30) == [[1, 2, 0]]
    assert members(1, 64, 1) == [[1], [0, 2]]
    assert members(300, 200, 210) == [[0], [2, 1]]


def test_grouped_kernels_give_what_products_in_turn_do(rng: torch.Generator) -> None:
    if not adapters.grouped_products_run(torch.device("cpu"), torch.float32):
        pytest.skip("this torch has no grouped products on the CPU")

    def some(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).requires_grad_()

    x, weight, pairs = (
        some(1, 20, 16),
        some(12, 16).detach(),
        [each for _ in range(3) for each in (some(4, 16), some(12, 4))],
    )
    spans = SPANS["similar"]
    assert alike(pairs, [2.0] * 3)
    found = []
    for products in (InTurn(spans, [2.0] * 3), ByKernels(torch.tensor([3, 11, 20], dtype=torch.int32), 2.0)):
        output = adapters._LoraLinear.apply(x, None, weight, None, products, False, *pairs)  # type: ignore[no-untyped-call]
        found.append([output, *torch.autograd.grad(output.sin().sum(), [x, *pairs])])
    for in_turn, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, in_turn)
