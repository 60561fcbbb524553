"""Preference losses against Liger 0.8.5's chunked losses, on given log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.preference import log1mexp
from gradwire_losses.registry import get_loss
from support.losses import read, tokens

chunked = pytest.importorskip("liger_kernel.chunked_loss")

PAIRS = 6
TARGET = torch.zeros(2 * PAIRS, 1)
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


class Data:
    """Pairs of one-token prompts and responses of 1 to 6 tokens."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.lengths = torch.from_numpy(rng.integers(1, 7, (PAIRS, 2)))
        self.columns = {
            f"{side}_input_ids": [tokens(rng, 1 + int(n)) for n in self.lengths[:, index]]
            for index, side in enumerate(("chosen", "rejected"))
        }
        total = int(self.lengths.sum())
        self.logprobs = torch.from_numpy(-rng.gamma(2, 0.7, total)).requires_grad_()
        self.ref = torch.from_numpy(-rng.gamma(2, 0.7, total))

    def batch(self, loss: str) -> Batch:
        return read(loss, self.columns)

    def scores(self) -> Scores:
        return Scores({"logprobs": self.logprobs, "ref_logprobs": self.ref})

    def sums(self, values: torch.Tensor, *, mean: bool = False) -> list[torch.Tensor]:
        parts = torch.split(values, self.lengths.view(-1).tolist())
        numbers = torch.stack([part.mean() if mean else part.sum() for part in parts]).view(-1, 2)
        return [numbers[:, 0], numbers[:, 1]]


def same(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    [own] = torch.autograd.grad(ours, leaf, retain_graph=True)
    [other] = torch.autograd.grad(theirs, leaf)
    torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize(
    "loss_type",
    ["sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"],
)
def test_dpo(loss_type: str, rng: np.random.Generator) -> None:
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction

    data, spec = Data(rng), get_loss("dpo")
    smoothing = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
    config = spec.config(loss_type=loss_type, beta=0.3, label_smoothing=smoothing)
    theirs = LigerFusedLinearDPOFunction.preference_loss_fn(
        *data.sums(data.logprobs),
        TARGET,
        *data.sums(data.ref),
        beta=0.3,
        loss_type=loss_type,
        label_smoothing=smoothing,
    )[0]
    same(spec.function(data.batch("dpo"), data.scores(), config).loss(), theirs, data.logprobs)


def test_simpo(rng: np.random.Generator) -> None:
    from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction

    data, spec, kwargs = Data(rng), get_loss("simpo"), {"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1}
    theirs = LigerFusedLinearSimPOFunction.preference_loss_fn(*data.sums(data.logprobs, mean=True), TARGET, **kwargs)
    same(spec.function(data.batch("simpo"), data.scores(), spec.config(**kwargs)).loss(), theirs[0], data.logprobs)


def test_cpo(rng: np.random.Generator) -> None:
    from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOFunction

    data, spec, kwargs = Data(rng), get_loss("cpo"), {"beta": 0.3, "label_smoothing": 0.2}
    theirs = LigerFusedLinearCPOFunction.preference_loss_fn(*data.sums(data.logprobs), TARGET, **kwargs)
    ours = spec.function(data.batch("cpo"), data.scores(), spec.config(**kwargs, cpo_alpha=0.0)).loss()
    same(ours, theirs[0], data.logprobs)


def test_orpo(rng: np.random.Generator) -> None:
    from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction

    data, spec = Data(rng), get_loss("orpo")
    theirs = LigerFusedLinearORPOFunction.preference_loss_fn(*data.sums(data.logprobs, mean=True), TARGET, beta=0.4)
    output = spec.function(data.batch("orpo"), data.scores(), spec.config(beta=0.4))
    odds = output.terms["odds"]
    same(odds.sum / odds.count, theirs[0], data.logprobs)


def test_liger_loses_the_odds_of_certain_responses() -> None:
    """log1p(-exp(x)) in float32 is -inf from about -6e-8 on, and off by percents before; ours is not."""
    x = torch.tensor(-2e-7)
    truth = torch.log(-torch.expm1(x.double())).item()
    assert log1mexp(x).item() == pytest.approx(truth, rel=1e-6)
    assert torch.log1p(-torch.exp(x)).item() != pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("z", [0.0, 0.8])
def test_kto(z: float, rng: np.random.Generator) -> None:
    from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction

    data, spec = Data(rng), get_loss("kto")
    labels = torch.tensor([True, False, True, True, False, False])
    columns: dict[str, Any] = {
        "input_ids": data.columns["chosen_input_ids"],
        "label": labels.long().tolist(),
    }
    if z:  # one mismatched token a row, whose log-ratio is z in the mean
        columns["kl_input_ids"] = [[1, 2]] * PAIRS
    batch = read("kto", columns)
    counts = data.lengths[:, 0].tolist()
    total = sum(counts)
    own, ref = data.logprobs[:total], data.ref[:total]
    if z:
        ends = torch.split(own, counts), torch.split(ref, counts)
        extra = torch.full((1,), -1.0, dtype=torch.float64), torch.full((1,), -1.0 - z, dtype=torch.float64)
        own_all, ref_all = (
            torch.cat([part for row in parts for part in (row, other)])
            for parts, other in zip(ends, extra, strict=True)
        )
    else:
        own_all, ref_all = own, ref
    scores = Scores({"logprobs": own_all, "ref_logprobs": ref_all})
    ours = spec.function(batch, scores, spec.config(beta=0.3)).loss()
    sums = [torch.stack([part.sum() for part in torch.split(values, counts)]) for values in (own, ref)]
    theirs = LigerFusedLinearKTOFunction.preference_loss_fn(
        sums[0], labels, torch.zeros(PAIRS, 1), sums[1], beta=0.3, kl=torch.full((PAIRS,), z, dtype=torch.float64)
    )[0]
    same(ours, theirs, data.logprobs)
