"""A newcomer's afternoons: from data to a model that one talks to, by the command line alone, on a tiny model."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gradwire.recipes.folder import next_steps
from support.chats import chat_model
from support.server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LM_EVAL = Path(__file__).parents[2] / ".venv-openai-shared/bin/lm_eval"
ASKED = [f"{number} and two?" for number in range(40)]
TUNED = ["learning_rate=0.02", "warmup=2", "batch_size=8", "epochs=12", "held_out=0", "lora_rank=8"]
AXOLOTL = """
base_model: model
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: talks.jsonl
    type: chat_template
    field_messages: turns
    message_property_mappings: {role: from, content: value}
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 12
learning_rate: 0.02
sample_packing: true
sequence_len: 64
flash_attention: true
warmup_steps: 2
val_set_size: 0
output_dir: runs/axolotl
"""
FACTORY = """
model_name_or_path: model
stage: sft
finetuning_type: lora
lora_rank: 8
dataset: mine
dataset_dir: sets
template: llama3
per_device_train_batch_size: 8
learning_rate: 0.02
num_train_epochs: 12
warmup_steps: 2
output_dir: runs/factory
"""


def gradwire(folder: Path, *words: str, said: str = "", code: int = 0) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "gradwire.cli", *words]
    done = subprocess.run(command, cwd=folder, input=said, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def train(folder: Path, recipe: str, **settings: object) -> str:
    """Train with a recipe's example configuration and other settings; what it prints."""
    (folder / f"{recipe}.yaml").write_text(gradwire(folder, "train", "--example", recipe))
    settings = {"model": "model", "folder": f"runs/{recipe}", **settings}
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return gradwire(folder, "train", recipe, f"{recipe}.yaml", *chosen)


def lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_model(tmp_path / "model", "marked")
    return tmp_path


def test_a_table_of_questions_becomes_a_chat(folder: Path) -> None:
    with (folder / "shop.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *((text, "four") for text in ASKED), ("and now?", "")])
    assert "line 42" in gradwire(folder, "data", "check", "shop.csv", code=1)
    rows = (folder / "shop.csv").read_text().splitlines()
    (folder / "shop.csv").write_text("\n".join(rows[:-1]))
    assert "40 rows, 0 of them unfit" in gradwire(folder, "data", "check", "shop.csv")
    assert "trained on" in gradwire(folder, "data", "show", "shop.csv", "--model", "model")
    (folder / "sft.yaml").write_text(gradwire(folder, "train", "--example", "sft"))
    chosen = [word for each in ("model=model", "data=shop.csv", *TUNED) for word in ("--set", each)]
    wrong = gradwire(folder, "train", "sft", "sft.yaml", *chosen, "--set", "lerning_rate=1", code=2)
    assert "did you mean learning_rate?" in wrong
    assert "40 rows" in gradwire(folder, "train", "sft", "sft.yaml", *chosen, "--dry-run")
    assert not (folder / "runs").exists()
    assert "gradwire chat runs/sft" in gradwire(folder, "train", "sft", "sft.yaml", *chosen)
    answered = gradwire(folder, "chat", "runs/sft", "--temperature", "0", "--base", said="7 and two?\n\n")
    assert "trained> four" in answered and "base> four" not in answered


@pytest.mark.parametrize("name", ["axolotl", "factory"])
def test_another_programs_configuration_is_trained(name: str, folder: Path) -> None:
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": "four"}] for text in ASKED]
    lines(folder / "talks.jsonl", [{"turns": each} for each in turns])
    (folder / "sets").mkdir()
    (folder / "sets/mine.json").write_text(json.dumps([{"ask": text, "say": "four"} for text in ASKED]))
    info = {"mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "response": "say"}}}
    (folder / "sets/dataset_info.json").write_text(json.dumps(info))
    (folder / "theirs.yaml").write_text(AXOLOTL if name == "axolotl" else FACTORY)
    report = gradwire(folder, "import-config", "theirs.yaml")
    if name == "axolotl":
        assert "sample_packing: the server packs rows" in report
    said = gradwire(folder, "train", "sft", "sft.yaml")
    assert f"gradwire chat runs/{name}" in said
    made = yaml.safe_load((folder / "sft.yaml").read_text())
    assert (made["lora_rank"], made["learning_rate"]) == (8, 0.02)
    assert made.get("batch_tokens") == 8 * 64 if name == "axolotl" else made["batch_size"] == 8
    assert "four" in gradwire(folder, "chat", f"runs/{name}", "--temperature", "0", said="7 and two?\n\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which sft, dpo and grpo were trained, each from the one before."""
    folder = tmp_path_factory.mktemp("afternoon")
    chat_model(folder / "model", "marked")
    lines(folder / "talks.jsonl", [{"prompt": text, "completion": "four"} for text in ASKED])
    lines(folder / "pairs.jsonl", [{"prompt": text, "chosen": "four", "rejected": "two"} for text in ASKED])
    lines(folder / "problems.jsonl", [{"prompt": text, "answer": "four"} for text in ASKED])
    (folder / "mine.py").write_text("def score(response, ground_truth):\n    return float(ground_truth in response)\n")
    tuned = dict(each.split("=") for each in TUNED)
    train(folder, "sft", data="talks.jsonl", **tuned)
    train(folder, "dpo", data="pairs.jsonl", init_from="runs/sft", **tuned | {"learning_rate": 0.005, "epochs": 2})
    said = train(
        folder, "grpo", data="problems.jsonl", init_from="runs/dpo", reward="mine.py:score", max_steps=3, warmup=0,
        batch_size=4, answer_tokens=16,
    )  # fmt: skip
    assert re.search(r"used: [\d,]+ tokens, \d+ s of an engine", said) and "gradwire serve runs/grpo" in said
    return folder


def test_what_was_trained_is_evaluated_and_exported(trained: Path) -> None:
    lines(trained / "asked.jsonl", [{"prompt": text, "answer": "four"} for text in ASKED[:4]])
    (trained / "evaluate.yaml").write_text(gradwire(trained, "evaluate", "--example"))
    chosen = ["model=model", "data=asked.jsonl", "checkpoints=[runs/sft, runs/grpo]", "answer_tokens=8"]
    table = gradwire(trained, "evaluate", "evaluate.yaml", *(word for each in chosen for word in ("--set", each)))
    scores = dict(re.findall(r"^(\S+) +(\d\.\d+) ±", table, re.MULTILINE))
    assert scores == {"model": "0.000", "runs/sft": "1.000", "runs/grpo": "1.000"}
    assert "is in OUT" in gradwire(trained, "export", "runs/grpo", "OUT", "--merged")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in (trained / "OUT").iterdir()}


@pytest.fixture(scope="module")
def served(trained: Path) -> Iterator[tuple[str, str]]:
    """``gradwire serve runs/grpo``: the address of OpenAI's API, and what the model is called there."""
    port, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "gradwire.cli", "serve", "runs/grpo"]
    command += ["--http", f"127.0.0.1:{port}", "--address", f"127.0.0.1:{grpc}"]
    process = subprocess.Popen(command, cwd=trained, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "listening on" in line:
            break
    name = next(each.split()[1] for each in next_steps(trained / "runs/grpo") if each.startswith("trained: "))
    yield f"http://127.0.0.1:{port}/v1", name
    process.terminate()
    process.stdout.close()
    assert process.wait(60) == 0


def test_three_trainings_are_exported_served_and_evaluated(trained: Path, served: tuple[str, str]) -> None:
    url, name = served
    body = {"model": name, "messages": [{"role": "user", "content": ASKED[3]}], "temperature": 0, "max_tokens": 8}
    asked = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == "four"


@pytest.mark.skipif(
    not LM_EVAL.exists(), reason="lm_eval's environment is missing: make .venv-openai-shared/.installed"
)
def test_lm_eval_scores_what_is_served(trained: Path, served: tuple[str, str]) -> None:
    url, name = served
    rows = [{"question": text, "choices": ["four", "kiwi"], "answer": 0} for text in ASKED[:8]]
    lines(trained / "rows.jsonl", rows)
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(trained / "rows.jsonl")}},
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (trained / "tasks").mkdir()
    (trained / "tasks/sums.yaml").write_text(yaml.safe_dump(task))
    arguments = f"model={name},base_url={url}/completions,tokenizer=model,tokenizer_backend=huggingface"
    command = [LM_EVAL, "--model", "local-completions", "--model_args", arguments, "--tasks", "sums"]
    command += ["--include_path", trained / "tasks", "--output_path", trained / "out"]
    done = subprocess.run(command, cwd=trained, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (results,) = (trained / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["sums"]["acc,none"] == 1.0
