"""The load-balancing loss of a mixture of experts and the figures of its routers, against transformers' own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.routers import ROUTER_SCORES
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.operations.scores import client_backward, keep_scores
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.loss_report import LossEvaluation
from support.engine import LocalEngine, token_rows
from support.training import train_on
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

load_builtin_losses()

VOCAB, EXPERTS, CHOSEN, COEFFICIENT = 64, 4, 2, 0.5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": CHOSEN, "initializer_range": 0.3,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
BALANCED: dict[str, PreTrainedConfig] = {
    "Qwen3-MoE": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=EXPERTS, head_dim=16),
    "Mixtral": MixtralConfig(**SHAPE, num_local_experts=EXPERTS),
}
OTHERS: dict[str, PreTrainedConfig] = {
    "DeepSeek-V2": DeepseekV2Config(**SHAPE, **LATENT, topk_method="greedy"),
    "DeepSeek-V3": DeepseekV3Config(**SHAPE, **LATENT),
}
ROWS = [[1, 5, 9, 3, 22, 40, 7], [2, 2, 8], [33, 4, 17, 60, 5], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
HEAD, NODE = list(range(1, 33)), [*range(1, 33), *range(50, 20, -1)]
FOREST = [[*NODE, 3, 4], [*HEAD, 60, 61, 2], NODE, [7, 8, 9], [*NODE, 5], [*HEAD, *HEAD], [*HEAD, *HEAD, 44]]
WHOLE = Budget()
SPLIT = Budget(microbatch_tokens=10)
RECOMPUTED = Budget(microbatch_tokens=10, activation_bytes=0)


def saved(folder: Path, name: str, **changes: Any) -> Path:
    config = (BALANCED | OTHERS | {"Llama": LlamaConfig(**SHAPE)})[name]
    config = type(config).from_dict(config.to_dict() | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for module in model.modules():
            if getattr(module, "e_score_correction_bias", None) is not None:
                module.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
        model.save_pretrained(folder / name)
    return folder / name


def policy_on(model: Path, *, rank: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    config = pb.RunConfig(base_model="m", **settings)
    if rank:
        config.lora.rank = rank
    policy = make_policy(ModelPool({"m": str(model)}, dtype=dtype), config, "run-1")
    for name, parameter in policy.trainable_parameters().items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    return policy


def batch_of(rows: list[list[int]]) -> Batch:
    lengths = torch.tensor([len(row) for row in rows])
    scored = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    return Batch(torch.tensor([token for row in rows for token in row]), lengths, scored, torch.ones_like(lengths))


def trained(policy: Policy, budget: Budget, rows: list[list[int]] = ROWS) -> tuple[dict[str, Tensor], LossEvaluation]:
    """The gradient of a causal_lm over rows, and its report."""
    loss, accumulator = get_loss("causal_lm"), GradientAccumulator()
    found = train_on(policy, batch_of(rows), loss, loss.config(), accumulator, budget=budget)
    sums, factor = accumulator.normalised()
    return {name: gradient * factor for name, gradient in sums.items()}, found


def padded() -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(ROWS), max(map(len, ROWS)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(ROWS):
        ids[number, : len(row)], mask[number, : len(row)] = torch.tensor(row), 1
    return ids, mask


def transformers_gradient(policy: Policy) -> tuple[dict[str, Tensor], Any]:
    """What transformers' own forward, asked for the loss of labels and the load-balancing loss, gives and trains."""
    policy.activate()
    model: PreTrainedModel = policy.model
    model.router_aux_loss_coef = COEFFICIENT
    ids, mask = padded()
    output = model(
        input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), output_router_logits=True
    )
    parameters = policy.trainable_parameters()
    found = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    return {name: each for name, each in zip(parameters, found, strict=True) if each is not None}, output


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("name", list(BALANCED))
def test_the_gradient_is_that_of_transformers_however_the_batch_is_split(name: str, rank: int, tmp_path: Path) -> None:
    # transformers sums the routers' probabilities in float32 whatever the model's dtype: hence 1e-6.
    for checkpointing in (False, True):
        policy = policy_on(
            saved(tmp_path, name), rank=rank, dtype=torch.float64, router_aux_loss_coef=COEFFICIENT,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        expected, output = transformers_gradient(policy)
        for budget, micros in ((WHOLE, 1), (SPLIT, 3), (RECOMPUTED, 3)):
            gradient, found = trained(policy, budget)
            assert found.num_microbatches == micros and found.recomputed == (budget is RECOMPUTED)
            assert gradient.keys() == expected.keys()
            for each in gradient:
                assert torch.allclose(gradient[each], expected[each], atol=1e-6, rtol=1e-6), each
            assert found.metrics["router_aux_loss"] == pytest.approx(output.aux_loss.item(), rel=1e-5)
            assert found.loss == pytest.approx(output.loss.item() - COEFFICIENT * output.aux_loss.item(), rel=1e-5)


def test_without_a_coefficient_the_loss_is_alone(tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3-MoE")
    alone, _ = trained(policy_on(model), WHOLE)
    zero, found = trained(policy_on(model, router_aux_loss_coef=0.0), SPLIT)
    balanced, _ = trained(policy_on(model, router_aux_loss_coef=COEFFICIENT), WHOLE)
    assert found.metrics["router_aux_loss"] > CHOSEN  # it is as small only where all experts are chosen alike
    for name in alone:
        assert torch.allclose(alone[name], zero[name], atol=1e-5)
    assert any((alone[name] - balanced[name]).abs().max() > 1e-3 for name in alone)


def test_a_model_that_asks_for_the_loss_gets_it(tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3-MoE", output_router_logits=True, router_aux_loss_coef=0.25)
    assert policy_on(model).router_aux_loss_coef == 0.25
    assert policy_on(model, router_aux_loss_coef=0.0).router_aux_loss_coef == 0.0
    assert policy_on(saved(tmp_path / "plain", "Qwen3-MoE")).router_aux_loss_coef == 0.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("DeepSeek-V3", "balances its experts by a bias on the router's scores (e_score_correction_bias)"),
        ("DeepSeek-V2", "transformers defines no load-balancing loss for DeepseekV2ForCausalLM"),
        ("Llama", "LlamaForCausalLM is not a mixture of experts"),
    ],
)
def test_a_model_without_such_a_loss_refuses_the_coefficient_by_name(name: str, why: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    with pytest.raises(OperationError) as refused:
        policy_on(model, rank=2, router_aux_loss_coef=0.1)
    assert refused.value.field == "router_aux_loss_coef" and why in refused.value.message
    assert policy_on(model, router_aux_loss_coef=0.0).router_aux_loss_coef == 0.0


def observed(policy: Policy) -> list[tuple[Tensor, Tensor]]:
    """Logits and choices of each router for the real tokens of the padded rows, from transformers' own forward."""
    policy.activate()
    seen: list[tuple[Tensor, Tensor]] = []
    ids, mask = padded()
    real = mask.flatten().bool()
    hooks = [
        module.register_forward_hook(lambda _, __, out: seen.append((out[0][real].double(), out[2][real])))
        for name, module in policy.model.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        policy.model(input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", [*BALANCED, *OTHERS])
def test_the_figures_of_routers_are_those_of_the_tokens_one_by_one(name: str, tmp_path: Path) -> None:
    policy = policy_on(saved(tmp_path, name), dtype=torch.float64)
    loads: list[list[int]] = []
    entropies: list[float] = []
    mean = torch.zeros(EXPERTS, dtype=torch.float64)
    for logits, chosen in observed(policy):
        loads.append([sum(row.count(expert) for row in chosen.tolist()) for expert in range(EXPERTS)])
        for row in logits:
            scores = row.sigmoid() if name == "DeepSeek-V3" else row.exp()
            chances = scores / scores.sum()
            entropies.append(float(-(chances * chances.log()).sum()))
            mean += chances
    pairs = len(entropies)
    assert pairs == sum(map(len, ROWS)) * len(loads)
    fractions = torch.tensor(loads, dtype=torch.float64).sum(0) / pairs
    expected = {
        "router_aux_loss": EXPERTS * float(fractions @ (mean / pairs)),
        "router_max_load": max(max(load) * EXPERTS / sum(load) for load in loads),
        "router_unused_experts": sum(load.count(0) for load in loads) / (EXPERTS * len(loads)),
        "router_entropy": sum(entropies) / pairs,
    }
    for budget in (WHOLE, SPLIT, RECOMPUTED):
        metrics = trained(policy, budget)[1].metrics
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-6)


def sums_of(policy: Policy, ids: Tensor, lengths: Tensor, groups: Tensor | None) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    policy.hidden(ids, lengths, sharing=groups, training=True, router_sums=found)
    assert found.keys() == ROUTER_SCORES
    return found


def test_a_shared_token_counts_in_each_of_its_sequences_and_padding_in_none(tmp_path: Path) -> None:
    policy = policy_on(saved(tmp_path, "Mixtral"), dtype=torch.float64)
    prefix = torch.arange(30) % VOCAB
    ids = torch.cat([prefix, torch.tensor([1, 2, 3]), prefix, torch.tensor([4, 5, 6, 7, 8])])
    lengths, groups = torch.tensor([33, 35]), torch.tensor([2])
    assert policy.split_model.packing is Packing.SHARED
    shared = sums_of(policy, ids, lengths, groups)
    assert shared["router_loads"].sum() == len(ids) * SHAPE["num_hidden_layers"] * CHOSEN
    for packing in (Packing.PACKED, Packing.PADDED):
        policy.split_model.packing = packing
        alone = sums_of(policy, ids, lengths, groups)
        assert torch.equal(alone["router_loads"], shared["router_loads"])
        for name in ("router_probabilities", "router_entropy"):
            assert torch.allclose(alone[name], shared[name], rtol=1e-10)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_forest_is_balanced_as_its_flat_rows(rank: int, checkpointing: bool, tmp_path: Path) -> None:
    policy = policy_on(
        saved(tmp_path, "Qwen3-MoE"), rank=rank, dtype=torch.float64, router_aux_loss_coef=COEFFICIENT,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    policy.split_model.packing = Packing.PACKED
    expected, flat = trained(policy, WHOLE, FOREST)
    policy.split_model.packing = Packing.SHARED
    parts = {"microbatch_tokens": 80, "kept_tokens": 90}
    for budget in (WHOLE, Budget(**parts), Budget(**parts, activation_bytes=0)):
        gradient, found = trained(policy, budget, FOREST)
        assert (found.num_microbatches > 1) == (budget is not WHOLE)
        assert found.num_computed_tokens < 0.7 * flat.num_computed_tokens == 0.7 * sum(map(len, FOREST))
        assert found.loss == pytest.approx(flat.loss, rel=1e-6)
        assert found.metrics == pytest.approx(flat.metrics, rel=1e-6)
        for name, value in expected.items():  # the routers' probabilities are summed in float32
            assert torch.allclose(gradient[name], value, atol=1e-6, rtol=1e-6), name


def test_a_loss_of_the_client_is_balanced_too(tmp_path: Path) -> None:
    policy = policy_on(saved(tmp_path, "Qwen3-MoE"), router_aux_loss_coef=COEFFICIENT)
    expected, evaluated = trained(policy, SPLIT)
    accumulator = GradientAccumulator()
    kept, _ = keep_scores(policy, batch_of(ROWS), ["logprobs"], budget=SPLIT)
    count = kept.scorings[0].batch.num_scored
    metrics = client_backward(kept, {"logprobs": torch.full((count,), -1.0 / count)}, 7.0, accumulator)
    assert metrics == pytest.approx({name: evaluated.metrics[name] for name in metrics}, rel=1e-6) and len(metrics) == 4
    sums, factor = accumulator.normalised()
    for name in expected:
        assert torch.allclose(sums[name] * factor, expected[name], atol=1e-5)


@pytest.mark.long
def test_a_run_repeats_itself_bit_by_bit_and_says_once_what_it_uses(tmp_path: Path) -> None:
    model = saved(tmp_path, "Qwen3-MoE")
    batch = token_rows(ROWS)
    call = pb.LossCall(loss_fn="causal_lm", loss_kwargs_json=json.dumps({}))
    told: list[list[str]] = []
    states = []
    for copy in ("first", "second"):
        engine = LocalEngine({"tiny": model}, tmp_path / copy, microbatch_tokens=10)
        engine.create("run-a", lora=4, router_aux_loss_coef=COEFFICIENT)
        engine.create("run-b", lora=4)
        for run in ("run-a", "run-b"):
            engine.train(run, batch)
            told += [list(engine.do(run, batch, forward_backward=call).proto.loss.warnings)]
        result = engine.do("run-a", batch, forward_backward=call).proto.loss
        states.append((dict(result.metrics), engine.context.runs["run-a"].accumulator.state_tensors()))
        engine.create("run-c")
        first = engine.do("run-c", batch, forward_backward=call).proto.loss
        assert any("create_run(router_aux_loss_coef=0.001) adds it" in said for said in first.warnings)
    assert not any("load-balancing" in said for warnings in told for said in warnings)
    (metrics, one), (same, other) = states
    assert metrics == same and metrics["router_aux_loss"] > 0
    assert all(torch.equal(one[name], other[name]) for name in one)
