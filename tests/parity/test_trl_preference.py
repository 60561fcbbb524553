"""Preference losses against TRL 1.16: the trainers' own methods on given log-probabilities, value and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.registry import get_loss
from support.losses import read, tokens

pytest.importorskip("trl")

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


class Padded:
    """Sequences as TRL has them, chosen then rejected, and as we do; one set of log-probabilities for both."""

    def __init__(self, rng: np.random.Generator, pairs: int = 5) -> None:
        self.prompts = [int(n) for n in rng.integers(1, 4, pairs)]
        sides = [[tokens(rng, p + int(rng.integers(1, 7))) for p in self.prompts] for _ in range(2)]
        self.columns = {"chosen_input_ids": sides[0], "rejected_input_ids": sides[1], "prompt_lengths": self.prompts}
        rows = [*sides[0], *sides[1]]
        width = max(map(len, rows))
        self.input_ids = torch.zeros(2 * pairs, width, dtype=torch.long)
        self.completion_mask = torch.zeros(2 * pairs, width, dtype=torch.long)
        for index, row in enumerate(rows):
            self.input_ids[index, : len(row)] = torch.tensor(row)
            self.completion_mask[index, self.prompts[index % pairs] : len(row)] = 1
        shifted = self.completion_mask[:, 1:]
        self.leaf = torch.from_numpy(-rng.gamma(2, 0.7, shifted.shape)).requires_grad_()
        self.logprobs = self.leaf * shifted
        self.ref = torch.from_numpy(-rng.gamma(2, 0.7, shifted.shape)) * shifted
        self.collision = torch.from_numpy(-rng.gamma(2, 0.5, shifted.shape)) * shifted
        self.pairs = pairs

    def ours(self, padded: torch.Tensor) -> torch.Tensor:
        """``[2P, width] -> [T]``, pair by pair, chosen first."""
        order = torch.arange(2 * self.pairs).view(2, -1).T.reshape(-1)
        return padded[order][self.completion_mask[:, 1:][order].bool()]

    def batch(self, loss: str = "dpo") -> Batch:
        return read(loss, self.columns)

    def scores(self, **kwargs: Any) -> Scores:
        names = {"logprobs": self.logprobs, "ref_logprobs": self.ref, "collision": self.collision}
        return Scores({name: self.ours(values) for name, values in names.items()})

    def model(self, logprobs: torch.Tensor) -> Any:
        rest = torch.zeros_like(self.ref)
        outputs = SimpleNamespace(
            log_probs=logprobs, entropy=rest, mean_logits=rest, is_top1=rest.bool(), log_sum_sq_probs=self.collision
        )
        return lambda **kwargs: outputs

    def sums(self, values: torch.Tensor, mean: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        total = values.sum(dim=1)
        return (total / self.completion_mask.sum(dim=1) if mean else total).chunk(2)


def accelerator() -> SimpleNamespace:
    same = lambda value: value  # noqa: E731
    return SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)


def trainer(**attributes: Any) -> SimpleNamespace:
    model = torch.nn.Identity().eval()
    model.is_gradient_checkpointing = False
    return SimpleNamespace(
        model=model,
        accelerator=accelerator(),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        **attributes,
    )


def trl_dpo(data: Padded, config: Any) -> torch.Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    own = trainer(
        ld_alpha=config.ld_alpha,
        precompute_ref_logps=False,
        ref_model=data.model(data.ref),
        f_divergence_type=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        loss_types=list(config.loss_types),
        loss_weights=list(config.weights),
        use_weighting=config.use_weighting,
        args=SimpleNamespace(discopop_tau=config.discopop_tau, gradient_checkpointing_kwargs=None),
    )
    inputs = {
        "input_ids": data.input_ids,
        "attention_mask": torch.ones_like(data.input_ids),
        "completion_mask": data.completion_mask,
    }
    model = data.model(data.logprobs)
    return DPOTrainer._compute_loss(own, model, inputs, return_outputs=False)


TYPES = ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
         "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft"]  # fmt: skip
SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}


def same(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), **CLOSE)
    [own] = torch.autograd.grad(ours, leaf, retain_graph=True)
    [other] = torch.autograd.grad(theirs, leaf, retain_graph=True)
    torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"loss_type": kind, "beta": 0.3, "label_smoothing": 0.1 if kind in SMOOTHED else 0.0} for kind in TYPES),
        {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
        {"f_divergence_type": "forward_kl"},
        {"f_divergence_type": "js_divergence", "loss_type": "ipo"},
        {"ld_alpha": 0.3},
        {"use_weighting": True},
    ],
    ids=str,
)
def test_dpo(kwargs: dict[str, Any], rng: np.random.Generator) -> None:
    data, spec = Padded(rng), get_loss("dpo")
    config = spec.config(**kwargs)
    same(spec.function(data.batch(), data.scores(), config).loss(), trl_dpo(data, config), data.leaf)


def test_trl_computes_alpha_divergences_in_float32(rng: np.random.Generator) -> None:
    data, spec = Padded(rng), get_loss("dpo")
    data.logprobs = data.logprobs.float()
    data.ref = data.ref.float()
    config = spec.config(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.6)
    same(spec.function(data.batch(), data.scores(), config).loss(), trl_dpo(data, config), data.leaf)


@pytest.mark.parametrize("kwargs", [{}, {"label_smoothing": 0.1}, {"loss_type": "hinge"}, {"loss_type": "ipo"},
                                    {"alpha": 0.5}], ids=str)  # fmt: skip
def test_cpo(kwargs: dict[str, Any], rng: np.random.Generator) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    data, spec = Padded(rng), get_loss("cpo")
    config = spec.config(**kwargs, cpo_alpha=0.0)
    # TRL takes AlphaPO's rewards on sums for this loss type; the paper, and we, on means.
    mean = config.loss_type == "ipo" or bool(config.alpha)
    own = SimpleNamespace(
        accelerator=accelerator(),
        alpha=config.alpha,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        loss_type=config.loss_type,
    )
    losses, _, _ = CPOTrainer.cpo_loss(own, *data.sums(data.logprobs, mean=mean))
    same(spec.function(data.batch("cpo"), data.scores(), config).loss(), losses.mean(), data.leaf)


def test_simpo(rng: np.random.Generator) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    data, spec = Padded(rng), get_loss("simpo")
    config = spec.config(beta=2.5, gamma=1.4, label_smoothing=0.1)
    own = SimpleNamespace(
        accelerator=accelerator(),
        alpha=0.0,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        loss_type="simpo",
        simpo_gamma=config.gamma,
    )
    losses, _, _ = CPOTrainer.cpo_loss(own, *data.sums(data.logprobs, mean=True))
    same(spec.function(data.batch("simpo"), data.scores(), config).loss(), losses.mean(), data.leaf)


def test_orpo_given_trls_likelihood(rng: np.random.Generator) -> None:
    """The odds ratio is the same. TRL's likelihood is a mean over a micro-batch's tokens, prompts among them."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    data, spec = Padded(rng), get_loss("orpo")
    config = spec.config(beta=0.4, nll_reduction="token_mean")
    own = SimpleNamespace(accelerator=accelerator(), beta=config.beta)
    gains, *_ = ORPOTrainer.odds_ratio_loss(own, *(sums.float() for sums in data.sums(data.logprobs, mean=True)))
    nll = -data.logprobs.chunk(2)[0].sum() / data.completion_mask.chunk(2)[0].sum()
    same(spec.function(data.batch("orpo"), data.scores(), config).loss(), nll - gains.mean(), data.leaf)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, rng: np.random.Generator) -> None:
    """The first half of the sequences are responses, the second the mismatched ones."""
    from trl.trainer.kto_trainer import KTOTrainer

    data, spec = Padded(rng), get_loss("kto")
    data.ref = data.ref - 1.0 * data.completion_mask[:, 1:]  # so that the estimate z is above 0
    labels = [True, False, True, True, False]
    kwargs = {"loss_type": loss_type, "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    columns = {
        "input_ids": data.columns["chosen_input_ids"],
        "kl_input_ids": data.columns["rejected_input_ids"],
        "prompt_lengths": data.prompts,
        "label": [int(label) for label in labels],
    }
    ours = spec.function(read("kto", columns), data.scores(), spec.config(**kwargs)).loss()

    def half(values: torch.Tensor) -> torch.Tensor:
        return values.chunk(2)[0]

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(
            log_probs=half(data.logprobs),
            entropy=half(torch.zeros_like(data.ref)),
            mean_logits=half(torch.zeros_like(data.ref)),
        )

    sums, ref = data.logprobs.sum(dim=1), data.ref.sum(dim=1)
    own = trainer(**kwargs, precompute_ref_logps=True, calculate_KL=loss_type == "kto")
    own._compute_kl_logps = lambda *_: sums.chunk(2)[1].detach()
    inputs = {
        "input_ids": half(data.input_ids),
        "attention_mask": half(torch.ones_like(data.input_ids)),
        "completion_mask": half(data.completion_mask),
        "label": torch.tensor(labels),
        "ref_logps": ref.chunk(2)[0],
        "ref_KL_logps": ref.chunk(2)[1],
    }
    theirs = KTOTrainer._compute_loss(own, model, inputs, return_outputs=False)
    same(ours, theirs, data.leaf)


def test_reward_modeling(rng: np.random.Generator) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    spec = get_loss("reward_modeling")
    rewards = torch.from_numpy(rng.normal(size=8)).requires_grad_()
    margins = [float(np.float32(margin)) for margin in rng.random(4)]
    columns = {"chosen_input_ids": [[1]] * 4, "rejected_input_ids": [[2]] * 4, "margin": margins}
    interleaved = rewards.view(2, 4).T.reshape(-1)
    ours = spec.function(read(spec, columns), Scores({"rewards": interleaved}), spec.config(center_coef=0.2)).loss()
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=0.2))
    theirs = RewardTrainer.compute_loss(
        own,
        lambda **_: SimpleNamespace(logits=rewards[:, None]),
        {"margin": torch.tensor(margins, dtype=torch.float64)},
    )
    same(ours, theirs, rewards)
