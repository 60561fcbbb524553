"""The lane that shows what the defaults teach: its rows, what fails it, and its page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gradwire.loop.loggers import read_jsonl
from gradwire.recipes.command import settings_of

from benchmarks import learn, learn_page
from benchmarks.learn import LESSONS, Result, write_data
from benchmarks.learn_tasks import reversed_share


def result(name: str, last: float, trl: list[float] | None = None) -> Result:
    curves = {"train/loss": [(1, 2.0), (2, 1.0), (3, 1.0)], LESSONS[name].metric: [(0, 2.0), (2, last)]}
    return Result(name, {}, (1e-3, 0.0), 2.0, last, 1.0, curves, trl or [])


def test_a_lesson_fails_by_its_threshold_and_by_a_loss_that_is_not_trls() -> None:
    reach = LESSONS["sft"].reach
    assert not result("sft", reach).failures()
    told = f"sft: eval/loss went from 2 to {reach + 1:.4g}, and should reach {reach:g}"
    assert result("sft", reach + 1).failures() == [told]
    assert "should rise by 0.1" in result("ppo", 2.05).failures()[0]
    assert result("reward", LESSONS["reward"].reach - 0.1).failures()  # an accuracy rises
    assert not result("sft", reach, [2.0005, 1.0]).failures()
    assert result("sft", reach, [2.002, 1.0]).failures() == ["sft: a loss is 0.002 from TRL's"]


def test_lessons_set_data_and_sizes_alone() -> None:
    allowed = {
        "data",
        "validation",
        "reward",
        "environment",
        "teacher",
        "init_from",
        "answer_tokens",
        "max_steps",
        "held_out",
        "eval_first",
    }
    for lesson in LESSONS.values():
        assert {*lesson.settings} <= allowed
        of_another = {name: "run-1/step-1" for name in ("reward", "init_from") if lesson.settings.get(name) in LESSONS}
        settings_of(lesson.recipe, {**lesson.settings, **of_another})


def test_rows_to_evaluate_on_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"question": f"{n} and 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(100)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "out").mkdir()
    write_data(tmp_path, tmp_path / "out")
    for name in ("talks", "pairs"):
        kept, held_out = (read_jsonl(tmp_path / "out" / f"{name}{end}.jsonl") for end in ("", "_held_out"))
        assert len(held_out) == learn.HELD_OUT and not {r["prompt"] for r in kept} & {r["prompt"] for r in held_out}
    assert all(pair["chosen"] != pair["rejected"] for pair in read_jsonl(tmp_path / "out" / "pairs.jsonl"))


def test_the_reward_is_the_share_that_is_right() -> None:
    assert reversed_share("Sure: <reversed_text>cba</reversed_text>", "cba") == 1.0
    assert reversed_share("<reversed_text>cb", "cba") == 0.8 and reversed_share("xyz", "cba") == 0.0


def test_the_lane_shows_answers_of_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "OUT", tmp_path)
    assert learn.examples("dpo") == []
    for folder in ("sft/evaluation", "ppo"):
        (tmp_path / folder).mkdir(parents=True)
    answers = [{"item": {"prompt": f"{n}?"}, "answer": said + str(n)} for said in ("base ", "tuned ") for n in range(3)]
    (tmp_path / "sft/evaluation/answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    shown = [("question", "0?"), ("before", "base 0"), ("after", "tuned 0")]
    assert learn.examples("sft") == [*shown, ("question", "1?"), ("before", "base 1"), ("after", "tuned 1")]
    rollouts = [
        {"iteration": at, "reward": at / 2, "steps": [{"observation": f"q{at}{n}", "action": f"a{at}{n}"}]}
        for at in range(3) for n in range(2)
    ]  # fmt: skip
    (tmp_path / "ppo/trajectories.jsonl").write_text("\n".join(map(json.dumps, rollouts)))
    assert learn.examples("ppo") == [
        ("question", "q00"), ("first iteration, reward 0", "a00"),
        ("question", "q20"), ("last iteration, reward 1", "a20"),
    ]  # fmt: skip


def test_the_page_has_a_line_a_lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "PICTURE", "FIGURES"):
        monkeypatch.setattr(learn_page, name, tmp_path / name)
    (tmp_path / "PAGE").write_text(f"Before\n{learn_page.BEGIN}\nold\n{learn_page.END}\nbehind\n")
    sft = result("sft", 0.5, [2.0, 1.25])
    sft.graded, sft.questions = {"last_number": ["0.010 ±0.005", "0.030 ±0.009"]}, 400
    learn_page.write_page(LESSONS, {"sft": asdict(sft)})
    learn_page.write_page(LESSONS, {"grpo": asdict(result("grpo", 0.7))})  # what was run before stays
    page = (tmp_path / "PAGE").read_text()
    assert "Before" in page and "behind" in page and "old" not in page
    assert "`eval/loss` | 2.000 → **0.500** | 0.95 | 0.2 in 2 steps |" in page
    assert "400 held-out questions: the number is right | 0.010 ±0.005 → 0.030 ±0.009" in page
    assert page.count("not run yet") == len(LESSONS) - 2
    ElementTree.parse(tmp_path / "PICTURE")


def test_the_page_of_the_documentation_has_a_place_for_the_table() -> None:
    page = learn_page.PAGE.read_text()
    assert page.count(learn_page.BEGIN) == page.count(learn_page.END) == 1
