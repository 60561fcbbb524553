"""Preference losses over pairs and over single responses, against plain references and on their own pitfalls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import BatchError
from gradwire_losses.dpo import LOSS_TYPES
from gradwire_losses.preference import log1mexp
from gradwire_losses.registry import get_loss
from support import preference_references as plain
from support.loss_properties import PROPERTIES
from support.losses import Case, Columns, bits, logps, pair_columns, per_row, read, row_columns, tokens

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
    *(case("dpo", pairs, plain.dpo, kind, loss_type=kind, beta=0.3, **SMOOTHED, **BASE) for kind in LOSS_TYPES),
    *(
        case(
            "dpo",
            lambda r: pairs(r, ref="tokens"),
            plain.dpo,
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
        plain.dpo,
        "mixture",
        loss_type=("sigmoid", "bco_pair", "sft"),
        loss_weights=(0.8, 0.2, 1.0),
        **BASE,
    ),
    case("dpo", pairs, plain.dpo, "length-desensitised", ld_alpha=0.4, loss_type=("sigmoid", "sft"), **BASE),
    case("dpo", pairs, plain.dpo, "weighted", gradcheck=False, use_weighting=True, **BASE),
    case("dpo", lambda r: pairs(r, ref="rows"), plain.dpo, "row-references", loss_type="apo_zero"),
    case("simpo", pairs, plain.simpo),
    case("simpo", pairs, plain.simpo, "smoothed", gamma=1.2, beta=2.5, label_smoothing=0.2),
    case("orpo", pairs, plain.orpo),
    case("orpo", pairs, plain.orpo, "token-mean", nll_reduction="token_mean", beta=0.5),
    case("cpo", pairs, plain.cpo),
    case("cpo", pairs, plain.cpo, "hinge", loss_type="hinge", cpo_alpha=0.0),
    case("cpo", pairs, plain.cpo, "ipo", loss_type="ipo", nll_reduction="token_mean"),
    case("cpo", pairs, plain.cpo, "alpha", alpha=0.25, label_smoothing=0.1),
    case("kto", responses, plain.kto, "no-mismatched", gradcheck=True),
    case("kto", lambda r: responses(r, kl=True), plain.kto, gradcheck=False, beta=0.05, desirable_weight=1.3),
    case(
        "kto", lambda r: responses(r, kl=True), plain.kto, "apo", loss_type="apo_zero_unpaired", undesirable_weight=0.5
    ),
    case("bco", responses, plain.bco, gradcheck=False),
    case("bco", lambda r: responses(r, weights=True), plain.bco, "delta", delta=0.3, beta=0.4),
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
        case("dpo", lambda r: pairs(r, ref="rows"), plain.dpo, ld_alpha=0.5).draw(rng).output()
    assert caught.value.field == "chosen_ref_log_probs"


def test_the_weights_of_wpo_have_no_gradient(rng: np.random.Generator) -> None:
    """The gradient is that of DPO, pair by pair, times the weight of the pair."""
    weighted = case("dpo", pairs, plain.dpo, use_weighting=True, **BASE).draw(rng)
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
    kto = case("kto", lambda r: responses(r, kl=True), plain.kto, beta=0.05).draw(rng)
    output = kto.output()
    assert output.metrics["kl"].value() > 0
    [grad] = torch.autograd.grad(output.loss(), kto.scores["logprobs"])
    mismatched = torch.arange(kto.batch.num_sequences) % 2 == 1
    assert (grad[mismatched.repeat_interleave(kto.batch.row_lengths)] == 0).all()

    bco = case("bco", responses, plain.bco).draw(rng)
    delta = bco.output().metrics["delta"].value()
    given = replace(bco, config=get_loss("bco").config(delta=delta))
    [grad] = torch.autograd.grad(bco.output().loss(), bco.scores["logprobs"])
    [expected] = torch.autograd.grad(given.output().loss(), bco.scores["logprobs"])
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
