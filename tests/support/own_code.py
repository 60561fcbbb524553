"""Files with rewards, an environment and problems, as people write them beside a configuration."""

from __future__ import annotations

import json
from pathlib import Path

REWARDS = '''
import os
from beside import most

def ones(response, ground_truth, data):
    """Share of ones; `wanted` is a column."""
    assert data["wanted"] == ground_truth
    return response.count(ground_truth) / max(len(response), 1)

def brevity(response):
    return 1 - min(len(response), most) / most

def pid(response):
    return float(os.getpid())

def wrong(answer_text):
    return 0.0

number = 3
'''
ENVIRONMENT = '''
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.types import State

class Counting(BaseEnvironment):
    """Says how often it was answered; each "1" is worth a point."""
    blocking = False

    def __init__(self, turns=2):
        self.max_steps = turns

    def reset(self, task, seed):
        return State(task, tuple(task.prompt), data={"env_rewards": ()})

    def step(self, state, action):
        given = (*state.data["env_rewards"], float(action.raw.count("1")))
        return StepResult(f"turn {state.step}", data={"env_rewards": given})

def broken(**arguments):
    raise RuntimeError("no world")
'''


def own_code(folder: Path) -> Path:
    """Write ``own_rewards.py``, ``own_world.py`` and ``asked.jsonl`` to a folder, and return it."""
    (folder / "own_rewards.py").write_text(REWARDS)
    (folder / "beside.py").write_text("most = 10\n")
    (folder / "own_world.py").write_text(ENVIRONMENT)
    rows = [{"question": f"{n} and {n}?", "wanted": "1"} for n in range(8)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
