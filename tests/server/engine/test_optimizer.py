"""Steps against torch's own loop, clipping, failures that leave everything as it was, and exact resumption."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architecture_configs import CONFIGURATIONS, SIZES
from gradwire_losses.registry import get_loss
from gradwire_proto.v1 import training_pb2
from gradwire_proto.v1.training_pb2 import OptimStep, RunConfig
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.update_rules import RULES, Kind, parameter_kinds
from make_architectures import save_model
from support.training import take_step, train_on
from transformers import AutoConfig, AutoModelForCausalLM


def settings(**changes: Any) -> OptimStep:
    return OptimStep(**({"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | changes))


def accumulate(run: EngineRun, batches: Any) -> None:
    loss = get_loss("causal_lm")
    with run.rng():
        train_on(
            run.policy, batches.batch(loss), loss, get_loss("causal_lm").config(), run.accumulator, budget=Budget()
        )


def gradient_of(run: EngineRun, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(m.shape, generator=generator) * scale for name, m in run.policy.masters().items()}


def weights(run: EngineRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.policy.state_tensors().items()}


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_steps_are_those_of_torch(make_run: Any, max_grad_norm: float) -> None:
    run = make_run(head="value")
    reference = {name: tensor.clone().requires_grad_() for name, tensor in run.policy.state_tensors().items()}
    adamw = torch.optim.AdamW(reference.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        gradients = gradient_of(run, step)
        for name, parameter in reference.items():
            parameter.grad = gradients[name] / 4
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in reference.values() if p.grad is not None))
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(reference.values(), max_grad_norm)
        adamw.step()
        run.accumulator.merge({("loss", "tokens"): gradients}, {("loss", "tokens"): 4.0})
        outcome = take_step(run, settings(weight_decay=0.1, max_grad_norm=max_grad_norm))
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
        assert run.accumulator.empty and not outcome.skipped
    for name, tensor in run.policy.state_tensors().items():
        torch.testing.assert_close(tensor, reference[name].detach(), atol=1e-6, rtol=1e-5)


def test_several_keys_are_divided_each_by_its_own_count(make_run: Any) -> None:
    split, whole = make_run(), make_run()
    one, two = gradient_of(split, 0), gradient_of(split, 1)
    split.accumulator.merge({("a", "tokens"): dict(one)}, {("a", "tokens"): 2.0})
    split.accumulator.merge({("a", "pairs"): {k: v.clone() for k, v in two.items()}}, {("a", "pairs"): 5.0})
    split.accumulator.merge({("a", "pairs"): {k: v.clone() for k, v in two.items()}}, {("a", "pairs"): 3.0})
    combined = {name: one[name] / 2 + 2 * two[name] / 8 for name in one}
    whole.accumulator.merge({("b", "sum"): combined}, {("b", "sum"): 1.0})
    norms = [take_step(run, settings(max_grad_norm=1.0)).grad_norm for run in (split, whole)]
    assert norms[0] == pytest.approx(norms[1])
    for name, tensor in split.policy.state_tensors().items():
        torch.testing.assert_close(tensor, whole.policy.state_tensors()[name], atol=1e-6, rtol=1e-5)


def test_a_step_needs_a_gradient(make_run: Any) -> None:
    run = make_run()
    with pytest.raises(OperationError, match="call forward_backward first") as caught:
        take_step(run, settings())
    assert caught.value.code == training_pb2.ERROR_CODE_NOTHING_TO_STEP


def test_a_non_finite_gradient_leaves_everything(make_run: Any) -> None:
    run = make_run(lora=4)
    run.accumulator.merge({("a", "tokens"): gradient_of(run, 0)}, {("a", "tokens"): 1.0})
    take_step(run, settings())
    before = weights(run) | {name: t.clone() for name, t in run.optimizer.state_tensors().items()}
    huge = gradient_of(run, 1, scale=1e38)
    run.accumulator.merge({("a", "tokens"): huge}, {("a", "tokens"): 1.0})
    with pytest.raises(OperationError, match="it is dropped, and the weights are untouched") as caught:
        take_step(run, settings())
    assert caught.value.code == training_pb2.ERROR_CODE_NON_FINITE
    assert run.accumulator.empty
    run.accumulator.merge({("a", "tokens"): gradient_of(run, 1, scale=1e38)}, {("a", "tokens"): 1.0})
    outcome = take_step(run, settings(skip_nonfinite=True))
    assert outcome.skipped and outcome.num_accumulated == 1 and run.accumulator.empty
    assert_equal(weights(run) | run.optimizer.state_tensors(), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", -1e-8),
        ("weight_decay", math.inf),
        ("max_grad_norm", -1.0),
    ],
)
def test_arguments_are_checked(make_run: Any, name: str, value: float) -> None:
    run = make_run(lora=4)
    run.accumulator.merge({("a", "tokens"): gradient_of(run, 0)}, {("a", "tokens"): 1.0})
    with pytest.raises(OperationError) as caught:
        take_step(run, settings(**{name: value}))
    assert (caught.value.code, caught.value.field) == (training_pb2.ERROR_CODE_INVALID_ARGUMENT, name)
    assert run.accumulator.empty


def test_a_parameter_without_gradient_is_left_alone(make_run: Any, batches: Any) -> None:
    run = make_run(head="reward")
    before = weights(run)
    accumulate(run, batches)
    take_step(run, settings(weight_decay=0.5))
    after = weights(run)
    assert torch.equal(after[".head.weight"], before[".head.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize("lora", [None, {"rank": 4, "dropout": 0.2}])
def test_resumption_mid_accumulation_is_bit_exact(make_run: Any, batches: Any, lora: dict[str, Any] | None) -> None:
    loss = get_loss("causal_lm")
    data = [batches.batch(loss) for _ in range(8)]

    def work(run: EngineRun, part: list[Any]) -> None:
        for batch in part:
            with run.rng():
                train_on(run.policy, batch, loss, get_loss("causal_lm").config(), run.accumulator, budget=Budget(30))

    straight, resumed = make_run(lora=lora), make_run(lora=lora, seed=1)
    work(straight, data[:2])
    take_step(straight, settings())
    work(straight, data[2:3])
    state = [
        {name: tensor.clone() for name, tensor in tensors.items()}
        for tensors in (
            straight.policy.state_tensors(),
            straight.optimizer.state_tensors(),
            straight.accumulator.state_tensors(),
            straight.rng_tensors(),
        )
    ]
    resumed.policy.load_state_tensors(state[0])
    resumed.optimizer.load_state_tensors(state[1])
    resumed.accumulator.load_state_tensors(state[2], resumed.policy.masters())
    resumed.load_rng_tensors(state[3])
    for run in (straight, resumed):
        work(run, data[3:5])
        take_step(run, settings())
        work(run, data[5:])
        take_step(run, settings())
    assert_equal(weights(resumed), weights(straight))
    assert_equal(resumed.optimizer.state_tensors(), straight.optimizer.state_tensors())


def test_loading_no_moments_makes_a_fresh_optimizer(make_run: Any) -> None:
    used, fresh = make_run(lora=4), make_run(lora=4)
    used.accumulator.merge({("a", "tokens"): gradient_of(used, 0)}, {("a", "tokens"): 1.0})
    take_step(used, settings())
    used.policy.load_state_tensors(fresh.policy.state_tensors())
    used.optimizer.load_state_tensors({})
    for run in (used, fresh):
        run.accumulator.merge({("a", "tokens"): gradient_of(run, 1)}, {("a", "tokens"): 1.0})
        take_step(run, settings())
    assert_equal(weights(used), weights(fresh))


def test_accumulated_state_round_trips() -> None:
    accumulator, other = GradientAccumulator(), GradientAccumulator()
    sums = {"w": torch.randn(3), "b.x": torch.randn(2)}
    accumulator.merge({("odd|name", "tokens"): dict(sums)}, {("odd|name", "tokens"): 3.0, ("empty", "pairs"): 0.0})
    other.load_state_tensors(accumulator.state_tensors(), sums)
    assert other.counts == accumulator.counts
    assert_equal(other.state_tensors(), accumulator.state_tensors())


KEPT = re.compile(r"(bias|clip\.scale|A_log|\.D|time_\w+|[Nn]orm\w*\.weight)$")
"""Parameters of two dimensions or more that are no weights."""
ROUTER = re.compile(
    r"router|mlp\.gate\.|\.(gate|wg|classifier|shared_expert_gate)\.weight$|(gate|input_linear)\.layer\.weight$"
)
SEVERAL = ("GPT-2", "MPT", "CTRL", "DBRX", "gpt-oss", "Mamba", "Zamba", "ERNIE 4.5 MoE", "JetMoE", "RWKV")


@pytest.mark.parametrize(
    "name", [each if each in SEVERAL else pytest.param(each, marks=pytest.mark.slow) for each in CONFIGURATIONS]
)
def test_kinds_of_parameters_are_those_of_their_modules(name: str) -> None:
    """Of what has the size of the vocabulary nothing goes to Muon, nor of experts and routers; nothing else decays."""
    kind, own = CONFIGURATIONS[name]
    sizes = {key: value for key, value in ({**SIZES, **own, "vocab_size": 67}).items() if value is not None}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    parameters = dict(model.named_parameters())
    policy: Any = SimpleNamespace(model=model, masters=lambda: parameters)
    kinds = parameter_kinds(policy)
    assert kinds.keys() == parameters.keys() and Kind.MATRIX in kinds.values()
    for each, parameter in parameters.items():
        kept = parameter.ndim < 2 or KEPT.search(each) is not None
        assert (kinds[each] is Kind.OTHER) == kept, each
        if kinds[each] is Kind.MATRIX:
            assert parameter.ndim == 2 and 67 not in parameter.shape and not ROUTER.search(each), each
            assert not re.search(r"(?<!un)embed|wpe|position|experts\.[a-z_]+$|\.[vw]\d$|conv1d", each), each
        elif not kept and parameter.ndim == 2 and 67 not in parameter.shape:
            assert re.search(
                r"embed|wpe|position|experts|\.[vw]\d$|_proj_weight$|rel_logits_proj|fn$", each
            ) or ROUTER.search(each), each


def test_adapters_on_ends_and_routers_are_no_matrices(make_run: Any) -> None:
    run = make_run(lora={"rank": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}, head="reward")
    for each, kind in parameter_kinds(run.policy).items():
        assert kind is (Kind.MATRIX if ".q_proj." in each else Kind.WEIGHT), each


def test_a_models_own_head_is_not_the_runs(tmp_path: Path) -> None:
    """RWKV calls its output head ``head``."""
    save_model("RWKV", tmp_path / "model")
    pool = ModelPool({"rwkv": str(tmp_path / "model")})
    config = RunConfig(base_model="rwkv", head="value")
    run = EngineRun(pool, "run-a", config)
    before = weights(run)
    assert {"head.weight", ".head.weight"} < before.keys()
    gradients = gradient_of(run, 0)
    run.accumulator.merge({("a", "tokens"): gradients}, {("a", "tokens"): 1.0})
    take_step(run, settings(head_learning_rate=0.0))
    after = weights(run)
    assert [name for name in after if torch.equal(after[name], before[name])] == [
        name for name in after if name.startswith(".head.")
    ]
    run.close()


@pytest.mark.parametrize("rule", ["adamw", "sgd", "muon"])
def test_rules_and_groups_are_those_of_torch(make_run: Any, rule: str) -> None:
    """Trunk and head with rates of their own, no decay for norms and biases; Muon leaves all but matrices to AdamW."""
    run = make_run(head="value")
    reference = {name: tensor.clone().requires_grad_() for name, tensor in run.policy.state_tensors().items()}
    optimizers = []
    for name, parameter in reference.items():
        head = name.startswith(".head.")
        rate, decay = (1e-3 if head else 1e-2), (0.1 if parameter.ndim >= 2 else 0.0)
        inner = parameter.ndim == 2 and not head and "embed" not in name and "lm_head" not in name
        if rule == "sgd":
            optimizers.append(torch.optim.SGD([parameter], lr=rate, momentum=0.8, weight_decay=decay))
        elif rule == "muon" and inner:
            optimizers.append(
                torch.optim.Muon([parameter], lr=rate, momentum=0.8, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )
        else:
            optimizers.append(torch.optim.AdamW([parameter], lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay))
    assert {type(each).__name__ for each in optimizers} >= ({"Muon", "AdamW"} if rule == "muon" else set())
    call = settings(optimizer=rule, momentum=0.8, head_learning_rate=1e-3, weight_decay=0.1, decay_matrices_only=True)
    for step in range(3):
        gradients = gradient_of(run, step)
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        for each in optimizers:
            each.step()
        run.accumulator.merge({("loss", "sum"): gradients}, {("loss", "sum"): 1.0})
        take_step(run, call)
        if step == 1:  # moments of every rule are part of the state
            saved = {name: tensor.clone() for name, tensor in run.optimizer.state_tensors().items()}
            run.optimizer.load_state_tensors({})
            assert run.optimizer.state_tensors() == {}
            run.optimizer.load_state_tensors(saved)
    for name, tensor in run.policy.state_tensors().items():
        torch.testing.assert_close(tensor, reference[name].detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_changes_nothing_by_any_rule(make_run: Any, rule: str, value: float) -> None:
    run, call = make_run(head="value"), settings(optimizer=rule)
    run.accumulator.merge({("a", "tokens"): gradient_of(run, 0)}, {("a", "tokens"): 1.0})
    take_step(run, call)
    before = weights(run) | {name: tensor.clone() for name, tensor in run.optimizer.state_tensors().items()}
    for name in (next(iter(before)), ".head.weight"):
        for skips in (False, True):
            gradients = gradient_of(run, 1)
            gradients[name].view(-1)[-1] = value
            run.accumulator.merge({("a", "tokens"): gradients}, {("a", "tokens"): 1.0})
            if skips:
                assert take_step(run, settings(optimizer=rule, skip_nonfinite=True)).skipped
            else:
                with pytest.raises(OperationError, match="the weights are untouched"):
                    take_step(run, call)
            assert run.accumulator.empty
            assert_equal(weights(run) | run.optimizer.state_tensors(), before)
    run.accumulator.merge({("a", "tokens"): gradient_of(run, 2)}, {("a", "tokens"): 1.0})
    take_step(run, call)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run).values())


def test_an_optimizer_that_is_not_known_is_refused(make_run: Any) -> None:
    run = make_run()
    run.accumulator.merge({("loss", "sum"): gradient_of(run, 0)}, {("loss", "sum"): 1.0})
    before = weights(run)
    with pytest.raises(OperationError, match="the rule is one of adamw, adamw8bit, sgd, muon"):
        take_step(run, settings(optimizer="adam"))
    assert_equal(weights(run), before)


def test_a_rate_for_a_head_that_a_run_does_not_have_is_refused(make_run: Any) -> None:
    run = make_run()
    run.accumulator.merge({("loss", "sum"): gradient_of(run, 0)}, {("loss", "sum"): 1.0})
    before = weights(run)
    with pytest.raises(OperationError, match="own head, and this run has none") as told:
        take_step(run, settings(head_learning_rate=1e-3))
    assert told.value.field == "head_learning_rate"
    assert_equal(weights(run), before)
