"""`make console-demo`: a small Llama, a few trainings of different settings, and the console over them.

It needs no GPU and no download; the runs stay in out/console_demo. Ctrl-C ends it. With --runs-only it trains and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path

import gradwire
from _support.small_model import small_model
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, RunRecorder, reward_function

FOLDER = Path("out/console_demo")
TEXTS = [f"{a} is the capital of {b}. " * 2 for a, b in (
    ("Lima", "Peru"), ("Paris", "France"), ("Rome", "Italy"), ("Oslo", "Norway"), ("Cairo", "Egypt"),
)]  # fmt: skip
RUNS = (("sft-baseline", 16, 3e-3), ("sft-rank-4", 4, 3e-3), ("sft-hot", 16, 3e-2), ("sft-cold", 16, 3e-4))
REINFORCED = "grpo-even-digits"
STEPS = 160


async def train(service: gradwire.ServiceClient, name: str, rank: int, rate: float) -> None:
    run = await service.create_run(
        "capitals", lora={"rank": rank}, name=name, tags={"data": "capitals", "peak_lr": f"{rate:g}"},
        record_batches=0.05,
    )  # fmt: skip
    rows = await service.encode("capitals", TEXTS)
    for step in range(STEPS):
        batch = {"input_ids": [rows[(step + n) % len(rows)] for n in range(4)]}
        loss = run.forward_backward(batch, "causal_lm")
        await run.optim_step(learning_rate=rate * min(1.0, (step + 1) / 10) * (1 - step / STEPS))
        await loss
        if step % 80 == 79:
            await run.save_checkpoint(f"step-{step + 1}")


@reward_function
def even_digits(response: str) -> float:
    return sum(character in "02468" for character in response) / max(len(response), 1)


async def reinforce(service: gradwire.ServiceClient) -> None:
    """A GRPO training, with its rollouts and every fifth batch recorded."""
    run = await service.create_run(
        "capitals", lora={"rank": 16}, name=REINFORCED, kind="rl", record_batches=0.2, tags={"reward": "even digits"}
    )
    config = AlgorithmConfig(batch_size=4, group_size=6, learning_rate=1e-2, max_tokens=12)
    tasks = ["Paris is", "Oslo is", "Rome is", "Cairo is"]
    recorder = RunRecorder(run, every=5)
    await GRPOAlgorithm(service, run, tasks, even_digits, config, recorder=recorder).train(20)
    await run.save_checkpoint("trained")


async def main(address: str, runs_only: bool) -> None:
    model = FOLDER / "capitals"
    if not model.exists():
        await asyncio.to_thread(small_model, model)
    async with gradwire.connect(
        models=[f"capitals={model}"], state_dir=FOLDER / "state", server_args=["--job-workers", "1"]
    ) as service:
        page = None
        if not runs_only:
            command = [
                "-m",
                "gradwire_console.cli",
                service.address,
                "--address",
                address,
                "--parent-pid",
                str(os.getpid()),
            ]
            page = await asyncio.create_subprocess_exec(
                sys.executable, *command, env=os.environ | {"GRADWIRE_API_KEY": service.api_key}
            )
        there = {run.name for run in await service.list_runs()}
        await asyncio.gather(*(train(service, *each) for each in RUNS if each[0] not in there))
        if REINFORCED not in there:
            await reinforce(service)
        if page is not None:
            print("The trainings are done; Ctrl-C ends the console.", flush=True)
            await page.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8080", help="HOST:PORT of the console")
    parser.add_argument("--runs-only", action="store_true", help="train and end, without the console")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(given.address, given.runs_only))
