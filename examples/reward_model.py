"""A reward model from preferences, in a script with no event loop: ``gradwire.sync``."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import gradwire.sync
from _support.start import arguments, model_folder
from _support.tasks import spoiled, sum_problem


def main() -> None:
    args = arguments(__doc__, steps=60)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        own = () if args.address else (args.model or str(model_folder(Path(folder), args.seed)),)
        with gradwire.sync.connect(args.address, models=own) as service:
            model = args.model if args.address else service.list_models()[0].name
            run = service.create_run(model, head="reward", seed=args.seed)
            for step in range(args.steps):
                problems = [sum_problem(rng) for _ in range(32)]
                right = [problem.prompt + problem.answer for problem in problems]
                wrong = [problem.prompt + spoiled(problem.answer, rng) for problem in problems]
                batch = {
                    "chosen_input_ids": service.encode(model, right),
                    "rejected_input_ids": service.encode(model, wrong),
                }
                result = run.forward_backward(batch, "reward_modeling")
                run.optim_step(learning_rate=1e-3)
                if step % 5 == 0 or step == args.steps - 1:
                    metrics = result.result()
                    print(f"step {step}: loss {metrics['loss']:.3f}  accuracy {metrics['preference_accuracy']:.3f}")
            careful = sum_problem(rng)
            texts = [careful.prompt + careful.answer, careful.prompt + spoiled(careful.answer, rng)]
            rewards = run.compute_rewards({"input_ids": service.encode(model, texts)}).result()
            for text, reward in zip(texts, rewards):
                print(f"{reward:+.2f}  {text}")


if __name__ == "__main__":
    main()
