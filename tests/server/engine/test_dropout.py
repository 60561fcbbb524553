"""Dropout is off by default whatever a model's configuration says; asked for, its masks depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.registry import get_loss
from gradwire_proto.v1.training_pb2 import LoraSettings, RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.loss_report import LossEvaluation
from support.training import train_on
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, PretrainedConfig

RATE = 0.1
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        attn_pdrop=RATE,
        embd_pdrop=RATE,
        resid_pdrop=RATE,
    ),
    "llama": LlamaConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=2, attention_dropout=RATE
    ),
    "opt": OPTConfig(
        **SIZES, ffn_dim=64, num_hidden_layers=2, word_embed_proj_dim=32, dropout=RATE, attention_dropout=RATE
    ),
}
WHOLE, SMALL, RECOMPUTE = Budget(1 << 20), Budget(16), Budget(16, activation_bytes=0)
Make = Callable[..., EngineRun]


@pytest.fixture(scope="module", params=CONFIGS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    path = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(path)
    return maker(path)


def maker(path: Path) -> Make:
    pool = ModelPool({"tiny": str(path)}, "cpu")
    numbers = iter(range(1000))

    def make(**settings: Any) -> EngineRun:
        lora = settings.pop("lora", None)
        config = RunConfig(base_model="tiny", seed=3, **settings)
        if lora:
            config.lora.CopyFrom(LoraSettings(**lora))
        return EngineRun(pool, f"run-{next(numbers)}", config)

    return make


def trained(
    run: EngineRun, batches: Any, rows: Any, budget: Budget, streams: bool = True
) -> tuple[LossEvaluation, dict[str, torch.Tensor]]:
    loss = get_loss("causal_lm")
    if not streams:
        from dataclasses import replace

        loss = replace(loss, streams=lambda config, present: False)
    run.accumulator.clear()
    with run.rng():
        found = train_on(
            run.policy, rows, loss, loss.config(), run.accumulator, budget=budget, dropout_seed=run.dropout_seed
        )
    return found, {name: gradient.clone() for name, gradient in run.accumulator.state_tensors().items()}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_policy_in_training_mode_gives_what_it_gives_when_scoring(make: Make, batches: Any, lora: Any) -> None:
    run = make(lora=lora)
    batch = batches.batch(get_loss("causal_lm"))
    assert not run.policy.has_dropout
    with torch.no_grad():
        scored, first, second = (
            run.policy.hidden(batch.input_ids, batch.lengths, training=training) for training in (False, True, True)
        )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, scored, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_cutting_a_batch_up_changes_nothing(make: Make, batches: Any, lora: Any, checkpointing: bool) -> None:
    run = make(lora=lora, dropout=0.3, gradient_checkpointing=checkpointing)
    rows = batches.batch(get_loss("causal_lm"))
    (whole, gradients), *others = (
        trained(run, batches, rows, budget, streams)
        for budget, streams in ((WHOLE, True), (SMALL, True), (SMALL, False), (RECOMPUTE, False))
    )
    for found, theirs in others:
        assert found.loss == pytest.approx(whole.loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4)


def test_masks_differ_by_operation_and_not_by_run(make: Make, batches: Any) -> None:
    rows = batches.batch(get_loss("causal_lm"))
    run, twin = make(dropout=0.3), make(dropout=0.3)
    first = trained(run, batches, rows, WHOLE)[0].loss
    torch.rand(7)  # whatever else has drawn
    assert trained(twin, batches, rows, SMALL)[0].loss == pytest.approx(first, rel=1e-6)
    run.step += 1
    assert trained(run, batches, rows, WHOLE)[0].loss != pytest.approx(first, rel=1e-6)
    assert trained(make(), batches, rows, WHOLE)[0].loss != pytest.approx(first, rel=1e-6)


def test_dropout_of_a_run_is_also_its_adapters(make: Make) -> None:
    policy = make(lora={"rank": 4}, dropout=0.25).policy
    policy.activate(training=True)
    rates = {
        module.p
        for name, module in policy.model.named_modules()
        if name.endswith(f"lora_dropout.{policy.adapter}") and hasattr(module, "p")
    }
    assert rates == {0.25} and policy.has_dropout


def test_what_draws_is_named(make: Make) -> None:
    names = {"GPT2Config": "attn_pdrop", "LlamaConfig": "attention_dropout", "OPTConfig": "attention_dropout"}
    assert make().policy.draws == make(lora={"rank": 4}).policy.draws == []
    policy = make(lora={"rank": 4, "dropout": 0.2}, dropout=0.3).policy
    assert f"{names[type(policy.model.config).__name__]} 0.3" in policy.draws
    assert policy.draws[-1] == "the adapter's dropout 0.2"


def test_a_model_is_exported_with_the_rates_it_came_with(make: Make, tmp_path: Path) -> None:
    run = make(dropout=0.3)
    run.policy.activate(training=True)
    run.policy.activate()
    run.policy.model.save_pretrained(tmp_path)
    there = AutoConfig.from_pretrained(tmp_path)
    rates = {name: rate for name, rate in vars(there).items() if "drop" in name and isinstance(rate, float) and rate}
    assert rates and set(rates.values()) == {RATE}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_noise_on_embeddings_is_that_of_the_row(make: Make, batches: Any, lora: Any) -> None:
    run = make(lora=lora, neftune_noise_alpha=5.0)
    rows = batches.batch(get_loss("causal_lm"))
    (whole, gradients), *others = (trained(run, batches, rows, budget) for budget in (WHOLE, SMALL, RECOMPUTE))
    for found, theirs in others:
        assert found.loss == pytest.approx(whole.loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, atol=1e-6, rtol=1e-4)
    assert trained(make(lora=lora), batches, rows, WHOLE)[0].loss != pytest.approx(whole.loss, rel=1e-6)
    assert "neftune_noise_alpha 5" in run.policy.draws


def test_noise_on_embeddings_has_the_papers_size(make: Make) -> None:
    """Uniform in +-alpha / sqrt(L * d), as equation (1) of arXiv 2310.05914 has it; none when scoring."""
    run = make(neftune_noise_alpha=5.0)
    ids = torch.randint(64, (1, 40))
    embeddings = run.policy.model.get_input_embeddings()
    run.policy.activate(training=True)
    noise = (embeddings(ids) - embeddings.weight[ids]).detach()
    bound = 5.0 / (40 * 32) ** 0.5
    assert noise.abs().max() <= bound * (1 + 1e-5) and noise.abs().mean().item() == pytest.approx(bound / 2, rel=0.1)
    assert noise.mean().abs() < 0.1 * bound
    run.policy.activate()
    assert torch.equal(embeddings(ids), embeddings.weight[ids])
