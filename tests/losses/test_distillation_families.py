"""Self-distillation, IW-OPD, A*-PO, TPO, optimal token baselines and PPO's rejection, as every loss is tested."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError, Scores
from gradwire_losses.registry import get_loss
from support import distillation_references as plain
from support import loss_references as seven
from support.distillation_references import squares, taught_rows, triples, two_tokenizers, valued_rows
from support.loss_properties import PROPERTIES
from support.losses import Case, logps, read
from support.policy_batches import BASE, case, samples, trajectories, unrewarded

SAMPLED = ("old_log_probs", "sampler_log_probs")


def sampled_trajectories(rng: np.random.Generator) -> Any:
    columns = trajectories(rng, "old_log_probs", "old_values")
    return columns | {"sampler_log_probs": logps(rng, columns["input_ids"], 0.7, -1.4)}


def baseline_cases(loss: str, by_rank: bool) -> list[Case]:
    reference = partial(plain.token_baseline, by_rank=by_rank)
    return [
        case(loss, lambda r: samples(r, "old_log_probs"), reference),
        case(loss, lambda r: samples(r), reference, "current", zero_tail=False),
        case(loss, lambda r: squares(samples(r, *SAMPLED)), reference, "weighted",
             sampler_correction="token_truncate", sampler_ratio_max=1.5),
        case(loss, lambda r: samples(r, "old_log_probs", "token_advantages"), reference, "given"),
    ]  # fmt: skip


CASES = [
    *baseline_cases("optimal_token_baseline", False),
    *baseline_cases("tir_optimal_token_baseline", True),
    case("a2po", valued_rows, plain.a2po, **BASE),
    case("a2po", lambda r: valued_rows(r, "tokens"), plain.a2po, "tokens", beta2=0.3),
    case("a2po", lambda r: valued_rows(r, "rows"), plain.a2po, "rows", beta2=0.3),
    case("sdft", lambda r: taught_rows(r, "old_log_probs"), plain.self_distillation, gradcheck=False, **BASE),
    case("sdft", taught_rows, plain.self_distillation, "live", gradcheck=False, reduction="token_mean"),
    case("sdpo", lambda r: taught_rows(r, "old_log_probs"), plain.self_distillation, gradcheck=False, **BASE),
    case("sdpo", lambda r: taught_rows(r, "old_log_probs", "advantages"), plain.self_distillation, "mixed",
         gradcheck=False, distillation_weight=0.3, is_clip=1.2, **BASE),
    case("sdpo", lambda r: taught_rows(r, "advantages", by_row=True), plain.self_distillation, "surrogate",
         gradcheck=False, distillation_weight=0.0, is_clip=None, clip_epsilon_high=0.4),
    case("iw_opd", lambda r: unrewarded(r, "old_log_probs"), plain.iw_opd, **BASE),
    case("iw_opd", lambda r: unrewarded(r, "ref_log_probs"), plain.iw_opd, "fresh", gradcheck=False, gamma=2.0),
    *(case("gold", two_tokenizers, plain.gold, f"beta {beta:g}", beta=beta, shared_weight=0.7, own_weight=0.4)
      for beta in (0.0, 0.3, 1.0)),
    case("gold", lambda r: two_tokenizers(r, ends=False), plain.gold, "sorted", reduction="token_mean"),
    *(case("tpo", triples, plain.tpo, kind, loss_type=kind, beta=0.3, tpo_alpha=0.7, label_smoothing=0.1)
      for kind in ("sigmoid", "hinge", "ipo", "tpo-l")),
    *(case("enhanced_ppo", sampled_trajectories, seven.ppo, mode, sampler_rejection=mode, sampler_rejection_max=bound)
      for mode, bound in (("seq_mean_k1", 1.3), ("seq_mean_k3", 0.15))),
    case("conservative_ppo", sampled_trajectories, seven.conservative_ppo, "rejection",
         sampler_rejection="seq_mean_k3", sampler_rejection_max=0.15),
]  # fmt: skip


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    check(case, rng)


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_the_gradient_is_that_of_the_reverse_kl_at_the_sampled_tokens(name: str, rng: np.random.Generator) -> None:
    """d loss / d log p = (log p - log teacher) / (tokens of the row) / rows, from the student's tokens alone."""
    spec = get_loss(name)
    batch = read(spec, taught_rows(rng))
    logprobs = torch.from_numpy(rng.normal(-2, 0.5, batch.num_scored)).requires_grad_()
    teacher = torch.from_numpy(rng.normal(-2, 0.5, batch.num_scored))
    scores = Scores({"logprobs": logprobs, "ref_logprobs": teacher})
    loss = spec.function(batch, scores, spec.config(reference_model="ema")).loss()
    [gradient] = torch.autograd.grad(loss, logprobs)
    lengths = batch.row_lengths.view(-1, 2)[:, 0]
    rows, at = int((lengths > 0).sum()), 0
    for length in lengths.tolist():
        student, taught = slice(at, at + length), slice(at + length, at + 2 * length)
        expected = (logprobs[student] - teacher[taught]).detach() / max(1, length) / rows
        torch.testing.assert_close(gradient[student], expected)
        assert not gradient[taught].any()
        at += 2 * length


def test_another_response_after_the_teachers_prompt_is_refused(rng: np.random.Generator) -> None:
    spec, columns = get_loss("sdft"), taught_rows(rng)
    columns["teacher_input_ids"][3][-1] = (columns["teacher_input_ids"][3][-1] + 1) % 50
    batch = read(spec, columns)
    zeros = torch.zeros(batch.num_scored)
    with pytest.raises(BatchError, match="row 3: the tokens that teacher_loss_mask scores"):
        spec.function(batch, Scores({"logprobs": zeros}), spec.config())
    columns["teacher_loss_mask"][3][-1] = 0
    batch = read(spec, columns)
    with pytest.raises(BatchError, match="row 3"):
        spec.function(batch, Scores({"logprobs": torch.zeros(batch.num_scored)}), spec.config())


def test_a_mixture_without_advantages_is_refused(rng: np.random.Generator) -> None:
    spec = get_loss("sdpo")
    batch = read(spec, taught_rows(rng))
    with pytest.raises(BatchError, match="needs advantages"):
        spec.function(batch, Scores({"logprobs": torch.zeros(batch.num_scored)}), spec.config(distillation_weight=0.5))


@pytest.mark.parametrize("kwargs", [{"baseline": "leave_one_out"}, {"scale_rewards": True}, {"kl_in_reward": True}])
def test_another_advantage_is_refused_beside_the_token_baseline(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its own advantages"):
        get_loss("optimal_token_baseline").config(**kwargs)


def test_a_rejected_row_is_as_if_it_were_not_there(rng: np.random.Generator) -> None:
    columns = sampled_trajectories(rng)
    columns["sampler_log_probs"] = [list(row) for row in columns["old_log_probs"]]
    columns["sampler_log_probs"][3] = [x - 1 for x in columns["old_log_probs"][3]]
    spec = get_loss("enhanced_ppo")
    rejecting = spec.config(sampler_rejection="seq_mean_k1", sampler_rejection_max=1.001)
    drawn = Case("enhanced_ppo", lambda _: columns, {}, seven.ppo).draw(rng)
    output = spec.function(drawn.batch, Scores(drawn.scores), rejecting)
    without = drawn.part([0, 1, 2, 4, 5])
    assert output.loss().item() == pytest.approx(without.loss().item(), rel=1e-12)
    assert 0 < output.metrics["kept_fraction"].value() < 1
    assert math.isclose(output.metrics["approx_kl"].value(), without.metrics["approx_kl"].value())
