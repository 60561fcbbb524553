"""Nothing waits for the device before an operation's end.

The device here is "meta", which has shapes and no numbers: asking it for one raises. That the figures are asked for at
all, all at once, is where an operation ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.registry import all_losses, get_loss
from gradwire_proto.v1.training_pb2 import RunConfig
from gradwire_server.engine.model.heads import make_head
from gradwire_server.engine.model.policy import FullPolicy, Policy
from gradwire_server.engine.model.pool import ModelPool
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.scoring.forward import score_batch
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.training import loss_report as evaluation
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.forward_backward import Training, forward_backward

META = torch.device("meta")
BUDGETS = {
    "whole": Budget(10**6, activation_bytes=1 << 40),
    "parts": Budget(25, activation_bytes=1 << 40),
    "recomputed": Budget(25, activation_bytes=0),
}


class Asked(Exception):
    """The operation has asked for its figures."""


@pytest.fixture(scope="module")
def numberless(model_path: Path) -> tuple[SplitModel, SplitModel]:
    """A model to train and one to compare with."""
    pool = ModelPool({"tiny": str(model_path)})
    pair = pool.load("tiny"), pool.load("tiny")
    for split_model in pair:
        split_model.model.to(META)
    return pair


@pytest.mark.parametrize(
    ("name", "budget"),
    [(loss.name, "parts") for loss in all_losses()]
    + [(name, budget) for name in ("causal_lm", "conservative_ppo") for budget in ("whole", "recomputed")],
)
def test_a_loss_waits_for_its_figures_only(
    numberless: tuple[SplitModel, SplitModel], batches: Any, name: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settled(figures: Any) -> None:
        raise Asked

    loss = get_loss(name)
    config: dict[str, Any] = {"reference_model": "base"} if "reference_model" in loss.config.model_fields else {}
    config |= {"reduction_divisor": 4.0} if name == "dr_grpo" else {}
    split_model, frozen = numberless
    head = loss.head or ("value" if "values" in loss.optional_scores else "")
    policy = FullPolicy(
        split_model, head=make_head(RunConfig(head=head, num_labels=64), split_model.facts.hidden_size, META)
    )
    base = Policy(frozen)
    monkeypatch.setattr(evaluation, "settled", settled)
    training = Training(
        policy,
        batches.batch(loss),
        loss,
        loss.config(**config),
        GradientAccumulator(),
        reference=lambda batch, temperature: score_batch(base, batch, {"logprobs"}, budget=BUDGETS[budget])["logprobs"],
        teacher=base,
        budget=BUDGETS[budget],
    )
    with pytest.raises(Asked):
        forward_backward(training)
