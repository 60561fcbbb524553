"""The same task learned through an unmodified agent and in an environment of our own: mean rewards over seeds.

    python -m benchmarks.agents --seeds 6 --iterations 24
    python -m benchmarks.agents --model SmolLM2-135M-Instruct --seeds 1 --iterations 10

Both train by GRPO on one server: the tests' model of a secret word (``tests/support/secret_word.py``), or an instruct
model in a folder, which is shown in its prompt how others called the tool and how they guessed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
from gradwire import rl
from gradwire.rl.environments import first_messages
from support import secret_word
from support.server import free_port
from support.tinker import HttpServer

SHOWN = (0, 2, 4, 6, 8, 10, 12, 16, 20, 23)


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
QUESTION = "Which word is it: red, green or blue?"
SYSTEM = f"You say which word it is. You may look it up first with {CALL}. Answer with one word."
SEEN = (("green", False), ("blue", True), ("red", False), ("red", True), ("green", True))
"""What the prompt shows: a word, and whether it was looked up."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Lesson:
    """A model, its tasks, and how it learns them."""

    model: Path
    tasks: list[rl.Task]
    max_tokens: int
    learning_rate: float
    rank: int


def tiny(folder: Path) -> Lesson:
    return Lesson(secret_word.secret_word_model(folder / "model"), secret_word.tasks(), 8, 1e-3, 8)


def instruct(model: Path, folder: Path) -> Lesson:
    """A model with a template that has tools, and a conversation that shows them."""
    made = folder / "model"
    made.mkdir()
    for file in model.iterdir():
        if "chat_template" not in file.name:
            (made / file.name).symlink_to(file.resolve())
    (made / "chat_template.jinja").write_text(TEMPLATE)
    talk: list[Any] = [{"role": "system", "content": SYSTEM}]
    for word, looked in SEEN:
        talk.append({"role": "user", "content": QUESTION})
        if looked:
            talk += [{"role": "assistant", "content": CALL}, {"role": "tool", "tool_call_id": "0", "content": word}]
        talk.append({"role": "assistant", "content": word})
    talk.append({"role": "user", "content": QUESTION})
    return Lesson(made, [rl.Task(talk, word, word) for word in ("red", "green", "blue")], 32, 3e-4, 16)


async def agent(client: Any, task: rl.Task) -> str:
    """The tests' agent, with a whole conversation for its beginning."""
    return await secret_word.converse(client, list(first_messages(task)), str(task.ground_truth).lower())


def environments() -> dict[str, tuple[Any, Any]]:
    """Name -> environment and reward."""
    reward = secret_word.secret_word_reward
    return {
        "agent": (rl.AgentEnvironment(agent, reward=reward), rl.environment_reward()),
        "`ToolEnvironment`": (secret_word.OwnEnvironment(), reward),
    }


async def curve(service: Any, lesson: Lesson, name: str, seed: int, iterations: int) -> list[float]:
    """Rewards of each iteration."""
    run = await service.create_run("tiny", lora={"rank": lesson.rank})
    environment, reward = environments()[name]
    config = rl.AlgorithmConfig(
        batch_size=3, group_size=8, max_tokens=lesson.max_tokens, learning_rate=lesson.learning_rate, seed=seed,
        checkpoint_dir=lesson.model.parent / f"{name.strip('`')}{seed}",
    )  # fmt: skip
    async with rl.GRPOAlgorithm(service, run, lesson.tasks, reward, config, environment=environment) as algorithm:
        metrics = await algorithm.train(iterations, progress_bar=False)
    return [each["rewards/reward"] for each in metrics]


async def main(model: Path | None, seeds: int, iterations: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lesson = tiny(folder) if model is None else instruct(model, folder)
        with HttpServer(lesson.model, folder / "state", free_port()) as server:
            async with gradwire.connect(server.address, connect_timeout=120) as service:
                found: dict[str, list[list[float]]] = {name: [] for name in environments()}
                for seed in range(seeds):
                    for name, curves in found.items():
                        curves.append(await curve(service, lesson, name, seed, iterations))
                        print(name, seed, [round(each, 2) for each in curves[-1]], flush=True)
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
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    asyncio.run(main(options.model, options.seeds, options.iterations))
