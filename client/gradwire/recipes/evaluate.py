"""``gradwire evaluate``: answers of a base model and of checkpoints to a file of prompts, graded, as a table."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire.cli.listing import print_listing
from gradwire.cli.text import warnings_to_stderr
from gradwire.data import DataError, OnError, Prompt, prompts
from gradwire.errors import GradwireError
from gradwire.recipes.folder import trained
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.own_code import AnsweredRow, RewardGrader
from gradwire.recipes.runs import open_service
from gradwire.recipes.settings import ServiceSettings, SettingsError, setting
from gradwire.recipes.settings_file import example, load
from gradwire.recipes.tokens import RowEncoder
from gradwire.rl.rewards.graders import Grader, GraderError, Sample, SampleError, ServiceJudge, grader_of
from gradwire.whole_files import whole_file

AT_ONCE = 64
"""Answers that are sampled, and then graded, together."""
EXACT = {
    "type": "string_check", "name": "exact", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    "operation": "eq",
}  # fmt: skip


@dataclass
class Evaluation(ServiceSettings):
    """Answers to prompts, graded: of the model, and of checkpoints trained from it."""

    folder: str = setting("runs/evaluation", "answers.jsonl, with each answer and its scores, and table.json")
    checkpoints: list[str] = setting([], "FOLDER, FOLDER@CHECKPOINT or RUN_ID/NAME, each a row below the model's")
    data: str = setting("prompts.jsonl", "a file or data set of prompts; graders see the columns of a row as item.NAME")
    split: str = setting("train", "split of a data set of the hub")
    mapping: dict[str, str] = setting({}, "field -> column, where the columns are not recognised")
    limit: int = setting(0, "rows to use at most; 0: all")
    on_error: OnError = setting("raise", "raise, or skip: what to do with a row that does not fit")
    graders: list[Any] = setting(
        [EXACT], "each a column: graders of OpenAI's form, or rewards of trainings: last_number, FILE.py:FUNCTION"
    )
    answers: int = setting(1, "answers to each prompt")
    answer_tokens: int = setting(256, "tokens of an answer at most")
    max_tokens: int = setting(2048, "longest prompt with its answer; longer prompts are cut at their beginning")
    temperature: float = setting(0.0, "of sampling; 0 takes the likeliest token")
    seed: int = setting(0, "of sampling")

    @property
    def starts_from(self) -> str:
        return next((each for each in self.checkpoints if not each.startswith("run-")), "")

    def check(self) -> None:
        super().check()
        if not 0 <= self.temperature < math.inf:
            raise SettingsError(f"temperature is {self.temperature}; it must be at least 0")
        if not self.graders:
            raise SettingsError("graders is empty; it needs one at least")
        titles = [each.name for each in graders_of(self.graders)]
        if twice := [title for title in titles if titles.count(title) > 1]:
            raise SettingsError(f"graders has two with the name {twice[0]!r}")


@dataclass
class Scored:
    """The scores of one model.

    Attributes:
        model: As the settings name it.
        scores: Name of a grader -> its scores of the answers to each prompt, of those that it could grade.
        not_graded: Name of a grader -> the answers that it could not grade, and why the first.
    """

    model: str
    scores: dict[str, list[list[float]]] = field(default_factory=dict)
    not_graded: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, name: str, scores: Sequence[float | SampleError]) -> None:
        """Take in the scores of the answers to a prompt, or why one has none."""
        graded = [each for each in scores if not isinstance(each, SampleError)]
        self.scores.setdefault(name, []).extend([graded] if graded else [])
        for error in (each for each in scores if isinstance(each, SampleError)):
            count, why = self.not_graded.get(name, (0, str(error)))
            self.not_graded[name] = count + 1, why

    def cell(self, name: str) -> str:
        """Mean of a grader's scores ± its standard error, clustered by prompt, as answers to one are alike (Miller
        2024, arXiv:2411.00640)."""
        prompts = self.scores.get(name, [])
        if not prompts:
            return "-"
        count = sum(map(len, prompts))
        mean = sum(map(sum, prompts)) / count
        if len(prompts) < 2:
            return f"{mean:.3f}"
        squares = sum((sum(scores) - mean * len(scores)) ** 2 for scores in prompts)
        return f"{mean:.3f} ±{math.sqrt(squares * len(prompts) / (len(prompts) - 1)) / count:.3f}"


def graders_of(specs: Sequence[Any], service: Any = None) -> list[Grader]:
    """Build graders.

    Args:
        service: The service with the models that they ask.

    Raises:
        SettingsError: One of them is not a valid grader.
    """
    if "environment" in specs:
        raise SettingsError("graders has environment, the reward of an environment; here there is none")
    judge = ServiceJudge(service) if service is not None else None
    try:
        return [RewardGrader(spec) if isinstance(spec, str) else grader_of(spec, judge=judge) for spec in specs]
    except GraderError as error:
        raise SettingsError(f"graders: {error}") from None


async def evaluate(settings: Evaluation, launch: Launch = ALONE) -> list[Scored]:
    """Grade the answers of the model and of each checkpoint; all answers are in the settings' folder afterwards.

    Raises:
        SettingsError: A setting does not fit.
        DataError: A row does not.
    """
    rows = await asyncio.to_thread(
        prompts, settings.data, mapping=settings.mapping, split=settings.split, limit=settings.limit or None,
        on_error=settings.on_error,
    )  # fmt: skip
    sources = {settings.model: settings.model}
    starts: dict[str, str] = {}
    for each in settings.checkpoints:
        training = trained(each)
        sources[each] = training.checkpoint or training.run_id
        starts |= {training.server: each} if training.server and not settings.address else {}
    if len(starts) > 1:
        raise SettingsError(
            f"checkpoints has {' and '.join(list(starts.values())[:2])}, which have a server each; evaluate one alone,"
            " or start a server for all of them and name its address"
        )
    folder = Path(settings.folder)
    async with open_service(settings, launch) as (service, model):
        sources[settings.model] = model.name
        graders = graders_of(settings.graders, service)
        results = []
        try:
            with whole_file(folder / "answers.jsonl") as file:
                for name, source in sources.items():
                    scored = Scored(name)
                    async for line in _answered(settings, service, source, graders, list(rows), scored):
                        file.write(json.dumps({"model": name, **line}, default=str).encode() + b"\n")
                    results.append(scored)
        finally:
            for grader in graders:
                grader.close()
    table = [{"model": each.model, "scores": each.scores, "not_graded": each.not_graded} for each in results]
    with whole_file(folder / "table.json") as file:
        file.write(json.dumps(table, indent=1).encode())
    return results


async def _answered(
    settings: Evaluation, service: Any, source: str, graders: Sequence[Grader], rows: Sequence[Prompt], scored: Scored
) -> Any:
    """Sample and grade one model's answers; yields each with its scores."""
    base = await ServiceJudge(service).base(source)
    model = next((each for each in await service.list_models() if each.name == base), None)
    if model is None:
        raise SettingsError(f"checkpoints has {source}, whose model {base} is not on this server")
    tokens = RowEncoder(service, model, settings.max_tokens, on_error=settings.on_error)
    sampler = service.sampling_client(source)
    for start in range(0, len(rows), max(1, AT_ONCE // settings.answers)):
        part = rows[start : start + max(1, AT_ONCE // settings.answers)]
        kept = await tokens.fitting(part, lambda some: _prompts(tokens, some, settings.answer_tokens))
        if not kept:
            continue
        sampled = await sampler.sample(
            [ids for _, ids in kept], n=settings.answers, max_tokens=settings.answer_tokens,
            temperature=settings.temperature, seed=settings.seed + start,
        )  # fmt: skip
        answers = [
            AnsweredRow(sample.text or "", row.columns, row, sample.token_ids, sample.stop_reason)
            for (row, _), samples in zip(kept, sampled.samples)
            for sample in samples
        ]
        grades = await asyncio.gather(*(_graded(graders, each) for each in answers))
        for first in range(0, len(answers), settings.answers):
            of_prompt = grades[first : first + settings.answers]
            for name in of_prompt[0]:
                scored.add(name, [scores[name] for scores in of_prompt])
        for answer, scores in zip(answers, grades):
            shown = {name: str(each) if isinstance(each, SampleError) else each for name, each in scores.items()}
            yield {"item": answer.item, "answer": answer.text, "scores": shown}
    tokens.tell_of_rows()


async def _prompts(tokens: RowEncoder, rows: Sequence[Prompt], room: int) -> list[tuple[Prompt, Any]]:
    return list(zip(rows, await tokens.prompts(rows, room)))


async def _graded(graders: Sequence[Grader], sample: Sample) -> Mapping[str, float | SampleError]:
    async def grade(grader: Grader) -> float | SampleError:
        try:
            return await grader.grade(sample)
        except SampleError as error:
            return error

    return dict(zip([each.name for each in graders], await asyncio.gather(*map(grade, graders))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of ``gradwire evaluate``; a mistake in it ends with one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="gradwire evaluate",
        description="Grade the answers of a model, and of checkpoints trained from it, to a file of prompts.",
        epilog="gradwire evaluate --example > evaluate.yaml writes a configuration with a comment on every setting.",
    )
    parser.add_argument("config", nargs="?", help="a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override; may be repeated")
    parser.add_argument("--example", action="store_true", help="print a configuration and exit")
    options = parser.parse_args(arguments)
    if options.example:
        sys.stdout.write(example(Evaluation))
        return
    if not options.config:
        parser.error("name a configuration: gradwire evaluate evaluate.yaml")
    if not Path(options.config).is_file():
        parser.error(f"there is no file {options.config}; `gradwire evaluate --example > {options.config}` writes one")
    with warnings_to_stderr("gradwire evaluate"):
        try:
            settings = load(Evaluation, options.config, options.set)
            results = asyncio.run(evaluate(settings))
        except (SettingsError, DataError, GradwireError, ValueError, OSError, ImportError) as error:
            print(f"gradwire evaluate: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    _print(results, settings.folder)


def _print(found: Sequence[Scored], folder: str) -> None:
    names = list(dict.fromkeys(name for each in found for name in each.scores))
    print_listing(("model", *names), [(each.model, *map(each.cell, names)) for each in found], empty="no answers")
    for each in found:
        for name, (count, why) in each.not_graded.items():
            print(f"{each.model}: {name} could not grade {count} answers, the first because {why}", file=sys.stderr)
    print(f"mean score ± its standard error; every answer is in {folder}/answers.jsonl")
