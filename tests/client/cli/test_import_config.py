"""Configurations of Axolotl and LLaMA-Factory, translated by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gradwire.cli.app import app
from gradwire.data import conversations
from gradwire.recipes import command
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings_file import load
from typer.testing import CliRunner

AXOLOTL = """
base_model: org/model
load_in_4bit: true
adapter: qlora
datasets:
  - path: talks.jsonl
    type: chat_template
    field_messages: turns
    message_property_mappings: {role: from, content: value}
  - path: org/set
    type: {field_instruction: ask, field_output: say, format: "[INST]{instruction}"}
    split: test
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.03
evals_per_epoch: 4
bf16: auto
flash_attention: true
neftune_noise_alpha: 5
output_dir: ./out
"""
FACTORY = """
model_name_or_path: org/model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: mine, theirs
dataset_dir: sets
template: qwen3
cutoff_len: 512
max_samples: 1000
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine_with_restarts
val_size: 0.1
mask_history: true
bf16: true
"""
INFO = {
    "mine": {"file_name": "mine.json", "columns": {"prompt": "ask", "response": "say", "history": "before"}},
    "theirs": {
        "hf_hub_url": "org/theirs", "formatting": "sharegpt", "num_samples": 50,
        "columns": {"messages": "turns"}, "tags": {"role_tag": "who", "content_tag": "value", "user_tag": "human"},
    },
}  # fmt: skip


def run(folder: Path, text: str, *more: str) -> tuple[int, str]:
    (folder / "sets").mkdir(exist_ok=True)
    (folder / "sets" / "dataset_info.json").write_text(json.dumps(INFO))
    (folder / "c.yaml").write_text(text)
    done = CliRunner().invoke(app, ["import-config", str(folder / "c.yaml"), *more])
    return done.exit_code, done.output


def test_an_axolotl_configuration(tmp_path: Path) -> None:
    code, said = run(tmp_path, AXOLOTL)
    assert code == 0, said
    made = load(command.settings_kind("sft"), tmp_path / "sft.yaml")
    assert yaml.safe_load((tmp_path / "sft.yaml").read_text()) == {
        "model": "org/model", "held_out": 0.05, "max_tokens": 4096, "lora_rank": 32, "lora_alpha": 16.0,
        "batch_tokens": 32768, "epochs": 3, "optimizer": "adamw8bit", "schedule": "cosine", "learning_rate": 2e-4,
        "folder": "./out", "neftune_noise_alpha": 5.0, "warmup": 0.03,
        "data": [
            {"path": "talks.jsonl", "mapping": {"messages": "turns"}},
            {"path": "org/set", "split": "test", "mapping": {"prompt": "ask", "completion": "say"}},
        ],
    }  # fmt: skip
    assert len(made.parts) == 2
    for words in (
        "adapter: qlora: the base is quantized by the server",
        "sample_packing: the server packs rows",
        "evals_per_epoch: no counterpart is known; '4' is left out",
        "datasets: org/set: format: no counterpart is known",
        "gradient_accumulation_steps: batch_tokens is micro_batch_size times it, times the longest row",
        f"next: gradwire train sft {tmp_path / 'sft.yaml'} --dry-run",
    ):
        assert words in said, (words, said)
    assert "message_property" not in said and "from" not in said
    assert run(tmp_path, AXOLOTL)[0] == 2 and run(tmp_path, AXOLOTL, "--force")[0] == 0


@pytest.mark.parametrize(
    ("more", "recipe", "expected"),
    [
        ("rl: dpo\nrl_beta: 0.2\n", "dpo", {"beta": 0.2, "lora_rank": 0}),
        ("rl: ipo\n", "dpo", {"loss": {"loss_type": "ipo"}}),
        ("rl: simpo\nrl_beta: 2\nsimpo_gamma: 1\n", "simpo", {"loss": {"beta": 2.0, "gamma": 1.0}}),
        ("reward_model: true\n", "reward", {}),
        (
            "rl: grpo\ntrl: {num_generations: 4, max_completion_length: 64, reward_funcs: [my.score, my.short], "
            "reward_weights: [1, 0.5], use_vllm: true}\n",
            "grpo",
            {"group_size": 4, "answer_tokens": 64, "reward": {"my.py:score": 1.0, "my.py:short": 0.5}},
        ),
    ],
)
def test_other_methods_of_axolotl(more: str, recipe: str, expected: dict[str, Any], tmp_path: Path) -> None:
    code, said = run(tmp_path, "base_model: m\ndatasets: [{path: a.jsonl}]\n" + more)
    assert code == 0, said
    found = yaml.safe_load((tmp_path / f"{recipe}.yaml").read_text())
    assert expected.items() <= found.items() and found["data"] == "a.jsonl"


def test_a_llama_factory_configuration_and_its_data(tmp_path: Path) -> None:
    code, said = run(tmp_path, FACTORY)
    assert code == 0, said
    found = yaml.safe_load((tmp_path / "sft.yaml").read_text())
    mine = {"path": str(tmp_path / "sets" / "mine.json"), "mapping": {"prompt": "ask", "completion": "say"}}
    assert found == {
        "model": "org/model", "data": [mine, {"path": "org/theirs", "limit": 50, "mapping": {"messages": "turns"}}],
        "limit": 1000, "held_out": 0.1, "max_tokens": 512, "lora_rank": 8, "lora_targets": ["q_proj", "v_proj"],
        "train_on": "last", "batch_size": 8, "learning_rate": 1e-4, "epochs": 3,
    }  # fmt: skip
    for words in (
        "mine: history: the column before has no counterpart",
        "theirs: role_tag: 'who' is not recognised: rename it to role",
        "lr_scheduler_type: cosine_with_restarts has no counterpart; schedule is one of cosine, linear",
        "template: the model's own chat template is used",
    ):
        assert words in said, (words, said)
    (tmp_path / "sets" / "mine.json").write_text(json.dumps([{"ask": f"{n}?", "say": "yes"} for n in range(20)]))
    settings = load(command.settings_kind("sft"), tmp_path / "sft.yaml", [f"data={json.dumps([mine])}"])
    kept, held_out = rows_of(conversations, settings)
    assert (len(kept), len(held_out)) == (18, 2)
    alone = CliRunner().invoke(app, ["import-config", str(tmp_path / "sets" / "dataset_info.json")])
    written = yaml.safe_load((tmp_path / "sets" / "sft.yaml").read_text())
    assert alone.exit_code == 0 and written["data"] == found["data"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: x\n", "has neither base_model, as Axolotl's configurations, nor model_name_or_path"),
        ("model_name_or_path: m\ndataset: other\ndataset_dir: sets\n", "describes no 'other'; it has mine, theirs"),
        (
            "model_name_or_path: m\ndataset: other\n",
            "dataset_info.json, which describes the data sets; set dataset_dir",
        ),
        ("base_model: m\ndatasets: [{path: a}]\nmicro_batch_size: 0\n", "batch_size is 0; it must be at least 1"),
        ("base_model: [\n", "line 2: not valid YAML"),
    ],
)
def test_mistakes_are_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    code, said = run(tmp_path, text)
    assert code == 2 and words in said and "Traceback" not in said, said
