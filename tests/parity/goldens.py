"""Numbers of verl 0.9.1 and TRL 1.16, from their own functions: written to ``tests/losses/goldens.json`` by
``python -m parity.goldens`` (in ``tests/``, in the environment of ``make parity``), compared with it by
``test_goldens.py``, and by ``tests/losses/test_goldens.py`` with our losses, without either library.

A golden is a loss's name, its arguments, the batch's columns, the scores by name, and the library's loss.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.losses import logps, numbers, tokens
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.experimental.a2po.a2po_trainer import A2POTrainer
from trl.experimental.gold.gold_trainer import ULDLoss
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.experimental.sdft.sdft_trainer import SDFTTrainer
from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer
from trl.experimental.tpo.tpo_trainer import TPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

PATH = Path(__file__).parents[1] / "losses" / "goldens.json"
SIZES = (3, 2, 4)
VOCAB = 50
Golden = dict[str, Any]


def padded(rows: list[list[float]]) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def flat(values: Tensor, mask: Tensor) -> list[float]:
    found: list[float] = values[mask.bool()].tolist()
    return found


# ------------------------------------------------------------------ verl: groups


class Group:
    """Responses of three prompts; with ``holes``, tool results lie between the policy's tokens."""

    def __init__(self, rng: np.random.Generator, *, holes: bool = False) -> None:
        responses = [[tokens(rng, int(rng.integers(2, 9))) for _ in range(n)] for n in SIZES]
        masks = [[[1] * len(r) for r in group] for group in responses]
        if holes:
            masks = [[[1] + [int(rng.random() < 0.6) for _ in r[2:]] + [1] for r in group] for group in responses]
        self.columns: dict[str, Any] = {
            "prompt_ids": [[1], [2, 3], [4]],
            "response_ids": responses,
            "response_masks": masks,
            "rewards": numbers(rng, [[0] * n for n in SIZES]),
            "old_log_probs": logps(rng, responses, 0.4, -1.4),
            "sampler_log_probs": logps(rng, responses, 0.5, -1.4),
        }
        self.mask = padded([row for group in masks for row in group])
        self.old, self.sampler = (
            padded([row for group in self.columns[name] for row in group])
            for name in ("old_log_probs", "sampler_log_probs")
        )
        self.logprobs = torch.from_numpy(rng.normal(-1.4, 0.4, self.mask.shape))
        self.collision = torch.from_numpy(-rng.gamma(2.0, 0.5, self.mask.shape))
        self.index = np.repeat(np.arange(len(SIZES)), SIZES)
        last = self.mask.cumsum(1).argmax(1)
        rewards = torch.tensor([r for group in self.columns["rewards"] for r in group], dtype=torch.float64)
        self.rewards = torch.zeros_like(self.mask).scatter(1, last[:, None], rewards[:, None])

    def golden(self, loss: str, expected: Tensor, *fields: str, **kwargs: Any) -> Golden:
        always = ("prompt_ids", "response_ids", "response_masks", "rewards")
        scores = {"logprobs": self.logprobs, "entropy": torch.zeros_like(self.mask), "collision": self.collision}
        return {
            "loss": loss,
            "kwargs": kwargs,
            "columns": {name: self.columns[name] for name in (*always, *fields)},
            "scores": {name: flat(values, self.mask) for name, values in scores.items()},
            "expected": float(expected),
        }

    def policy_loss(self, advantages: Tensor, mode: str = "vanilla", mask: Tensor | None = None, **more: Any) -> Tensor:
        settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_c": 1e6}
        config = ActorConfig(**settings, **more.pop("config", {}))
        function = core_algos.get_policy_loss_fn(mode)
        used = self.mask if mask is None else mask
        found: Tensor = function(self.old, self.logprobs, advantages, used, "token-mean", config, **more)[0]
        return found

    def grpo(self) -> Tensor:
        found: Tensor = core_algos.compute_grpo_outcome_advantage(self.rewards, self.mask, self.index, epsilon=1e-4)[0]
        return found


def verl_baselines(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    estimators: dict[str, Callable[..., Any]] = {
        "optimal_token_baseline": core_algos.compute_optimal_token_baseline_advantage,
        "tir_optimal_token_baseline": core_algos.compute_multi_turn_optimal_token_baseline_advantage,
    }
    for name, estimate in estimators.items():
        for tail in (True, False):
            for weighted in (False, True):
                group = Group(rng, holes=name.startswith("tir"))
                weights = (group.old - group.sampler).exp().clamp(max=1.3) if weighted else None
                advantages, _ = estimate(
                    group.rewards,
                    group.mask,
                    group.index,
                    group.old,
                    group.collision.exp(),
                    rollout_is_weights=weights,
                    handle_zero_tail=tail,
                )
                more = {"rollout_is_weights": weights} if weighted else {}
                kwargs = {"sampler_correction": "token_truncate", "sampler_ratio_max": 1.3} if weighted else {}
                fields = ("old_log_probs", *(["sampler_log_probs"] if weighted else []))
                yield (
                    f"verl-{name}{'' if tail else '-tail'}{'-weighted' if weighted else ''}",
                    group.golden(name, group.policy_loss(advantages, **more), *fields, zero_tail=tail, **kwargs),
                )


def verl_corrections(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    group = Group(rng)
    for name, settings, kwargs in (
        ("", {"ppo_kl_coef": 0.1}, {"kl_cov_coef": 0.1}),
        ("-documented-default", {"ppo_kl_coef": None}, {}),
    ):
        config = {"policy_loss": PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.1, **settings)}
        loss = group.policy_loss(group.grpo(), "kl_cov", config=config)
        yield f"verl-kl_cov{name}", group.golden("kl_cov", loss, "old_log_probs", cov_share=0.1, **kwargs)
    both = ("old_log_probs", "sampler_log_probs")
    for level in ("token", "sequence"):
        for threshold, way in ((3.0, "truncate"), ("0.3_3.0", "mask")):
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
                group.old - group.sampler, group.mask, level, threshold, rollout_is_batch_normalize=True
            )
            loss = group.policy_loss(group.grpo(), rollout_is_weights=weights)
            low = {"sampler_ratio_min": 0.3} if way == "mask" else {}
            yield (
                f"verl-normalised-{level}-{way}",
                group.golden("grpo", loss, *both, reduction="token_mean", sampler_correction=f"{level}_{way}",
                             sampler_ratio_max=3.0, sampler_normalize=True, **low),
            )  # fmt: skip
    for option, threshold, bounds in (
        ("seq_mean_k1", "0.8_1.2", {"sampler_rejection_min": 0.8, "sampler_rejection_max": 1.2}),
        ("seq_mean_k3", "0.15", {"sampler_rejection_max": 0.15}),
    ):
        mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            group.old - group.sampler, group.mask, option, threshold
        )
        assert 0 < mask.sum() < group.mask.sum()
        loss = group.policy_loss(group.grpo(), mask=mask)
        yield (
            f"verl-{option}",
            group.golden("grpo", loss, *both, reduction="token_mean", sampler_rejection=option, **bounds),
        )
        yield f"verl-ppo-{option}", ppo_rejected(group, mask, option, bounds)


def ppo_rejected(group: Group, mask: Tensor, option: str, bounds: dict[str, float]) -> Golden:
    """Rows with their returns as advantages: verl whitens those that the mask leaves."""
    advantages, _ = core_algos.compute_gae_advantage_return(
        group.rewards, torch.zeros_like(group.rewards), mask, 0.9, 0.8
    )
    loss = group.policy_loss(advantages, mask=mask)
    whole = [[1, *r] for g in group.columns["response_ids"] for r in g]
    columns = {
        "input_ids": whole,
        "rewards": [r for g in group.columns["rewards"] for r in g],
        "values": [[0.0] * len(r) for r in whole],
        **{name: [[-1.0, *row] for g in group.columns[name] for row in g] for name in
           ("old_log_probs", "sampler_log_probs")},
    }  # fmt: skip
    scores = {"logprobs": group.logprobs, "entropy": torch.zeros_like(group.mask)}
    return {
        "loss": "enhanced_ppo",
        "kwargs": {"gamma": 0.9, "gae_lambda": 0.8, "value_loss_coef": 0.0, "sampler_rejection": option, **bounds},
        "columns": columns,
        "scores": {name: flat(values, group.mask) for name, values in scores.items()},
        "expected": float(loss),
    }


# ------------------------------------------------------------------ TRL: rows


class Rows:
    """Prompts of one token and responses, with logits of a student and a teacher at each response token."""

    def __init__(self, rng: np.random.Generator, rows: int = 4) -> None:
        self.responses = [tokens(rng, int(rng.integers(2, 8))) for _ in range(rows)]
        self.ids = pad_sequence([torch.tensor(r) for r in self.responses], batch_first=True)
        self.mask = padded([[1] * len(r) for r in self.responses])
        self.student, self.teacher = (torch.from_numpy(rng.normal(0, 1, (*self.ids.shape, VOCAB))) for _ in range(2))
        self.old_rows = logps(rng, self.responses, 0.4, -4.0)
        self.old = padded(self.old_rows)

    def at_tokens(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1).gather(-1, self.ids[..., None]).squeeze(-1)

    def columns(self) -> dict[str, Any]:
        return {
            "input_ids": [[1, *r] for r in self.responses],
            "old_log_probs": [[0.0, *row] for row in self.old_rows],
        }

    def golden(self, loss: str, expected: Tensor, columns: dict[str, Any], **kwargs: Any) -> Golden:
        mine, theirs = (flat(self.at_tokens(logits), self.mask) for logits in (self.student, self.teacher))
        return {
            "loss": loss,
            "kwargs": kwargs,
            "columns": columns,
            "scores": {"logprobs": mine, "ref_logprobs": theirs},
            "expected": float(expected),
        }


def trl_distillation(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    rows, metrics = Rows(rng), defaultdict(lambda: defaultdict(list))
    labels = torch.where(rows.mask.bool(), rows.ids, -100)
    fake = SimpleNamespace(
        temperature=1.0, iw_opd_epsilon=1e-8, iw_opd_gamma=0.5, model=SimpleNamespace(training=True), _metrics=metrics
    )
    teacher = torch.where(rows.mask.bool(), rows.at_tokens(rows.teacher), torch.nan)
    loss = IWOPDTrainer._compute_iw_opd_loss(fake, rows.student, rows.ids, labels, teacher, rows.old)
    yield "trl-iw_opd", rows.golden("iw_opd", loss, rows.columns(), reference_model="base")

    for trainer, name, weight in ((SDFTTrainer, "sdft", 1.0), (SDPOTrainer, "sdpo", 1.0), (SDPOTrainer, "sdpo", 0.4)):
        settings = SimpleNamespace(distillation_mode="sampled_token", distillation_alpha=1.0, distillation_is_clip=1.1)
        fake = SimpleNamespace(
            args=settings,
            model=SimpleNamespace(training=True),
            _metrics=metrics,
            accelerator=SimpleNamespace(gather=lambda value: value),
            _log_self_distillation_metric=lambda *a: None,
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.2,
            loss_type="grpo",
        )
        given = SimpleNamespace(
            loss_mask=rows.mask, student_logits=rows.student, teacher_logits=rows.teacher, completion_ids=rows.ids
        )
        advantages = numbers(rng, [0] * len(rows.responses))
        inputs = {
            "old_per_token_logps": rows.old,
            "completion_ids": rows.ids,
            "completion_mask": rows.mask,
            "advantages": torch.tensor(advantages, dtype=torch.float64),
        }
        loss = weight * trainer._compute_self_distillation_loss(fake, fake.model, inputs, given)
        columns, kwargs = rows.columns(), {"is_clip": 1.1, "reference_model": "base"}
        columns["teacher_input_ids"] = [[5, 6, *r] for r in rows.responses]
        columns["teacher_loss_mask"] = [[0, 0, *([1] * len(r))] for r in rows.responses]
        if weight < 1:
            loss = loss + (1 - weight) * trainer._compute_policy_loss(fake, inputs, rows.student)
            columns["advantages"], kwargs = advantages, kwargs | {"distillation_weight": weight}
        golden = rows.golden(name, loss, columns, **kwargs)
        mine, theirs = rows.at_tokens(rows.student), rows.at_tokens(rows.teacher)
        both = {"logprobs": (mine, torch.zeros_like(mine)), "ref_logprobs": (torch.zeros_like(mine), theirs)}
        golden["scores"] = {
            score: [x for i, r in enumerate(rows.responses) for side in sides for x in side[i, : len(r)].tolist()]
            for score, sides in both.items()
        }
        yield f"trl-{name}{'' if weight == 1 else '-mixed'}", golden


def trl_regression(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    rows = Rows(rng)
    rewards, values = ([float(x) for x in numbers(rng, [0] * len(rows.responses))] for _ in range(2))
    mine, theirs = ((rows.at_tokens(logits) * rows.mask).sum(1) for logits in (rows.student, rows.teacher))
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(beta2=0.05),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_sequence_logps=lambda *a: mine,
    )
    inputs = {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "v_star": torch.tensor(values, dtype=torch.float64),
    }
    loss = A2POTrainer.compute_loss(
        fake, None, inputs | {"ref_logps": theirs} | dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    )
    columns = {"input_ids": rows.columns()["input_ids"], "rewards": rewards, "optimal_values": values}
    yield "trl-a2po", rows.golden("a2po", loss, columns, beta2=0.05, reference_model="base")


def trl_tpo(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    rows = Rows(rng, 9)  # three chosen, three rejected, three gold
    gather = lambda value, **_: value  # noqa: E731
    for kind in ("sigmoid", "hinge", "ipo", "tpo-l"):
        fake = SimpleNamespace(
            model=SimpleNamespace(training=False),
            tpo_alpha=0.7,
            loss_type=kind,
            beta=0.3,
            label_smoothing=0.1,
            tpo_l_gamma=0.5,
            accelerator=SimpleNamespace(gather_for_metrics=gather, gather=gather),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
        )
        ones = torch.ones(9, 1, dtype=torch.long)
        ahead = torch.cat([rows.student, rows.student[:, :1]], dim=1)  # the last position predicts nothing
        inputs = {
            "input_ids": torch.cat([ones, rows.ids], 1),
            "attention_mask": torch.cat([ones, rows.mask.long()], 1),
            "completion_mask": torch.cat([0 * ones, rows.mask.long()], 1),
        }
        loss = TPOTrainer._compute_loss(fake, lambda logits=ahead, **_: SimpleNamespace(logits=logits), inputs, False)
        ids = rows.columns()["input_ids"]
        columns = {f"{side}_input_ids": ids[3 * i : 3 * i + 3] for i, side in enumerate(("chosen", "rejected", "gold"))}
        kwargs = {"loss_type": kind, "beta": 0.3, "label_smoothing": 0.1, "tpo_alpha": 0.7}
        golden = rows.golden("tpo", loss, columns, **kwargs)
        mine = rows.at_tokens(rows.student)
        order = [3 * side + row for row in range(3) for side in range(3)]
        golden["scores"] = {"logprobs": [x for i in order for x in mine[i, : len(rows.responses[i])].tolist()]}
        yield f"trl-tpo-{kind}", golden


def trl_gold(rng: np.random.Generator) -> Iterator[tuple[str, Golden]]:
    """Three texts in the tokens of two vocabularies, of 9 and 11 tokens, of which 5 are the same."""
    words = [["a", "b", "c", "d", "e", *(f"{side}{n}" for n in range(n))] for side, n in (("s", 4), ("t", 6))]
    tokenizers = [SimpleNamespace(get_vocab=lambda own=own: {w: i for i, w in enumerate(own)}) for own in words]
    ends = [[sorted({*rng.integers(1, length, length // 3).tolist(), length}) for _ in words] for length in (9, 6, 12)]
    ids, labels, offsets, logits, answers = [], [], [], [], []
    for side, own in enumerate(words):
        rows = [[1, *rng.integers(0, len(own), len(text[side])).tolist()] for text in ends]
        ids.append(pad_sequence([torch.tensor(row) for row in rows], batch_first=True))
        labels.append(pad_sequence([torch.tensor([-100, *row[1:]]) for row in rows], True, -100))
        spans = [torch.tensor([[0, 0], *zip([0, *text[side]], text[side], strict=False)]) for text in ends]
        offsets.append(pad_sequence(spans, batch_first=True))
        logits.append(torch.from_numpy(rng.normal(0, 1, (*ids[side].shape, len(own)))))
        answers.append(rows)
    mine, theirs = (each.log_softmax(-1) for each in logits)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("piece_ends", "student_token_ids", "teacher_log_probs", "own")
    }
    token_scores, candidate_scores = [], []
    for row, (student, teacher) in enumerate(ends):
        at, before = {end: place for place, end in enumerate(teacher)}, 0.0
        columns["piece_ends"].append([int(end in at) for end in student])
        of_teacher, start = [], 0
        for end in student:
            place = at.get(end, 0)
            before = (
                sum(float(theirs[row, t, answers[1][row][t + 1]]) for t in range(start, place)) if end in at else 0.0
            )
            start = place + 1 if end in at else start
            of_teacher.append((theirs[row, place] + before).tolist())
        columns["teacher_log_probs"].append(of_teacher)
        columns["student_token_ids"].append([[*range(9), 0, 0] for _ in student])
        columns["own"].append([[0] * 5 + [1] * 4 + [0, 0] for _ in student])
        for place in range(len(student)):
            token_scores.append(float(mine[row, place, answers[0][row][place + 1]]))
            candidate_scores.append([*mine[row, place].tolist(), 0.0, 0.0])
    for hybrid, beta, weights in ((False, 0.5, (None, None)), (True, 0.3, (0.7, 0.4)), (True, 1.0, (None, None))):
        settings = SimpleNamespace(
            uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=1.0,
            uld_teacher_temperature=1.0, uld_skip_student_eos=False, uld_skip_teacher_eos=False,
            use_extended_uld=True, uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=hybrid, beta=beta,
            uld_hybrid_matched_weight=weights[0], uld_hybrid_unmatched_weight=weights[1],
        )  # fmt: skip
        loss = ULDLoss(settings, *tokenizers)(*logits, *labels, *ids, *offsets)
        shared = [[[int(hybrid)] * 5 + [0] * 6 for _ in student] for student, _ in ends]
        own = columns["own"] if hybrid else [[[1] * 9 + [0, 0] for _ in student] for student, _ in ends]
        kwargs = {"beta": beta, "shared_weight": weights[0] or 5 / 11, "own_weight": weights[1] or 6 / 11}
        yield (
            f"trl-gold-{f'hybrid-{beta:g}' if hybrid else 'sorted'}",
            {
                "loss": "gold",
                "kwargs": kwargs if hybrid else {},
                "columns": {"input_ids": answers[0], **columns, "shared": shared, "own": own},
                "scores": {"logprobs": token_scores, "candidate_logprobs": candidate_scores},
                "expected": float(loss),
            },
        )


def goldens() -> dict[str, Golden]:
    """Every golden by name, computed by the libraries."""
    found: dict[str, Golden] = {}
    for family in (verl_baselines, verl_corrections, trl_distillation, trl_regression, trl_tpo, trl_gold):
        found |= dict(family(np.random.default_rng(7)))
    return found


if __name__ == "__main__":
    PATH.write_text(json.dumps(goldens(), indent=None, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{PATH}\n")
