"""Recipes of `tinker-cookbook` that need a search engine, environments or images; by `make tinker`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cookbook import AGAIN, MARKS, ROOT, ran, run_program, served
from support.saying_model import MARKS as TURNS
from support.saying_model import saying_model
from support.tinker import HttpServer
from support.vision import vision_model
from transformers import AutoModelForImageTextToText, AutoTokenizer

AXOLOTL_PYTHON = ROOT / ".venv-axolotl" / "bin" / "python"
MODEL, SEEING = "Qwen/Qwen3.5-4B", "Qwen/Qwen3-VL-30B-A3B-Instruct"
CALL = '<tool_call>\n<function=search>\n<parameter=query_list>\n["a cat"]\n</parameter>\n</function>\n</tool_call>'
SAID = {"\n": [CALL, "Answer: cat", "Answer: dog"], CALL: ["<|im_end|>"]}
SAID |= {answer: ["<|im_end|>"] for answer in ("Answer: cat", "Answer: dog")}
CATS = """
import datasets, verifiers

def load_environment():
    rows = [{"question": f"Who sat? {number}", "answer": "cat"} for number in range(16)]
    rubric = verifiers.Rubric(funcs=[lambda completion, answer: float(answer in completion[-1]["content"])])
    return verifiers.SingleTurnEnv(dataset=datasets.Dataset.from_list(rows), rubric=rubric)
"""
VERIFIERS = """
import asyncio, chz
from tinker_cookbook.recipes.verifiers_rl import train
from tinker_cookbook.rl import rollouts

class Rollouts(type(rollouts)):
    def __setattr__(self, name, value):
        super().__setattr__(name, lambda *args, termination, **more: value(*args, **more))

rollouts.__class__ = Rollouts
asyncio.run(train.cli_main(chz.entrypoint(train.CLIConfig), None))
"""
"""The recipe; in the cookbook's 0.5.0 to 0.6.1 its own rollout lacks an argument that the cookbook passes to it."""
PICTURES = """
import datasets, numpy
from PIL import Image
features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "sea_horse"])})
for split, count in (("train", 32), ("test", 8)):
    rows = [{"image": Image.new("RGB", (24, 24), (250 * (i % 2), 99, i)), "label": i % 2} for i in range(count)]
    datasets.Dataset.from_list(rows, features=features).to_parquet(f"dpdl-benchmark/caltech101/{split}.parquet")
"""
AXOLOTL = """
base_model: {model}
plugins: [axolotl.integrations.hatchery.HatcheryPlugin]
hatchery: {{backend: tinker, lora_rank: 8, save_steps: 2, {loss}}}
datasets: [{data}]
chat_template: qwen3
special_tokens: {{pad_token: <pad>}}
sequence_len: 2048
learning_rate: 0.003
optimizer: adamw_torch
num_epochs: 1
max_steps: {steps}
micro_batch_size: 2
gradient_accumulation_steps: 1
logging_steps: 1
output_dir: out
"""
REWARDED = "loss_fn: importance_sampling, max_sample_tokens: 3, num_samples: 8, reward_funcs: [rewards.right]"
REWARDS = """
def right(prompts, completions):
    return [float("Answer: cat" in each) for each in completions]
"""
PROMPTS = """
import datasets, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained("{model}")
ids = tokenizer.encode("<|im_start|>user\\nWho sat?<|im_end|>\\n<|im_start|>assistant\\n", add_special_tokens=False)
row = {{"input_ids": ids, "labels": [-100] * len(ids), "attention_mask": [1] * len(ids)}}
datasets.Dataset.from_list([row] * 32).save_to_disk("prompts")
"""
SMALL = ("lora_rank=8", "learning_rate=0.002", "max_steps=3", AGAIN)

pytestmark = MARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model that searches and answers."""
    folder = tmp_path_factory.mktemp("recipes")
    saying_model(folder / MODEL, SAID)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    yield from served(folder, MODEL)


def _metrics(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_search_tool_searches_and_trains(server: HttpServer, folder: Path) -> None:
    program = Path(__file__).parents[1] / "tinker" / "wikipedia.py"
    arguments = (f"model_name={MODEL}", f"log_path={folder / 'search'}", "batch_size=4", "group_size=4", *SMALL)
    told = run_program(
        server, folder, str(program), str(folder), *arguments, "max_tokens=8", "max_turns=3", "embedding_dim=2"
    )
    searched = json.loads(told.splitlines()[-1])
    assert len(searched) >= 8 and set(searched) == {"a cat"}
    assert len(_metrics(folder / "search")) >= 3


def test_verifiers_judge_what_was_said(server: HttpServer, folder: Path) -> None:
    (folder / "cats_env.py").write_text(CATS)
    arguments = [f"model_name={MODEL}", f"log_path={folder / 'verifiers'}", "vf_env_id=cats-env", "group_size=4"]
    arguments += ["groups_per_batch=4", "max_tokens=8", *SMALL]
    run_program(server, folder, "-c", VERIFIERS, *arguments, PYTHONPATH=str(folder))
    metrics = _metrics(folder / "verifiers")
    assert len(metrics) >= 3 and 0 < metrics[0]["env/all/reward/total"] < 1


def test_vlm_classifier_learns_names_of_pictures(tmp_path: Path) -> None:
    vision_model(tmp_path / SEEING, "qwen3_vl")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / SEEING)
    tokenizer.add_tokens(list(TURNS), special_tokens=True)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / SEEING)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / SEEING)
    tokenizer.save_pretrained(tmp_path / SEEING)
    for server in served(tmp_path, SEEING):
        run_program(server, tmp_path, "-c", PICTURES)
        arguments = [f"model_name={SEEING}", "renderer_name=qwen3_vl_instruct", f"experiment_dir={tmp_path / 'logs'}"]
        arguments += ["batch_size=8", "num_epochs=2", "n_eval=4", "max_tokens=4", "eval_every=2", "lora_rank=8", AGAIN]
        run_program(
            server, tmp_path, "-m", "tinker_cookbook.recipes.vlm_classifier.train", *arguments, "learning_rate=0.01"
        )
    (log,) = (tmp_path / "logs").iterdir()
    metrics = _metrics(log)
    losses = [line["train_mean_nll"] for line in metrics if "train_mean_nll" in line]
    assert losses[-1] < losses[0] - 1, losses
    assert any("accuracy" in key for line in metrics for key in line), metrics[-1]


@pytest.mark.skipif(not AXOLOTL_PYTHON.exists(), reason=f"{AXOLOTL_PYTHON} is made by `make tinker`")
@pytest.mark.parametrize("way", ["conversations", "rewards"])
def test_axolotl_trains_by_its_plugin_for_tinker(server: HttpServer, folder: Path, way: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "cat"}]}] * 32
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARDS)
    run_program(server, folder, "-c", PROMPTS.format(model=MODEL), python=AXOLOTL_PYTHON)
    loss, data = "loss_fn: cross_entropy", "{path: chat.jsonl, ds_type: json, type: chat_template}"
    if way == "rewards":
        loss, data = REWARDED, "{path: prompts, ds_type: arrow, type: completion}"
    (folder / "axolotl.yaml").write_text(AXOLOTL.format(model=MODEL, loss=loss, data=data, steps=6))
    command = ("-m", "axolotl.cli.main", "train", "axolotl.yaml", "--launcher", "python")
    own = {"PYTHONPATH": str(folder), "AXOLOTL_DO_NOT_TRACK": "1"}
    done = ran(server, folder, *command, python=AXOLOTL_PYTHON, **own)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "checkpoint saved: final" in said, said[-5000:]
    if way == "conversations":
        losses = [float(each) for each in re.findall(r"loss/tok=([\d.]+)", said)]
        assert len(losses) == 6 and losses[-1] < losses[0], losses
    else:
        assert len(re.findall(r"\[step \d/6\] acc=", said)) == 6, said[-5000:]
