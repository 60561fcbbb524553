"""What the recipes' settings do, on a real server with a tiny model: refused rows, and what the loop does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gradwire
import httpx
import pytest
from gradwire.data import DataError
from gradwire.recipes import command, dpo, gigpo, grpo, rloo, sft
from gradwire.recipes.folder import trained
from gradwire.recipes.launch import Launch
from support.chats import chat_model
from support.own_code import own_code
from support.server import Server
from typer.testing import CliRunner

COMMON: dict[str, Any] = {"model": "gemma", "batch_size": 4, "held_out": 0.0, "warmup": 0, "lora_rank": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("settings")
    model = chat_model(folder / "gemma", "gemma")
    running = Server(model, folder / "state", "--model", f"gemma={model}", "--threads", "1").start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations; the template refuses the third, in which the user speaks twice."""
    user, assistant = {"role": "user", "content": "2 and 2?"}, {"role": "assistant", "content": "four"}
    rows = [{"messages": [user | {"content": f"{n} and 2?"}, assistant]} for n in range(8)]
    rows[2] = {"messages": [user, user, assistant]}
    return written(tmp_path_factory.mktemp("talks") / "talks.jsonl", rows)


def written(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(file)


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def log(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["iteration"], line[name]) for line in lines if name in line]


REFUSED = r"line 3: the chat template of 'gemma' refuses it: Conversation roles must alternate"


@pytest.mark.long
async def test_a_row_that_the_template_refuses_is_named(server: Server, talks: str, tmp_path: Path) -> None:
    common = COMMON | {"address": server.address}
    rows = rows_of(talks)
    pairs = [{"chosen": row["messages"], "rejected": [*row["messages"][:-1], {"role": "assistant", "content": "five"}]}
             for row in rows]  # fmt: skip
    asked = [{"prompt": row["messages"][:-1], "answer": "4"} for row in rows]
    for recipe, kind, data in (
        (sft, sft.SFT, talks),
        (dpo, dpo.DPO, written(tmp_path / "pairs.jsonl", pairs)),
        (grpo, grpo.GRPO, written(tmp_path / "asked.jsonl", asked)),
    ):
        settings = kind(**common, data=data, folder=str(tmp_path / kind.__name__))
        with pytest.raises(DataError, match=REFUSED):
            await recipe.train(settings)


@pytest.mark.long
async def test_a_refused_row_is_skipped(
    server: Server, talks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = sft.SFT(
        **COMMON, address=server.address, data=talks, folder=str(tmp_path), on_error="skip", epochs=2, validation=talks
    )
    await sft.train(settings)
    assert len(log(tmp_path, "train/loss")) == 4 and len(log(tmp_path, "eval/loss")) == 1
    said = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(said) == 1 and "line 3" in said[0], said
    with pytest.raises(DataError, match=REFUSED):  # which may be changed, as the error's reader will
        await sft.train(replace(settings, on_error="raise", epochs=3))
    one = tmp_path / "one"
    with pytest.raises(DataError, match="no row could be used"):
        bad = written(tmp_path / "bad.jsonl", rows_of(talks)[2:3])
        await sft.train(sft.SFT(**COMMON, address=server.address, data=bad, folder=str(one), on_error="skip"))


@pytest.mark.long
@pytest.mark.parametrize("dry_run", [True, False])
async def test_an_argument_that_the_loss_does_not_take_is_the_error(
    dry_run: bool, server: Server, talks: str, tmp_path: Path
) -> None:
    settings = sft.SFT(
        **COMMON, address=server.address, data=talks, folder=str(tmp_path), on_error="skip", loss={"beta": 0.1}
    )
    with pytest.raises(gradwire.GradwireError, match="beta") as raised:
        await sft.train(settings, Launch(dry_run=dry_run))
    assert "not run" not in str(raised.value)


@pytest.mark.long
def test_all_unfit_rows_are_listed_before_the_training(server: Server, talks: str, tmp_path: Path) -> None:
    from gradwire.cli.app import app

    file = tmp_path / "talks.jsonl"
    long = {"messages": [{"role": "user", "content": "two " * 100}, {"role": "assistant", "content": "1"}]}
    file.write_text(Path(talks).read_text() + '{"question": 1}\n{\n' + json.dumps(long) + "\n")
    half = {"prompt": "2 and 2?", "completion": "\ud83d"}
    file.write_text(file.read_text() + json.dumps(half) + "\n")
    runner, more = CliRunner(), ["--model", "gemma", "--address", server.address, "--max-tokens", "64"]
    done = runner.invoke(app, ["data", "check", str(file), *more])
    assert done.exit_code == 1 and "12 rows, 5 of them unfit" in done.output, done.output
    for words in ("line 9: no column is recognised as completion", "line 10: not valid JSON", "line 3: the chat",
                  "tokens; max_tokens allows 64", "line 12: completion holds half of a character"):  # fmt: skip
        assert words in done.output
    shown = runner.invoke(app, ["data", "show", str(file), *more]).output
    assert "9 conversations, 3 unfit rows" in shown and "#####" in shown, shown
    assert ">>>four<end_of_turn><<<" in shown and "0 and 2?" in shown, shown
    assert runner.invoke(app, ["data", "check", talks]).exit_code == 0


UNLEARNED = [
    ([{"weight": 0}] * 12, {}, "line 1: no message of the assistant is learned: each has the weight 0"),
    ([{}] * 12, {"max_tokens": 4}, "nothing of it is trained on: masks, weights of 0 or max_tokens leave no token"),
    ([{"row": 0}] * 12, {}, "nothing of it is trained on"),
]


@pytest.mark.long
@pytest.mark.parametrize(("said", "more", "sentence"), UNLEARNED, ids=lambda value: str(value)[:30])
async def test_data_of_which_nothing_is_trained_on_is_refused(
    server: Server, tmp_path: Path, said: list[dict[str, Any]], more: dict[str, Any], sentence: str
) -> None:
    user = {"role": "user", "content": "two and two?"}
    rows = [
        {"messages": [user, {"role": "assistant", "content": "4"} | each], "weight": each.get("row", 1)}
        for each in said
    ]
    data = written(tmp_path / "talks.jsonl", rows)
    with pytest.raises(DataError, match=sentence):
        await sft.train(sft.SFT(**COMMON, **more, address=server.address, data=data, folder=str(tmp_path / "run")))
    assert "metrics.jsonl" not in [name for _, _, names in os.walk(tmp_path) for name in names]


def test_rows_of_which_nothing_is_learned_are_counted_as_unfit(tmp_path: Path) -> None:
    from gradwire.cli.app import app

    user = {"role": "user", "content": "2 and 2?"}
    rows = [{"messages": [user, {"role": "assistant", "content": "4", "weight": 0}]}] * 12
    done = CliRunner().invoke(app, ["data", "check", written(tmp_path / "talks.jsonl", rows)])
    assert done.exit_code == 1 and "12 rows, 12 of them unfit" in done.output, done.output


@pytest.mark.long
async def test_the_best_checkpoint_is_kept_and_the_training_ends_early(
    server: Server, talks: str, tmp_path: Path
) -> None:
    given = COMMON | {"address": server.address, "data": talks, "on_error": "skip", "validation": talks, "keep": 2,
                      "folder": str(tmp_path), "eval_first": True, "eval_every": 1, "save_every": 1, "patience": 2,
                      "best_by": "loss"}  # fmt: skip
    await sft.train(sft.SFT(**given, learning_rate=1e-12, max_steps=8))
    assert [step for step, _ in log(tmp_path, "eval/loss")] == [0, 1, 2]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] == 2 and state["best"]["step"] == 0
    async with gradwire.connect(server.address) as service:
        run = service.get_training_client(state["run_id"])
        names = [each.path.partition("/")[2] for each in await run.list_checkpoints()]
        assert names == ["best", "step-1", "step-2"]
    assert trained(f"{tmp_path}@best").checkpoint == f"{state['run_id']}/best"
    await sft.train(sft.SFT(**given | {"patience": 3}, learning_rate=1e-12, max_steps=8))  # goes on
    assert [step for step, _ in log(tmp_path, "eval/loss")] == [0, 1, 2, 3]


@pytest.mark.long
async def test_a_finished_training_takes_more_epochs_and_starts_another(
    server: Server, talks: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    given = COMMON | {"address": server.address, "data": talks, "on_error": "skip", "learning_rate": 1e-2}
    await sft.train(sft.SFT(**given, folder=str(first), schedule="constant", accumulation=2))
    assert len(log(first, "train/loss")) == 1
    await sft.train(sft.SFT(**given, folder=str(first), schedule="constant", accumulation=2, epochs=3))
    losses = [loss for _, loss in log(first, "train/loss")]
    assert len(losses) == 3
    await sft.train(
        sft.SFT(**given | {"learning_rate": 0.0, "batch_size": 8}, folder=str(second), init_from=str(first))
    )
    assert log(second, "train/loss")[0][1] < losses[-1] < losses[0]
    async with gradwire.connect(server.address) as service:
        info = await service.get_training_client(trained(str(second)).run_id).info()
    assert info.forked_from == trained(str(first)).checkpoint


@pytest.mark.long
async def test_more_epochs_for_a_finished_training_equal_those_of_one_call(
    server: Server, talks: str, tmp_path: Path
) -> None:
    """With three batches an epoch and two a step: no step has batches of two epochs, so no row is left out."""
    data = written(tmp_path / "three.jsonl", [{"messages": row["messages"]} for row in rows_of(talks)[3:6]])
    common = COMMON | {"batch_size": 1, "accumulation": 2, "learning_rate": 1e-2, "schedule": "constant"}
    given = common | {"address": server.address, "data": data}
    for epochs in (1, 2, 3):
        await sft.train(sft.SFT(**given, folder=str(tmp_path / "raised"), epochs=epochs))
    await sft.train(sft.SFT(**given, folder=str(tmp_path / "at_once"), epochs=3))
    once = log(tmp_path / "at_once", "train/tokens")
    assert len(once) == 6 and len({two + one for (_, two), (_, one) in zip(once[::2], once[1::2])}) == 1
    for name in ("train/tokens", "train/loss"):
        assert log(tmp_path / "raised", name) == log(tmp_path / "at_once", name)


@pytest.mark.long
async def test_the_adapter_is_made_as_the_settings_say(server: Server, talks: str, tmp_path: Path) -> None:
    settings = sft.SFT(
        **COMMON | {"lora_rank": 4}, address=server.address, data=talks, folder=str(tmp_path), on_error="skip",
        rslora=True, lora_alpha=8.0, lora_dropout=0.1, lora_targets=["q_proj"], max_steps=1, max_grad_norm=0.5,
        optimizer="sgd", optimizer_args={"momentum": 0.5},
    )  # fmt: skip
    await sft.train(settings)
    async with gradwire.connect(server.address) as service:
        folder = await service.get_training_client(trained(str(tmp_path)).run_id).export(tmp_path / "peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 16.0, 0.1)  # 8 / sqrt(4) = 16 / 4
    assert config["target_modules"] == ["q_proj"]


RATED = [{"prompt": f"{n} and 2?", "completion": word, "label": word == "four"} for n in range(4)
         for word in ("four", "two")]  # fmt: skip
PAIRS = [{"prompt": f"{n} and 2?", "chosen": "four", "rejected": "two"} for n in range(8)]
STEPS = [{"prompt": f"{n} and 2?", "completions": ["two and two", word], "labels": [True, word == "four"]}
         for n in range(4) for word in ("four", "one")]  # fmt: skip
LEARNT: dict[str, tuple[list[dict[str, Any]], str, float]] = {
    "kto": (RATED, "train/rewards", 0.0),
    "orpo": (PAIRS, "train/preference_accuracy", 1.0),
    "simpo": (PAIRS, "train/preference_accuracy", 1.0),
    "process_reward": (STEPS, "train/accuracy", 0.95),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", LEARNT)
async def test_more_recipes_learn(recipe: str, server: Server, tmp_path: Path) -> None:
    rows, metric, wanted = LEARNT[recipe]
    given = COMMON | {"address": server.address, "data": written(tmp_path / "rows.jsonl", rows), "learning_rate": 1e-2}
    given |= {"folder": str(tmp_path), "batch_size": 8, "lora_rank": 0, "max_steps": 40 if "process" in recipe else 12}
    await command.train(recipe, command.settings_of(recipe, given))
    losses = [loss for _, loss in log(tmp_path, "train/loss")]
    assert losses[-1] < 0.97 * losses[0], losses
    if recipe != "kto":
        assert log(tmp_path, metric)[-1][1] >= wanted, log(tmp_path, metric)


@pytest.mark.long
async def test_texts_are_learned_whole(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("two and two make four. " * 40)
    settings = sft.SFT(**COMMON, address=server.address, data=str(tmp_path / "a.txt"), folder=str(tmp_path / "run"),
                       max_steps=1, max_tokens=32)  # fmt: skip
    await sft.train(settings)
    async with gradwire.connect(server.address) as service:
        (ids,) = await service.encode("gemma", [(tmp_path / "a.txt").read_text()])
    assert log(tmp_path / "run", "train/tokens") == [(1, len(ids) + 1)]  # and the end of the text


@pytest.mark.long
def test_what_was_trained_is_exported_and_talked_to(
    server: Server, talks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradwire.cli.app import app

    folder, runner = tmp_path / "run", CliRunner()
    given = COMMON | {"address": server.address, "data": talks, "on_error": "skip", "max_steps": 1}
    (tmp_path / "c.yaml").write_text(json.dumps(given | {"folder": str(folder)}))
    assert runner.invoke(app, ["export", str(folder), str(tmp_path / "none")]).exit_code == 2
    command.main(["sft", str(tmp_path / "c.yaml")])
    said = capsys.readouterr().out
    checkpoint = trained(str(folder)).checkpoint
    assert f"trained: {checkpoint}" in said and checkpoint.endswith("/step-1")
    report = (folder / "report.html").read_text()
    for words in ("gradwire chat", "gradwire export", "gradwire push"):
        assert f"{words} {folder}" in said and f"{words} {folder.name}" in report
    assert str(tmp_path) not in report, "one can send it to a colleague"
    for flags, file in (([], "adapter_config.json"), (["--merged"], "config.json")):
        out = tmp_path / file
        done = runner.invoke(app, ["export", f"{folder}@step-1", str(out), *flags])
        assert done.exit_code == 0 and (out / file).is_file(), done.output
    done = runner.invoke(app, ["export", str(folder), str(tmp_path / "gguf"), "--gguf", "q5_k_m"])
    assert done.exit_code == 2 and "let llama.cpp's llama-quantize make q5_k_m of it" in done.output, done.output
    done = runner.invoke(app, ["export", str(folder), str(tmp_path / "gguf"), "--gguf", "q8_0"])
    if find_spec("gguf"):
        file = tmp_path / "gguf" / "model-q8_0.gguf"
        assert done.exit_code == 0 and [*file.parent.iterdir()] == [file] and str(file) in done.output, done.output
    else:
        assert done.exit_code == 2 and "gradwire[gguf]" in done.output, done.output
    asked = ["chat", checkpoint, "--address", server.address, "--base", "--max-tokens", "4", "--temperature", "0"]
    done = runner.invoke(app, asked, input="2 and 2?\n/new\nand 3?\n\n")
    assert done.exit_code == 0 and done.output.count("trained> ") == 2, done.output
    with gradwire.sync.connect(server.address) as service:
        assert not [run for run in service.list_runs() if run.name == "export"]
    for words in (["chat", f"{folder}@stp-1"], ["export", f"{folder}@stp-1", str(tmp_path / "none")]):
        done = runner.invoke(app, words)
        assert done.exit_code == 2 and "there is no checkpoint" in done.output and "step-1" in done.output, done.output


def test_a_server_finds_what_was_trained(tmp_path: Path) -> None:
    from gradwire_server.cli.serve import Trained
    from gradwire_server.cli.settings_file import SettingsError

    state = {"run_id": "run-1", "checkpoint": "run-1/step-1", "settings": {"model": "m"}, "server": "/s", "address": ""}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert Trained.read(tmp_path).flags() == {"models": ["m"], "state_dir": "/s", "http": "127.0.0.1:8000"}
    (tmp_path / "state.json").write_text(json.dumps(state | {"server": "", "address": "box:1"}))
    with pytest.raises(SettingsError) as caught:
        Trained.read(tmp_path)
    assert "used the server at box:1" in str(caught.value.sentences)


@pytest.mark.slow
def test_an_afternoon_by_commands_alone(tmp_path: Path) -> None:
    """SFT, then DPO and GRPO from it, an export and a served model, without a server that a person starts."""
    model = chat_model(tmp_path / "model", "marked")
    talks = [{"question": f"{n} and 2?", "answer": str(n + 2)} for n in range(8)]
    data = {"sft": written(tmp_path / "talks.jsonl", talks), "dpo": written(tmp_path / "pairs.jsonl", PAIRS)}
    data["grpo"] = data["sft"]
    before = ""
    for recipe in ("sft", "dpo", "grpo"):
        given = {"model": str(model), "data": data[recipe], "folder": str(tmp_path / recipe), "max_steps": 2,
                 "batch_size": 2, "held_out": 0.0, "warmup": 0, "init_from": before}  # fmt: skip
        given |= {"answer_tokens": 8, "group_size": 2} if recipe == "grpo" else {}
        (tmp_path / "c.yaml").write_text(json.dumps(given))
        command.main([recipe, str(tmp_path / "c.yaml")])
        before = str(tmp_path / recipe)
    assert trained(before).server == str(tmp_path / "sft" / "server")
    command_line = [sys.executable, "-m", "gradwire.cli", "serve", before, "--address", "127.0.0.1:0"]
    with subprocess.Popen([*command_line, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        try:
            url = next(line.split()[-1] for line in served.stdout if "HTTP on" in line)
            asked = {"messages": [{"role": "user", "content": "2 and 2?"}], "max_tokens": 4}
            asked |= {"model": trained(before).checkpoint}
            answered = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
        finally:
            served.terminate()
    assert answered.status_code == 200 and answered.json()["choices"], answered.text


@pytest.mark.long
async def test_own_rewards_and_environments_are_trained_on(server: Server, tmp_path: Path) -> None:
    code = own_code(tmp_path)
    common: dict[str, Any] = COMMON | {
        "address": server.address, "data": str(code / "asked.jsonl"), "mapping": {"answer": "wanted"},
        "max_steps": 1, "batch_size": 2, "answer_tokens": 8, "held_out": 0.2, "eval_every": 1, "eval_problems": 1,
        "group_size": 4,
    }  # fmt: skip
    world = f"{code}/own_world.py:Counting"
    own = {f"{code}/own_rewards.py:ones": 1.0, f"{code}/own_rewards.py:brevity": 0.1}
    for module, settings in (
        (rloo, rloo.RLOO(**common, reward=own, folder=str(tmp_path / "rloo"))),
        (grpo, grpo.GRPO(**common, reward="environment", environment=world, folder=str(tmp_path / "grpo"))),
        (
            gigpo,
            gigpo.GiGPO(**common, environment=world, environment_args={"turns": 3}, folder=str(tmp_path / "gigpo")),
        ),
    ):
        await module.train(settings)
    lines = {name: json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("rloo", "grpo", "gigpo")}
    assert {"rewards/ones", "rewards/brevity", "train/grad_norm", "eval/success"} <= set(lines["rloo"])
    assert (
        lines["grpo"]["rollouts/avg_trajectory_length"] == 2 and lines["gigpo"]["rollouts/avg_trajectory_length"] == 3
    )
    assert lines["gigpo"]["train/anchor_states"] == 6


@pytest.mark.long
def test_a_grid_of_trainings_is_compared_and_the_worse_are_dropped(server: Server, talks: str, tmp_path: Path) -> None:
    from gradwire.cli.app import app

    given = {
        "recipe": "sft", "folder": str(tmp_path / "sweep"), "halving": 2, "rounds": 2,
        "settings": COMMON | {"address": server.address, "data": talks, "on_error": "skip", "validation": talks,
                              "max_steps": 4, "eval_every": 1},
        "grid": {"learning_rate": [1e-2, 1e-4, 1e-3], "loss.reduction": ["token_mean", "none of them"]},
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(json.dumps(given))
    runner = CliRunner()
    done = runner.invoke(app, ["sweep", str(tmp_path / "grid.yaml")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    good = {each["values"]["learning_rate"]: each for each in found if not each["error"]}
    assert len(found) == 6 and len(good) == 3 and all("reduction" in each["error"] for each in found if each["error"])
    assert {rate: (each["steps"], each["dropped"]) for rate, each in good.items()} == {
        1e-2: (4, 0), 1e-3: (4, 0), 1e-4: (2, 2),
    }  # fmt: skip
    assert good[1e-2]["value"] < good[1e-3]["value"] < good[1e-4]["value"]
    assert f"best: {good[1e-2]['folder']}" in done.output.replace("\n", "") and "dropped at 2" in done.output
    with gradwire.sync.connect(server.address) as service:
        tags = {run.name: run.tags for run in service.list_runs() if run.tags.get("sweep") == "sweep"}
    assert {tags[Path(each["folder"]).name]["learning_rate"] for each in good.values()} == {"0.01", "0.001", "0.0001"}
    page = (tmp_path / "sweep" / "sweep.html").read_text()
    assert "eval/loss" in page and page.count("<polyline") >= 3
    before = (Path(good[1e-2]["folder"]) / "metrics.jsonl").read_text()
    alone = tmp_path / "alone"  # a training that was stopped between the rounds is as one that was not
    (tmp_path / "one.yaml").write_text(json.dumps(given["settings"] | {"learning_rate": 1e-2, "folder": str(alone)}))
    command.main(["sft", str(tmp_path / "one.yaml"), "--set", "loss.reduction=token_mean"])
    assert log(alone, "train/loss") == log(Path(good[1e-2]["folder"]), "train/loss")
    wrong = runner.invoke(
        app, ["sweep", str(tmp_path / "grid.yaml"), "--set", "by=eval/acc", "--set", "folder=" + str(tmp_path / "by")]
    )
    assert wrong.exit_code == 2 and "by is 'eval/acc', which no training has" in wrong.output.replace("\n", " ")
    assert [len(log(each, "train/loss")) for each in (tmp_path / "by").glob("*token_mean")] == [
        2,
        2,
        2,
    ]  # no more rounds
    again = runner.invoke(app, ["sweep", str(tmp_path / "grid.yaml")])
    assert again.exit_code == 0 and (Path(good[1e-2]["folder"]) / "metrics.jsonl").read_text() == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grid": {}}, "grid is empty"),
        ({"grid": {"learning_rat": [1]}}, "there is no setting 'learning_rat'; did you mean learning_rate?"),
        ({"grid": {"seed": 3}}, "grid has seed: 3; it maps settings of a training to lists"),
        ({"grid": {"seed": list(range(300))}}, "grid has 300 combinations; 256 at most"),
        ({"halving": 1}, "halving is 1; it must be 0, or 2 or more"),
        ({"halving": 2, "settings": {"data": "x"}}, "halving needs max_steps"),
        (
            {"halving": 2, "settings": {"max_steps": 24, "held_out": 0.1, "eval_every": 50}},
            "halving has 3 rounds, which would end after steps 24, 24, 24: each must be longer",
        ),
        ({"recipe": "sfft"}, "there is no recipe 'sfft'"),
        ({"gird": {}}, "line 1: there is no setting 'gird'; did you mean grid?"),
    ],
)
def test_mistakes_in_a_sweep_are_one_sentence(
    change: dict[str, Any], words: str, server: Server, tmp_path: Path
) -> None:
    from gradwire.cli.app import app

    given = {"folder": str(tmp_path / "s"), "settings": {"model": "gemma"}, "grid": {"seed": [0, 1]}} | change
    given["settings"] |= {"address": server.address}
    (tmp_path / "g.yaml").write_text(json.dumps(given))
    done = CliRunner().invoke(app, ["sweep", str(tmp_path / "g.yaml")])
    assert done.exit_code == 2 and words in done.output.replace("\n", " "), done.output
