"""Off-policy policy gradient: answers sampled once are used for many steps, with importance weights."""

from __future__ import annotations

import asyncio
import random

import numpy as np
from _support.start import arguments, open_service
from _support.tasks import sum_problem


def reward(text: str) -> float:
    """Return the share of even digits: a reward that an untrained model can learn."""
    return sum(character in "02468" for character in text) / max(1, len(text))


async def main() -> None:
    args = arguments(__doc__, steps=15)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        run = await service.create_run(model.name, seed=args.seed)
        prompts = await service.encode(model.name, [sum_problem(rng).prompt for _ in range(128)])
        # The behaviour policy is the untrained model, outside any run.
        sampled = await service.sampling_client(model.name).sample(
            prompts, max_tokens=16, temperature=1.0, seed=args.seed
        )
        samples = [group[0] for group in sampled.samples]
        rewards = np.array([reward(sample.text or "") for sample in samples])
        batch = {
            "input_ids": [[*prompt, *sample.token_ids.tolist()] for prompt, sample in zip(prompts, samples)],
            "loss_mask": [[0] * len(prompt) + [1] * len(each.token_ids) for prompt, each in zip(prompts, samples)],
            "behavior_log_probs": [sample.logprobs for sample in samples],
            "advantages": (rewards - rewards.mean()) / rewards.std(),
        }
        for step in range(args.steps):
            result = await run.forward_backward(batch, "importance_sampling", {"beta": 0.0, "clip_ratio": 2.0})
            await run.optim_step(learning_rate=3e-4)
            names = ("loss", "is_ratio_mean", "is_ratio_max", "clipped_fraction")
            print(f"step {step}:", "  ".join(f"{name} {result[name]:.3f}" for name in names))
        now = await run.sample(prompts, max_tokens=16, temperature=1.0)
        rewards_now = [reward(group[0].text or "") for group in now.samples]
        print(f"mean reward: {rewards.mean():.3f} before, {np.mean(rewards_now):.3f} after")


if __name__ == "__main__":
    asyncio.run(main())
