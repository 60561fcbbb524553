"""What a policy loss promises besides its formula: which gradient it gives, which tokens count, what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.registry import all_losses, get_loss
from support.losses import VOCAB, Case, Drawn, read
from support.policy_batches import RL, case, predictions, samples, trajectories, unrewarded_samples


def gradient(drawn: Drawn, name: str = "logprobs") -> torch.Tensor:
    drawn.output().loss().backward()
    found = drawn.scores[name].grad
    assert found is not None
    return found


def test_cispo_gives_every_token_its_weighted_gradient(rng: np.random.Generator) -> None:
    drawn = case("cispo", lambda r: predictions(r, *RL), None, clip_high_threshold=1.2).draw(rng)
    ratio = (drawn.scores["logprobs"].detach() - drawn.batch["logprobs"]).exp()
    torch.testing.assert_close(gradient(drawn), -ratio.clamp(0, 1.2) * drawn.batch["advantages"])


def test_cispo_over_groups_gives_every_token_its_weighted_gradient(rng: np.random.Generator) -> None:
    drawn = case("group_cispo", lambda r: samples(r, "old_log_probs", "advantages"), None, ratio_max=1.2).draw(rng)
    ratio = (drawn.scores["logprobs"].detach() - drawn.batch["old_log_probs"]).exp()
    expected = -ratio.clamp(0, 1.2) * drawn.batch.per_token("advantages") / drawn.batch.num_scored
    torch.testing.assert_close(gradient(drawn), expected)


def test_gspo_gives_tokens_their_own_gradient_times_the_row_ratio(rng: np.random.Generator) -> None:
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    drawn = case("gspo", lambda r: predictions(r, *RL), None, **wide).draw(rng)
    difference = drawn.scores["logprobs"].detach() - drawn.batch["logprobs"]
    ratio = torch.cat([row.mean().exp().expand(len(row)) for row in difference.split(drawn.batch.row_lengths.tolist())])
    torch.testing.assert_close(gradient(drawn), -ratio * drawn.batch["advantages"])


def test_gspo_token_with_one_advantage_a_response_has_gspos_gradient(rng: np.random.Generator) -> None:
    """As the paper says of equation (13): with a response's advantage on every token the two are the same."""
    columns = samples(rng, "old_log_probs")
    seed = int(rng.integers(1 << 31))
    both = []
    for name in ("group_gspo", "gspo_token"):
        drawn = case(name, lambda _: columns, None, clip_epsilon=0.9, clip_epsilon_high=50).draw(
            np.random.default_rng(seed)
        )
        both.append(gradient(drawn))
    torch.testing.assert_close(*both)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(rng: np.random.Generator) -> None:
    from gradwire_losses.kl import kl_estimate

    logprobs = torch.from_numpy(rng.normal(-1, 0.5, 9)).requires_grad_()
    ref = torch.from_numpy(rng.normal(-1, 0.5, 9))
    for plus, value in (("k3+", "k3"), ("k1+", "k1")):
        estimate = kl_estimate(logprobs, ref, plus)  # type: ignore[arg-type]
        torch.testing.assert_close(estimate, kl_estimate(logprobs, ref, value))  # type: ignore[arg-type]
        [found] = torch.autograd.grad(estimate.sum(), logprobs)
        torch.testing.assert_close(found, (logprobs - ref).detach())


def test_an_entry_of_targets_is_about_what_follows_its_token(rng: np.random.Generator) -> None:
    batch = read("ppo", {"input_ids": [[5, 6, 7], [8]], "target_tokens": [[6, 7, 9], [3]], "mask": [[0, 1, 1], [1]],
                         "logprobs": [[9.0, -1.0, -2.0], [-3.0]], "advantages": [[9.0, 1.0, 2.0], [3.0]]})  # fmt: skip
    assert batch.read_positions.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [7, 9, 3]
    assert batch["logprobs"].tolist() == [-1.0, -2.0, -3.0]
    part = batch.select(torch.tensor([1, 0]))
    assert part.targets.tolist() == [3, 7, 9]
    assert part.read_positions.tolist() == [0, 2, 3]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_prompts_placeholders_are_as_good_as_a_mask(loss: str, rng: np.random.Generator) -> None:
    """Tinker's batches have 0 for the log-probabilities and advantages of a prompt, and no mask."""
    columns = {
        "input_ids": [[5, 6, 7, 8]],
        "target_tokens": [[6, 7, 8, 9]],
        "logprobs": [[0.0, 0.0, -1.0, -2.0]],
        "advantages": [[0.0, 0.0, 1.0, 2.0]],
    }
    if loss == "importance_sampling":
        columns["ref_log_probs"] = [[-9.0, -9.0, -1.0, -1.5]]
    drawn = case(loss, lambda _: columns, None).draw(rng)
    placeholders, found = drawn.output(), gradient(drawn)
    masked = drawn.output(
        batch=read(loss, columns | {"mask": [[0, 0, 1, 1]]}), scores={"logprobs": drawn.scores["logprobs"][2:]}
    )
    assert placeholders.loss().item() == pytest.approx(masked.loss().item())
    mine, other = ({name: metric.value() for name, metric in o.metrics.items()} for o in (placeholders, masked))
    assert mine == pytest.approx(other, nan_ok=True)
    assert found[:2].tolist() == [0.0, 0.0]


def test_token_aligned_rows_are_read_one_token_before(rng: np.random.Generator) -> None:
    batch = read("causal_lm", {"input_ids": [[5, 6, 7], [8], [1, 2]], "loss_mask": [[1, 0, 1], [1], [1, 1]]})
    assert batch.own_positions.tolist() == [2, 5]
    assert batch.read_positions.tolist() == [1, 4]
    assert batch.targets.tolist() == [7, 2]


@pytest.mark.parametrize(
    "loss,changes,field",
    [
        ("ppo", {"target_tokens": [[1], [2]]}, "target_tokens"),
        ("ppo", {"target_tokens": [[1, VOCAB], [2]]}, "target_tokens"),
        ("ppo", {"logprobs": [[math.nan, -1.0], [-1.0]]}, "logprobs"),
        ("cross_entropy", {"weights": [[[1.0], [1.0]], [[1.0]]]}, "weights"),
        ("importance_sampling", {"loss_mask": [[1, 1], [1]]}, "loss_mask"),
        ("importance_sampling", {"behavior_log_probs": [[-1.0, -1.0], [-1.0]]}, "behavior_log_probs"),
        ("importance_sampling", {"logprobs": None}, "logprobs"),
        ("importance_sampling", {"target_tokens": None, "mask": [[1, 1], [1]]}, "mask"),
        ("importance_sampling", {"target_tokens": None}, "behavior_log_probs"),
    ],
)
def test_a_batch_of_targets_that_breaks_a_rule_is_named(
    rng: np.random.Generator, loss: str, changes: dict[str, Any], field: str
) -> None:
    columns = {"input_ids": [[1, 2], [3]], "target_tokens": [[2, 4], [5]]}
    columns |= (
        {"weights": [[1.0, 1.0], [1.0]]}
        if loss == "cross_entropy"
        else {
            "logprobs": [[-1.0, -1.0], [-1.0]],
            "advantages": [[1.0, 1.0], [1.0]],
        }
    )
    columns = {name: rows for name, rows in (columns | changes).items() if rows is not None}
    with pytest.raises(BatchError) as caught:
        Case(loss, lambda _: columns, {}, None).draw(rng).output()  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_target_of_no_weight_may_be_impossible(rng: np.random.Generator) -> None:
    columns = {"input_ids": [[1, 2]], "target_tokens": [[2, 3]], "weights": [[0.0, 2.0]]}
    drawn = Case("cross_entropy", lambda _: columns, {}, None).draw(rng)  # type: ignore[arg-type]
    with torch.no_grad():
        drawn.scores["logprobs"].copy_(torch.tensor([-math.inf, -1.5]))
    assert drawn.output().loss().item() == 3.0
    assert gradient(drawn).tolist() == [0.0, -2.0]


def test_planning_tokens_gain_more_from_success_and_lose_less_by_failure(rng: np.random.Generator) -> None:
    columns = {
        "prompt_ids": [[1]],
        "response_ids": [[[2, 3], [4, 5]]],
        "rewards": [[1.0, 0.0]],
        "planning_mask": [[[1, 0], [1, 0]]],
    }
    drawn = case("grpo", lambda _: columns, None, scale_rewards=False, reduction="sum").draw(rng)
    torch.testing.assert_close(gradient(drawn), torch.tensor([-0.6, -0.5, 0.4, 0.5], dtype=torch.float64))
    assert drawn.output().metrics["planning_fraction"].value() == 0.5


def test_every_group_loss_of_a_policy_takes_a_planning_mask() -> None:
    takers = {spec.name for spec in all_losses() if any(f.name == "planning_mask" for f in spec.fields)}
    policies = {spec.name for spec in all_losses() if spec.layout == "groups" and not spec.head}
    assert takers == policies and {"grpo", "dapo", "gigpo", "gmpo", "rloo"} <= takers


def test_an_amplification_that_is_asked_for_needs_its_mask(rng: np.random.Generator) -> None:
    with pytest.raises(BatchError, match="planning_alpha needs planning_mask"):
        case("dapo", lambda r: samples(r), None, planning_alpha=0.2).draw(rng).output()
    case("dapo", lambda r: samples(r), None, planning_alpha=0.0).draw(rng).output()


def test_truncated_responses_and_level_groups_count_nowhere_in_dapo(rng: np.random.Generator) -> None:
    """Taking them out of the batch gives the same loss, as long as baselines stay."""
    columns = samples(rng, "old_log_probs", "truncated")
    drawn = case("dapo", lambda _: columns, None).draw(rng)
    kept = drawn.output()
    masked = columns | {
        "response_masks": [
            [[0] * len(m) if cut or len(set(rewards)) < 2 else m for m, cut in zip(group, cuts, strict=True)]
            for group, cuts, rewards in zip(
                columns["response_masks"], columns["truncated"], columns["rewards"], strict=True
            )
        ],
        "truncated": [[0] * len(group) for group in columns["truncated"]],
    }
    batch = read(drawn.spec, masked)
    index = torch.tensor(
        [
            bool(on)
            for before, after in zip(columns["response_masks"], masked["response_masks"], strict=True)
            for old, new in zip(before, after, strict=True)
            for was, on in zip(old, new, strict=True)
            if was
        ]
    )
    scores = {name: values[index] for name, values in drawn.scores.items()}
    other = drawn.output(batch=batch, scores=scores)
    assert other.loss().item() == pytest.approx(kept.loss().item(), rel=1e-9)
    assert other.terms["policy"].count == kept.terms["policy"].count


def test_a_group_of_one_response_has_no_advantage(rng: np.random.Generator) -> None:
    for name in ("grpo", "rloo", "opo", "dr_grpo", "group_gspo"):
        more = {"reduction_divisor": 4.0} if name == "dr_grpo" else {}
        columns = {"prompt_ids": [[1]], "response_ids": [[[2, 3]]], "response_masks": [[[1, 1]]], "rewards": [[5.0]]}
        drawn = case(name, lambda _, c=columns: c, None, **more).draw(rng)
        assert gradient(drawn).abs().max() == 0, name


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [({"mask_truncated": True}, "truncated"), ({"sampler_correction": "token_mask"}, "sampler_log_probs")],
)
def test_an_option_that_lacks_its_field_says_which(
    kwargs: dict[str, Any], field: str, rng: np.random.Generator
) -> None:
    with pytest.raises(BatchError, match=f"needs {field}") as caught:
        case("grpo", lambda r: samples(r), None, **kwargs).draw(rng).output()
    assert caught.value.field == field
    case("dapo", lambda r: samples(r), None).draw(rng).output()  # there it is a default: nothing was cut off


def test_dr_grpo_asks_for_its_divisor() -> None:
    described = get_loss("dr_grpo").config.model_json_schema()["properties"]
    assert described["reduction"]["default"] == "fixed" and "paper" not in described["reduction"]["description"]
    assert described["reduction_divisor"]["description"].startswith("required")
    with pytest.raises(ValueError, match="reduction_divisor"):
        get_loss("dr_grpo").config()


def test_dapo_with_advantages_of_its_own_counts_groups_of_equal_rewards(rng: np.random.Generator) -> None:
    columns = samples(rng, "old_log_probs", "advantages")
    columns["rewards"] = [[1.0] * len(group) for group in columns["rewards"]]
    output = case("dapo", lambda _: columns, None).draw(rng).output()
    assert math.isfinite(output.metrics["policy_loss"].value())
    assert output.metrics["kept_fraction"].value() == 1.0


def test_groups_need_rewards_or_advantages(rng: np.random.Generator) -> None:
    with pytest.raises(BatchError, match="neither rewards nor advantages") as caught:
        case("grpo", lambda r: unrewarded_samples(r), None).draw(rng).output()
    assert caught.value.field == "rewards"


def test_the_next_beta_follows_the_kl(rng: np.random.Generator) -> None:
    """Above the target it grows by at most a fifth over the horizon, below it falls, without a target it stays."""
    for target, change in ((1e-6, 0.2), (1e6, -0.2), (None, 0.0)):
        drawn = case(
            "enhanced_ppo",
            lambda r: trajectories(r, "old_log_probs", "ref_log_probs"),
            None,
            kl_target=target,
            kl_horizon=60.0,
        ).draw(rng)
        rows = int((drawn.batch.row_lengths > 0).sum())
        assert drawn.output().metrics["next_beta"].value() == pytest.approx(0.01 * (1 + change * rows / 60))


def test_a_teacher_whose_tokens_add_up_to_more_than_one_is_refused(rng: np.random.Generator) -> None:
    columns = {"input_ids": [[1, 2]], "teacher_token_ids": [[[1, 2], [3, 4]]], "teacher_log_probs": [[[0.0, 0.0]] * 2]}
    with pytest.raises(BatchError, match="renormalise"):
        case("top_k_distillation", lambda _: columns, None).draw(rng).output()
    assert math.isfinite(
        case("top_k_distillation", lambda _: columns, None, tail="renormalise").draw(rng).output().loss().item()
    )


def test_distilling_a_teacher_with_nothing_left_over_is_finite(rng: np.random.Generator) -> None:
    half = math.log(0.5)
    columns = {
        "input_ids": [[1, 2]],
        "teacher_token_ids": [[[1, 2], [3, 4]]],
        "teacher_log_probs": [[[half, half]] * 2],
    }
    drawn = case("top_k_distillation", lambda _: columns, None).draw(rng)
    with torch.no_grad():
        drawn.scores["candidate_logprobs"].fill_(half)
    found = gradient(drawn, "candidate_logprobs")
    assert drawn.output().loss().item() == pytest.approx(0.0, abs=1e-6)
    assert found.isfinite().all()
