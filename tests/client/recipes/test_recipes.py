"""The recipes on a real server with a tiny model: each learns, goes on after kill -9, and says what it will take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.data import Conversation, DataError
from gradwire.recipes import command, distill, dpo, grpo, ppo, reward, sft
from gradwire.recipes.estimate import Estimate
from gradwire.recipes.folder import facts_of, next_steps, open_folder
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import SettingsError
from gradwire.recipes.tokens import RowEncoder
from support.chats import chat_model
from support.server import Server
from support.tiny import tiny_model

PROGRAM = """
import os, signal
from gradwire.recipes.command import main
from gradwire.loop.loggers import JsonlLogger

written, log = 0, JsonlLogger.log

def log_and_die(*arguments, **named):
    global written
    log(*arguments, **named)
    written += 1
    if written == {lines}:
        os.kill(os.getpid(), signal.SIGKILL)

JsonlLogger.log = log_and_die
main()
"""
"""``gradwire train``, killed when it has written so many lines of its log; 0: never."""
COMMON: dict[str, Any] = {
    "model": "marked", "batch_size": 8, "held_out": 0.1, "warmup": 2, "max_tokens": 256, "eval_every": 4,
    "save_every": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("recipes")
    model, teacher = chat_model(folder / "marked", "marked"), chat_model(folder / "teacher", "marked", seed=1)
    plain = tiny_model(folder / "plain")
    flags = ("--model", f"marked={model}", "--model", f"teacher={teacher}", "--model", f"plain={plain}")
    running = Server(model, folder / "state", *flags, "--threads", "1").start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sums to learn, right and wrong answers to prefer among, in files as people have them."""
    folder = tmp_path_factory.mktemp("sums")
    asked = [(f"{a} and {b}?", str(a + b)) for a in range(8) for b in range(8)]
    rows = {
        "talks": [{"question": question, "answer": answer} for question, answer in asked],
        "pairs": [
            {"prompt": question, "chosen": f"four {answer}", "rejected": f"two {answer}"} for question, answer in asked
        ],
        "ones": [{"question": question, "answer": "1"} for question, _ in asked],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {name: str(folder / f"{name}.jsonl") for name in rows}


@pytest.mark.long
@pytest.mark.parametrize("name", ["marked", "plain"])
async def test_what_a_row_says_of_its_weight_is_trained_on(server: Server, name: str) -> None:
    asked, answered = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "4"}
    async with gradwire.connect(server.address) as service:
        model = next(each for each in await service.list_models() if each.name == name)
        tokens = RowEncoder(service, model, 256)
        whole, unlearned, half, other = await tokens.rows(
            [
                Conversation((asked, answered)),
                Conversation((asked, answered | {"weight": 0})),
                Conversation((asked, answered), weight=0.5),
                Conversation((asked, {"role": "assistant", "content": "44"})),
            ]
        )
        run = await service.create_run(name, lora=2)
        losses = [(await run.forward([row], "causal_lm")).loss for row in (whole, other)]
        mixed = (await run.forward([half, other, unlearned], "causal_lm")).loss
        await service.delete_run(run.run_id)
    assert whole["loss_mask"].sum() > 0 == unlearned["loss_mask"].sum()
    counts = [0.5 * whole["loss_mask"].sum(), other["loss_mask"].sum()]
    assert mixed == pytest.approx(np.average(losses, weights=counts), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "settings", "data"), [(sft.train, sft.SFT, "talks"), (dpo.train, dpo.DPO, "pairs")], ids=["sft", "dpo"]
)
async def test_batches_of_a_step_are_reported_as_one(
    train: Any, settings: Any, data: str, server: Server, sums: dict[str, str], tmp_path: Path
) -> None:
    """Whatever they are cut into, down to the last step, which has what is left of the epoch."""
    shared = {**COMMON, "address": server.address, "data": sums[data], "held_out": 0.0, "limit": 13, "epochs": 1}
    for name, sizes in {"one": {"batch_size": 8}, "several": {"batch_size": 2, "accumulation": 4}}.items():
        await train(settings(**{**shared, **sizes}, folder=str(tmp_path / name)))
    one, several = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "several")
    )
    assert len(one) == len(several) == 2
    for mine, theirs in zip(several, one, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if name.startswith("train/"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
async def test_a_pairs_margin_is_trained_on_or_refused(server: Server, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "margin": 3 * (n % 2)} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    shared = {**COMMON, "address": server.address, "data": str(tmp_path / "pairs.jsonl"), "held_out": 0.0,
              "max_steps": 1, "batch_size": 8}  # fmt: skip
    await reward.train(reward.Reward(**shared, folder=str(tmp_path / "reward")))
    (loss,) = curve(tmp_path / "reward", "train/loss")
    rest = float(np.mean([np.logaddexp(0, margin) for margin in (0, 3)]))  # of a new head, which scores all alike
    assert loss == pytest.approx(rest, abs=0.05) and abs(rest - np.log(2)) > 1
    with pytest.raises(DataError, match=r"pairs.jsonl, line \d: there is a margin, which the recipe reward alone uses"):
        await dpo.train(dpo.DPO(**shared, folder=str(tmp_path / "dpo")))


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if "time" not in name and "second" not in name} for line in lines
    ]


def near(estimate: Estimate | None, folder: Path, steps: int) -> bool:
    """Whether the tokens and the memory of an estimate are about those of the training that followed it."""
    assert estimate is not None and estimate.steps == steps and estimate.seconds > 0
    total, trained = estimate.parameters
    assert estimate.memory_bytes == 4 * total + 12 * trained  # weights in float32; a gradient and two moments
    return 0.7 < estimate.tokens / sum(curve(folder, "train/computed_tokens")) < 1.4


def curve(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder) if name in line]


@pytest.mark.long
async def test_supervised_fine_tuning_learns(server: Server, sums: dict[str, str], tmp_path: Path) -> None:
    settings = sft.SFT(**COMMON, address=server.address, data=sums["talks"], folder=str(tmp_path), max_steps=16,
                       learning_rate=1e-2, lora_rank=0)  # fmt: skip
    async with gradwire.connect(server.address) as service:
        before = len(await service.list_runs())
    estimate = await sft.train(settings, Launch(dry_run=True))
    assert estimate is not None and estimate.rows == 58 and estimate.parameters[0] == estimate.parameters[1]
    assert not (tmp_path / "metrics.jsonl").exists()
    await sft.train(settings)
    assert near(estimate, tmp_path, 16), estimate
    losses, held_out = curve(tmp_path, "train/loss"), curve(tmp_path, "eval/loss")
    assert len(losses) == 16 and len(held_out) == 4
    assert losses[-1] < 0.7 * losses[0] and held_out[-1] < held_out[0], (losses, held_out)
    report = (tmp_path / "report.html").read_text()
    assert "eval/loss" in report and "learning_rate" in report and "<polyline" in report
    async with gradwire.connect(server.address) as service:
        assert len(await service.list_runs()) == before + 1  # the estimate's is gone


@pytest.mark.long
async def test_preferences_are_learned(server: Server, sums: dict[str, str], tmp_path: Path) -> None:
    common = COMMON | {"address": server.address, "data": sums["pairs"], "max_steps": 8}
    for name, recipe, kind in (("dpo", dpo, dpo.DPO), ("reward", reward, reward.Reward)):
        settings = kind(**common, folder=str(tmp_path / name), learning_rate=1e-2)
        estimate = await recipe.train(settings, Launch(dry_run=True))
        await recipe.train(settings)
        assert near(estimate, tmp_path / name, 8), estimate
        assert curve(tmp_path / name, "eval/preference_accuracy")[-1] == 1.0, name
        going_on = "\n".join(next_steps(tmp_path / name))
        assert ("gradwire chat" in going_on) == (name == "dpo") and ("gradwire train ppo" in going_on) == (
            name == "reward"
        )


@pytest.mark.long
async def test_a_teacher_is_approached(server: Server, sums: dict[str, str], tmp_path: Path) -> None:
    common = COMMON | {"address": server.address, "data": sums["talks"], "folder": str(tmp_path), "eval_every": 1}
    settings = distill.Distill(
        **common, max_steps=24, learning_rate=1e-2, lora_rank=0, teacher="teacher", answer_tokens=8
    )
    estimate = await distill.train(settings, Launch(dry_run=True))
    await distill.train(settings)
    assert near(estimate, tmp_path, 24), estimate
    divergence = curve(tmp_path, "eval/divergence")
    assert len(divergence) == 24 and divergence[-1] < 0.9 * divergence[0], divergence


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
async def test_rewards_are_trained_on(recipe: str, server: Server, sums: dict[str, str], tmp_path: Path) -> None:
    common = COMMON | {"address": server.address, "data": sums["talks"], "max_steps": 2, "batch_size": 2}
    common |= {"save_every": 1, "eval_every": 2, "answer_tokens": 8, "eval_problems": 2, "folder": str(tmp_path)}
    module, settings = {
        "ppo": (ppo, ppo.PPO(**common, answers=2)), "grpo": (grpo, grpo.GRPO(**common, group_size=2)),
    }[recipe]  # fmt: skip
    estimate = await module.train(settings, Launch(dry_run=True))
    await module.train(settings)
    await module.train(settings)  # is at its end
    async with gradwire.connect(server.address) as service:
        newest = max(await service.list_runs(), key=lambda run: run.created_at)
    assert estimate is not None and estimate.steps == 2 and estimate.seconds > 0
    assert 0.3 < estimate.tokens / newest.num_tokens < 1.4, (estimate, newest)  # the run evaluates as well
    assert [line["iteration"] for line in metrics(tmp_path)] == [0, 1]
    assert "rewards/reward" in metrics(tmp_path)[1] and (tmp_path / "report.html").exists()


@pytest.mark.long
async def test_a_reward_model_is_the_reward_of_its_folder(server: Server, sums: dict[str, str], tmp_path: Path) -> None:
    common = COMMON | {"address": server.address, "max_steps": 2, "eval_every": 0, "learning_rate": 1e-2}
    for name, recipe, kind in (("judge", reward, reward.Reward), ("dpo", dpo, dpo.DPO)):
        await recipe.train(kind(**common, data=sums["pairs"], folder=str(tmp_path / name)))
    common |= {"data": sums["talks"], "batch_size": 2, "answer_tokens": 8, "folder": str(tmp_path / "ppo")}
    async with gradwire.connect(server.address) as service:
        before = len(await service.list_runs())
        await ppo.train(ppo.PPO(**common, answers=2, reward=str(tmp_path / "judge")))
        assert len(await service.list_runs()) == before + 1  # the reward model's copy is gone
        await ppo.train(ppo.PPO(**common | {"folder": str(tmp_path / "as_is")}, answers=2, missing_eos_penalty=0.0,
                                reward=str(tmp_path / "judge")))  # fmt: skip
    for name, penalty in (("ppo", 1.0), ("as_is", 0.0)):  # an untrained model's answers are cut
        (first, *rest) = metrics(tmp_path / name)
        assert len(rest) == 1 and first["rollouts/truncated"] > 0
        share = first["rollouts/truncated"] / first["rollouts/trajectories"]
        assert first["rewards/reward"] == pytest.approx(first["rewards/reward_model"] - penalty * share)
    with pytest.raises(SettingsError, match="dpo, whose run has no head: name a training by reward"):
        await ppo.train(ppo.PPO(**common | {"folder": str(tmp_path / "no")}, reward=str(tmp_path / "dpo")))


SUPERVISED: dict[str, Any] = {
    "data": "talks", "max_steps": 40, "batch_size": 8, "held_out": 0.1, "eval_every": 5, "save_every": 7,
    "learning_rate": 1e-3, "lora_rank": 4,
}  # fmt: skip
PAIRS = SUPERVISED | {"data": "pairs", "max_steps": 24}
REWARDED: dict[str, Any] = {  # an untrained model writes a "1" now and then
    "data": "ones", "max_steps": 5, "batch_size": 4, "held_out": 0.1, "eval_every": 2, "save_every": 2, "warmup": 2,
    "learning_rate": 1e-2, "lora_rank": 4, "answer_tokens": 24, "eval_problems": 2, "max_tokens": 256,
}  # fmt: skip
KILLED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "sft": (SUPERVISED, (11, 15)),
    "dpo": (PAIRS, (10,)),
    "reward": (PAIRS, (10,)),
    "distill": (SUPERVISED | {"max_steps": 24, "teacher": "teacher", "answer_tokens": 8}, (10,)),
    "ppo": (REWARDED | {"answers": 8}, (2,)),
    "grpo": (REWARDED | {"group_size": 8}, (2,)),
}
"""Recipe -> settings, and for each kill the lines of its log that the process has written by then."""
ALIKE = ("dpo", "reward", "distill", "ppo")
"""Go on through the same loop as sft and grpo."""


def test_every_loop_is_killed() -> None:
    """The others have the loop of sft and dpo, rows, a loss and a step, or that of grpo."""
    assert set(command.RECIPES) - set(KILLED) == {"kto", "orpo", "simpo", "process_reward", "rloo", "gigpo"}


def trained(recipe: str, folder: Path, lines: int = 0) -> tuple[int, str]:
    """The exit code and the output of a training that is killed after so many lines of its log."""
    command = [sys.executable, "-c", PROGRAM.format(lines=lines), recipe, f"{folder}.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=pytest.mark.slow) if each in (*ALIKE, "sft") else each for each in KILLED]
)
def test_a_killed_training_ends_as_if_nothing_had_happened(
    recipe: str, server: Server, sums: dict[str, str], tmp_path: Path
) -> None:
    given, kills = KILLED[recipe]
    common = {**given, "model": "marked", "address": server.address, "data": sums[given["data"]]}
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.with_suffix(".yaml").write_text(json.dumps({**common, "folder": str(folder)}))
    assert trained(recipe, folders[0])[0] == 0
    for lines in kills:
        assert trained(recipe, folders[1], lines)[0] == -signal.SIGKILL
    code, out = trained(recipe, folders[1])
    assert code == 0 and "going on at" in out
    assert metrics(folders[1]) == metrics(folders[0])
    assert len({line["train/grad_norm"] for line in metrics(folders[0]) if "train/grad_norm" in line}) > 2  # it learns


BAD: list[tuple[str, list[str], str]] = [
    ("model: x\nlearning_rat: 1\n", [], "line 2: there is no setting 'learning_rat'; did you mean learning_rate?"),
    ("model: x\nbatch_size: many\n", [], "line 2: batch_size is 'many'; it must be a whole number"),
    ("model: x\nschedule: cosin\n", [], "line 2: schedule is 'cosin'; it must be one of constant, linear, cosine, wsd"),
    ("model: x\nheld_out: 2\n", [], "line 2: held_out is 2.0; it must be at least 0 and less than 1"),
    ("model: x\nmodel: y\n", [], "line 2: model is set a second time"),
    ("model: x\nlimit: -1\n", [], "line 2: limit is -1; it must be at least 0"),
    ("model: x\nseed: -1\n", [], "line 2: seed is -1; it must be at least 0"),
    ("model: x\nlearning_rate: .nan\n", [], "line 2: learning_rate is nan; numbers must be finite"),
    ("model: x\nfolder: ''\n", [], "line 2: folder is empty"),
    ("model: x\nloggers: [wandbb]\n", [], "line 2: loggers has 'wandbb'; there are tensorboard, wandb"),
    ("model: x\ntrain_on: me\n", [], "line 2: train_on is 'me'; it must be one of assistant, last, all"),
    (
        "model: x\nmapping: {prompt:q}\n",
        [],
        "line 2: mapping has 'prompt:q', without a value: write a blank behind the",
    ),
    ("model: x\n", ["--set", "mapping={prompt:q}"], "mapping has 'prompt:q', without a value: write a blank behind"),
    ("model: [\n", [], "line 2: not valid YAML"),
    ("- x\n", [], "settings are a mapping"),
    ("base_model: x\n", [], "line 1: there is no setting 'base_model'; did you mean model?"),
    ("lora_target_modules: [q]\n", [], "there is no setting 'lora_target_modules'; did you mean lora_targets?"),
    ("model: x\nzzz: 1\n", [], "there is no setting 'zzz'; `gradwire train --example RECIPE` shows all"),
    ("model: x\n", ["--set", "batch_siz=3"], "--set batch_siz=3: there is no setting 'batch_siz'"),
    ("model: x\n", ["--set", "batch_size"], "write NAME=VALUE"),
    ("model: x\n", ["--set", "data=/nowhere.jsonl"], "there is no file /nowhere.jsonl"),
    ("model: x\n", ["--set", "data=*.jsonl"], "there is no file *.jsonl"),
    ("model: x\n", ["--set", "batch_size=[1"], "batch_size is '[1'; it must be a whole number"),
]


@pytest.mark.parametrize(("text", "more", "words"), BAD, ids=[words[:30] for *_, words in BAD])
def test_mistakes_are_one_sentence(
    text: str, more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        command.main(["sft", str(file), *more])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and words in said and "Traceback" not in said


def test_a_folder_that_cannot_be_used_is_said_before_anything_starts(
    sums: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.json").write_text("{")
    (tmp_path / "run" / "run.json").write_text("{")
    for recipe in ("sft", "grpo"):
        for folder, words in (("c.yaml/run", "cannot be used: Not a directory"), ("run", "no state of a training")):
            file.write_text(json.dumps({"data": sums["talks"], "model": "none", "folder": str(tmp_path / folder)}))
            with pytest.raises(SystemExit):
                command.main([recipe, str(file)])
            said = capsys.readouterr().err
            assert words in said and said.count("\n") == 1, said


def test_another_trainings_folder_is_told_with_what_differs(tmp_path: Path) -> None:
    settings = sft.SFT(data="a", folder=str(tmp_path))
    (tmp_path / "state.json").write_text(json.dumps(facts_of(settings, ALONE)))
    open_folder(tmp_path / "state.json", sft.SFT(data="a", folder=str(tmp_path), epochs=9))
    with pytest.raises(SettingsError, match="with other settings: max_tokens was 2048; give another folder"):
        open_folder(tmp_path / "state.json", sft.SFT(data="a", folder=str(tmp_path), max_tokens=9))
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "state.json").write_text(
        json.dumps(facts_of(grpo.GRPO(data="a", folder=str(tmp_path / "rl")), ALONE))
    )
    open_folder(tmp_path / "rl" / "state.json", grpo.GRPO(data="a", on_failure="warn"))  # as its error advises
    with pytest.raises(SettingsError, match="a training by another recipe, SFT; give another folder, or remove it"):
        open_folder(tmp_path / "state.json", dpo.DPO(data="a", folder=str(tmp_path)))


def test_a_folder_may_be_moved_and_be_older_than_a_setting(tmp_path: Path) -> None:
    def at(name: str, **more: Any) -> sft.SFT:
        return sft.SFT(data=str(tmp_path / name / "files" / "a.jsonl"), folder=str(tmp_path / name), **more)

    facts = facts_of(at("one"), ALONE)
    (tmp_path / "two").mkdir()
    state = tmp_path / "two" / "state.json"
    whole = facts["settings"] | {"data": "/elsewhere/two/files/a.jsonl"}  # as earlier versions wrote it
    for settings in (facts["settings"], whole, {k: v for k, v in whole.items() if k != "weight_decay"}):
        state.write_text(json.dumps(facts | {"settings": settings}))
        assert open_folder(state, at("two"))["settings"] == settings
        with pytest.raises(SettingsError, match=r"weight_decay was 0.0"):
            open_folder(state, at("two", weight_decay=0.5))
        with pytest.raises(SettingsError, match=r"data was"):
            open_folder(state, sft.SFT(data="/elsewhere/a.jsonl", folder=str(tmp_path / "two")))


def test_columns_are_named_as_the_configuration_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = tmp_path / "c.yaml", tmp_path / "rows.jsonl"
    data.write_text('{"q": "1 and 1?", "a": "2"}\n')
    file.write_text(f"data: {data}\n")
    with pytest.raises(SystemExit):
        command.main(["sft", str(file)])
    said = capsys.readouterr().err
    assert said == (
        f"gradwire train: {data}, line 1: no column is recognised as messages, or as prompt and completion;"
        " the row has q, a: name its columns in the settings, mapping: {prompt: COLUMN, completion: COLUMN}\n"
    )


@pytest.mark.long
def test_skipped_rows_are_said(
    server: Server, sums: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = tmp_path / "talks.jsonl", tmp_path / "c.yaml"
    data.write_text(Path(sums["talks"]).read_text() + '\n{"question": "and?"}\n')
    common = {"model": "marked", "address": server.address, "data": str(data), "folder": str(tmp_path / "run")}
    file.write_text(json.dumps({**common, "on_error": "skip", "max_steps": 2}))
    command.main(["sft", str(file), "--dry-run"])
    said = capsys.readouterr()
    assert "gradwire train: 1 of 65 rows were skipped" in said.err and "line 65" in said.err and "steps" in said.out


@pytest.mark.long
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
async def test_a_model_without_a_template_is_trained_on_what_the_settings_say(
    train_on: str, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = [{"role": role, "content": "ab"} for role in ("user", "assistant", "user", "assistant")]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": [*said, {**said[3], "content": "?"}]})
                                                   .replace("ab", 2 * letter) for letter in "abcdef"))  # fmt: skip
    settings = sft.SFT(model="plain", address=server.address, data=str(tmp_path / "talks.jsonl"), train_on=train_on,
                       folder=str(tmp_path / "run"), held_out=0.2, batch_size=2, max_steps=1)  # fmt: skip
    await sft.train(settings)
    (line,) = [line for line in metrics(tmp_path / "run") if "train/tokens" in line]
    scored = (
        line["train/tokens"] - 2 if train_on == "all" else 2 * len(["?", "end"])
    )  # a row's first token is never scored
    assert line["train/num_tokens"] == scored
    warned = [record.message for record in caplog.records if "only the last answer" in record.message]
    assert len(warned) == (train_on == "assistant")


@pytest.mark.long
async def test_rows_without_an_answer_after_the_cut_are_said(
    server: Server, sums: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common = COMMON | {"address": server.address, "data": sums["talks"], "max_steps": 2, "eval_every": 0}
    with pytest.raises(DataError, match="nothing of it is trained on"):
        await sft.train(sft.SFT(**common | {"max_tokens": 6}, folder=str(tmp_path / "sft")))
    said = [record.message for record in caplog.records]
    assert sum("answers begin behind token 6; raise max_tokens" in each for each in said) == 1, said
    assert not any("warmup" in each for each in said)  # as long as the training
    settings = distill.Distill(
        **common | {"max_tokens": 20, "max_steps": 1}, folder=str(tmp_path / "own"), teacher="teacher",
        answer_tokens=15, own_answers=1.0,
    )  # fmt: skip
    await distill.train(settings)
    assert sum("warmup is 2 steps and the training has 1" in record.message for record in caplog.records) == 1
    said = [record.message for record in caplog.records]
    assert sum("prompts of more than 5 tokens are cut at their beginning, to leave 15" in each for each in said) == 1


@pytest.mark.parametrize("recipe", command.RECIPES)
def test_an_example_is_a_valid_configuration(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gradwire.recipes.settings_file import load

    command.main(["--example", recipe])
    text = capsys.readouterr().out
    assert all("  # " in line for line in text.splitlines()[1:])
    (tmp_path / "c.yaml").write_text(text)
    kind, _ = command._recipe(recipe)
    needed = {"distill": ["teacher=t"], "gigpo": ["environment=world.py:World"]}.get(recipe, [])
    overrides = ["loss.reduction=sum", "learning_rate=1e-3", *needed]
    settings = load(kind, tmp_path / "c.yaml", overrides)
    assert settings.loss == {"reduction": "sum"} and settings.learning_rate == 1e-3


def test_settings_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["sft", "--set", "model=tiny", "--set", "data=/nowhere.jsonl", "--set", "lorra_rank=4"])
    assert "--set lorra_rank=4: there is no setting" in (said := capsys.readouterr().err) and "lora_rank" in said
