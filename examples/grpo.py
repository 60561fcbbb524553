"""GRPO: several answers to each prompt, each compared with the others; no value head, no critic."""

from __future__ import annotations

import asyncio
import random

from _support.start import arguments, open_service
from _support.tasks import sum_problem


def reward(text: str) -> float:
    """Return the share of even digits: a reward that an untrained model can learn."""
    return sum(character in "02468" for character in text) / max(1, len(text))


async def main() -> None:
    args = arguments(__doc__, steps=20)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        run = await service.create_run(model.name, lora={"rank": 16}, seed=args.seed)
        for step in range(args.steps):
            prompts = await service.encode(model.name, [sum_problem(rng).prompt for _ in range(16)])
            groups = (await run.sample(prompts, n=8, max_tokens=16, temperature=1.0)).samples
            batch = {
                "prompt_ids": prompts,  # [rows, tokens]
                "response_ids": [[sample.token_ids for sample in group] for group in groups],  # [rows, samples, tokens]
                "rewards": [[reward(sample.text or "") for sample in group] for group in groups],  # [rows, samples]
            }
            result = run.forward_backward(batch, "grpo", {"beta": 0.01, "reference_model": "base"})
            await run.optim_step(learning_rate=3e-3)
            names = ("reward_mean", "group_reward_std", "kl_divergence", "zero_spread_groups")
            metrics = await result
            print(f"step {step}:", "  ".join(f"{name} {metrics[name]:.3f}" for name in names))


if __name__ == "__main__":
    asyncio.run(main())
