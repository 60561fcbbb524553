"""stable-baselines3's PPO on the router's environment, in an environment of its own; prints one JSON line per seed."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from gradwire.router import RouterEnvironment
from gradwire.router.evaluation import HeldOut
from gradwire.router.world import World
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.router import HELD_OUT

ENVIRONMENTS = 8


TUNED = {"learning_rate": 3e-3, "gamma": 1.0, "batch_size": 512, "n_epochs": 8, "ent_coef": 0.002}


def train(seed: int, steps: int, settings: dict[str, Any]) -> dict[str, float]:
    """A network of two layers of 64, 8 environments and 2,048 steps a rollout, its defaults where none is given."""
    environments = DummyVecEnv([RouterEnvironment] * ENVIRONMENTS)
    model = PPO("MlpPolicy", environments, n_steps=2048 // ENVIRONMENTS, seed=seed, device="cpu", **settings)
    began = time.process_time()
    model.learn(steps)
    seconds = time.process_time() - began
    held_out = HeldOut(World(), *HELD_OUT)
    modes, _ = model.predict(held_out.x.astype(np.float32), deterministic=True)
    reward = held_out.tables["reward"][np.arange(len(modes)), modes].mean()
    return {"reward": float(reward), "cpu_seconds": seconds, "steps": float(model.num_timesteps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--tuned", action="store_true", help="settings for this environment in place of the defaults")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = TUNED if arguments.tuned else {}
    for seed in arguments.seeds:
        print(json.dumps(train(seed, arguments.steps, settings)), flush=True)


if __name__ == "__main__":
    main()
