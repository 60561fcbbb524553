"""Losses over a policy: the same whatever the micro-batches, kept or computed again, and nothing left by a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch, BatchError, Scores
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.registry import LossConfig, LossSpec, all_losses, get_loss, load_builtin_losses
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.scores import client_backward, keep_scores
from gradwire_server.engine.scoring.forward import Scoring, score_batch
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import Reference
from gradwire_server.engine.training.loss_report import LossEvaluation
from support.training import scores_on, train_on

load_builtin_losses()
CORE = {
    "causal_lm",
    "conservative_ppo",
    "dpo",
    "enhanced_ppo",
    "grpo",
    "importance_sampling",
    "reward_modeling",
}
WHOLE = Budget(microbatch_tokens=10**6, activation_bytes=1 << 40)
SMALL = Budget(microbatch_tokens=12, activation_bytes=1 << 40, logits_elements=5 * 64)
RECOMPUTE = Budget(microbatch_tokens=12, activation_bytes=0)


def config_of(loss: LossSpec) -> LossConfig:
    kwargs: dict[str, Any] = {"reference_model": "base"} if "reference_model" in loss.config.model_fields else {}
    return loss.config(**kwargs, **({"reduction_divisor": 16.0} if loss.name == "dr_grpo" else {}))


def head_of(loss: LossSpec) -> str:
    return loss.head or ("value" if "values" in loss.optional_scores else "")


LOSSES = [loss.name for loss in all_losses()]
LOSSES_AND_LORA = [(name, lora) for name in LOSSES for lora in (None, 4) if lora or name in CORE]


def base_reference(run: EngineRun) -> Reference:
    """Not quite the policy, so that ratios to it are not 1: the base at another temperature."""

    def reference(batch: Batch, temperature: float) -> torch.Tensor:
        base = Policy(run.policy.split_model)
        return score_batch(Scoring(base, batch, ["logprobs"], 1.5 * temperature, None, WHOLE))["logprobs"]

    return reference


def evaluate(
    run: EngineRun, batch: Batch, loss: LossSpec, budget: Budget, **kwargs: Any
) -> tuple[LossEvaluation, dict[str, torch.Tensor]]:
    """The evaluation and the gradient that a step would take, from an empty accumulation."""
    run.accumulator.clear()
    result = train_on(
        run.policy,
        batch,
        loss,
        config_of(loss),
        run.accumulator,
        reference=base_reference(run),
        teacher=Policy(run.policy.split_model),
        budget=budget,
        **kwargs,
    )
    return result, gradient(run)


def gradient(run: EngineRun) -> dict[str, torch.Tensor]:
    gradients, factor = run.accumulator.normalised()
    return {name: value * factor for name, value in gradients.items()}


def assert_same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(mine) == set(other)
    assert any(value.any() for value in other.values())
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def perturb(run: EngineRun) -> None:
    """A run that has moved from its start: no gradient of it is zero by construction."""
    with run.rng(), torch.no_grad():
        for master in run.policy.masters().values():
            master.add_(torch.randn_like(master), alpha=0.02)
        run.policy.sync()


@contextmanager
def trunk_forwards(run: EngineRun) -> Iterator[list[int]]:
    """Tokens of each forward of the trunk within."""
    counts: list[int] = []
    hook = run.policy.split_model.trunk.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield counts
    finally:
        hook.remove()


@pytest.mark.parametrize(("name", "lora"), LOSSES_AND_LORA)
def test_microbatches_change_no_loss_and_no_gradient(make_run: Any, batches: Any, name: str, lora: int | None) -> None:
    loss = get_loss(name)
    batch, run = batches.batch(loss), make_run(lora=lora, head=head_of(loss))
    perturb(run)
    whole, expected = evaluate(run, batch, loss, WHOLE)
    assert whole.num_microbatches == 1 and not whole.recomputed
    together = dataclasses.replace(loss, streams=lambda config, present: False)
    for variant, budget in ((loss, SMALL), (together, SMALL), (together, RECOMPUTE)):
        split, found = evaluate(run, batch, variant, budget)
        assert split.num_microbatches > 1
        assert split.recomputed == (budget is RECOMPUTE)
        assert split.metrics == pytest.approx(whole.metrics, abs=1e-5, rel=1e-4, nan_ok=True)
        assert_same(found, expected)


def loss_streams(loss: LossSpec) -> bool:
    return loss.streams(config_of(loss), frozenset())


@pytest.mark.parametrize(("name", "lora"), LOSSES_AND_LORA)
def test_two_halves_and_a_step_are_the_whole_and_a_step(
    make_run: Any, batches: Any, name: str, lora: int | None
) -> None:
    loss = get_loss(name)
    if not loss_streams(loss):
        pytest.skip("needs the whole batch at once: no mean over rows or tokens")
    batch, run = batches.batch(loss, rows=9), make_run(lora=lora, head=head_of(loss))
    perturb(run)
    _, expected = evaluate(run, batch, loss, WHOLE)
    run.accumulator.clear()
    for rows in (torch.arange(3), torch.arange(3, 9)):
        train_on(
            run.policy,
            batch.select(rows),
            loss,
            config_of(loss),
            run.accumulator,
            reference=base_reference(run),
            teacher=Policy(run.policy.split_model),
            budget=WHOLE,
        )
    assert_same(gradient(run), expected)


def test_a_loss_in_two_units_averages_each_over_its_own_count(make_run: Any, batches: Any) -> None:
    """Uneven halves: weighting either unit by the other's count would show."""

    def function(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
        tokens = Term(-scores.logprobs.sum(), batch.num_scored, "tokens")
        rows = Term(scores.logprobs.exp().sum(), batch.num_sequences, "sequences")
        total = Term(scores.logprobs.square().sum() * 1e-3, 1, "sum")
        return LossOutput({"nll": tokens, "mass": rows, "total": total})

    loss = dataclasses.replace(
        get_loss("causal_lm"), name="two_units", function=function, scores=lambda c, p: frozenset({"logprobs"})
    )
    batch, run = batches.batch(loss, rows=7), make_run()
    logprobs = score_batch(Scoring(run.policy, batch, ["logprobs"], 1.0, None, WHOLE))["logprobs"]
    whole, expected = evaluate(run, batch, loss, WHOLE)
    by_hand = -logprobs.mean() + logprobs.exp().sum() / 7 + logprobs.square().sum() * 1e-3
    assert whole.loss == pytest.approx(by_hand.item(), rel=1e-5)
    split, found = evaluate(run, batch, loss, SMALL)
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert_same(found, expected)
    together = dataclasses.replace(loss, streams=lambda config, present: False)
    assert_same(evaluate(run, batch, together, RECOMPUTE)[1], expected)
    run.accumulator.clear()
    for rows in (torch.arange(2), torch.arange(2, 7)):
        train_on(run.policy, batch.select(rows), loss, config_of(loss), run.accumulator, budget=SMALL)
    assert_same(gradient(run), expected)


def test_gradients_are_those_of_plain_autograd(make_run: Any, batches: Any) -> None:
    loss = get_loss("causal_lm")
    batch, run = batches.batch(loss), make_run()
    result, found = evaluate(run, batch, loss, SMALL)
    model = run.policy.model
    total, count = torch.zeros(()), 0
    for ids, scored in zip(
        batch.input_ids.split(batch.lengths.tolist()), batch.scored.split(batch.lengths.tolist()), strict=True
    ):
        if len(ids) > 1:
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            own = log_p.gather(1, ids[1:, None]).squeeze(1)[scored[1:]]
            total, count = total - own.sum(), count + len(own)
    (total / count).backward()
    assert result.loss == pytest.approx((total / count).item(), rel=1e-5)
    assert_same(found, {name: p.grad for name, p in run.policy.trainable_parameters().items() if p.grad is not None})


@pytest.mark.parametrize("lora", [None, 4])
def test_kept_graphs_cost_one_forward_and_recomputation_two(make_run: Any, batches: Any, lora: int | None) -> None:
    loss = get_loss("conservative_ppo")
    assert not loss_streams(loss)
    batch, run = batches.batch(loss, shortest=5), make_run(lora=lora, head="value")
    for budget, passes in ((SMALL, 1), (RECOMPUTE, 2)):
        with trunk_forwards(run) as counts:
            result = train_on(run.policy, batch, loss, loss.config(), run.accumulator, budget=budget)
        assert len(counts) == passes * result.num_microbatches
        assert result.recomputed == (passes == 2)


def test_the_activation_budget_decides_how_much_is_kept(make_run: Any) -> None:
    loss = dataclasses.replace(get_loss("causal_lm"), streams=lambda config, present: False)
    batch, run = rows_of([8] * 12), make_run()
    forwards = []
    for budget_bytes in (0, 200_000, 400_000, 1 << 40):
        with trunk_forwards(run) as counts:
            result, _ = evaluate(run, batch, loss, Budget(25, budget_bytes))
        forwards.append(len(counts))
    assert forwards[0] == 2 * result.num_microbatches
    assert forwards[-1] == result.num_microbatches
    assert forwards == sorted(forwards, reverse=True) and len(set(forwards)) >= 3


@pytest.mark.parametrize("budget", [WHOLE, SMALL, RECOMPUTE])
def test_dropout_is_the_same_in_the_second_forward(make_run: Any, batches: Any, budget: Budget) -> None:
    """With the second forward's dropout drawn anew, the gradient would not be that of the scores reported."""
    run = make_run(lora={"rank": 4, "dropout": 0.5})
    perturb(run)
    batch = batches.batch(get_loss("causal_lm"))
    together = dataclasses.replace(get_loss("causal_lm"), streams=lambda config, present: False)
    found = []
    for limit in (1 << 40, budget.activation_bytes):
        torch.manual_seed(5)
        found.append(evaluate(run, batch, together, dataclasses.replace(budget, activation_bytes=limit)))
        found.append((found[-1][0], {"next draw": torch.rand(1)}))
    (kept, gradients), (_, draw), (again, recomputed), (_, draw_again) = found
    assert kept.loss == again.loss
    assert_same(recomputed, gradients)
    assert torch.equal(draw["next draw"], draw_again["next draw"])


def test_scoring_has_no_dropout(make_run: Any, batches: Any) -> None:
    run = make_run(lora={"rank": 4, "dropout": 0.5})
    perturb(run)
    batch = batches.batch(get_loss("causal_lm"))
    first, second = (scores_on(run.policy, batch, outputs=["logprobs"], budget=WHOLE) for _ in range(2))
    assert torch.equal(first.outputs["logprobs"], second.outputs["logprobs"])


@pytest.mark.parametrize("budget", [WHOLE, SMALL, RECOMPUTE])
def test_custom_dpo_has_the_gradient_of_the_built_in_one(make_run: Any, batches: Any, budget: Budget) -> None:
    loss = get_loss("dpo")
    batch, run = batches.batch(loss, shortest=2), make_run(lora=4)
    perturb(run)
    built_in, expected = evaluate(run, batch, loss, WHOLE)
    reference = base_reference(run)(batch, 1.0)
    run.accumulator.clear()
    with trunk_forwards(run) as counts:
        kept, scored = keep_scores(run.policy, batch, ["logprobs"], budget=budget)
        logprobs = kept.by_name[0]["logprobs"].requires_grad_()
        ratios = torch.stack([part.sum() for part in (logprobs - reference).split(batch.row_lengths.tolist())])
        value = -torch.nn.functional.logsigmoid(0.1 * (ratios[0::2] - ratios[1::2])).mean()
        value.backward()
        client_backward(kept, {"logprobs": logprobs.grad}, weight=8.0, accumulator=run.accumulator)
    assert value.item() == pytest.approx(built_in.loss, rel=1e-5)
    assert_same(gradient(run), expected)
    assert len(counts) == scored.num_microbatches * (2 if budget is RECOMPUTE else 1)
    assert scored.recomputed == (budget is RECOMPUTE)


def test_custom_calls_average_by_weight(make_run: Any, batches: Any) -> None:
    loss = get_loss("causal_lm")
    batch, run = batches.batch(loss), make_run()
    _, expected = evaluate(run, batch, loss, WHOLE)
    run.accumulator.clear()
    for rows in (torch.arange(3), torch.arange(3, 8)):
        kept, scored = keep_scores(run.policy, batch.select(rows), ["logprobs"], budget=WHOLE)
        mean = torch.full_like(kept.by_name[0]["logprobs"], -1.0 / max(1, scored.num_loss_tokens))
        if scored.num_loss_tokens:
            client_backward(kept, {"logprobs": mean}, scored.num_loss_tokens, run.accumulator)
    assert_same(gradient(run), expected)


@pytest.mark.parametrize(
    ("gradients", "weight", "code", "field"),
    [
        ({"logprobs": torch.zeros(2)}, 1.0, training_pb2.ERROR_CODE_INVALID_ARGUMENT, "grad_logprobs"),
        ({"values": torch.zeros(2)}, 1.0, training_pb2.ERROR_CODE_INVALID_ARGUMENT, "grad_values"),
        ({}, 0.0, training_pb2.ERROR_CODE_INVALID_ARGUMENT, "weight"),
        ({"logprobs": torch.tensor([1.0, 1.0, float("nan"), 0.0])}, 1.0, training_pb2.ERROR_CODE_NON_FINITE, ""),
    ],
)
def test_custom_gradients_are_checked(
    make_run: Any, gradients: dict[str, torch.Tensor], weight: float, code: int, field: str
) -> None:
    run = make_run()
    kept, _ = keep_scores(run.policy, rows_of([3, 3]), ["logprobs"], budget=WHOLE)
    with pytest.raises(OperationError) as caught:
        client_backward(kept, gradients, weight, run.accumulator)
    assert (caught.value.code, caught.value.field) == (code, field)
    if code == training_pb2.ERROR_CODE_NON_FINITE:
        assert caught.value.row == 1
    assert run.accumulator.empty


def rows_of(lengths: list[int]) -> Batch:
    sizes = torch.tensor(lengths)
    scored = torch.ones(int(sizes.sum()), dtype=torch.bool)
    scored[sizes.cumsum(0) - sizes] = False
    return Batch(torch.arange(int(sizes.sum())) % 64, sizes, scored, torch.ones(len(lengths), dtype=torch.int64))


def test_outputs_come_in_the_callers_order(make_run: Any) -> None:
    batch, loss = rows_of([2, 9, 1, 5, 7]), get_loss("causal_lm")
    run = make_run(head="value")
    perturb(run)
    names = ["logprobs", "entropy", "values"]
    result, _ = evaluate(run, batch, loss, Budget(microbatch_tokens=10), outputs=names)
    assert result.num_microbatches > 2
    assert result.row_lengths.tolist() == [1, 8, 0, 4, 6]
    for name in names:
        for row, own in enumerate(result.outputs[name].split(result.row_lengths.tolist())):
            alone = scores_on(run.policy, batch.select(torch.tensor([row])), outputs=[name], budget=WHOLE)
            torch.testing.assert_close(own, alone.outputs[name], atol=1e-5, rtol=1e-5)
    assert (result.num_tokens, result.num_loss_tokens, result.num_sequences) == (24, 19, 5)


def test_rewards_are_read_at_the_last_token(make_run: Any) -> None:
    batch, run = rows_of([2, 9, 1, 5]), make_run(lora=4, head="reward")
    rewards = scores_on(run.policy, batch, outputs=["rewards"], budget=Budget(10)).outputs["rewards"]
    assert run.policy.head is not None
    with torch.no_grad():
        states = run.policy.hidden(batch.input_ids, batch.lengths)[batch.lengths.cumsum(0) - 1]
        torch.testing.assert_close(rewards, run.policy.head(states))


def test_values_are_read_before_the_token(make_run: Any) -> None:
    batch, run = rows_of([3, 4]), make_run(head="value")
    perturb(run)
    values = scores_on(run.policy, batch, outputs=["values"], budget=WHOLE).outputs["values"]
    assert run.policy.head is not None
    with torch.no_grad():
        states = run.policy.hidden(batch.input_ids, batch.lengths)[torch.tensor([0, 1, 3, 4, 5])]
        torch.testing.assert_close(values, run.policy.head(states))


def test_a_batch_may_say_what_is_predicted(make_run: Any) -> None:
    """With target_tokens nothing is shifted: place t is read after token t; rewards of tokens are read there too."""
    run = make_run(lora=4, head="reward")
    lengths = torch.tensor([4, 9, 2])
    ids, candidates = torch.randint(64, (15,)), torch.randint(64, (14, 3))
    scored = torch.ones(15, dtype=torch.bool)
    scored[6] = False
    batch = Batch(
        ids, lengths, scored, torch.ones(3, dtype=torch.int64), {"candidates": candidates}, {"candidates": "token"},
        target_tokens=candidates[:, 0],
    )  # fmt: skip
    names = ["logprobs", "candidate_logprobs", "token_rewards"]
    found = score_batch(Scoring(run.policy, batch, names, 1.0, None, Budget(10)))
    with torch.no_grad():
        states = run.policy.hidden(ids, lengths)[scored]
        log_p = (states @ run.policy.compute(run.policy.output_head).weight.T).log_softmax(-1)
        assert run.policy.head is not None
        torch.testing.assert_close(found["token_rewards"], run.policy.head(states))
    torch.testing.assert_close(found["candidate_logprobs"], log_p.gather(1, candidates), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["logprobs"], found["candidate_logprobs"][:, 0])


def test_temperature_divides_the_logits_of_a_score(make_run: Any) -> None:
    batch, run = rows_of([6]), make_run()
    found = scores_on(run.policy, batch, outputs=["logprobs"], temperature=0.5, budget=WHOLE).outputs["logprobs"]
    with torch.no_grad():
        log_p = (run.policy.model(input_ids=batch.input_ids[None]).logits[0, :-1] / 0.5).log_softmax(-1)
    torch.testing.assert_close(found, log_p.gather(1, batch.input_ids[1:, None]).squeeze(1))


@pytest.mark.parametrize("name", LOSSES)
def test_forward_gives_the_loss_and_no_gradient(make_run: Any, batches: Any, name: str) -> None:
    loss = get_loss(name)
    batch, run = batches.batch(loss), make_run(lora=4, head=head_of(loss))
    perturb(run)
    expected, _ = evaluate(run, batch, loss, WHOLE)
    run.accumulator.clear()
    compared = {"reference": base_reference(run), "teacher": Policy(run.policy.split_model)}
    found = scores_on(run.policy, batch, loss, config_of(loss), budget=SMALL, **compared)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5, rel=1e-4, nan_ok=True)
    assert all(parameter.grad is None for parameter in run.policy.trainable_parameters().values())


def test_a_batch_with_nothing_scored_contributes_nothing(make_run: Any, batches: Any) -> None:
    loss = get_loss("causal_lm")
    batch, run = batches.batch(loss), make_run()
    _, expected = evaluate(run, batch, loss, WHOLE)
    with trunk_forwards(run) as counts:
        result = train_on(run.policy, rows_of([1, 1]), loss, config_of(loss), run.accumulator, budget=WHOLE)
    assert (result.loss, result.num_loss_tokens, counts) == (0.0, 0, [])
    assert_same(gradient(run), expected)


# ------------------------------------------------------------------ failures


def poisoned(run: EngineRun, loss: LossSpec, where: str) -> LossSpec:
    """The loss, made non-finite for the rows that begin with token 7."""

    def function(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
        first = batch.input_ids[batch.lengths.cumsum(0) - batch.lengths] == 7
        bad = first.repeat_interleave(batch.row_lengths)
        if where == "loss":
            logprobs = scores.logprobs + torch.where(bad, torch.inf, 0.0)
        else:  # the value is 0, the gradient 0 / 0
            zero = scores.logprobs - scores.logprobs.detach()
            logprobs = scores.logprobs + torch.where(bad, zero, 1.0).sqrt()
        return LossOutput({"nll": Term(-logprobs.sum(), batch.num_scored, "tokens")})

    return dataclasses.replace(loss, function=function)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("budget", [WHOLE, SMALL, RECOMPUTE])
def test_a_failing_call_names_the_row_and_leaves_gradients_as_they_were(
    make_run: Any, batches: Any, where: str, streams: bool, budget: Budget
) -> None:
    loss = get_loss("causal_lm")
    run = make_run()
    _, before = evaluate(run, batches.batch(loss), loss, WHOLE)
    before = {name: tensor.clone() for name, tensor in before.items()}
    batch = rows_of([9, 9, 9, 9, 9, 9])
    starts = batch.lengths.cumsum(0) - batch.lengths
    batch.input_ids[starts] = torch.tensor([1, 2, 3, 4, 7, 5])
    bad = dataclasses.replace(poisoned(run, loss, where), streams=lambda config, present: streams)
    with pytest.raises(OperationError) as caught:
        train_on(run.policy, batch, bad, config_of(loss), run.accumulator, budget=budget)
    assert caught.value.code == training_pb2.ERROR_CODE_NON_FINITE
    assert caught.value.row == 4
    assert gradient(run).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in gradient(run).items())
    assert all(parameter.grad is None for parameter in run.policy.trainable_parameters().values())


def test_non_finite_weights_are_blamed_before_anything_is_accumulated(make_run: Any, batches: Any) -> None:
    run, loss = make_run(), get_loss("causal_lm")
    with torch.no_grad():
        run.policy.model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(OperationError, match="logprobs in row") as caught:
        train_on(run.policy, rows_of([4, 4]), loss, config_of(loss), run.accumulator, budget=WHOLE)
    assert (caught.value.code, caught.value.row) == (training_pb2.ERROR_CODE_NON_FINITE, 0)
    assert run.accumulator.empty


def test_an_overflowing_weight_gradient_is_not_merged(make_run: Any) -> None:
    def function(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
        difference = scores.logprobs - scores.logprobs.detach()
        return LossOutput({"nll": Term(difference.sum() * 3e38, batch.num_scored, "tokens")})

    run = make_run()
    loss = dataclasses.replace(get_loss("causal_lm"), function=function)
    with pytest.raises(OperationError, match="respect to the weights") as caught:
        train_on(run.policy, rows_of([9, 9]), loss, config_of(loss), run.accumulator, budget=WHOLE)
    assert caught.value.code == training_pb2.ERROR_CODE_NON_FINITE
    assert run.accumulator.empty


def test_a_batch_error_of_a_loss_names_the_callers_row(make_run: Any) -> None:
    def function(batch: Batch, scores: Scores, config: LossConfig) -> LossOutput:
        for row, length in enumerate(batch.lengths.tolist()):
            if length == 3:
                raise BatchError("three tokens are bad luck", field="input_ids", row=row, rule="tokens != 3")
        return LossOutput({"nll": Term(-scores.logprobs.sum(), batch.num_scored, "tokens")})

    loss = dataclasses.replace(get_loss("causal_lm"), function=function)
    run = make_run()
    with pytest.raises(OperationError, match="bad luck") as caught:
        train_on(run.policy, rows_of([9, 9, 9, 3]), loss, config_of(loss), run.accumulator, budget=SMALL)
    error = caught.value.to_proto()
    assert (error.code, error.field, error.row) == (training_pb2.ERROR_CODE_INVALID_BATCH, "input_ids", 3)
    assert run.accumulator.empty


def test_a_missing_head_or_reference_is_refused(make_run: Any, batches: Any) -> None:
    plain, reward, dpo = make_run(), get_loss("reward_modeling"), get_loss("dpo")
    with pytest.raises(OperationError, match='head="reward"') as caught:
        train_on(plain.policy, batches.batch(reward), reward, reward.config(), plain.accumulator, budget=WHOLE)
    assert caught.value.code == training_pb2.ERROR_CODE_UNSUPPORTED
    with pytest.raises(OperationError) as caught:
        train_on(plain.policy, batches.batch(dpo), dpo, dpo.config(), plain.accumulator, budget=WHOLE)
    assert caught.value.field == "reference_model"
    with pytest.raises(OperationError, match="there is no score 'logits'"):
        scores_on(plain.policy, rows_of([3]), outputs=["logits"], budget=WHOLE)
