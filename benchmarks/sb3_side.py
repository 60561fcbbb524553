"""stable-baselines3's PPO on the router's environment, in an environment of its own; prints its figures as JSON."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from gradwire.router import RouterEnvironment
from gradwire.router.evaluation import HeldOut
from gradwire.router.world import World
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.router import HELD_OUT

ENVIRONMENTS = 8


def train(seed: int, steps: int) -> dict[str, float]:
    """Its defaults (a network of two layers of 64), 8 environments and its 2,048 steps a rollout."""
    environments = DummyVecEnv([RouterEnvironment] * ENVIRONMENTS)
    model = PPO("MlpPolicy", environments, n_steps=2048 // ENVIRONMENTS, seed=seed, device="cpu")
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps([train(seed, given.steps) for seed in given.seeds]))


if __name__ == "__main__":
    main()
