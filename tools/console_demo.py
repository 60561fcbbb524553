"""`make console-demo`: a few trainings, and the console over them; needs no GPU and no download. Ctrl-C ends it.

A small Llama learns capitals. With MODEL and DATA a real model learns to solve word problems instead: SFT, then
DPO and GRPO, each from what SFT gave (SmolLM2-135M: half an hour on two cores). What is trained stays in
out/console_demo, and a second call goes on from there. With --runs-only it trains and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
from _support.small_model import small_model
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, RunRecorder, reward_function

FOLDER = Path("out/console_demo")
CAPITALS = "capitals"
TEXTS = [f"{a} is the capital of {b}. " * 2 for a, b in (
    ("Lima", "Peru"), ("Paris", "France"), ("Rome", "Italy"), ("Oslo", "Norway"), ("Cairo", "Egypt"),
)]  # fmt: skip
RUNS = (("sft-baseline", 16, 3e-3), ("sft-rank-4", 4, 3e-3), ("sft-hot", 16, 3e-2), ("sft-cold", 16, 3e-4))
STEPS = 160
SFT, DPO, GRPO = "SFT on solutions", "DPO on pairs", "grpo-word-problems"
ROWS, PROBLEMS = 400, 32


@dataclass(frozen=True)
class Demo:
    """What a demo has trained.

    Attributes:
        model: Name of the served model.
        compared: Ids of runs that differ in a setting.
        reinforced: Id of the run that learned from rewards.
        prompt: What to ask the models.
        checkpoints: Of these runs, to ask.
    """

    model: str
    compared: tuple[str, ...]
    reinforced: str
    prompt: str
    checkpoints: tuple[str, ...]


async def train(service: gradwire.ServiceClient, name: str, rank: int, rate: float) -> None:
    run = await service.create_run(
        CAPITALS, lora={"rank": rank}, name=name, tags={"data": CAPITALS, "peak_lr": f"{rate:g}"},
        record_batches=0.05,
    )  # fmt: skip
    rows = await service.encode(CAPITALS, TEXTS)
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


async def capitals(service: gradwire.ServiceClient) -> Demo:
    """Trainings of the small Llama."""
    there = {run.name: run for run in await service.list_runs()}
    await asyncio.gather(*(train(service, *each) for each in RUNS if each[0] not in there))
    name = "grpo-even-digits"
    if name not in there:
        run = await service.create_run(
            CAPITALS, lora={"rank": 16}, name=name, kind="rl", record_batches=0.2, tags={"reward": "even digits"}
        )
        config = AlgorithmConfig(batch_size=4, group_size=6, learning_rate=1e-2, max_tokens=12)
        tasks = ["Paris is", "Oslo is", "Rome is", "Cairo is"]
        await GRPOAlgorithm(service, run, tasks, even_digits, config, recorder=RunRecorder(run, every=5)).train(20)
        await run.save_checkpoint("trained")
    there = {run.name: run for run in await service.list_runs()}
    compared = tuple(there[each[0]].run_id for each in RUNS)
    paths = tuple(f"{each}/step-{STEPS}" for each in compared[:2])
    return Demo(CAPITALS, compared, there[name].run_id, "Lima is the capital of", paths)


def rows_of(file: Path) -> Iterator[dict[str, str]]:
    """Rows of GSM8K without the calculator's annotations, as <<48/2=24>>."""
    for line in file.read_text(encoding="utf-8").splitlines():
        yield {name: re.sub("<<.*?>>", "", text) for name, text in json.loads(line).items()}


@reward_function
def solved(response: str, ground_truth: str) -> Mapping[str, Any]:
    found = re.findall(r"####\s*(-?[\d,.]*\d)", response)
    if not found:
        return {"score": 0.0, "reason": "no line says #### and a number"}
    right = found[-1].replace(",", "") == ground_truth
    return {"score": 1.0 if right else 0.1, "reason": f"says {found[-1]}; the answer is {ground_truth}"}


async def finished(service: gradwire.ServiceClient, recipe: str, name: str, settings: Mapping[str, Any]) -> str:
    """The run of a job with this name, which is submitted where there is none."""
    jobs = {job.name: job for job in await service.jobs.list()}
    job = jobs.get(name) or await service.jobs.submit(recipe, dict(settings), name=name)
    job = await service.jobs.wait(job.job_id)
    if job.state != "succeeded":
        raise SystemExit(f"{name}: {job.state} {job.error}")
    print(f"{name}: {job.step} steps", flush=True)
    return job.run_id


async def word_problems(service: gradwire.ServiceClient, model: str, data: Path) -> Demo:
    """SFT, DPO and GRPO of a real model, on files of GSM8K's columns: train.jsonl and preferences.jsonl."""
    rows = list(rows_of(data / "train.jsonl"))
    solutions, pairs = FOLDER / "solutions.jsonl", FOLDER / "pairs.jsonl"
    chats = [[{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
             for row in rows[:ROWS]]  # fmt: skip
    solutions.write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    better = list(rows_of(data / "preferences.jsonl"))[:ROWS]
    pairs.write_text("".join(json.dumps(each) + "\n" for each in better))
    files = {file.filename: file.file_id for file in await service.files.list()}
    for each in (solutions, pairs):
        files.setdefault(each.name, "")
        files[each.name] = files[each.name] or (await service.files.upload(each)).file_id
    common = {"model": model, "batch_size": 4, "max_tokens": 384, "held_out": 0.03, "eval_every": 20, "save_every": 20}
    sft = common | {"data": files[solutions.name], "max_steps": 60}
    first = await finished(service, "sft", SFT, sft)
    checkpoint = (await service.get_training_client(first).list_checkpoints())[-1].path
    reinforced = await solve(service, model, checkpoint, rows)
    dpo = common | {"data": files[pairs.name], "init_from": checkpoint, "max_steps": 16, "eval_every": 8}
    preferred = await finished(service, "dpo", DPO, dpo)
    ends = [(await service.get_training_client(each).list_checkpoints())[-1].path for each in (preferred, reinforced)]
    question = rows[ROWS + 1]["question"]
    return Demo(model, (first, preferred), reinforced, question, (checkpoint, *ends))


async def solve(service: gradwire.ServiceClient, model: str, checkpoint: str, rows: list[dict[str, str]]) -> str:
    """GRPO from a checkpoint on the problems with the shortest solutions; the run's id."""
    there = {run.name: run.run_id for run in await service.list_runs()}
    if GRPO in there:
        return there[GRPO]
    run = await service.create_run(
        model, lora={"rank": 16}, name=GRPO, kind="rl", record_batches=0.2, tags={"stage": "grpo"}
    )
    await run.load_checkpoint(checkpoint, weights_only=True)
    shortest = sorted(rows[ROWS:], key=lambda row: len(row["answer"]))[:PROBLEMS]
    tasks = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"].rpartition("#### ")[2]}
        for row in shortest
    ]
    config = AlgorithmConfig(batch_size=3, group_size=6, learning_rate=1e-4, max_tokens=96)
    await GRPOAlgorithm(service, run, tasks, solved, config, recorder=RunRecorder(run, every=3)).train(10)
    await run.save_checkpoint("trained")
    return run.run_id


@asynccontextmanager
async def demo_server(model: str, data: str) -> AsyncIterator[tuple[gradwire.ServiceClient, str]]:
    """The server of a demo, and the name of its model."""
    path = Path(model) if model else FOLDER / CAPITALS
    if not path.exists():
        await asyncio.to_thread(small_model, path)
    FOLDER.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    name, state = (path.name, FOLDER / f"state-{path.name}") if model else (CAPITALS, FOLDER / "state")
    async with gradwire.connect(
        models=[f"{name}={path}"], state_dir=state, server_args=["--job-workers", "1"]
    ) as service:
        yield service, name


async def trained(service: gradwire.ServiceClient, name: str, data: str) -> Demo:
    """Train what is not there yet."""
    return await (capitals(service) if name == CAPITALS else word_problems(service, name, Path(data)))


async def console_of(service: gradwire.ServiceClient, address: str, **options: Any) -> asyncio.subprocess.Process:
    """Start the console over a server."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gradwire_console.cli", service.address, "--address", address,
        "--parent-pid", str(os.getpid()), env=os.environ | {"GRADWIRE_API_KEY": service.api_key}, **options,
    )  # fmt: skip


async def main(address: str, runs_only: bool, model: str, data: str) -> None:
    async with demo_server(model, data) as (service, name):
        page = None if runs_only else await console_of(service, address)
        await trained(service, name, data)
        if page is not None:
            print("The trainings are done; Ctrl-C ends the console.", flush=True)
            await page.wait()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that say which demo it is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="", help="folder of a real model; by default a small Llama is made")
    parser.add_argument("--data", default="", help="folder with train.jsonl and preferences.jsonl for it, as GSM8K's")
    return parser


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--address", default="127.0.0.1:8080", help="HOST:PORT of the console")
    parser.add_argument("--runs-only", action="store_true", help="train and end, without the console")
    given = parser.parse_args()
    if given.model and not given.data:
        parser.error("--model needs --data, the folder of the questions that it learns from")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(given.address, given.runs_only, given.model, given.data))
