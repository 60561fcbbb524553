"""Supervised fine-tuning: learn to add from worked sums; only the answers are trained on, not the questions."""

from __future__ import annotations

import asyncio
import random

from _support.start import arguments, open_service
from _support.tasks import sum_problem


async def main() -> None:
    args = arguments(__doc__, steps=300)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):
        run = await service.create_run(model.name, seed=args.seed)
        for step in range(args.steps):
            problems = [sum_problem(rng) for _ in range(64)]
            prompts = await service.encode(model.name, [problem.prompt for problem in problems])
            answers = await service.encode(model.name, [each.answer for each in problems], add_special_tokens=False)
            rows = []
            for prompt, answer in zip(prompts, answers):
                ids = [*prompt, *answer, model.eos_token_ids[0]]
                rows.append({"input_ids": ids, "loss_mask": [i >= len(prompt) for i in range(len(ids))]})
            result = run.forward_backward(rows, "causal_lm")
            stepped = run.optim_step(learning_rate=3e-3 * min(1.0, (step + 1) / 20))
            if step % 10 == 0 or step == args.steps - 1:
                loss, accuracy = (await result)["loss"], (await result)["token_accuracy"]
                print(f"step {step}: loss {loss:.3f}  accuracy {accuracy:.3f}  |grad| {(await stepped).grad_norm:.2f}")
        checkpoint = await run.save_checkpoint("sft")
        print(f"saved {checkpoint.path}, {checkpoint.size_bytes / 1e6:.1f} MB")
        sample = (await run.sample(["123+456="], max_tokens=40, temperature=0.0)).samples[0][0]
        print(f"123+456={sample.text}")


if __name__ == "__main__":
    asyncio.run(main())
