"""A small language model as a router: it reads a request and writes who should answer it, trained by GRPO and HICRA.

The requests, the modes and their rewards are those of `gradwire.router`. A request becomes a line such as
`code, length 2, difficulty 7, urgency 3, budget 5, loads 1 4 9:`, and each mode is a phrase of the answer, as in
`let four models debate`. The model first imitates a person who guesses by the domain half of the time and at random
else, and then learns from rewards alone, through the server. HICRA's strategic grams come from the start's own answers
that succeeded.

Prints what each router earns on the same held-out requests, with the linear policy trained by PPO (on as many requests
as the language model saw, and on its defaults' many more), the best single mode, random choice and the oracle.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gradwire
import numpy as np
import numpy.typing as npt
from _support.small_model import EOS, small_model
from gradwire.rl import (
    AlgorithmConfig,
    GRPOAlgorithm,
    HICRAAlgorithm,
    SamplingParams,
    StrategicGrams,
    Task,
    find_strategic_grams,
    reward_function,
)
from gradwire.rl.inference import RunInference
from gradwire.router import LinearPolicy, RouterPPOAdapter
from gradwire.router.world import DOMAINS, World

PHRASES = {
    "small": "ask the small model",
    "large": "ask the large model",
    "review": "let a second one review",
    "planner_worker": "plan it and hand out",
    "debate": "let four models debate",
    "research": "search the web for it",
}
GUESSES = {"chat": "small", "code": "review", "math": "debate", "search": "research"}
WORLD = World()
MODE_OF = {PHRASES[mode]: number for number, mode in enumerate(WORLD.modes)}  # in the order of the modes
UNREADABLE = -1.0  # what an answer that names no mode earns: less than any mode does on average
DEMONSTRATIONS = 64  # a step of imitation
Floats = npt.NDArray[np.float64]


def domain_of(request: Floats) -> str:
    return next(each for each in DOMAINS if request[WORLD.features.names.index(f"domain={each}")])


def as_text(request: Floats) -> str:
    """Format a request's features in tenths."""
    named = dict(zip(WORLD.features.names, request))
    tenths = {name: min(9, int(10 * value)) for name, value in named.items()}
    parts = [f"{name} {tenths[name]}" for name in ("length", "difficulty", "urgency", "budget")]
    loads = " ".join(str(tenths[f"load_{provider}"]) for provider in ("small", "large", "tools"))
    return f"{domain_of(request)}, {', '.join(parts)}, loads {loads}:"


def mode_in(answer: str) -> int | None:
    """Return the number of the mode that an answer names."""
    return MODE_OF.get(answer.strip())


class Requests:
    """Requests with fixed random outcomes: the same for every answer to one request.

    Attributes:
        x: ``[requests, features]``.
        rewards: ``[requests, modes]``, reward of each mode.
        successes: ``[requests, modes]`` bool.
    """

    def __init__(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        self.x, luck = WORLD.draw(rng, count), rng.random((2, count))
        played = [WORLD.outcome(self.x, np.full(count, mode), luck) for mode in range(len(WORLD.modes))]
        self.rewards = np.stack([each.reward for each in played], axis=1)
        self.successes = np.stack([each.success for each in played], axis=1)

    @property
    def tasks(self) -> list[Task]:
        """Each with the reward of every phrase for its ground truth."""
        return [
            Task(as_text(request), dict(zip(MODE_OF, rewards)), str(number))
            for number, (request, rewards) in enumerate(zip(self.x, self.rewards.tolist()))
        ]


@reward_function
def earned(response: str, ground_truth: dict[str, float]) -> float:
    return ground_truth.get(response.strip(), UNREADABLE)


async def imitate(service: gradwire.ServiceClient, model: str, steps: int, seed: int) -> str:
    """Train a run to imitate the person; return its checkpoint."""
    run, rng = await service.create_run(model, seed=seed), np.random.default_rng(seed)
    for step in range(steps):
        requests = WORLD.draw(rng, DEMONSTRATIONS)
        prompts = [as_text(request) for request in requests]
        modes = [GUESSES[domain_of(each)] if rng.random() < 0.5 else rng.choice(WORLD.modes) for each in requests]
        starts = await service.encode(model, prompts)
        rows = await service.encode(model, [f"{p} {PHRASES[m]}{EOS}" for p, m in zip(prompts, modes)])
        mask = [[0] * len(start) + [1] * (len(row) - len(start)) for start, row in zip(starts, rows)]
        run.forward_backward({"input_ids": rows, "loss_mask": mask}, "causal_lm")
        await run.optim_step(learning_rate=2e-3 * min(1.0, (step + 1) / 20))
    return (await run.save_checkpoint(name="imitation")).path


async def answers(
    service: gradwire.ServiceClient, run: gradwire.TrainingClient, x: Floats, temperature: float
) -> list[str]:
    inference = await RunInference.of(service, run)
    prompts = await inference.codec.encode([as_text(request) for request in x])
    return [each.text for each in await inference.generate(prompts, SamplingParams(16, temperature, seed=0))]


async def train(
    service: gradwire.ServiceClient, start: str, grams: StrategicGrams | None, requests: Requests,
    args: argparse.Namespace,
) -> gradwire.TrainingClient:  # fmt: skip
    run = await service.fork_run(start, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = AlgorithmConfig(
            batch_size=args.batch_size, group_size=8, learning_rate=args.learning_rate, warmup_iterations=5,
            max_tokens=16, seed=args.seed, checkpoint_dir=folder,
            loss_kwargs={"scale_rewards": False},
        )  # fmt: skip
        if grams is None:
            algorithm = GRPOAlgorithm(service, run, requests.tasks, earned, config)
        else:
            algorithm = HICRAAlgorithm(service, run, requests.tasks, earned, config, grams=grams)
        async with algorithm:
            await algorithm.train(args.iterations)
    return run


def linear_policy(requests: int | None, seed: int) -> LinearPolicy:
    """Train the linear policy by PPO on about this many requests; by default with the default settings."""
    on = {"rllm": {"enabled": True}, "trainer": {"enabled": True}}
    if requests is None:
        return RouterPPOAdapter(on).train(seed=seed).policy
    # A rollout of 64 environments with 16 steps each has some 400 requests: a request takes 1 to 6 steps.
    few = on | {"rollout": {"environments": 64, "rollout_length": 16}}
    few["trainer"] = on["trainer"] | {"mini_batch_size": 256}
    return RouterPPOAdapter(few).train(updates=max(1, requests // 400), seed=seed).policy


def row(name: str, modes: Sequence[int | None], table: Floats) -> str:
    earned = [UNREADABLE if mode is None else table[number, mode] for number, mode in enumerate(modes)]
    shares = " ".join(f"{np.mean([mode == each for mode in modes]):5.2f}" for each in range(len(WORLD.modes)))
    return f"{name:34} {np.mean(earned):7.3f}   {shares}"


async def main(args: argparse.Namespace) -> None:
    requests = Requests(args.seed + 1, args.iterations * args.batch_size)
    held_out = Requests(args.seed + 2, args.held_out).x
    tried = Requests(args.seed + 3, 512)  # what the start answers, for the strategic grams
    table = WORLD.expected(held_out)["reward"]
    trained: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="gradwire-example-") as folder:
        texts = [f"{as_text(x)} {phrase}" for x in tried.x[:200] for phrase in PHRASES.values()]
        path = small_model(Path(folder) / "small", texts=texts, vocab_size=330, context_length=64, seed=args.seed)
        async with gradwire.connect(models=[f"small={path}"]) as service:
            start = await imitate(service, "small", args.imitation_steps, args.seed)
            run = await service.fork_run(start, seed=args.seed)
            read = [(answer, mode_in(answer)) for answer in await answers(service, run, tried.x, 1.0)]
            right = [
                answer
                for (answer, mode), successes in zip(read, tried.successes)
                if mode is not None and successes[mode]
            ]
            grams = find_strategic_grams(right)
            print(f"strategic in {len(right)} answers that succeeded: {', '.join(sorted(grams.grams))}")
            trained["as it started"] = await answers(service, run, held_out, 0.0)
            for name, marks in (("GRPO", None), ("HICRA", grams)):
                run = await train(service, start, marks, requests, args)
                trained[f"language model, {name}"] = await answers(service, run, held_out, 0.0)

    seen = 8 * args.iterations * args.batch_size  # every answer to a request is one outcome
    print(f"\n{'router':34} {'reward':>7}   {' '.join(f'{mode[:5]:>5}' for mode in WORLD.modes)}")
    for name, texts in trained.items():
        print(row(name, [mode_in(text) for text in texts], table))
    for name, policy in (
        (f"linear policy, {seen} outcomes", linear_policy(seen, args.seed)),
        ("linear policy, PPO's defaults", linear_policy(None, args.seed)),
    ):
        print(row(name, policy.act(held_out)[0].tolist(), table))
    single, rng = int(table.mean(0).argmax()), np.random.default_rng(args.seed)
    print(row(f"always {WORLD.modes[single]}", [single] * len(held_out), table))
    print(row("random", rng.integers(len(WORLD.modes), size=len(held_out)).tolist(), table))
    print(row("oracle", table.argmax(1).tolist(), table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--imitation-steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
