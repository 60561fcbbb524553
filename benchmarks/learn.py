"""Do the recipes teach a real model with their defaults? ``make learn``, or ``make learn ONLY=sft,dpo``.

Each lesson is a recipe with nothing set but its data, its sizes and the seed: rates, warm-up, schedule, batch, clipping
and groups are the defaults. A lesson fails the lane if its figure does not reach a threshold. Where TRL has the
trainer, it gets the same adapter, rows, order and rates in its own environment, and the losses of each step are
compared.

    python -m benchmarks.learn --data FOLDER [--model FOLDER] [--only sft,dpo] [--write-docs]

The data are GSM8K's ``train.jsonl`` and ``test.jsonl`` (question, answer). Pairs are made of them: the solution of a
problem, and that of another. Which of two attempts is right is beyond a model of this size. What a lesson did stays in
``out/learn``; ``--write-docs`` makes of it ``docs/results.md`` and its curves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from gradwire import data
from gradwire.loop.loggers import read_jsonl
from gradwire.recipes import command
from gradwire.recipes.evaluate import Evaluation, Scored, evaluate
from gradwire.recipes.folder import trained
from gradwire.recipes.launch import Launch
from gradwire.recipes.own_code import reward_models
from gradwire.recipes.rows import rows_of
from gradwire.recipes.runs import new_run
from gradwire.recipes.settings import RowSettings
from gradwire.recipes.tokens import RowEncoder
from gradwire.rl.types import Action, StepData, Task, Trajectory

from benchmarks import ROOT
from benchmarks.learn_page import write_page

OUT = ROOT / "out" / "learn"
TASKS = ROOT / "benchmarks" / "learn_tasks.py"
TRL_PYTHON = Path(os.environ.get("GRADWIRE_TRL_PYTHON", ROOT / ".venv-parity/bin/python"))
CLOSE = 1e-3
"""Largest difference to TRL's loss of a step."""
MOST_CHARS = 350
"""Longer rows are left out, so that a lesson takes minutes on two cores."""
MARKED = {
    "type": "string_check", "name": "marked", "input": "{{ sample.output_text }}", "reference": "#### ",
    "operation": "like",
}  # fmt: skip
"""Whether an answer ends as GSM8K's do."""
HELD_OUT = 24
"""Rows to evaluate on."""
ANSWERS = 8
"""To each of them, where it is sampled how many end."""
SHOWN = 300
"""Characters of a text that the lane prints."""
WORDS = (
    "the a red blue old small green house dog cat tree sun moon river stone bread water night day king ship road bird "
    "fish apple glass door lamp song"
)


@dataclass(frozen=True)
class Lesson:
    """One recipe, what it is taught with, and what it must reach.

    Attributes:
        recipe: Of ``gradwire train``.
        says: What is learned, for the page.
        settings: Data and sizes; every other setting is the default.
        metric: Name in the log.
        reach: Its value at the end, at least; for a loss or a divergence at most.
        gain: Whether ``reach`` is how much it rises by.
        trl: Whether TRL has the same trainer.
        graded: Whether answers to held-out questions are graded, before and after.
        ends: Whether held-out answers are sampled, before and after, to see how many end and what these are worth.
    """

    recipe: str
    says: str
    settings: Mapping[str, Any]
    metric: str
    reach: float
    gain: bool = False
    trl: bool = False
    graded: bool = False
    ends: bool = False

    @property
    def falls(self) -> bool:
        return self.metric.endswith(("loss", "divergence"))


ACCURACY = "eval/preference_accuracy"
PAIRS = {"data": "pairs.jsonl", "validation": "pairs_held_out.jsonl", "max_steps": 6, "eval_first": True}
TALKS = {"data": "talks.jsonl", "validation": "talks_held_out.jsonl", "eval_first": True}
LESSONS = {
    "sft": Lesson(
        "sft", "worked solutions of GSM8K", TALKS | {"max_steps": 8}, "eval/loss", 0.95, trl=True, graded=True
    ),
    "reward": Lesson("reward", "which of two solutions is of the problem", PAIRS, ACCURACY, 0.8, trl=True),
    "dpo": Lesson("dpo", "to prefer the solution that is of the problem", PAIRS, ACCURACY, 0.8, trl=True),
    "grpo": Lesson(
        "grpo", "to reverse a text; the reward is the share of it that is right",
        {"data": "reverse.jsonl", "reward": f"{TASKS}:reversed_share", "answer_tokens": 32, "max_steps": 8,
         "held_out": 0.0}, "rewards/reward", 0.18,
    ),
    "rloo": Lesson(
        "rloo", "sums; the reward is 1 if the last number is right",
        {"data": "sums.jsonl", "answer_tokens": 24, "max_steps": 16, "held_out": 0.0}, "rewards/reward", 0.4,
    ),
    "gigpo": Lesson(
        "gigpo", "to look into a box, by a tool, before it says what is in it",
        {"data": "boxes.jsonl", "environment": f"{TASKS}:Box", "reward": f"{TASKS}:found", "answer_tokens": 16,
         "max_steps": 16, "held_out": 0.0}, "rewards/reward", 0.5,
    ),
    "ppo": Lesson(
        "ppo", "what the reward model of `reward` scores highly, from the policy that `sft` made",
        {"data": "talks.jsonl", "init_from": "sft", "reward": "reward", "answer_tokens": 64, "max_steps": 12,
         "held_out": 0.0},
        "rewards/reward", 0.1, gain=True, ends=True,
    ),
    "distill": Lesson(
        "distill", "the distributions of the model that `sft` made",
        TALKS | {"teacher": "sft", "answer_tokens": 64, "max_steps": 8}, "eval/divergence", 0.05,
    ),
}  # fmt: skip


@dataclass
class Result:
    """What a lesson did.

    Attributes:
        curves: Name -> (step, value).
        first, last: The metric before (or at the first step) and at the end; of sampled rewards means of three steps.
        seconds: CPU seconds of this process and its children are not told apart, so this is wall time.
        trl: Losses of TRL's steps; [] if it was not asked.
        graded: Grader -> the share of answers to held-out questions that pass it, before and after.
        questions: How many.
    """

    name: str
    settings: Mapping[str, Any]
    rates: tuple[float, float]
    first: float
    last: float
    seconds: float
    curves: Mapping[str, list[tuple[int, float]]]
    trl: list[float] = field(default_factory=list)
    graded: dict[str, list[str]] = field(default_factory=dict)
    questions: int = 0

    @property
    def apart(self) -> float:
        """Largest difference to TRL's loss of a step."""
        return max(abs(ours - theirs) for (_, ours), theirs in zip(self.curves["train/loss"], self.trl))

    def failures(self) -> list[str]:
        """Say what the lesson should have reached and has not."""
        lesson = LESSONS[self.name]
        value = self.last - self.first if lesson.gain else self.last
        reached = value <= lesson.reach if lesson.falls else value >= lesson.reach
        wanted = f"should {'rise by' if lesson.gain else 'reach'} {lesson.reach:g}"
        told = (
            []
            if reached
            else [f"{self.name}: {lesson.metric} went from {self.first:.4g} to {self.last:.4g}, and {wanted}"]
        )
        if self.trl and self.apart > CLOSE:
            told.append(f"{self.name}: a loss is {self.apart:.2g} from TRL's")
        before, after = (float(cell.split()[0]) for cell in self.graded.get("ended", ("0", "0")))
        if after < before:
            told.append(f"{self.name}: of held-out answers {before:.3f} ended, and now {after:.3f}")
        return told


def write_data(source: Path, folder: Path, seed: int = 0) -> None:
    """Write the rows of all lessons."""
    chance = random.Random(seed)

    def write(name: str, rows: Sequence[Mapping[str, str]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    solved = [row for row in read_jsonl(source / "train.jsonl") if sum(map(len, row.values())) <= MOST_CHARS]
    talks = [{"prompt": row["question"], "completion": row["answer"]} for row in solved]
    others = [row["answer"] for row in (*solved[1:], solved[0])]
    pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": o} for r, o in zip(solved, others)]
    for name, rows in (("talks", talks), ("pairs", pairs)):
        write(name, rows[:-HELD_OUT])
        write(f"{name}_held_out", rows[-HELD_OUT:])
    write("questions", [{"prompt": r["question"], "answer": r["answer"]} for r in read_jsonl(source / "test.jsonl")])
    texts = [" ".join(chance.choices(WORDS.split(), k=chance.randint(3, 6))) for _ in range(512)]
    asked = "Reverse the text character by character. Put your answer in <reversed_text> tags.\n\n"
    write("reverse", [{"prompt": asked + text, "answer": text[::-1]} for text in texts])
    box = "Box {} is closed. Write LOOK to open it. Which word is in it?"
    write("boxes", [{"prompt": box.format(n), "answer": chance.choice(WORDS.split())} for n in range(512)])
    sums = [(chance.randint(2, 60), chance.randint(2, 60)) for _ in range(512)]
    write("sums", [{"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)} for a, b in sums])


async def learn(launch: Launch, model: str, name: str, questions: int) -> Result:
    """Run a lesson in ``out/learn/NAME``; one that is finished is not run again."""
    lesson, folder = LESSONS[name], OUT / name
    values = {"model": model, "folder": str(folder), **lesson.settings}
    for key in ("data", "validation"):
        if key in values:
            values[key] = str(OUT / values[key])
    for key in ("reward", "init_from"):  # another lesson's folder
        if values.get(key) in LESSONS:
            values[key] = str(OUT / values[key])
    if values.get("teacher"):
        values["teacher"] = trained(str(OUT / values["teacher"])).checkpoint
    if lesson.trl and not (folder / "batches.json").exists():
        values["init_from"] = await _prepare_trl(launch.service, name, values)
    elif lesson.trl:
        values["init_from"] = json.loads((folder / "batches.json").read_text())["start"]
    settings, began = command.settings_of(lesson.recipe, values), time.monotonic()
    await command.train(lesson.recipe, settings, launch)
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in read_jsonl(folder / "metrics.jsonl"):
        for key, value in line.items():
            if isinstance(value, float):
                curves.setdefault(key, []).append((line["iteration"], value))
    values_of = [value for _, value in curves[lesson.metric]]
    ends = 1 if lesson.metric.startswith("eval/") else 3
    rates = [rate for _, rate in curves["train/learning_rate"]]
    result = Result(
        name, lesson.settings, (max(rates), rates[-1]), sum(values_of[:ends]) / ends, sum(values_of[-ends:]) / ends,
        time.monotonic() - began, {key: curves[key] for key in ("train/loss", lesson.metric) if key in curves},
    )  # fmt: skip
    if lesson.graded:
        found = await evaluate(
            Evaluation(
                model=model, folder=str(folder / "evaluation"), checkpoints=[str(folder)], limit=questions,
                data=str(OUT / "questions.jsonl"), graders=["last_number", MARKED], answer_tokens=160,
            ),
            launch,
        )  # fmt: skip
        result.questions = questions
        result.graded = {name: [each.cell(name) for each in found] for name in ("last_number", "marked")}
    if lesson.ends:
        ends = [trained(each).checkpoint for each in (values["init_from"], str(folder))]
        found = await _endings(launch.service, ends, values["reward"], values["answer_tokens"])
        result.questions = HELD_OUT
        result.graded = {name: [each.cell(name) for each in found] for name in ("ended", "of_ended")}
    return result


async def _endings(
    service: gradwire.ServiceClient, checkpoints: Sequence[str], reward: str, answer_tokens: int
) -> list[Scored]:
    """Sample held-out answers of checkpoints: which end, and the reward model's own scores of those that do."""
    (info,) = await service.list_models()
    rows = list(data.prompts(str(OUT / "talks_held_out.jsonl")))
    prompts = await RowEncoder(service, info, RowSettings().max_tokens).prompts(rows, answer_tokens)
    found = []
    async with reward_models(service, reward) as models:
        for checkpoint in checkpoints:
            scored = Scored(checkpoint)
            sampled = await service.sampling_client(checkpoint).sample(
                prompts, n=ANSWERS, max_tokens=answer_tokens, temperature=1.0, seed=0
            )
            for ids, samples in zip(prompts, sampled.samples):
                ended = [each for each in samples if each.stop_reason != "length"]
                scored.add("ended", [1.0] * len(ended) + [0.0] * (len(samples) - len(ended)))
                written = [Trajectory(Task(""), steps=[_step(ids, each.token_ids)]) for each in ended]
                scored.add("of_ended", [each.score for each in await models[reward].evaluate(written)])
            found.append(scored)
    return found


def _step(prompt: Any, written: Any) -> StepData:
    ids = np.asarray(written)
    return StepData(0, "", "", np.asarray(prompt), Action(""), ids, np.zeros(len(ids), np.float32))


async def _prepare_trl(service: gradwire.ServiceClient, name: str, values: Mapping[str, Any]) -> str:
    """Write the adapter from which both sides start, and the batches that the recipe will take; return the start."""
    lesson, folder = LESSONS[name], OUT / name
    settings = command.settings_of(lesson.recipe, values)
    assert isinstance(settings, RowSettings)
    (info,) = await service.list_models()
    run = await new_run(settings, service, info, "reward" if name == "reward" else None)
    start = (await run.save_checkpoint("start")).path
    await run.export(folder / "start")
    if name == "reward":
        await run.export(folder / "start_merged", "merged")
    pairs = name != "sft"
    kept, _ = rows_of(data.preferences if pairs else data.conversations, settings)
    tokens = RowEncoder(service, info, settings.max_tokens, settings.overlong)
    batches = kept.batches(settings.batch_size, seed=settings.seed)
    encoded: list[Any] = [
        await (tokens.pairs(next(batches), margins=True) if pairs else tokens.rows(next(batches)))  # type: ignore[arg-type]
        for _ in range(settings.max_steps)
    ]
    (folder / "batches.json").write_text(json.dumps({"start": start, "batches": encoded}, default=_listed))
    return start


def _listed(value: Any) -> Any:
    return value.tolist()


def ask_trl(model: str, result: Result, steps: int) -> list[float]:
    """Take the same first steps with TRL; return its losses."""
    folder = OUT / result.name
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/learning_rate" in line]
    plan = json.loads((folder / "batches.json").read_text())
    plan |= {
        "batches": plan["batches"][:steps],
        "kind": result.name, "model": model, "folder": str(folder), "device": "cpu", "dtype": "float32",
        "learning_rate": result.rates[0], "rates": [line["train/learning_rate"] for line in lines], "beta": 0.1,
    }  # fmt: skip
    program = [TRL_PYTHON, ROOT / "benchmarks" / "learn_trl.py"]
    done = subprocess.run(program, input=json.dumps(plan), text=True, stdout=subprocess.PIPE, check=True)
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def examples(name: str) -> list[tuple[str, str]]:
    """Texts of a lesson, each with what it is: answers of before and after, or of the first and the last iteration."""
    graded, sampled = OUT / name / "evaluation" / "answers.jsonl", OUT / name / "trajectories.jsonl"
    if graded.exists():
        lines = list(read_jsonl(graded))
        before, after = lines[: len(lines) // 2], lines[len(lines) // 2 :]
        return [
            (what, text)
            for old, new in list(zip(before, after))[:2]
            for what, text in (
                ("question", old["item"]["prompt"]), ("before", old["answer"]), ("after", new["answer"])
            )
        ]  # fmt: skip
    if not sampled.exists():
        return []
    lines = list(read_jsonl(sampled))
    ends = [next(line for line in lines if line["iteration"] == at) for at in (0, lines[-1]["iteration"])]
    return [
        (what, text)
        for line, when in zip(ends, ("first", "last"))
        for what, text in (
            ("question", line["steps"][0]["observation"]),
            (f"{when} iteration, reward {line['reward']:.3g}", line["steps"][-1]["action"]),
        )
    ]


async def lessons(model: str, names: Sequence[str], questions: int, done: Callable[[Result], None]) -> None:
    """Run lessons on one server, whose state stays in ``out/learn/server``."""
    async with gradwire.connect(models=[model], state_dir=OUT / "server") as service:
        launch = Launch(service=service, server=OUT / "server")
        for name in names:
            done(await learn(launch, model, name, questions))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL", ""), help="a folder or a name of the hub")
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA", ""), help="folder of GSM8K's files")
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help=f"of {','.join(LESSONS)}")
    parser.add_argument("--questions", type=int, default=400, help="held-out questions that are answered")
    parser.add_argument("--trl-steps", type=int, default=1000, help="steps that TRL takes as well; 0: none")
    parser.add_argument("--write-docs", action="store_true", help="write docs/results.md, with what was run before")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(LESSONS)
    if unknown := [name for name in names if name not in LESSONS]:
        parser.error(f"there is no lesson {unknown[0]!r}; there are {', '.join(LESSONS)}")
    if not (Path(args.data) / "train.jsonl").is_file():
        parser.error(f"--data is {str(args.data)!r}: name a folder with GSM8K's train.jsonl and test.jsonl")
    if not args.model:
        made = [sys.executable, ROOT / "scripts" / "make_models.py", "smollm2"]
        args.model = subprocess.run(made, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "sums.jsonl").exists():
        write_data(Path(args.data), OUT)
    failures: list[str] = []

    def keep(result: Result) -> None:
        (OUT / result.name / "result.json").write_text(json.dumps(asdict(result)))

    def tell(result: Result) -> None:
        keep(result)
        print(f"{result.name}: {LESSONS[result.name].metric} {result.first:.4g} -> {result.last:.4g}")
        for what, text in examples(result.name):
            line = " ".join(text.split())
            print(f"  {what}: {line[:SHOWN]}{' …' if len(line) > SHOWN else ''}")
        print(flush=True)

    asyncio.run(lessons(args.model, names, args.questions, tell))
    for name in names:
        result = Result(**json.loads((OUT / name / "result.json").read_text()))
        if LESSONS[name].trl and args.trl_steps and TRL_PYTHON.exists():
            result.trl = ask_trl(args.model, result, args.trl_steps)
            print(f"{name}: losses at most {result.apart:.2g} from TRL's", flush=True)
            keep(result)
        failures += result.failures()
    if args.write_docs:
        write_page(LESSONS, {each.parent.name: json.loads(each.read_text()) for each in OUT.glob("*/result.json")})
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
