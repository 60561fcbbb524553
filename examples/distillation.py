"""Distillation: an untrained student learns its teacher's distributions, on the student's own texts.

The teacher is another run that learned to add; the student names its checkpoint as ``reference_model``.
"""

from __future__ import annotations

import asyncio
import random

import gradwire
from _support.start import arguments, open_service
from _support.tasks import sum_problem


async def main() -> None:
    args = arguments(__doc__, steps=200)
    rng = random.Random(args.seed)
    async with open_service(args) as (service, model):

        async def worked_sums(rows: int) -> list[dict[str, list[int]]]:
            problems = [sum_problem(rng) for _ in range(rows)]
            prompts = await service.encode(model.name, [problem.prompt for problem in problems])
            answers = await service.encode(model.name, [each.answer for each in problems], add_special_tokens=False)
            return [row([*prompt], [*answer, model.eos_token_ids[0]]) for prompt, answer in zip(prompts, answers)]

        async def own_answers(student: gradwire.TrainingClient, rows: int) -> list[dict[str, list[int]]]:
            prompts = await service.encode(model.name, [sum_problem(rng).prompt for _ in range(rows)])
            sampled = (await student.sample(prompts, max_tokens=24)).samples
            return [row([*prompt], group[0].token_ids.tolist()) for prompt, group in zip(prompts, sampled)]

        teacher = await service.create_run(model.name, seed=args.seed)
        for _ in range(args.steps):
            teacher.forward_backward(await worked_sums(64), "causal_lm")
            taught = teacher.optim_step(learning_rate=3e-3)
        await taught
        checkpoint = await teacher.save_checkpoint("teacher")

        student = await service.create_run(model.name, seed=args.seed + 1)
        kwargs = {"reference_model": checkpoint.path, "beta": 0.5}
        for step in range(args.steps):
            # Half of the batches are the student's own samples, so that it learns to recover from its own mistakes.
            batch = await own_answers(student, 64) if rng.random() < 0.5 else await worked_sums(64)
            result = await student.forward_backward(batch, "gkd", kwargs)
            await student.optim_step(learning_rate=3e-3)
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step}: divergence {result['divergence']:.4f}  nll {result['nll']:.3f}")
        held_out = await worked_sums(128)
        for name, run in (("teacher", teacher), ("student", student)):
            found = await run.forward(held_out, "causal_lm")
            print(f"{name}: loss {found['loss']:.3f}, token accuracy {found['token_accuracy']:.3f} on sums not seen")


def row(prompt: list[int], response: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + [1] * len(response)}


if __name__ == "__main__":
    asyncio.run(main())
