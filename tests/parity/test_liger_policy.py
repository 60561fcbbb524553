"""GRPO's losses and the distillation divergence against Liger 0.8.5's chunked losses, from hidden states, on CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire_server.engine.model.split_model import OutputHead
from gradwire_server.engine.scoring.divergence import score_divergence
from gradwire_server.engine.scoring.token_scores import score_tokens
from parity.rollouts import Rollouts

pytest.importorskip("liger_kernel.chunked_loss")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

H, V = 6, 50
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CASES = [
    ("grpo", {"beta": 0.0}, {"loss_type": "grpo"}),
    ("grpo", {"beta": 0.2, "temperature": 0.7}, {"loss_type": "grpo", "beta": 0.2, "temperature": 0.7}),
    ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("sapo", {}, {"loss_type": "sapo"}),
    ("group_cispo", {"ratio_max": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    (
        "group_gspo",
        {"clip_epsilon": 0.1, "clip_epsilon_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1},
    ),
    ("grpo", {"beta": 0.0, "dual_clip": 1.4}, {"loss_type": "grpo", "delta": 1.4}),
]


@pytest.mark.parametrize(
    ("loss", "kwargs", "settings"), CASES, ids=lambda x: x if isinstance(x, str) else str(sorted(x))
)
def test_grpo(loss: str, kwargs: Any, settings: Any, rng: np.random.Generator) -> None:
    """From the same hidden states and head, through our scoring and theirs."""
    data = Rollouts(rng)
    rows, width = data.mask.shape
    hidden = torch.from_numpy(rng.normal(size=(rows, width, H))).float().requires_grad_()
    weight = torch.from_numpy(rng.normal(size=(V, H)) * 0.3).float().requires_grad_()
    ids = torch.zeros(rows, width, dtype=torch.long)
    ids[data.mask] = torch.tensor([t for group in data.columns["response_ids"] for row in group for t in row])
    settings = {"beta": 0.0} | settings
    liger = LigerFusedLinearGRPOLoss(compiled=False, use_ref_model=settings["beta"] > 0, chunk_size=rows, **settings)
    # The policy of old_log_probs is near, so that some ratios are clipped and some are not.
    with torch.no_grad():
        scored = score_tokens(
            hidden.flatten(0, 1), OutputHead(weight), ids.view(-1, 1), temperature=kwargs.get("temperature", 1.0)
        )
    near = scored.logprobs.view(rows, width) + 0.2 * torch.from_numpy(rng.normal(size=(rows, width))).float()
    data.columns["old_log_probs"] = _nested(near, data)
    ref = data.padded("ref_log_probs").float()
    theirs, *_ = liger(
        hidden,
        weight,
        ids,
        data.mask.float(),
        data.advantages().float(),
        ref_per_token_logps=ref if settings["beta"] else None,
        old_per_token_logps=near,
    )
    found = score_tokens(
        hidden[data.mask], OutputHead(weight), ids[data.mask][:, None], temperature=kwargs.get("temperature", 1.0)
    )
    leaf, data.leaf = data.leaf, torch.zeros(data.mask.shape).masked_scatter(data.mask, found.logprobs[:, 0])
    fields = ("old_log_probs", "ref_log_probs") if settings["beta"] else ("old_log_probs",)
    ours = data.ours(loss, *fields, **kwargs).loss()
    data.leaf = leaf
    torch.testing.assert_close(ours.float(), theirs, **CLOSE)
    for mine, other in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def _nested(padded: torch.Tensor, data: Rollouts) -> list[Any]:
    rows = iter(row[:n].tolist() for row, n in zip(padded, data.lengths.tolist(), strict=True))
    return [[next(rows) for _ in group] for group in data.columns["response_ids"]]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence(beta: float, rng: np.random.Generator) -> None:
    """Liger's M is (1 - beta) S + beta T, as ours; its ends are KL(T || S) and KL(S || T)."""
    student, teacher = (torch.from_numpy(rng.normal(size=(9, V))) for _ in range(2))
    eye = torch.eye(V, dtype=torch.float64)
    own = score_divergence(student, OutputHead(eye), teacher, OutputHead(eye), beta=beta).sum()
    theirs = LigerFusedLinearJSDFunction.distillation_loss_fn(
        student, teacher, beta, target=torch.zeros(9, dtype=torch.long)
    )
    torch.testing.assert_close(own, theirs if theirs.dim() == 0 else theirs.sum(), **CLOSE)
