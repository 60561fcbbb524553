"""Two rounds from ratings to a better policy: 200 simulated raters, a reward model, PPO, and ratings of the result.

A small model first learns to answer like a careless clerk: that is set-up. Then the feedback service runs two rounds:
raters, each with their own bias and noise, rate the answers of the deployed versions; the ratings train a reward model
and then the policy; the new version is deployed beside the old one, and the next ratings cover both. At the end every
version answers held-out questions and is judged by the true score, which no rater saw. The exit code is 0 if the true
score rose from version to version and the KL of each to the previous one stayed bounded."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from _support.feedback_service import FeedbackService, feedback_service
from _support.help_desk import Question, Rater, clerk, questions, raters, true_score
from _support.small_model import small_model
from gradwire.rlhf import TrainingResult
from rich.console import Console
from rich.table import Table

AGENT = "help-desk"
MAX_TOKENS = 32
HELD_OUT = 256
AT_ONCE = 16
TARGET_KL = 6.0
SETTINGS = {
    "loraR": 16, "loraDropout": 0.0, "learningRate": 5e-4, "batchSize": 64, "miniBatchSize": 32, "ppoEpochs": 2,
    "initKlCoef": 0.3, "targetKl": TARGET_KL, "maxNewTokens": MAX_TOKENS, "topK": 0, "topP": 1.0,
    "rewardModelConfig": {"learningRate": 2e-3, "batchSize": 32, "numEpochs": 6},
}  # fmt: skip

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Outcome:
    """A version on held-out questions.

    Attributes:
        version: Its name.
        score: Mean true score.
        kl: KL to the previous version in nats per answer; NaN for the first.
        answers: Answers to the first few questions.
    """

    version: str
    score: float
    kl: float
    answers: list[str]


async def imitate(out: Path, steps: int, practice: Sequence[Question], seed: int) -> Path:
    """Set-up: train a small model that answers like the careless clerk, and write it as a Hugging Face folder."""
    rng = random.Random(seed)
    texts = [question.prompt + clerk(question, rng) for question in practice]
    made = small_model(out / "untrained", texts=texts, vocab_size=360, num_layers=3, context_length=96, seed=seed)
    async with gradwire.connect(models=f"clerk={made}") as service:
        run = await service.create_run("clerk", seed=seed)
        (end,) = (await service.list_models())[0].eos_token_ids
        for step in range(steps):
            asked = rng.sample(practice, 64)
            prompts = await service.encode("clerk", [question.prompt for question in asked])
            answers = await service.encode("clerk", [clerk(q, rng) for q in asked], add_special_tokens=False)
            rows = [
                {"input_ids": [*prompt, *answer, end], "loss_mask": [0] * len(prompt) + [1] * (len(answer) + 1)}
                for prompt, answer in zip(prompts, answers)
            ]
            done = run.forward_backward(rows, "causal_lm")
            run.optim_step(learning_rate=3e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2))
            if (step + 1) % max(1, steps // 4) == 0:
                console.print(f"set-up: step {step + 1} of {steps}, loss {(await done).loss:.3f}")
        return await run.export(out / "start")


def rated(service: FeedbackService, crowd: Sequence[Rater], asked: Sequence[Question], rng: random.Random) -> None:
    """Let each rater rate a few answers of the deployed versions.

    Each answer has a seed: the ratings, and everything trained on them, are the same in every run.
    """
    users = [number % len(crowd) for number in range(len(asked))]
    seeds = [rng.getrandbits(32) for _ in asked]

    def ask(question: Question, user: int, seed: int) -> dict[str, Any]:
        return service.generate(question.prompt, f"rater-{user}", MAX_TOKENS, seed)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, asked, users, seeds))
    ratings = []
    for question, user, answer in zip(asked, users, answers):
        rating = crowd[user].rate(question, answer["response"], rng)
        ratings.append({"prompt": question.prompt, "response": answer["response"], "score": rating,
                        "runId": answer["runId"]})  # fmt: skip
    service.rate(ratings)
    mean = np.mean([rating["score"] for rating in ratings])
    versions = sorted({answer["version"] for answer in answers})
    console.print(f"{len(ratings)} ratings of {', '.join(versions)}: mean {mean:.3f}")


def trained(service: FeedbackService, steps: int, seed: int) -> dict[str, Any]:
    """Train a new version on all ratings so far."""
    stages: list[str] = []

    def show(progress: dict[str, Any]) -> None:
        if progress["stage"] not in stages:
            stages.append(progress["stage"])
            console.print(f"  {progress['stage']}: {progress['total']} steps")

    made = service.train({**SETTINGS, "maxSteps": steps, "seed": seed}, show)
    result = TrainingResult.load(Path(made["modelPath"]).parent)
    report = result.reward_model_report
    assert report is not None
    console.print(
        f"{made['version']}: reward model on {report.num_ratings} held-out ratings: Pearson {report.pearson:.2f}, "
        f"squared error {report.mean_squared_error:.3f} (a constant: {report.baseline_error:.3f}); policy: predicted "
        f"score {result.reward_history[0]:.3f} -> {result.final_reward_mean:.3f}, KL {result.kl_history[-1]:.2f}"
    )
    return made


async def judged(versions: Sequence[tuple[str, Path]], held_out: Sequence[Question], seed: int) -> list[Outcome]:
    """Evaluate every version's folder on the held-out questions, on a server that has only these folders."""
    outcomes: list[Outcome] = []
    async with gradwire.connect(models=[f"{name}={folder}" for name, folder in versions]) as service:
        first = versions[0][0]
        scorer = await service.create_run(first, lora=1)  # untrained: it is only used for scoring
        prompts = await service.encode(first, [question.prompt for question in held_out])
        before = ""
        for name, _ in versions:
            result = await service.sampling_client(name).sample(prompts, max_tokens=MAX_TOKENS, seed=seed)
            samples = [each for (each,) in result.samples]
            rows = [
                {"input_ids": [*prompt, *each.token_ids.tolist()],
                 "loss_mask": [0] * len(prompt) + [1] * len(each.token_ids)}
                for prompt, each in zip(prompts, samples)
            ]  # fmt: skip
            kl = math.nan
            if before:
                theirs = await scorer.compute_logprobs(rows, model=before)
                kl = float(np.mean([np.sum(own.logprobs) - np.sum(their) for own, their in zip(samples, theirs)]))
            answers = [each.text or "" for each in samples]
            score = float(np.mean([true_score(question, text) for question, text in zip(held_out, answers)]))
            outcomes.append(Outcome(name, score, kl, answers[:4]))
            before = name
    return outcomes


def loop(args: argparse.Namespace, folder: Path) -> list[tuple[str, Path]]:
    """Run the rounds; return the versions with their folders."""
    practice, _ = questions(args.seed, HELD_OUT)
    crowd, rng = raters(args.raters, args.seed), random.Random(args.seed)
    versions = [("start", folder)]
    with feedback_service(folder, args.out, AGENT) as service:
        for number in range(args.rounds):
            rated(service, crowd, rng.sample(practice, args.raters * args.ratings_each), rng)
            if number:
                console.print(f"A/B: {service.comparison()['verdict']}")
            made = trained(service, args.steps, args.seed)
            before = "base" if len(versions) == 1 else versions[-1][0]
            versions.append((made["version"], Path(made["modelPath"])))
            service.deploy({before: 0.5, made["version"]: 0.5})
        rated(service, crowd, rng.sample(practice, args.raters * args.ratings_each), rng)
        console.print(f"A/B: {service.comparison()['verdict']}")
    return versions


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    shutil.rmtree(args.out, ignore_errors=True)
    practice, held_out = questions(args.seed, HELD_OUT)
    folder = asyncio.run(imitate(args.out, args.setup_steps, practice, args.seed))
    started = time.monotonic()
    versions = loop(args, folder)
    outcomes = asyncio.run(judged(versions, held_out, args.seed))
    table = Table("version", "true score", "KL to the one before, nats", title=f"{HELD_OUT} held-out questions")
    for each in outcomes:
        table.add_row(each.version, f"{each.score:.3f}", "" if math.isnan(each.kl) else f"{each.kl:.2f}")
    console.print(table)
    for place, question in enumerate(held_out[:4]):
        console.print(question.text, *(f"\n  {each.version:6}{each.answers[place]}" for each in outcomes), sep="")
    console.print(f"{time.monotonic() - started:.0f} s without the set-up")
    rose = all(after.score > before.score for before, after in pairwise(outcomes))
    bounded = all(each.kl < 2 * TARGET_KL for each in outcomes[1:])
    if not rose or not bounded:
        console.print(f"[red]{'the true score did not rise' if not rose else 'the KL is above twice its target'}")
    return 0 if rose and bounded else 1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--raters", type=int, default=200)
    parser.add_argument("--ratings-each", type=int, default=4, help="by each rater in each round (4)")
    parser.add_argument("--steps", type=int, default=40, help="of PPO in each round (40)")
    parser.add_argument("--setup-steps", type=int, default=300, help="of learning to answer like the clerk (300)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random: one seed, one result (0)")
    parser.add_argument("--out", type=Path, default=Path("out/feedback_loop"), help="emptied first")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
