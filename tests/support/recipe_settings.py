"""Small settings of every recipe, and the data, the reward and the environment that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ASKED = [(f"{a} and {b}?", f"It is {a + b}.") for a in range(4) for b in range(4)]
STEPS = [{"prompt": question, "completions": ["Add. ", answer], "labels": [True, False]} for question, answer in ASKED]
ROWS: dict[str, list[dict[str, Any]]] = {
    "talks": [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer},
                      {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}
        for question, answer in ASKED
    ],
    "pairs": [{"prompt": question, "chosen": answer, "rejected": "five"} for question, answer in ASKED],
    "labelled": [
        {"prompt": question, "completion": answer, "label": bool(n % 2)} for n, (question, answer) in enumerate(ASKED)
    ],
    "steps": STEPS,
    "problems": [{"prompt": question, "answer": answer} for question, answer in ASKED],
}  # fmt: skip
WORLD = """
from gradwire import rl
from gradwire.rl.environments import first_messages

class World(rl.BaseEnvironment):
    max_steps = 2

    def reset(self, task, seed):
        return rl.State(task, first_messages(task))

    def step(self, state, action):
        earned = [*state.data.get("env_rewards", ()), float(len(action.raw) % 3)]
        return rl.StepResult("and?", data={"env_rewards": earned})
"""
REWARD = "def score(response, ground_truth):\n    return float(len(response) % 3)\n"
COMMON: dict[str, Any] = {"batch_size": 4, "warmup": 0, "max_tokens": 256, "learning_rate": 1e-2, "eval_every": 2}
SUPERVISED: dict[str, Any] = COMMON | {"max_steps": 3}
REWARDED: dict[str, Any] = COMMON | {
    "max_steps": 2, "answer_tokens": 8, "data": "problems.jsonl", "reward": "reward.py:score",
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "sft": SUPERVISED | {"data": "talks.jsonl"},
    "dpo": SUPERVISED | {"data": "pairs.jsonl"},
    "kto": SUPERVISED | {"data": "labelled.jsonl"},
    "orpo": SUPERVISED | {"data": "pairs.jsonl"},
    "simpo": SUPERVISED | {"data": "pairs.jsonl"},
    "reward": SUPERVISED | {"data": "pairs.jsonl"},
    "process_reward": SUPERVISED | {"data": "steps.jsonl"},
    "distill": SUPERVISED | {"data": "talks.jsonl", "teacher": "", "answer_tokens": 8},
    "ppo": REWARDED | {"answers": 4},
    "grpo": REWARDED | {"group_size": 4},
    "rloo": REWARDED | {"group_size": 4},
    "gigpo": REWARDED | {"group_size": 4, "environment": "world.py:World", "reward": "environment"},
}
"""Recipe -> settings of a short training that does something in each step; distill's teacher is left to be named."""


def write_data(folder: Path) -> None:
    """Write the files that the settings name."""
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "world.py").write_text(WORLD)
    (folder / "reward.py").write_text(REWARD)
