"""HICRA compared with plain GRPO and with random grams, on problems of two levels: choose a plan, then carry it out.

`red 14 9` has to be answered by adding, `blue 14 9` by the larger number, and so on: a colour asks for a plan, and the
plan for a calculation, as in `let us add both numbers, now it goes quickly: 14+9=23`. The model first imitates pupils
who choose the right plan half of the time and miscalculate three times in ten; each plan has two wordings, followed by
one of eight meaningless phrases. From there GRPO learns only from whether the last number was right. HICRA's grams are
found in the initial policy's right answers; the random ones are clusters of the same grams, drawn until they mark as
many tokens.

Prints the grams and a table, writes the curves as `curves.svg` and each training's numbers as JSONL under --output.
--write-docs puts table and curves into docs/hicra.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import gradwire
from _support.comparison import Training, draw, means, table
from _support.small_model import EOS, small_model
from gradwire.rl import (
    AlgorithmConfig,
    GRPOAlgorithm,
    HICRAAlgorithm,
    SamplingParams,
    StrategicGrams,
    Task,
    find_strategic_grams,
    last_number,
)
from gradwire.rl.inference import RunInference
from gradwire.rl.strategic_grams import token_texts

ARMS = ("GRPO", "HICRA", "random grams")
DEMONSTRATIONS = 64  # a step of imitation
DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- results: begin (examples/hicra_language_model.py --write-docs) -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Plan:
    """Two wordings of a plan, and the sign and result of its calculation."""

    said: tuple[str, str]
    sign: str

    def result(self, a: int, b: int) -> int:
        return {"+": a + b, "|": max(a, b), "&": min(a, b), "-": abs(a - b)}[self.sign]


PLANS = (
    Plan(("let us add both numbers", "we should form the sum"), "+"),
    Plan(("let us take the larger number", "we should keep the greater one"), "|"),
    Plan(("let us take the smaller number", "we should keep the lesser one"), "&"),
    Plan(("let us subtract one number", "we should form the difference"), "-"),
)
PHRASES = (
    "which soon gives us", "so here it is", "and the rest follows", "now it goes quickly", "step by step then",
    "with care it becomes", "as anyone can see", "just work it out",
)  # fmt: skip
COLOURS = {"red": 0, "blue": 1, "green": 2, "gold": 3, "black": 0, "white": 3, "pink": 1, "grey": 2}


@dataclass(frozen=True)
class Problem:
    colour: str
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.colour} {self.a} {self.b}:"

    @property
    def number(self) -> int:
        return PLANS[COLOURS[self.colour]].result(self.a, self.b)

    def demonstration(self, rng: random.Random) -> str:
        """A pupil's answer: half of the plans are right, and seven numbers in ten are correct for the plan."""
        plan = PLANS[COLOURS[self.colour]] if rng.random() < 1 / 3 else rng.choice(PLANS)
        number = plan.result(self.a, self.b)
        if rng.random() < 0.3:
            number = max(0, number + rng.choice((-2, -1, 1, 2)))
        return f" {rng.choice(plan.said)}, {rng.choice(PHRASES)}: {self.a}{plan.sign}{self.b}={number}"


def problems(seed: int, demonstrations: int) -> tuple[list[tuple[str, str]], list[Task], list[Task]]:
    """Demonstrations, tasks to train on, and tasks held out of both."""
    rng = random.Random(seed)
    every = [Problem(colour, a, b) for colour in COLOURS for a, b in itertools.permutations(range(1, 13), 2)]
    rng.shuffle(every)
    held_out, train = every[:256], every[256:]
    shown = [(each.prompt, each.demonstration(rng) + EOS) for each in rng.choices(train, k=demonstrations)]
    tasks = [[Task(each.prompt, str(each.number)) for each in part] for part in (train, held_out)]
    return shown, tasks[0], tasks[1]


async def imitate(
    service: gradwire.ServiceClient, model: str, demonstrations: Sequence[tuple[str, str]], seed: int
) -> str:
    """Train a run to imitate the pupils; return its checkpoint."""
    run = await service.create_run(model, seed=seed)
    steps = len(demonstrations) // DEMONSTRATIONS
    for step in range(steps):
        pupils = demonstrations[DEMONSTRATIONS * step : DEMONSTRATIONS * (step + 1)]
        prompts = await service.encode(model, [prompt for prompt, _ in pupils])
        rows = await service.encode(model, [prompt + answer for prompt, answer in pupils])
        mask = [[0] * len(prompt) + [1] * (len(row) - len(prompt)) for prompt, row in zip(prompts, rows)]
        run.forward_backward({"input_ids": rows, "loss_mask": mask}, "causal_lm")
        warm, cool = min(1.0, (step + 1) / 20), (1 + math.cos(math.pi * step / steps)) / 2
        await run.optim_step(learning_rate=3e-3 * warm * cool)
    return (await run.save_checkpoint(name="imitation")).path


async def find_grams(
    service: gradwire.ServiceClient, start: str, tasks: Sequence[Task], seed: int
) -> tuple[StrategicGrams, StrategicGrams]:
    """Find the strategic grams of the initial policy's right answers, and random ones that mark the same share of
    tokens."""
    inference = await RunInference.of(service, await service.fork_run(start, seed=seed))
    chosen = random.Random(seed).sample(list(tasks), 512)
    prompts = await inference.codec.encode([str(task.prompt) for task in chosen])
    answers = await inference.generate(prompts, SamplingParams(max_tokens=28, seed=seed))
    right = [
        each for task, each in zip(chosen, answers) if each.text.rpartition("=")[2].strip() == str(task.ground_truth)
    ]
    solutions = [each.text for each in right]
    texts = await token_texts(inference.codec, [each.token_ids for each in right])

    def marked(grams: StrategicGrams) -> float:
        return fmean(float(mark) for each in texts for mark in grams.planning_mask(each))

    mined = find_strategic_grams(solutions)
    clusters = list(find_strategic_grams(solutions, top_share=1.0).clusters)
    random.Random(seed + 1).shuffle(clusters)
    drawn = StrategicGrams(())
    for cluster in clusters:
        if marked(drawn) >= marked(mined):
            break
        drawn = StrategicGrams((*drawn.clusters, cluster), mined.num_solutions, mined.num_clusters)
    print(
        f"seed {seed}: of {mined.num_clusters} clusters of grams in {len(solutions)} right answers, "
        f"{len(mined.clusters)} are strategic and mark {marked(mined):.0%} of tokens; {len(drawn.clusters)} random "
        f"clusters mark {marked(drawn):.0%}"
    )
    for cluster in mined.clusters:
        print(f"  in {cluster.solutions:3d} answers: {', '.join(cluster.grams[:6])}")
    return mined, drawn


async def train(
    service: gradwire.ServiceClient, start: str, arm: str, grams: StrategicGrams | None, tasks: Sequence[Task],
    held_out: Sequence[Task], seed: int, args: argparse.Namespace,
) -> Training:  # fmt: skip
    run = await service.fork_run(start, seed=seed)
    config = AlgorithmConfig(
        batch_size=16, group_size=8, learning_rate=args.learning_rate, warmup_iterations=5, max_tokens=28, seed=seed,
        eval_every=max(1, args.iterations // 10), eval_temperature=1.0, loss_kwargs={"scale_rewards": False},
        checkpoint_dir=args.output / f"{arm.replace(' ', '-')}-{seed}",
    )  # fmt: skip
    options = {"eval_tasks": held_out}
    if grams is None:
        algorithm = GRPOAlgorithm(service, run, tasks, last_number(), config, **options)
    else:
        algorithm = HICRAAlgorithm(service, run, tasks, last_number(), config, grams=grams, **options)
    async with algorithm:
        curve = [(0, (await algorithm.evaluate())["eval/success"])]
        for iteration, metrics in enumerate(await algorithm.train(args.iterations), 1):
            if "eval/success" in metrics:
                curve.append((iteration, metrics["eval/success"]))
    return Training(arm, "plan and calculate", seed, curve)


async def compare(args: argparse.Namespace) -> list[Training]:
    trainings = []
    rng = random.Random(0)
    shown, _, _ = problems(0, 2000)
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        texts = [prompt + answer.removesuffix(EOS) for prompt, answer in rng.sample(shown, 2000)]
        path = small_model(Path(folder) / "small", texts=texts, vocab_size=400, context_length=64)
        async with gradwire.connect(models=[f"small={path}"]) as service:
            for seed in range(args.seeds):
                demonstrations, tasks, held_out = problems(seed, args.imitation_steps * DEMONSTRATIONS)
                start = await imitate(service, "small", demonstrations, seed)
                found, drawn = await find_grams(service, start, tasks, seed)
                for arm, grams in zip(ARMS, (None, found, drawn)):
                    trainings.append(await train(service, start, arm, grams, tasks, held_out, seed, args))
                    print(f"{arm}, seed {seed}: {trainings[-1]}", flush=True)
    return trainings


def along_the_way(trainings: Sequence[Training]) -> str:
    """Markdown: held-out success averaged over the evaluations of a training, which rewards learning sooner."""
    seeds = sorted({each.seed for each in trainings})
    lines = [["mean over the training", *(f"seed {seed}" for seed in seeds), "mean"], ["---"] * (len(seeds) + 2)]
    for arm in ARMS:
        means = [fmean(success for _, success in each.curve[1:]) for each in trainings if each.algorithm == arm]
        lines.append([arm, *(f"{each:.3f}" for each in means), f"**{fmean(means):.3f}**"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--imitation-steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/hicra_language_model"))
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    trainings = asyncio.run(compare(args))
    args.output.mkdir(parents=True, exist_ok=True)
    draw(trainings, args.output / "curves.svg")
    results = f"{table(trainings)}\n\n{along_the_way(trainings)}"
    print("", results, sep="\n")
    if args.write_docs:
        shutil.copy(args.output / "curves.svg", DOCS / "hicra_curves.svg")
        page = (DOCS / "hicra.md").read_text()
        before, begin, rest = page.partition(BEGIN)
        (DOCS / "hicra.md").write_text(f"{before}{begin}\n{means(trainings)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
