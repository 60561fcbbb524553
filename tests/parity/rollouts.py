"""Groups of responses as the public implementations have them, padded, and as we do; one set of numbers for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.outputs import LossOutput
from gradwire_losses.registry import get_loss
from support.losses import logps, numbers, read, tokens

SAMPLES = (3, 2, 4)


class Rollouts:
    """Three groups of 3, 2 and 4 responses of 1 to 8 tokens, with rewards that differ; ``[9, width]`` where padded."""

    def __init__(self, rng: np.random.Generator) -> None:
        responses = [[tokens(rng, int(rng.integers(1, 9))) for _ in range(n)] for n in SAMPLES]
        self.columns: dict[str, Any] = {
            "prompt_ids": [[1], [2, 3], [4]],
            "response_ids": responses,
            "response_masks": [[[1] * len(r) for r in group] for group in responses],
            "rewards": numbers(rng, [[0] * n for n in SAMPLES]),
            "old_log_probs": logps(rng, responses, 0.4, -1.4),
            "ref_log_probs": logps(rng, responses, 0.4, -1.4),
            "sampler_log_probs": logps(rng, responses, 0.5, -1.4),
        }
        self.lengths = torch.tensor([len(r) for group in responses for r in group])
        self.mask = torch.arange(int(self.lengths.max())) < self.lengths[:, None]
        self.leaf = torch.from_numpy(rng.normal(-1.4, 0.4, self.mask.shape)).requires_grad_()
        self.entropy = torch.from_numpy(rng.gamma(2, 0.5, self.mask.shape)).float().double()  # as TRL's quantile
        self.index = np.repeat(np.arange(len(SAMPLES)), SAMPLES)

    def padded(self, name: str) -> torch.Tensor:
        """``[9, width]``: a token field, 0 at padding."""
        rows = [torch.tensor(row, dtype=torch.float64) for group in self.columns[name] for row in group]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @property
    def rewards(self) -> torch.Tensor:
        return torch.tensor([reward for group in self.columns["rewards"] for reward in group], dtype=torch.float64)

    def advantages(self, *, scale: bool = True) -> torch.Tensor:
        """``[9]``, as every library computes them."""
        groups = self.rewards.split(list(SAMPLES))
        return torch.cat([(g - g.mean()) / (g.std() + 1e-4 if scale else 1.0) for g in groups])

    def ours(self, loss: str, *fields: str, **kwargs: Any) -> LossOutput:
        """Our loss; ``fields`` beside prompts, responses and rewards."""
        spec = get_loss(loss)
        always = ("prompt_ids", "response_ids", "response_masks", "rewards")
        batch: Batch = read(spec, {name: self.columns[name] for name in (*always, *fields)})
        scores = {"logprobs": self.leaf[self.mask], "entropy": self.entropy[self.mask]}
        return spec.function(batch, Scores(scores), spec.config(**kwargs))

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        [found] = torch.autograd.grad(loss, self.leaf)
        return torch.where(self.mask, found, 0.0)
