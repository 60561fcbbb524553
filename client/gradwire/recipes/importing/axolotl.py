"""Configurations of Axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.recipes.importing.imported import Imported

PREFERENCES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "grpo": "grpo"}
FIELDS = {
    "field_messages": "messages", "field_instruction": "prompt", "field_output": "completion", "field_system": "system",
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected", "field_tools": "tools",
    "field_completion": "completion", "field_label": "label",
}  # fmt: skip
PLAIN = ("chat_template", "alpaca", "sharegpt", "completion", "input_output", "")
ROLE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}


def from_axolotl(config: Mapping[str, Any]) -> Imported:
    """Translate a configuration."""
    unread = dict(config)
    rl = unread.pop("rl", None)
    recipe = PREFERENCES.get(str(rl), "sft")
    if unread.pop("reward_model", False):
        recipe = "reward"
    if unread.pop("process_reward_model", False):
        recipe = "process_reward"
    made = Imported(recipe)
    if rl and str(rl) not in PREFERENCES:
        made.notes["rl"] = f"{rl} has no counterpart; the recipe is {recipe}"
    if rl == "ipo":
        made.settings["loss"] = {"loss_type": "ipo"}
    made.take(unread, "base_model", "model", str)
    sets = unread.pop("datasets", None) or []
    parts = [_part(made, each) for each in sets if isinstance(each, Mapping)]
    made.settings["data"] = parts[0]["path"] if len(parts) == 1 and set(parts[0]) == {"path"} else parts
    if tests := unread.pop("test_datasets", None):
        made.settings["validation"] = str(tests[0].get("path"))
        if len(tests) > 1:
            made.notes["test_datasets"] = "validation is one file: only the first is taken"
    size = unread.pop("val_set_size", 0)
    if isinstance(size, int | float) and size >= 1:
        made.notes["val_set_size"] = f"{size} rows: write their share as held_out"
    else:
        made.settings["held_out"] = float(size or 0)
    if "sequence_len" in unread:
        made.take(unread, "sequence_len", "max_tokens", int)
    _adapter(made, unread)
    made.take_batch(unread, "micro_batch_size")
    if unread.pop("train_on_inputs", False):
        made.settings["train_on"] = "all"
    for key, name in (("rl_beta", "beta"), ("dpo_beta", "beta"), ("orpo_alpha", "beta"), ("simpo_gamma", "gamma")):
        if key in unread and recipe in ("dpo", "kto"):
            made.take(unread, key, "beta", float)
        elif key in unread and recipe in ("orpo", "simpo"):
            made.settings.setdefault("loss", {})[name] = float(unread.pop(key))
    if recipe == "grpo":
        _grpo(made, dict(unread.pop("trl", None) or {}))
    if patience := unread.pop("early_stopping_patience", None):
        made.settings |= {"patience": int(patience), "best_by": "loss"}
    if unread.pop("saves_per_epoch", None) == 1:
        made.settings["save_every"] = 0
    if unread.pop("wandb_project", None):
        made.settings["loggers"] = ["wandb"]
    for key in [key for key in unread if key.startswith("wandb_")]:
        del unread[key]
    made.take_shared(unread)
    made.note_rest(unread)
    return made


def _part(made: Imported, given: Mapping[str, Any]) -> dict[str, Any]:
    """One data set: its path, split and columns."""
    rest = dict(given)
    files = rest.pop("data_files", None)
    part: dict[str, Any] = {"path": str(rest.pop("path", ""))}
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, str):
        part["path"] = files if "/" in files else f"{part['path']}/{files}"
    elif files:
        rest["data_files"] = files
    if split := rest.pop("split", None):
        part["split"] = str(split)
    kind = rest.pop("type", "") or ""
    columns = dict(kind) if isinstance(kind, Mapping) else {}
    for key, field in FIELDS.items():
        for source in (columns, rest):
            if named := source.pop(key, None):
                part.setdefault("mapping", {})[field] = str(named)
    if isinstance(kind, str) and kind == "completion":
        part.setdefault("mapping", {})["text"] = str(rest.pop("field", "text"))
    elif isinstance(kind, str) and kind.partition(".")[0] not in PLAIN:
        made.notes[f"datasets: {part['path']}: type"] = f"{kind}: the columns are recognised by their names"
    names = rest.pop("message_property_mappings", None) or rest.pop("message_field_mappings", None) or {}
    for name, column in dict(names).items():
        if column not in ROLE_KEYS.get(name, (name,)):
            made.notes[f"datasets: {part['path']}: {name}"] = f"messages have {name} under {column!r}: rename it"
    for key in ("ds_type", "chat_template", "roles_to_train", "train_on_eos", "name"):
        if rest.get(key) in (None, "tokenizer_default", "json", "parquet", "csv", ["assistant"], "turn"):
            rest.pop(key, None)
    for key, value in [*columns.items(), *rest.items()]:
        made.notes[f"datasets: {part['path']}: {key}"] = f"no counterpart is known; {str(value)[:60]!r} is left out"
    return part


def _adapter(made: Imported, given: dict[str, Any]) -> None:
    kind = given.pop("adapter", None)
    rank, targets = given.pop("lora_r", None), given.pop("lora_target_modules", None)
    linear, rslora = given.pop("lora_target_linear", None), given.pop("peft_use_rslora", None)
    if kind is None:
        made.settings["lora_rank"] = 0
        return
    made.settings["lora_rank"] = int(rank or 8)
    if kind == "qlora":
        made.notes["adapter"] = "qlora: the base is quantized by the server, gradwire serve --quantize"
    if targets:
        made.settings["lora_targets"] = (
            ["all-linear"] if linear else [targets] if isinstance(targets, str) else list(targets)
        )
    if rslora:
        made.settings["rslora"] = True


def _grpo(made: Imported, trl: dict[str, Any]) -> None:
    functions, weights = trl.pop("reward_funcs", None) or [], trl.pop("reward_weights", None) or []
    rewards = {each.rpartition(".")[0].replace(".", "/") + ".py:" + each.rpartition(".")[2]: 1.0 for each in functions}
    for name, weight in zip(list(rewards), weights):
        rewards[name] = float(weight)
    if rewards:
        made.settings["reward"] = next(iter(rewards)) if len(rewards) == 1 else rewards
        made.notes["trl: reward_funcs"] = "a function here takes response and ground_truth of one answer: adapt it"
    for key, setting in (
        ("num_generations", "group_size"), ("max_completion_length", "answer_tokens"), ("temperature", "temperature"),
    ):  # fmt: skip
        if key in trl:
            made.take(trl, key, setting)
    if beta := trl.pop("beta", None):
        made.settings["loss"] = {"beta": float(beta), "reference_model": "base"}
    for key, value in trl.items():
        if value not in (None, False) and not key.startswith(("vllm_", "use_vllm")):
            made.notes[f"trl: {key}"] = f"no counterpart is known; {str(value)[:60]!r} is left out"
