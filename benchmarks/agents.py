"""The same task learned through an unmodified agent and in an environment of our own: mean rewards over seeds.

    python -m benchmarks.agents --seeds 6 --iterations 24

Both train the tests' model of a secret word by GRPO on one server: see ``tests/support/secret_word.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import gradwire
from gradwire import rl
from support import secret_word
from support.server import free_port
from support.tinker import HttpServer

SHOWN = (0, 2, 4, 6, 8, 10, 12, 16, 20, 23)


def environments() -> dict[str, tuple[Any, Any]]:
    """Name -> environment and reward."""
    agent = rl.AgentEnvironment(secret_word.agent, reward=secret_word.secret_word_reward)
    return {
        "agent": (agent, rl.environment_reward()),
        "ToolEnvironment": (secret_word.OwnEnvironment(), secret_word.secret_word_reward),
    }


async def curve(service: Any, name: str, seed: int, iterations: int, folder: Path) -> list[float]:
    """Rewards of each iteration."""
    run = await service.create_run("tiny", lora={"rank": 8})
    environment, reward = environments()[name]
    config = rl.AlgorithmConfig(
        batch_size=3, group_size=8, max_tokens=8, learning_rate=1e-3, seed=seed, checkpoint_dir=folder / f"{name}{seed}"
    )
    tasks = secret_word.tasks()
    async with rl.GRPOAlgorithm(service, run, tasks, reward, config, environment=environment) as algorithm:
        metrics = await algorithm.train(iterations, progress_bar=False)
    return [each["rewards/reward"] for each in metrics]


async def main(seeds: int, iterations: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = secret_word.secret_word_model(folder / "model")
        with HttpServer(model, folder / "state", free_port(), "--threads", "1") as server:
            async with gradwire.connect(server.address, connect_timeout=120) as service:
                found: dict[str, list[list[float]]] = {name: [] for name in environments()}
                for seed in range(seeds):
                    for name, curves in found.items():
                        curves.append(await curve(service, name, seed, iterations, folder))
    table(found)


def table(found: dict[str, list[list[float]]]) -> None:
    """Print means and their standard errors."""
    print("| iteration | " + " | ".join(found) + " |\n| --- |" + " --- |" * len(found))
    for at in (each for each in SHOWN if each < len(next(iter(found.values()))[0])):
        cells = []
        for curves in found.values():
            values = [each[at] for each in curves]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.2f} ± {error:.2f}")
        print(f"| {at + 1} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    asyncio.run(main(options.seeds, options.iterations))
