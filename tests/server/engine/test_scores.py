"""Scores that need more than the policy's own logits: a teacher, classes, candidates that a batch names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss
from gradwire_proto.v1 import training_pb2
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.scores import keep_scores
from gradwire_server.engine.scoring.forward import Scoring, score_batch
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.scoring.score_types import Teacher
from support.training import scores_on, train_on

WHOLE = Budget(microbatch_tokens=10**6, activation_bytes=1 << 40)
SMALL = Budget(microbatch_tokens=9, activation_bytes=0, logits_elements=3 * 64)


def two_rows() -> Batch:
    """Rows of 4 and 3 tokens; all but the first of each are scored."""
    return Batch(
        input_ids=torch.tensor([5, 9, 3, 7, 1, 2, 8]),
        lengths=torch.tensor([4, 3]),
        scored=torch.tensor([False, True, True, True, False, True, True]),
        group_sizes=torch.ones(2, dtype=torch.int64),
    )


def moved(run: Any) -> Any:
    with run.rng(), torch.no_grad():
        for master in run.policy.masters().values():
            master.add_(torch.randn_like(master), alpha=0.05)
    run.policy.sync()
    return run


def hidden_at(policy: Policy, batch: Batch, positions: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy.hidden(batch.input_ids, batch.lengths, torch.tensor(positions))


@pytest.mark.parametrize("budget", [WHOLE, SMALL])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_is_that_of_the_distributions_before_each_token(make_run: Any, beta: float, budget: Budget) -> None:
    run, batch = moved(make_run(lora=4)), two_rows()
    teacher = Policy(run.policy.split_model)
    found = score_batch(Scoring(run.policy, batch, ["divergence"], 0.8, Teacher(teacher, beta), budget))["divergence"]
    before = [0, 1, 2, 4, 5]
    logs = [
        torch.log_softmax(hidden_at(policy, batch, before) @ policy.compute(policy.output_head).weight.T / 0.8, -1)
        for policy in (run.policy, teacher)
    ]
    s, t = (log.exp() for log in logs)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(-1)

    m = beta * t + (1 - beta) * s
    expected = {0.0: kl(t, s), 1.0: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)
    assert found.min() > 0


def test_a_student_that_learns_by_gkd_comes_closer_to_its_teacher(make_run: Any) -> None:
    run, batch, loss = moved(make_run(lora=4)), two_rows(), get_loss("gkd")
    teacher, losses = Policy(run.policy.split_model), []
    for _ in range(8):
        config = loss.config(reference_model="base", beta=0.5)
        found = train_on(run.policy, batch, loss, config, run.accumulator, teacher=teacher, budget=SMALL)
        losses.append(found.metrics["divergence"])
        gradients, factor = run.accumulator.normalised()
        with torch.no_grad():
            for name, master in run.policy.masters().items():
                master.sub_(gradients[name] * factor, alpha=0.1)
        run.policy.sync()
        run.accumulator.clear()
    assert losses[-1] < 0.7 * losses[0]


def test_a_teacher_of_another_vocabulary_is_refused(make_run: Any) -> None:
    run, loss = make_run(lora=4), get_loss("gkd")

    class Other:
        facts = type("Facts", (), {"vocab_size": 99, "name": "other"})

    with pytest.raises(OperationError, match="99") as caught:
        scores_on(run.policy, two_rows(), loss, loss.config(reference_model="other"), teacher=Other(), budget=WHOLE)
    assert (caught.value.code, caught.value.field) == (training_pb2.ERROR_CODE_INVALID_ARGUMENT, "reference_model")


@pytest.mark.parametrize("budget", [WHOLE, SMALL])
def test_classes_are_read_at_the_last_token_and_at_each(make_run: Any, budget: Budget) -> None:
    run, batch = moved(make_run(lora=4, head="classification")), two_rows()
    scores = score_batch(Scoring(run.policy, batch, ["class_logits", "token_class_logits"], 1.0, None, budget))
    head = run.policy.head
    assert head is not None
    torch.testing.assert_close(scores["class_logits"], head(hidden_at(run.policy, batch, [3, 6])).detach())
    own = head(hidden_at(run.policy, batch, [1, 2, 3, 5, 6])).detach()
    torch.testing.assert_close(scores["token_class_logits"], own)


def test_a_classification_head_needs_its_number_of_labels(pool: Any) -> None:
    from gradwire_server.engine.model.policy_from_config import make_policy

    config = training_pb2.RunConfig(base_model="tiny", head="classification", num_labels=1)
    with pytest.raises(OperationError) as caught:
        make_policy(pool, config, "run")
    assert caught.value.field == "num_labels"


def test_a_custom_loss_gets_the_candidates_of_its_batch(make_run: Any) -> None:
    run, batch = make_run(lora=4), two_rows()
    with pytest.raises(OperationError) as caught:
        keep_scores(run.policy, batch, ["candidate_logprobs"], budget=WHOLE)
    assert caught.value.field == "candidates"
    ids = torch.tensor([[1, 2], [3, 3], [4, 5], [6, 7], [8, 9]])
    named = Batch(
        batch.input_ids,
        batch.lengths,
        batch.scored,
        batch.group_sizes,
        fields={"candidates": ids},
        levels={"candidates": "token"},
    )
    kept, _ = keep_scores(run.policy, named, ["candidate_logprobs"], budget=SMALL)
    hidden = hidden_at(run.policy, batch, [0, 1, 2, 4, 5])
    expected = torch.log_softmax(hidden @ run.policy.compute(run.policy.output_head).weight.T, -1).gather(1, ids)
    torch.testing.assert_close(kept.by_name[0]["candidate_logprobs"], expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [WHOLE, SMALL])
def test_activating_the_teacher_between_forward_and_backward_changes_no_gradient(make_run: Any, budget: Budget) -> None:
    """Teacher and student share one copy of the model; with checkpointing the student runs again in the backward."""
    loss, gradients = get_loss("gkd"), []
    for checkpointing in (False, True):
        run = moved(make_run(lora=4, run_id=f"run-{checkpointing}", gradient_checkpointing=checkpointing))
        train_on(
            run.policy,
            two_rows(),
            loss,
            loss.config(reference_model="base"),
            run.accumulator,
            teacher=Policy(run.policy.split_model),
            budget=budget,
        )
        found, factor = run.accumulator.normalised()
        gradients.append({name: value * factor for name, value in found.items()})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and any(value.any() for value in plain.values())
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, atol=1e-6, rtol=1e-4)
