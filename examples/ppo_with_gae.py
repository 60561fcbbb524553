"""PPO with a value head: sample, score with any function of the text, and take a few clipped steps on each batch."""

from __future__ import annotations

import asyncio
import random

import gradwire
from _support.start import arguments, open_service
from _support.tasks import sum_problem


def reward(text: str) -> float:
    """Return the share of even digits: a reward that an untrained model can learn."""
    return sum(character in "02468" for character in text) / max(1, len(text))


async def main() -> None:
    args = arguments(__doc__, steps=20)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        policy = await service.create_run(model.name, head="value", seed=args.seed)
        for step in range(args.steps):
            prompts = await service.encode(model.name, [sum_problem(rng).prompt for _ in range(64)])
            sampled = await policy.sample(prompts, max_tokens=16, temperature=1.0)
            rows = []
            for prompt, (sample,) in zip(prompts, sampled.samples):
                ids = [*prompt, *sample.token_ids.tolist()]
                mask = [0] * len(prompt) + [1] * len(sample.token_ids)
                rows.append({"input_ids": ids, "loss_mask": mask, "rewards": reward(sample.text or "")})
            # One entry per answer token: log-probabilities and values before the first step.
            scored = [{"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]} for row in rows]
            before = await policy.forward(scored, outputs=("logprobs", "values"))
            for row, logprobs, values in zip(rows, before.outputs["logprobs"], before.outputs["values"]):
                row |= {"old_log_probs": logprobs, "old_values": values}
            calls = []
            for _ in range(3):
                kwargs = {"gamma": 1.0, "beta": 0.02, "reference_model": "base", "whiten_advantages": True}
                calls.append(policy.forward_backward(rows, "enhanced_ppo", kwargs))
                policy.optim_step(learning_rate=3e-4)
            last = (await gradwire.gather(*calls))[-1]
            names = ("reward_mean", "policy_loss", "value_loss", "kl_divergence", "clip_fraction")
            print(f"step {step}:", "  ".join(f"{name} {last[name]:.3f}" for name in names))


if __name__ == "__main__":
    asyncio.run(main())
