"""The library without the service: preferences become scores, scores a reward model, and that a policy.

Two files of JSON lines: demonstrations (``question``, ``answer``), which a small model made on the spot learns to
write, and preferences (``prompt``, ``chosen``, ``rejected``): an answer's score is the share of comparisons that it
won. One prompt in five is held out. Prints what the reward model makes of held-out answers, and what the policy became.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import gradwire
from _support.small_model import small_model
from gradwire.rlhf import RewardModelConfig, RLHFTrainer, TrainingConfig


def scores(path: Path) -> list[dict[str, object]]:
    """Score each distinct answer by the share of its comparisons that it won."""
    won: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        won[row["prompt"] + "\n", row["chosen"]].append(1)
        won[row["prompt"] + "\n", row["rejected"]].append(0)
    return [
        {"prompt": prompt, "response": answer, "score": sum(wins) / len(wins)} for (prompt, answer), wins in won.items()
    ]


def demonstrations(path: Path) -> list[tuple[str, str]]:
    """Prompts and the answers to imitate."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["question"] + "\n", row["answer"]) for row in rows]


async def imitate(pairs: Sequence[tuple[str, str]], args: argparse.Namespace) -> Path:
    """Train a small model on the demonstrations, and write it as a Hugging Face folder."""
    made = small_model(
        args.out / "untrained", texts=[text for pair in pairs for text in pair], vocab_size=1024,
        hidden_size=args.hidden_size, num_layers=3, context_length=512, seed=args.seed,
    )  # fmt: skip
    rng = random.Random(args.seed)
    async with gradwire.connect(models=f"small={made}") as service:
        run = await service.create_run("small", seed=args.seed)
        (end,) = (await service.list_models())[0].eos_token_ids
        for step in range(args.setup_steps):
            part = rng.sample(pairs, 16)
            prompts = await service.encode("small", [prompt for prompt, _ in part])
            answers = await service.encode("small", [answer for _, answer in part], add_special_tokens=False)
            batch = [
                {"input_ids": [*p, *a, end][:512], "loss_mask": ([0] * len(p) + [1] * (len(a) + 1))[:512]}
                for p, a in zip(prompts, answers)
            ]
            done = run.forward_backward(batch, "causal_lm")
            run.optim_step(learning_rate=2e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / args.setup_steps)) / 2))
            if (step + 1) % max(1, args.setup_steps // 4) == 0:
                print(f"set-up: step {step + 1} of {args.setup_steps}, loss {(await done).loss:.3f}", flush=True)
        return await run.export(args.out / "start")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--demonstrations", type=Path, required=True)
    parser.add_argument("--preferences", type=Path, required=True)
    parser.add_argument("--setup-steps", type=int, default=400)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="of PPO (40)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/scores_from_preferences"))
    args = parser.parse_args(argv)
    feedbacks = scores(args.preferences)
    print(f"{len(feedbacks)} scored answers to {len({item['prompt'] for item in feedbacks})} prompts", flush=True)
    folder = asyncio.run(imitate(demonstrations(args.demonstrations), args))
    shared = {"base_model": str(folder), "lora_r": 16, "lora_dropout": 0.0, "batch_size": 16, "seed": args.seed}
    config = TrainingConfig(
        **shared, learning_rate=3e-4, max_steps=args.steps, max_new_tokens=args.max_new_tokens, ppo_epochs=2
    )
    trainer = RLHFTrainer(config, reward_config=RewardModelConfig(**shared, learning_rate=2e-3))
    result = trainer.train(feedbacks, args.out / "trained")
    report = result.reward_model_report
    assert report is not None
    print(f"reward model, {report.num_ratings} held-out answers: Pearson {report.pearson:.3f}, Spearman "
          f"{report.spearman:.3f}, squared error {report.mean_squared_error:.4f} (a constant: "
          f"{report.baseline_error:.4f}), calibration error {report.calibration_error:.3f}")  # fmt: skip
    tenth = max(1, len(result.reward_history) // 10)
    first = sum(result.reward_history[:tenth]) / tenth
    print(f"policy: predicted score {first:.3f} -> {result.final_reward_mean:.3f} (standard deviation "
          f"{result.final_reward_std:.3f}), KL {result.kl_history[-1]:.2f} nats an answer")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
