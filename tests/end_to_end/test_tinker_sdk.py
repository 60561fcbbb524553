"""The unmodified `tinker` SDK and `tinker-cookbook` against a real server; run by `make tinker`."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from support.cookbook import AGAIN, LIMIT_S, MARKS, PYTHON, ROLES, ROOT, environment, ran, run_program, served
from support.plain_peft import with_adapter
from support.recording_proxy import losses_of, recording_proxy
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FORMS = ("\\boxed{%d}\n\nUser:", "Guess: %d\n\nUser:", "%d\n\nUser:", "hm hm hm hm hm hm hm hm hm")
"""The last one never ends within the few tokens that the tests sample."""
QUESTIONS = (
    "What is %d + %d?\n\nAssistant:",
    "Too low %d %d\n\nAssistant:",
    "How many? %d %d. Provide a numerical answer without units, written inside \\boxed{}.\n\nAssistant:",
    "Your job is to guess a integer between %d and %d. Guess: <guess> and say nothing else.\n\nAssistant:",
)


def chatty_model(path: Path, *, steps: int = 250, context_length: int = 4096) -> Path:
    """Write a model that answers in one of :data:`FORMS` at random, so that reinforcement learning has a choice."""
    tiny_model(path, context_length=context_length, hidden_size=64)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rng = np.random.default_rng(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 * (1 - step / steps)
            rows, labels = [], []
            for _ in range(16):
                asked = "".join(
                    "User: " + QUESTIONS[rng.integers(4)] % tuple(rng.integers(0, 100, 2)) + _answer(rng)[:-5]
                    for _ in range(rng.integers(0, 3))
                )
                asked += "User: " + QUESTIONS[rng.integers(4)] % tuple(rng.integers(0, 100, 2))
                prompt = tokenizer(asked, add_special_tokens=False).input_ids[-160:]
                answer = tokenizer(_answer(rng), add_special_tokens=False).input_ids
                rows.append(prompt + answer)
                labels.append([-100] * len(prompt) + answer)
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            wanted = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
            model(input_ids=ids, labels=wanted).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def _answer(rng: np.random.Generator) -> str:
    form = FORMS[rng.integers(len(FORMS))]
    return " " + (form % rng.integers(1, 6) if "%d" in form else form)


OLD_PYTHON = ROOT / ".venv-tinker-old" / "bin" / "python"
MODEL = "Qwen/Qwen3.5-9B-Base"

pytestmark = MARKS
RECIPES: dict[str, tuple[str, ...]] = {
    "sl_loop": ("batch_size=16", "max_steps=3", "save_every=2"),
    "rl_loop": ("loss_fn=importance_sampling", "batch_size=4", "group_size=4", "max_steps=2", "max_tokens=6"),
    "math_rl.train": (
        ROLES, "env=arithmetic", "loss_fn=importance_sampling", "group_size=4",
        "groups_per_batch=4", "max_tokens=5", "max_steps=2", AGAIN,
    ),
    "chat_sl.train": (
        ROLES, "dataset=chat.jsonl", "batch_size=16", "max_length=128", "eval_every=0",
        "infrequent_eval_every=0", AGAIN,
    ),
    "multiplayer_rl.guess_number.train": (
        ROLES, "group_size=2", "batch_size=4", "max_tokens=6", "max_steps=2", "eval_every=0",
        AGAIN,
    ),
    "preference.dpo.train": (
        ROLES, "dataset=hhh", "batch_size=8", "max_length=128", "max_steps=2",
        AGAIN,
    ),
    "multiplayer_rl.text_arena.train": (
        ROLES, "batch_size=4", "num_train_datapoints=8", "num_test_datapoints=4", "max_tokens=6",
        "max_steps=2", "eval_every=0", AGAIN,
    ),
    "preference.shorter.train": (
        ROLES, "batch_size=2", "group_size=4", "max_tokens=6", "max_steps=2", "eval_every=0",
        AGAIN,
    ),
    "prompt_distillation.train": (
        ROLES, "file_path=chat.jsonl", "batch_size=16", "max_length=128", "num_epochs=1",
        "eval_every=0", AGAIN,
    ),
    "sdft.train": (
        ROLES, "dataset=toolalpaca", "groups_per_batch=4", "max_tokens=6", "topk=4", "lora_rank=8",
        "max_steps=2", "eval_every=0", AGAIN,
    ),
    "rubric.train": (
        ROLES, f"grader_llm_name={MODEL}", "grader_renderer_name=role_colon",
        "train_jsonl_path=example_rubric_train.jsonl", "test_jsonl_path=example_rubric_test.jsonl",
        "loss_fn=importance_sampling", "groups_per_batch=2", "train_group_size=2", "max_tokens=6", "max_steps=2",
        "eval_every=0", AGAIN,
    ),
}  # fmt: skip
"""The cookbook's recipes that need no network, and their arguments."""
RUBRIC_DATA = "from tinker_cookbook.recipes.rubric import generate_data as of; of.generate_dataset(16, 2, 1, '.')"
LEARNING: dict[str, tuple[tuple[str, ...], str, float]] = {
    "sl_loop": (("batch_size=16", "learning_rate=0.005", "save_every=0"), "train_mean_nll", -0.5),
    "rl_loop": (
        ("loss_fn=importance_sampling", "batch_size=8", "group_size=8", "max_steps=24", "max_tokens=20",
         "learning_rate=0.005", "save_every=0"), "reward/total", 0.1,
    ),
    "math_rl.train": (
        (ROLES, "env=arithmetic", "loss_fn=importance_sampling", "group_size=8", "groups_per_batch=8",
         "max_tokens=20", "max_steps=20", "learning_rate=0.002", "eval_every=0", "save_every=0", AGAIN),
        "env/all/format", 0.07,
    ),
    "multiplayer_rl.guess_number.train": (
        (ROLES, "group_size=4", "batch_size=4", "max_tokens=20", "max_steps=12", "learning_rate=0.005",
         "eval_every=0", "save_every=0", AGAIN), "env/all/reward/total", 1.0,
    ),
    "chat_sl.train": (
        (ROLES, "dataset=chat.jsonl", "batch_size=16", "max_length=128", "num_epochs=4", "learning_rate=0.005",
         "eval_every=0", "infrequent_eval_every=0", AGAIN), "train_mean_nll", -0.5,
    ),
    "preference.dpo.train": (
        (ROLES, "dataset=hhh", "batch_size=8", "max_length=128", "max_steps=8", "learning_rate=0.002", AGAIN),
        "dpo_loss", -0.1,
    ),
}  # fmt: skip
"""Recipes, the metric that they improve, and by how much at least from the first quarter of the steps to the last."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model and data sets under the names of the hub."""
    folder = tmp_path_factory.mktemp("cookbook")
    tiny_model(folder / MODEL, context_length=4096)
    _write_data(folder)
    return folder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a model whose answers are of a few forms, and one number as the answer of all problems."""
    folder = tmp_path_factory.mktemp("chatty")
    chatty_model(folder / MODEL)
    _write_data(folder, answer=3)
    return folder


def _write_data(folder: Path, answer: int | None = None) -> None:
    write: dict[str, Callable[[int], dict[str, Any]]] = {
        "HuggingFaceH4/no_robots": lambda i: {
            "messages": [
                {"role": "user", "content": f"Say {i % 7}"},
                {"role": "assistant", "content": f"{i % 7} is it"},
            ]
        },
        "openai/gsm8k": lambda i: {"question": f"{i % 5} + 1?", "answer": f"so #### {answer or i % 5 + 1}"},
        "tangqiaoyu/ToolAlpaca": lambda i: {"instruction": f"Add {i % 5}.", "output": f"It is {i % 5}."},
        "Anthropic/hh-rlhf": lambda i: {
            "chosen": f"\n\nHuman: Hi {i % 5}\n\nAssistant: Yes {i % 5}",
            "rejected": f"\n\nHuman: Hi {i % 5}\n\nAssistant: No",
        },
    }
    for name, row in write.items():
        (folder / name).mkdir(parents=True)
        for split, count in (("train", 256 if answer else 64), ("test", 8)):
            rows = "\n".join(json.dumps(row(i)) for i in range(count))
            (folder / name / f"{split}.jsonl").write_text(rows)
    shutil.copy(folder / "HuggingFaceH4/no_robots/train.jsonl", folder / "chat.jsonl")
    splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    yield from served(folder, MODEL)


async def test_the_sdk_trains_as_gradwires_own_does(server: HttpServer, folder: Path) -> None:
    program = Path(__file__).parents[1] / "tinker" / "program.py"
    found = json.loads((await asyncio.to_thread(run_program, server, folder, str(program), MODEL)).splitlines()[-1])
    tinker = found["sync"]
    async with gradwire.connect(server.address) as service:
        lora = {"rank": 8, "alpha": 32, "target_modules": ["all-linear", "lm_head"]}
        run = await service.create_run(MODEL, lora=lora, seed=7)
        ids = [np.random.default_rng(seed).integers(1, 99, 17) for seed in range(4)]
        rows = [{"input_ids": row[:-1], "target_tokens": row[1:], "weights": np.ones(16)} for row in ids]
        losses = []
        for _ in tinker["losses"]:
            loss = run.forward_backward(rows, "cross_entropy")
            step = run.optim_step(learning_rate=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, max_grad_norm=5.0)
            losses.append((await loss).loss)
            await step
    assert tinker["losses"] == pytest.approx(losses, rel=1e-5)
    assert tinker["custom_losses"] == pytest.approx(losses, rel=1e-5)
    assert tinker["traced_losses"] == pytest.approx(losses, rel=1e-5)
    assert tinker["losses"][-1] < tinker["losses"][0] and tinker["shape"] == [16]
    assert tinker["after"][0] == pytest.approx(tinker["after"][1], rel=1e-6)  # resumed, with the optimizer
    first, again = tinker["tokens"]
    assert first == again and len(first) == 2  # later steps do not change a sampler
    assert tinker["prompt_logprobs"][0] is None and all(value < 0 for value in tinker["prompt_logprobs"][1:])
    drawn = np.array(tinker["alternatives"])
    assert drawn.shape == (2, 4) and (drawn[:, 0, None] == drawn).all()  # at temperature 0
    assert found["async"]["losses"][-1] < found["async"]["losses"][0]
    assert tinker["path"].split("/")[2] in found["async"]["runs"]
    told = found["told"]
    assert set(told["usage"]) == {"training", "checkpoint", "sampling_prefill", "sampling_sample"}
    assert told["usage"]["training"] >= 4 * 16 * len(losses) and told["usage"]["sampling_sample"] >= 24
    assert told["stored"] >= 1 and tinker["path"] in told["audited"]
    assert {"forward_backward", "optim_step"} <= set(told["traced"])
    arguments = ("-m", "tinker.cli", "-f", "json", "checkpoint", "list")
    listed = json.loads(await asyncio.to_thread(run_program, server, folder, *arguments))
    assert tinker["path"] in json.dumps(listed)


def test_chunks_sent_in_parallel_or_in_turn_train_as_one_request_does(server: HttpServer, folder: Path) -> None:
    program = Path(__file__).parents[1] / "tinker" / "chunks.py"
    found = json.loads(run_program(server, folder, str(program), MODEL).splitlines()[-1])
    whole = np.array(found["whole"]["losses"])
    assert found["whole"]["operations"] == 3 * (1 + 1) and (whole[1:] < whole[:-1]).all()
    for way in ("in turn", "parallel"):
        assert found[way]["operations"] == 3 * (5 + 1)  # nine rows, two a request
        np.testing.assert_allclose(found[way]["losses"], whole, rtol=1e-5)


def test_the_command_downloads_what_was_trained(server: HttpServer, folder: Path, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "tinker" / "download.py"
    found = json.loads(run_program(server, folder, str(program), MODEL, str(tmp_path / "recipe")).splitlines()[-1])
    command = ("-m", "tinker.cli", "checkpoint", "download", found["path"], "-o", str(tmp_path / "command"))
    run_program(server, folder, *command)
    ids = torch.tensor([found["ids"]])
    for adapter in [file.parent for file in tmp_path.rglob("adapter_config.json")]:
        model = with_adapter(folder / MODEL, adapter)
        with torch.no_grad():
            log_p = model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
        theirs = log_p.gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found["logprobs"], theirs, atol=1e-5)
    assert len(list(tmp_path.rglob("adapter_config.json"))) == 2


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason=f"{OLD_PYTHON} is made by `make tinker`")
def test_the_oldest_sdk_that_is_served_trains(server: HttpServer, folder: Path) -> None:
    command = [str(OLD_PYTHON), str(ROOT / "tests/tinker/old_program.py"), MODEL]
    ran = subprocess.run(
        command, env=environment(server, folder), cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["losses"] == sorted(found["losses"], reverse=True) and found["after"] < found["losses"][-1]
    assert [len(tokens) for tokens in found["tokens"]] == [4, 4] and len(found["prompt_logprobs"]) == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_cookbook_runs_unchanged(server: HttpServer, folder: Path, recipe: str) -> None:
    log = folder / "logs" / recipe
    arguments = ["-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={log}", *RECIPES[recipe]]
    if recipe == "rubric.train":
        run_program(server, folder, "-c", RUBRIC_DATA)
    run_program(server, folder, *arguments)
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= 2
    if recipe == "sl_loop":
        assert metrics[-1]["train_mean_nll"] < metrics[0]["train_mean_nll"]
        run_program(server, folder, *arguments)  # resumes from its newest checkpoint


@pytest.mark.parametrize("recipe", ["rl_loop", "math_rl.train"])
def test_a_recipe_is_told_what_to_pass_in_place_of_a_loss_that_is_not_public(
    server: HttpServer, folder: Path, recipe: str
) -> None:
    arguments = [each for each in RECIPES[recipe] if not each.startswith("loss_fn=")]
    log = f"log_path={folder / 'refused' / recipe}"
    done = ran(server, folder, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", log, *arguments)
    assert done.returncode != 0 and "stable_reinforce" in done.stderr, done.stderr[-3000:]
    assert "loss_fn=importance_sampling" in done.stderr and "loss_fn=importance_sampling" in RECIPES[recipe]


@pytest.fixture(scope="module")
def chatty_server(chatty: Path) -> Iterator[HttpServer]:
    yield from served(chatty, MODEL)


@pytest.mark.parametrize("recipe", LEARNING)
async def test_a_recipe_learns_what_gradwires_own_sdk_learns_from_the_same_rows(
    chatty_server: HttpServer, chatty: Path, recipe: str
) -> None:
    log = chatty / "logs" / recipe
    arguments, metric, least = LEARNING[recipe]
    command = ("-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={log}")
    async with (
        recording_proxy(chatty_server.url) as proxy,
        gradwire.connect(chatty_server.address) as service,
    ):
        await asyncio.to_thread(run_program, proxy, chatty, *command, *arguments)
        [(model_id, trained)] = proxy.trained.items()
        [info] = [info for info in await service.list_runs() if info.name == model_id]
        history = await service.get_training_client(info.run_id).history()
        losses = history.loss[history.operation == "forward_backward"]
        assert len(losses) >= 8 and losses.any()
        again = await losses_of(service, info, trained)
        np.testing.assert_allclose(losses, again, rtol=1e-5, atol=1e-5)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    found = [line[metric] for line in lines if metric in line]
    quarter = len(found) // 4
    gain = np.mean(found[-quarter:]) - np.mean(found[:quarter])
    apart = np.abs(losses - again).max()
    print(recipe, metric, [round(float(value), 3) for value in found], f"losses are {apart:.1g} apart")
    assert gain * np.sign(least) > abs(least), found


@pytest.mark.long
def test_a_recipe_survives_the_kill_of_its_server(folder: Path, tmp_path: Path) -> None:
    server = HttpServer(folder / MODEL, tmp_path / "state", free_port(), "--threads", "1", name=MODEL)
    server.start()
    log = tmp_path / "log"
    command = [
        str(PYTHON), "-m", "tinker_cookbook.recipes.sl_loop", f"model_name={MODEL}", f"log_path={log}",
        "batch_size=4", "max_steps=12", "save_every=4",
    ]  # fmt: skip
    recipe = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(server, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert recipe.stdout is not None
        said, kills = [], 0
        for line in recipe.stdout:
            said.append(line)
            if "Step 3" in line:
                kills += 1
                server.end(signal.SIGKILL)
                server.start()
        assert recipe.wait(LIMIT_S) == 0, "".join(said[-60:])
        steps = [json.loads(line)["step"] for line in (log / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(12)) and kills > 0
    finally:
        recipe.kill()
        server.end()
