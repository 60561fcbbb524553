"""Direct preference optimisation: prefer careful sums to careless ones, relative to the initial model."""

from __future__ import annotations

import asyncio
import random

from _support.start import arguments, open_service
from _support.tasks import sum_problem


async def main() -> None:
    args = arguments(__doc__, steps=60)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        run = await service.create_run(model.name, lora={"rank": 16}, seed=args.seed)
        for step in range(args.steps):
            pairs = []
            while len(pairs) < 32:
                seed = rng.random()
                careful, careless = sum_problem(random.Random(seed)), sum_problem(random.Random(seed), 0.9)
                if careful.prompt == careless.prompt and careful.answer != careless.answer:
                    pairs.append((careful.prompt, careful.answer, careless.answer))
            prompts = await service.encode(model.name, [prompt for prompt, _, _ in pairs])
            chosen = await service.encode(model.name, [right for _, right, _ in pairs], add_special_tokens=False)
            rejected = await service.encode(model.name, [wrong for _, _, wrong in pairs], add_special_tokens=False)
            batch = {
                "chosen_input_ids": [[*prompt, *answer] for prompt, answer in zip(prompts, chosen)],
                "rejected_input_ids": [[*prompt, *answer] for prompt, answer in zip(prompts, rejected)],
                "prompt_lengths": [len(prompt) for prompt in prompts],
            }
            # "base" is the model with the adapter switched off: it costs no memory.
            result = run.forward_backward(batch, "dpo", {"beta": 0.1, "reference_model": "base"})
            run.optim_step(learning_rate=1e-3)
            if step % 5 == 0 or step == args.steps - 1:
                names = ("loss", "preference_accuracy", "reward_margin")
                metrics = await result
                print(f"step {step}:", "  ".join(f"{name} {metrics[name]:.3f}" for name in names))


if __name__ == "__main__":
    asyncio.run(main())
