"""A custom loss, written on the client in torch: the server computes log-probabilities and backpropagates the gradient.

This one is SimPO (Meng et al. 2024, arXiv 2405.14734): a preference between mean log-probabilities, with a margin and
no reference model. Rows 0, 2, 4, … are preferred to rows 1, 3, 5, …: a custom loss sees all rows at once.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch
import torch.nn.functional as F
from _support.start import arguments, open_service
from _support.tasks import spoiled, sum_problem


def simpo(batch: Any, scores: dict[str, list[torch.Tensor]]) -> tuple[torch.Tensor, dict[str, float]]:
    means = torch.stack([logprobs.mean() for logprobs in scores["logprobs"]])
    margins = 2.0 * (means[0::2] - means[1::2]) - 0.5
    return -F.logsigmoid(margins).mean(), {"preferred": (margins > 0).float().mean().item()}


async def main() -> None:
    args = arguments(__doc__, steps=60)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        run = await service.create_run(model.name, seed=args.seed)
        for step in range(args.steps):
            problems = [sum_problem(rng) for _ in range(32)]
            answers = [text for each in problems for text in (each.answer, spoiled(each.answer, rng))]
            prompts = await service.encode(model.name, [each.prompt for each in problems for _ in range(2)])
            endings = await service.encode(model.name, answers, add_special_tokens=False)
            batch = {
                "input_ids": [[*prompt, *answer] for prompt, answer in zip(prompts, endings)],
                "loss_mask": [[0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, endings)],
            }
            result = run.forward_backward_custom(batch, simpo)
            run.optim_step(learning_rate=1e-3)
            if step % 5 == 0 or step == args.steps - 1:
                print(f"step {step}: loss {(await result)['loss']:.3f}  preferred {(await result)['preferred']:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
