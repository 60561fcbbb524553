"""The ways of averaging, of the losses whose tokens are not weighed by a policy's ratio alone, counted by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from gradwire_losses.batch import Batch, BatchError, Scores
from gradwire_losses.reduction import Reduction
from gradwire_losses.registry import all_losses, get_loss, load_builtin_losses
from torch import Tensor

load_builtin_losses()

OF_SEQUENCES = {
    "a2po", "bco", "cpo", "dpo", "kto", "orpo", "plackett_luce", "reward_modeling", "reward_regression",
    "score_regression", "sequence_classification", "simpo", "tpo",
}  # fmt: skip

WAYS = {
    "token_mean": lambda x: sum(x) / 5,
    "sequence_mean": lambda x: ((x[0] + x[1]) / 2 + (x[2] + x[3] + x[4]) / 3) / 2,
    "sequence_mean_token_sum": lambda x: sum(x) / 2,
    "fixed": lambda x: sum(x) / 4 / 2,
    "sum": sum,
}


def batch(fields: dict[str, Tensor], level: str = "token") -> Batch:
    scored = torch.tensor([False, True, True, False, False, True, True, True])
    lengths = torch.tensor([3, 1, 4])
    return Batch(torch.zeros(8, dtype=torch.int64), lengths, scored, torch.ones(3, dtype=torch.int64), fields,
                 dict.fromkeys(fields, level))  # type: ignore[arg-type]  # fmt: skip


def kwargs(way: str) -> dict[str, object]:
    return {"reduction": way} | ({"reduction_divisor": 4} if way == "fixed" else {})


def test_every_loss_of_tokens_takes_every_reduction() -> None:
    assert set(get_args(Reduction)) == set(WAYS)
    taking = {loss.name for loss in all_losses() if "reduction" in loss.config.model_fields}
    assert {loss.name for loss in all_losses()} - taking == OF_SEQUENCES
    for name in taking:
        for way in WAYS:
            get_loss(name).config(**kwargs(way))


@pytest.mark.parametrize("way", WAYS)
def test_importance_sampling(way: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs, behavior, advantages, ref = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    loss = get_loss("importance_sampling")
    given = batch({"behavior_log_probs": behavior, "advantages": advantages, "ref_log_probs": ref})
    output = loss.function(given, Scores({"logprobs": logprobs}), loss.config(beta=0.3, clip_ratio=2.0, **kwargs(way)))
    tokens = []
    for lp, b, a, r in zip(logprobs, behavior, advantages, ref):
        kl = (r - lp).exp() - (r - lp) - 1
        tokens.append(-min((lp - b).exp(), torch.tensor(2.0)) * a + 0.3 * kl)
    assert output.loss().item() == pytest.approx(WAYS[way](tokens).item(), rel=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_token_classification(way: str) -> None:
    logits = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    labels = torch.tensor([0, 2, 1, 1, 0])
    loss = get_loss("token_classification")
    output = loss.function(
        batch({"token_labels": labels}), Scores({"token_class_logits": logits}), loss.config(**kwargs(way))
    )
    tokens = [-logits[t].log_softmax(0)[labels[t]] for t in range(5)]
    assert output.loss().item() == pytest.approx(WAYS[way](tokens).item(), rel=1e-9)


def test_a_ratio_a_row_is_averaged_over_rows_and_nothing_else() -> None:
    loss = get_loss("importance_sampling")
    given = batch({"behavior_log_probs": torch.zeros(3), "advantages": torch.ones(3)}, "sequence")
    scores = Scores({"logprobs": torch.zeros(5)})
    assert loss.function(given, scores, loss.config()).loss().item() == -1.0
    with pytest.raises(BatchError, match="mean over rows"):
        loss.function(given, scores, loss.config(reduction="sum"))
