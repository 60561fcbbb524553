"""Policies over a hosted model: adapters that do not disturb each other, own copies, masters, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss
from gradwire_proto.v1 import training_pb2
from gradwire_proto.v1.training_pb2 import LoraSettings, OptimStep, RunConfig
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, Policy
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from support.training import take_step, train_on
from transformers import AutoModelForCausalLM

STEP = OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, max_grad_norm=1.0)
IDS, LENGTHS = torch.arange(3, 17), torch.tensor([5, 1, 8])


def train(run: EngineRun, batch: Batch, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        with run.rng():
            result = train_on(
                run.policy,
                batch,
                get_loss("causal_lm"),
                get_loss("causal_lm").config(),
                run.accumulator,
                budget=Budget(),
            )
            take_step(run, STEP)
        assert result.loss is not None
        losses.append(result.loss)
    return losses


@torch.no_grad()
def hidden(policy: Policy) -> torch.Tensor:
    return policy.hidden(IDS, LENGTHS)


def test_ragged_hidden_states_are_those_of_each_sequence_alone(pool: ModelPool) -> None:
    policy = Policy(pool.get("tiny"))
    together = hidden(policy).split(LENGTHS.tolist())
    for own, ids in zip(together, IDS.split(LENGTHS.tolist()), strict=True):
        with torch.no_grad():
            alone = policy.model.model(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(own, alone, atol=1e-5, rtol=1e-5)


def test_positions_choose_hidden_states(pool: ModelPool) -> None:
    policy = Policy(pool.get("tiny"))
    positions = torch.tensor([13, 0, 5])
    with torch.no_grad():
        assert torch.equal(policy.hidden(IDS, LENGTHS, positions), hidden(policy)[positions])


def test_a_fresh_adapter_is_the_base(pool: ModelPool, make_run: Any) -> None:
    before = hidden(Policy(pool.get("tiny")))
    assert torch.equal(hidden(make_run(lora=4).policy), before)


@pytest.mark.parametrize("lora", [None, 4])
def test_training_reaches_only_its_own_run(pool: ModelPool, make_run: Any, batches: Any, lora: int | None) -> None:
    batch = batches.batch(get_loss("causal_lm"))
    trained, other = make_run(lora=lora), make_run(lora=4, seed=1)
    base, before = Policy(pool.get("tiny")), hidden(other.policy)
    base_before = hidden(base)
    losses = train(trained, batch, 5)
    assert losses[-1] < losses[0]
    assert torch.equal(hidden(other.policy), before)
    assert torch.equal(hidden(base), base_before)
    assert not torch.allclose(hidden(trained.policy), base_before, atol=1e-3)


@pytest.mark.long
def test_two_adapters_trained_in_turns_equal_each_trained_alone(model_path: Path, make_run: Any, batches: Any) -> None:
    batch = batches.batch(get_loss("causal_lm"))
    settings = {"rank": 4, "dropout": 0.2}
    alone = [
        train(make_run(lora=settings, seed=seed, pool=ModelPool({"tiny": str(model_path)})), batch, 3)
        for seed in (0, 1)
    ]
    first, second = make_run(lora=settings, seed=0), make_run(lora=settings, seed=1)
    in_turns = list(zip(*[(train(first, batch)[0], train(second, batch)[0]) for _ in range(3)], strict=True))
    assert [list(losses) for losses in in_turns] == alone


def test_initial_adapter_depends_on_the_seed_alone(make_run: Any) -> None:
    one, _, again, other = make_run(lora=4), make_run(lora=8, seed=3), make_run(lora=4), make_run(lora=4, seed=1)
    tensors, same, different = (run.policy.state_tensors() for run in (one, again, other))
    assert list(tensors) == list(same)
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    assert any(not torch.equal(tensors[name], different[name]) for name in tensors)


def test_a_closed_adapter_leaves_the_others_and_then_the_bare_model(
    pool: ModelPool, make_run: Any, batches: Any
) -> None:
    batch = batches.batch(get_loss("causal_lm"))
    first, second = make_run(lora=4), make_run(lora=4, seed=1)
    train(first, batch), train(second, batch)
    base, before = hidden(Policy(pool.get("tiny"))), hidden(second.policy)
    first.close()
    assert torch.equal(hidden(second.policy), before)
    train(second, batch)
    second.close()
    assert pool.get("tiny").adapters is None
    assert torch.equal(hidden(Policy(pool.get("tiny"))), base)
    train(make_run(lora=4, run_id="run-anew"), batch)


def test_lora_scale_and_targets(make_run: Any) -> None:
    run = make_run(lora={"rank": 4})
    config = run.policy.peft_config
    assert config.lora_alpha == 8
    names = list(run.policy.trainable_parameters())
    assert len(names) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
    assert not any("lm_head" in name or run.run_id in name for name in names)
    only = make_run(lora={"rank": 2, "alpha": 3.0, "target_modules": ["q_proj"]})
    assert len(only.policy.trainable_parameters()) == 4
    assert only.policy.peft_config.lora_alpha == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rank": 0}, "lora.rank"),
        ({"rank": 4, "alpha": -1.0}, "lora.alpha"),
        ({"rank": 4, "dropout": 1.0}, "lora.dropout"),
        ({"rank": 4, "target_modules": ["no_such_layer"]}, "lora.target_modules"),
    ],
)
def test_lora_settings_that_do_not_fit_are_refused(make_run: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(OperationError) as caught:
        make_run(lora=settings)
    assert (caught.value.code, caught.value.field) == (training_pb2.ERROR_CODE_INVALID_ARGUMENT, field)
    make_run(lora=4)


@pytest.mark.parametrize("lora", [None, 4])
def test_state_loads_into_another_run(make_run: Any, batches: Any, lora: int | None) -> None:
    trained, fresh = make_run(lora=lora, head="value"), make_run(lora=lora, head="value", seed=1)
    train(trained, batches.batch(get_loss("causal_lm")), 2)
    fresh.policy.load_state_tensors({name: t.clone() for name, t in trained.policy.state_tensors().items()})
    assert torch.equal(hidden(fresh.policy), hidden(trained.policy))


def test_state_of_another_shape_is_refused_untouched(make_run: Any) -> None:
    small, large = make_run(lora=4), make_run(lora=8)
    before = {name: tensor.clone() for name, tensor in small.policy.state_tensors().items()}
    with pytest.raises(OperationError, match="LoRA rank"):
        small.policy.load_state_tensors(large.policy.state_tensors())
    assert all(torch.equal(before[name], tensor) for name, tensor in small.policy.state_tensors().items())


def test_a_fork_may_leave_the_head_behind(make_run: Any) -> None:
    scored, plain = make_run(lora=4, head="reward"), make_run(lora=4, seed=1)
    with pytest.raises(OperationError):
        plain.policy.load_state_tensors(scored.policy.state_tensors())
    plain.policy.load_state_tensors(scored.policy.state_tensors(), head=False)
    assert torch.equal(
        next(iter(plain.policy.state_tensors().values())), next(iter(scored.policy.state_tensors().values()))
    )


@pytest.mark.parametrize("lora", [None, 4])
def test_gradient_checkpointing_changes_no_gradient(make_run: Any, batches: Any, lora: int | None) -> None:
    batch = batches.batch(get_loss("causal_lm"))
    gradients = []
    for checkpointing in (False, True):
        run = make_run(lora=lora, gradient_checkpointing=checkpointing)
        train_on(
            run.policy,
            batch,
            get_loss("causal_lm"),
            get_loss("causal_lm").config(),
            run.accumulator,
            budget=Budget(),
        )
        gradients.append(run.accumulator.normalised()[0])
    plain, recomputed = gradients
    assert set(plain) == set(recomputed)
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name])


@pytest.mark.parametrize("lora", [None, 4])
def test_bfloat16_weights_have_masters_that_keep_small_updates(
    model_path: Path, make_run: Any, batches: Any, lora: int | None
) -> None:
    pool = ModelPool({"tiny": str(model_path)}, dtype=torch.bfloat16)
    run = make_run(lora=lora, head="value", pool=pool)
    name, parameter = next(iter(run.policy.trainable_parameters().items()))
    master = run.policy.masters()[name]
    assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert run.policy.trainable_parameters()[".head.weight"].dtype == torch.float32
    before = master.clone()
    batch = batches.batch(get_loss("causal_lm"))
    for _ in range(3):
        train_on(
            run.policy,
            batch,
            get_loss("causal_lm"),
            get_loss("causal_lm").config(),
            run.accumulator,
            budget=Budget(20),
        )
        assert all(g.dtype == torch.float32 for g in run.accumulator.normalised()[0].values())
        take_step(run, OptimStep(learning_rate=1e-6, beta1=0.9, beta2=0.99, eps=1e-8))
    moved = (master - before).abs().max().item()
    assert 1e-6 < moved < 4e-6  # far below what bfloat16 resolves
    assert torch.equal(parameter, master.bfloat16())


def test_hosted_facts_come_without_loading(pool: ModelPool, model_path: Path) -> None:
    facts = pool.facts("tiny")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert facts.num_parameters == model.num_parameters()
    assert (facts.vocab_size, facts.context_length, facts.hidden_size, facts.num_layers) == (64, 64, 32, 2)
    assert (facts.architecture, facts.eos_token_ids, facts.dtype) == ("LlamaForCausalLM", (2,), "float32")


def test_only_named_models_are_loaded(pool: ModelPool, model_path: Path) -> None:
    with pytest.raises(OperationError, match="there are: tiny") as caught:
        pool.get(str(model_path))
    assert caught.value.code == training_pb2.ERROR_CODE_UNKNOWN_MODEL


def test_pickled_weights_are_refused(tmp_path: Path, model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OperationError, match="safetensors") as caught:
        ModelPool({"pickled": str(tmp_path)}).get("pickled")
    assert caught.value.code == training_pb2.ERROR_CODE_UNSUPPORTED


def test_a_model_that_does_more_after_its_trunk_is_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(OperationError, match="logits differ"):
        ModelPool({"tiny": str(model_path)}).get("tiny")


def test_loading_draws_nothing_from_the_global_generator(pool: ModelPool, make_run: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make_run(lora=4, head="reward"), make_run(head="value")
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_may_be_made_for_references(pool: ModelPool, make_run: Any, batches: Any) -> None:
    """As the engine does for "ema" and for checkpoints: another adapter, filled with a run's tensors."""
    run = make_run(lora=4)
    train(run, batches.batch(get_loss("causal_lm")), 2)
    reference = LoraPolicy(pool.get("tiny"), "reference-1", LoraSettings(rank=4), seed=0)
    reference.load_state_tensors(run.policy.state_tensors())
    frozen = hidden(reference)
    assert torch.equal(frozen, hidden(run.policy))
    train(run, batches.batch(get_loss("causal_lm")))
    assert torch.equal(hidden(reference), frozen)
    reference.close()


def test_unknown_head_is_refused(pool: ModelPool) -> None:
    with pytest.raises(OperationError, match="'value', 'reward'") as caught:
        EngineRun(pool, "run-x", RunConfig(base_model="tiny", head="critic"))
    assert caught.value.field == "head"
