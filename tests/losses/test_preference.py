"""Preference losses over pairs and over single responses, against plain references and on their own pitfalls."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.dpo import LOSS_TYPES
from gradwire_losses.preference import log1mexp
from gradwire_losses.registry import get_loss
from support.loss_properties import PROPERTIES
from support.loss_references import Examples, Result, log_ratios, log_sigmoid, mean
from support.losses import Case, Columns, bits, logps, pair_columns, per_row, read, row_columns, tokens


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def score(ratio: float, config: Any) -> float:
    """f'(u) at u = e^ratio, from the divergences' definitions."""
    u, alpha = math.exp(ratio), config.f_alpha_divergence_coef
    if config.f_divergence_type == "forward_kl":
        return 1 - 1 / u
    if config.f_divergence_type == "js_divergence":
        return math.log(2 * u / (1 + u))
    if config.f_divergence_type == "alpha_divergence":
        return (u ** (alpha - 1) - 1) / (alpha - 1)
    return ratio


def dpo_type(kind: str, p: SimpleNamespace, b: float, e: float, tau: float) -> float:
    c, w, delta = p.c, p.w, p.score_c - p.score_w
    z = b * delta
    if kind == "sigmoid":
        return -(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z)
    if kind == "robust":
        return (-(1 - e) * log_sigmoid(z) + e * log_sigmoid(-z)) / (1 - 2 * e)
    if kind == "hinge":
        return max(0.0, 1 - z)
    if kind == "ipo":
        return (p.score_c / p.n_c - p.score_w / p.n_w - 1 / (2 * b)) ** 2
    if kind == "exo_pair":
        return sum(q * math.log(q / t) for q, t in ((sigmoid(z), 1 - e), (sigmoid(-z), e)))
    if kind == "nca_pair":
        return -log_sigmoid(b * c) - 0.5 * log_sigmoid(-b * c) - 0.5 * log_sigmoid(-b * w)
    if kind == "bco_pair":
        return -log_sigmoid(b * c) - log_sigmoid(-b * w)
    if kind == "sppo_hard":
        return (c - 0.5 / b) ** 2 + (w + 0.5 / b) ** 2
    if kind == "apo_zero":
        return 1 - sigmoid(b * c) + sigmoid(b * w)
    if kind == "apo_down":
        return sigmoid(b * c) + 1 - sigmoid(b * (c - w))
    if kind == "discopop":
        m = sigmoid(z / tau)
        return -log_sigmoid(z) * (1 - m) + math.exp(-z) * m
    if kind == "sigmoid_norm":
        return -log_sigmoid(b * (p.score_c / p.n_c - p.score_w / p.n_w))
    raise AssertionError(kind)


def weighted_sums(own: SimpleNamespace, other: SimpleNamespace, alpha: float | None) -> tuple[float, float]:
    """Log-probabilities of a response under policy and reference; a token beyond the other's length weighs alpha."""
    ref = getattr(own, "ref_log_probs", getattr(own, "score_ref_logprobs", None))
    if alpha is None:
        logprob, ratio = log_ratios(own)
        return logprob, logprob - ratio
    weights = [1.0 if t < other.n else alpha for t in range(own.n)]
    return (
        math.fsum(x * y for x, y in zip(weights, own.score_logprobs, strict=True)),
        math.fsum(x * y for x, y in zip(weights, ref, strict=True)),
    )


def dpo(examples: Examples, config: Any) -> Result:
    pairs = []
    for c, w in examples:
        if not (c.n and w.n):
            continue
        (lp_c, ref_c), (lp_w, ref_w) = weighted_sums(c, w, config.ld_alpha), weighted_sums(w, c, config.ld_alpha)
        pair = SimpleNamespace(c=lp_c - ref_c, w=lp_w - ref_w, n_c=c.n, n_w=w.n, lp=(lp_c, lp_w), ref=(ref_c, ref_w))
        pair.score_c, pair.score_w = score(pair.c, config), score(pair.w, config)
        pair.nll = -math.fsum(c.score_logprobs)
        pair.weight = 1.0
        if config.use_weighting:
            for side in (c, w):
                aligned = [lp - s for lp, s in zip(side.score_logprobs, side.score_collision, strict=True)]
                pair.weight *= math.exp(mean(aligned))
        pairs.append(pair)
    b, e = config.beta, config.label_smoothing
    loss = 0.0
    for kind, weight in zip(config.loss_types, config.weights, strict=True):
        if kind == "sft":
            loss += weight * math.fsum(p.nll * p.weight for p in pairs) / sum(p.n_c for p in pairs)
            continue
        if kind.startswith("aot"):
            paired = kind == "aot"
            first = sorted(p.lp[0] - p.lp[1] if paired else p.c for p in pairs)
            second = sorted(p.ref[0] - p.ref[1] if paired else p.w for p in pairs)
            deltas = [b * (x - y) for x, y in zip(first, second, strict=True)]
            losses = [-(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z) for z in deltas]
        else:
            losses = [dpo_type(kind, p, b, e, config.discopop_tau) for p in pairs]
        loss += weight * mean([x * p.weight for x, p in zip(losses, pairs, strict=True)])
    rewards = [(b * p.c, b * p.w) for p in pairs]
    return loss, {"implicit_reward": mean([r for pair in rewards for r in pair])} | pair_metrics(
        rewards, sums(complete(examples))
    )


def pair_metrics(rewards: list[tuple[float, float]], logprobs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "chosen_reward": mean([c for c, _ in rewards]),
        "rejected_reward": mean([w for _, w in rewards]),
        "reward_margin": mean([c - w for c, w in rewards]),
        "preference_accuracy": mean([float(c > w) for c, w in rewards]),
        "chosen_log_probs": mean([c for c, _ in logprobs]),
        "rejected_log_probs": mean([w for _, w in logprobs]),
        "num_pairs": len(rewards),
    }


def complete(examples: Examples) -> list[tuple[SimpleNamespace, SimpleNamespace]]:
    return [(c, w) for c, w in examples if c.n and w.n]


def sums(pairs: list[tuple[SimpleNamespace, SimpleNamespace]]) -> list[tuple[float, float]]:
    return [(math.fsum(c.score_logprobs), math.fsum(w.score_logprobs)) for c, w in pairs]


def means(pairs: list[tuple[SimpleNamespace, SimpleNamespace]]) -> list[tuple[float, float]]:
    return [(mean(c.score_logprobs), mean(w.score_logprobs)) for c, w in pairs]


def nll(pairs: list[tuple[SimpleNamespace, SimpleNamespace]], config: Any) -> float:
    if config.nll_reduction == "sequence_mean":
        return -mean([mean(c.score_logprobs) for c, _ in pairs])
    return -mean([lp for c, _ in pairs for lp in c.score_logprobs])


def simpo(examples: Examples, config: Any) -> Result:
    pairs = complete(examples)
    rewards = [(config.beta * c, config.beta * w) for c, w in means(pairs)]
    e = config.label_smoothing
    losses = []
    for c, w in rewards:
        z = c - w - config.gamma
        losses.append(-(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z))
    return mean(losses), pair_metrics(rewards, sums(pairs))


def orpo(examples: Examples, config: Any) -> Result:
    pairs = complete(examples)
    odds = [[math.log(math.exp(m) / (1 - math.exp(m))) for m in pair] for pair in means(pairs)]
    ratios = [c - w for c, w in odds]
    likelihood = nll(pairs, config)
    gains = [log_sigmoid(r) for r in ratios]
    return likelihood - config.beta * mean(gains), pair_metrics(
        [(config.beta * c, config.beta * w) for c, w in means(pairs)], sums(pairs)
    ) | {"nll_loss": likelihood, "log_odds_ratio": mean(ratios), "log_odds_chosen": mean(gains)}


def cpo(examples: Examples, config: Any) -> Result:
    pairs = complete(examples)
    values = means(pairs) if config.alpha or config.loss_type == "ipo" else sums(pairs)
    if config.alpha:
        values = [
            ((1 - math.exp(c) ** -config.alpha) / config.alpha, (1 - math.exp(w) ** -config.alpha) / config.alpha)
            for c, w in values
        ]
    b, e = config.beta, config.label_smoothing
    losses = []
    for c, w in values:
        if config.loss_type == "hinge":
            losses.append(max(0.0, 1 - b * (c - w)))
        elif config.loss_type == "ipo":
            losses.append((c - w - 1 / (2 * b)) ** 2)
        else:
            losses.append(-(1 - e) * log_sigmoid(b * (c - w)) - e * log_sigmoid(-b * (c - w)))
    likelihood = nll(pairs, config)
    return mean(losses) + config.cpo_alpha * likelihood, pair_metrics(
        [(b * c, b * w) for c, w in values], sums(pairs)
    ) | {"nll_loss": likelihood}


def unpaired_metrics(rewards: list[tuple[int, float]]) -> dict[str, float]:
    good, bad = [r for on, r in rewards if on], [r for on, r in rewards if not on]
    return {
        "chosen_reward": mean(good),
        "rejected_reward": mean(bad),
        "reward_margin": mean(good) - mean(bad),
        "desirable_share": mean([float(on) for on, _ in rewards]),
    }


def kto(examples: Examples, config: Any) -> Result:
    mismatched = [log_ratios(example[1])[1] for example in examples if len(example) > 1 and example[1].n]
    z = max(0.0, mean(mismatched)) if mismatched and config.loss_type == "kto" else 0.0
    losses, rewards = [], []
    for row in (example[0] for example in examples):
        if not row.n:
            continue
        r = log_ratios(row)[1]
        rewards.append((row.label, config.beta * r))
        if row.label:
            losses.append(config.desirable_weight * (1 - sigmoid(config.beta * (r - z))))
        else:
            losses.append(config.undesirable_weight * (1 - sigmoid(config.beta * (z - r))))
    return mean(losses), unpaired_metrics(rewards) | {"kl": z}


def bco(examples: Examples, config: Any) -> Result:
    rows = [row for [row] in examples if row.n]
    rewards = [(row.label, config.beta * log_ratios(row)[1]) for row in rows]
    delta = mean([r for _, r in rewards]) if config.delta is None else config.delta
    losses = [
        -log_sigmoid(r - delta if label else delta - r) * getattr(row, "weights", 1.0)
        for row, (label, r) in zip(rows, rewards, strict=True)
    ]
    return mean(losses), unpaired_metrics(rewards) | {"delta": delta}


BASE = {"reference_model": "base"}


def pairs(rng: np.random.Generator, *, ref: str = "") -> Columns:
    columns = pair_columns(rng)
    for side in ("chosen", "rejected") if ref else ():
        ids = columns[f"{side}_input_ids"]
        own = logps(rng, ids, 0.5, -1.4) if ref == "tokens" else logps(rng, [0] * len(ids), 2.0, -5.0)
        columns[f"{side}_ref_log_probs"] = own
    return columns


def responses(rng: np.random.Generator, *, kl: bool = False, weights: bool = False) -> Columns:
    columns = row_columns(rng)
    ids = columns["input_ids"]
    columns |= {"label": [0, 1, 1, 1, 0, 1], "ref_log_probs": logps(rng, ids, 0.5, -2.0)}
    if kl:
        other = [tokens(rng, int(length)) for length in rng.integers(2, 9, len(ids))]
        masks = bits(rng, other, 0.9)
        masks[2], masks[0] = [0] * len(other[2]), [1] * len(other[0])
        masks[1] = [0] * len(other[1])
        columns |= {"kl_input_ids": other, "kl_loss_mask": masks, "kl_ref_log_probs": logps(rng, other, 0.1, -9.0)}
    if weights:
        columns["weights"] = [abs(weight) for weight in per_row(rng, len(ids))]
    return columns


def case(loss: str, build: Any, reference: Any, label: str = "", gradcheck: bool = True, **kwargs: Any) -> Case:
    return Case(loss, build, kwargs, reference, label, gradcheck=gradcheck)


SMOOTHED = {"label_smoothing": 0.1}
CASES = [
    *(case("dpo", pairs, dpo, kind, loss_type=kind, beta=0.3, **SMOOTHED, **BASE) for kind in LOSS_TYPES),
    *(
        case(
            "dpo",
            lambda r: pairs(r, ref="tokens"),
            dpo,
            f"{kind}-{loss_type}",
            f_divergence_type=kind,
            loss_type=loss_type,
            f_alpha_divergence_coef=0.7,
        )
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
        for loss_type in ("sigmoid", "ipo")
    ),
    case(
        "dpo",
        pairs,
        dpo,
        "mixture",
        loss_type=("sigmoid", "bco_pair", "sft"),
        loss_weights=(0.8, 0.2, 1.0),
        **BASE,
    ),
    case("dpo", pairs, dpo, "length-desensitised", ld_alpha=0.4, loss_type=("sigmoid", "sft"), **BASE),
    case("dpo", pairs, dpo, "weighted", gradcheck=False, use_weighting=True, **BASE),
    case("dpo", lambda r: pairs(r, ref="rows"), dpo, "row-references", loss_type="apo_zero"),
    case("simpo", pairs, simpo),
    case("simpo", pairs, simpo, "smoothed", gamma=1.2, beta=2.5, label_smoothing=0.2),
    case("orpo", pairs, orpo),
    case("orpo", pairs, orpo, "token-mean", nll_reduction="token_mean", beta=0.5),
    case("cpo", pairs, cpo),
    case("cpo", pairs, cpo, "hinge", loss_type="hinge", cpo_alpha=0.0),
    case("cpo", pairs, cpo, "ipo", loss_type="ipo", nll_reduction="token_mean"),
    case("cpo", pairs, cpo, "alpha", alpha=0.25, label_smoothing=0.1),
    case("kto", responses, kto, "no-mismatched", gradcheck=True),
    case("kto", lambda r: responses(r, kl=True), kto, gradcheck=False, beta=0.05, desirable_weight=1.3),
    case("kto", lambda r: responses(r, kl=True), kto, "apo", loss_type="apo_zero_unpaired", undesirable_weight=0.5),
    case("bco", responses, bco, gradcheck=False),
    case("bco", lambda r: responses(r, weights=True), bco, "delta", delta=0.3, beta=0.4),
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_property(case: Case, check: Any, rng: np.random.Generator) -> None:
    if case.id == "kto-no-mismatched" and check.__name__ == "is_the_same_in_parts":
        return  # z is 0 whatever the batch
    check(case, rng)


def test_every_type_has_its_formula_and_paper() -> None:
    for name, (formula, _) in LOSS_TYPES.items():
        assert formula, name
    schema = get_loss("dpo").config.model_json_schema()
    assert set(schema["properties"]["loss_type"]["anyOf"][0]["enum"]) == set(LOSS_TYPES)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"loss_type": "exo_pair"}, "label_smoothing"),
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]}, "1 loss_weights for 2"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "nca_pair"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss_type": "sigmoidal"}, "loss_type"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_loss("dpo").config(**kwargs)


def test_length_desensitising_wants_a_reference_for_each_token(rng: np.random.Generator) -> None:
    with pytest.raises(BatchError) as caught:
        case("dpo", lambda r: pairs(r, ref="rows"), dpo, ld_alpha=0.5).draw(rng).output()
    assert caught.value.field == "chosen_ref_log_probs"


def test_the_weights_of_wpo_have_no_gradient(rng: np.random.Generator) -> None:
    """The gradient is that of DPO, pair by pair, times the weight of the pair."""
    weighted = case("dpo", pairs, dpo, use_weighting=True, **BASE).draw(rng)
    scores = {name: values for name, values in weighted.scores.items() if name != "collision"}
    plain_config = replace(weighted, config=get_loss("dpo").config(**BASE), scores=scores)
    for example in range(weighted.batch.num_examples):
        ours, theirs = weighted.part([example]), plain_config.part([example])
        if not theirs.terms["sigmoid"].count:
            continue
        [grad] = torch.autograd.grad(ours.terms["sigmoid"].sum, weighted.scores["logprobs"])
        [plain_grad] = torch.autograd.grad(theirs.terms["sigmoid"].sum, weighted.scores["logprobs"])
        weight = (ours.terms["sigmoid"].sum / theirs.terms["sigmoid"].sum).item()
        torch.testing.assert_close(grad, weight * plain_grad)


def test_the_baselines_of_kto_and_bco_have_no_gradient(rng: np.random.Generator) -> None:
    of_kto = case("kto", lambda r: responses(r, kl=True), kto, beta=0.05).draw(rng)
    output = of_kto.output()
    assert output.metrics["kl"].value() > 0
    [grad] = torch.autograd.grad(output.loss(), of_kto.scores["logprobs"])
    mismatched = torch.arange(of_kto.batch.num_sequences) % 2 == 1
    assert (grad[mismatched.repeat_interleave(of_kto.batch.row_lengths)] == 0).all()

    of_bco = case("bco", responses, bco).draw(rng)
    delta = of_bco.output().metrics["delta"].value()
    given = replace(of_bco, config=get_loss("bco").config(delta=delta))
    [grad] = torch.autograd.grad(of_bco.output().loss(), of_bco.scores["logprobs"])
    [expected] = torch.autograd.grad(given.output().loss(), of_bco.scores["logprobs"])
    torch.testing.assert_close(grad, expected)


def test_orpo_of_certain_and_of_hopeless_responses_is_finite() -> None:
    x = torch.tensor([-1e-12, 0.0, -1e-3, -0.6931, -0.6932, -5.0, -200.0], requires_grad=True)
    result = log1mexp(x)
    result.sum().backward()
    assert torch.isfinite(result).all() and x.grad is not None and torch.isfinite(x.grad).all()
    for value in (-1e-3, -0.6931, -0.6932, -5.0):
        assert log1mexp(torch.tensor(value, dtype=torch.float64)).item() == pytest.approx(
            math.log(-math.expm1(value)), rel=1e-12
        )


def test_a_mismatched_reference_needs_its_mismatched_tokens() -> None:
    columns = {"input_ids": [[1, 2]], "label": [1], "ref_log_probs": [-1.0], "kl_ref_log_probs": [-1.0]}
    with pytest.raises(BatchError) as caught:
        read("kto", columns)
    assert (caught.value.field, caught.value.rule) == ("kl_ref_log_probs", "with kl_input_ids")
