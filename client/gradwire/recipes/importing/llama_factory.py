"""Configurations and data sets of LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.recipes.importing.imported import Imported
from gradwire.recipes.settings import SettingsError

STAGES = {"sft": "sft", "pt": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
COLUMNS = {
    "prompt": "prompt", "response": "completion", "messages": "messages", "chosen": "chosen", "rejected": "rejected",
    "system": "system", "tools": "tools", "kto_tag": "label",
}  # fmt: skip
USUAL_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"), "system_tag": ("system",),
    "function_tag": ("function_call",),
}  # fmt: skip


def from_llama_factory(config: Mapping[str, Any], folder: Path) -> Imported:
    """Translate a configuration.

    Args:
        folder: Where it is; the data sets' descriptions are beside it, in ``dataset_dir``.

    Raises:
        SettingsError: A data set has no description.
    """
    unread = dict(config)
    stage = str(unread.pop("stage", "sft"))
    made = Imported(STAGES.get(stage, "sft"))
    if stage not in STAGES:
        made.notes["stage"] = f"{stage} has no counterpart; the recipe is sft"
    loss = str(unread.pop("pref_loss", "sigmoid"))
    if made.recipe == "dpo" and loss in ("orpo", "simpo"):
        made.recipe = loss
    elif loss != "sigmoid":
        made.settings["loss"] = {"loss_type": loss}
    made.take(unread, "model_name_or_path", "model", str)
    directory = unread.pop("dataset_dir", "data")
    names = {key: unread.pop(key, None) or [] for key in ("dataset", "eval_dataset")}
    sets = {key: [each.strip() for each in (value.split(",") if isinstance(value, str) else value) if each.strip()]
            for key, value in names.items()}  # fmt: skip
    parts = _described(made, sets["dataset"], folder / str(directory))
    limit = unread.pop("max_samples", None)
    if limit:
        made.settings["limit"] = int(limit)
    made.settings["data"] = parts[0]["path"] if len(parts) == 1 and set(parts[0]) == {"path"} else parts
    if sets["eval_dataset"]:
        made.settings["validation"] = _described(made, sets["eval_dataset"][:1], folder / str(directory))[0]["path"]
    if probabilities := unread.pop("interleave_probs", None):
        made.notes["interleave_probs"] = f"{probabilities}: say how often a set is seen by its weight"
    made.settings["held_out"] = float(unread.pop("val_size", 0) or 0)
    if "cutoff_len" in unread:
        made.take(unread, "cutoff_len", "max_tokens", int)
    kind = unread.pop("finetuning_type", "lora")
    rank, target = unread.pop("lora_rank", 8), unread.pop("lora_target", "all")
    made.settings["lora_rank"] = int(rank) if kind == "lora" else 0
    if kind == "freeze":
        made.notes["finetuning_type"] = "freeze has no counterpart; all weights are trained: lora_rank: 0"
    if kind == "lora" and target != "all":
        made.settings["lora_targets"] = [each.strip() for each in str(target).split(",")]
    if unread.pop("use_rslora", False):
        made.settings["rslora"] = True
    if (beta := unread.pop("pref_beta", None)) is not None:
        if made.recipe in ("dpo", "kto"):
            made.settings["beta"] = float(beta)
        else:
            made.settings.setdefault("loss", {})["beta"] = float(beta)
    if unread.pop("train_on_prompt", False):
        made.settings["train_on"] = "all"
    if unread.pop("mask_history", False):
        made.settings["train_on"] = "last"
    loggers = unread.pop("report_to", None) or []
    known = [each for each in ([loggers] if isinstance(loggers, str) else loggers) if each != "none"]
    if known:
        made.settings["loggers"] = known
    made.take_batch(unread, "per_device_train_batch_size")
    made.take_shared(unread)
    made.note_rest(unread)
    return made


def from_dataset_info(file: Path) -> Imported:
    """Translate all descriptions of a ``dataset_info.json``, as the data sets of one training."""
    made = Imported("sft")
    made.settings["data"] = _described(made, list(_info(file)), file.parent)
    return made


def _info(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise SettingsError(f"there is no file {file}, which describes the data sets; set dataset_dir")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(described, dict):
        raise SettingsError(f"{file} maps no names to data sets")
    return described


def _described(made: Imported, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """The data sets of these names, as ``dataset_info.json`` describes them."""
    datasets = _info(folder / "dataset_info.json")
    for name in names:
        if name not in datasets:
            raise SettingsError(f"{folder / 'dataset_info.json'} describes no {name!r}; it has {', '.join(datasets)}")
    return [_part(made, name, dict(datasets[name]), folder) for name in names]


def _part(made: Imported, name: str, entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    file, hub = entry.pop("file_name", None), entry.pop("hf_hub_url", None)
    part: dict[str, Any] = {"path": str(folder / file) if file else str(hub or "")}
    entry.pop("ms_hub_url", None)
    if not part["path"]:
        made.notes[f"{name}: source"] = "neither file_name nor hf_hub_url: name its path"
    if split := entry.pop("split", None):
        part["split"] = str(split)
    if count := entry.pop("num_samples", None):
        part["limit"] = int(count)
    columns = dict(entry.pop("columns", None) or {})
    for key, column in columns.items():
        if key in COLUMNS and column:
            part.setdefault("mapping", {})[COLUMNS[key]] = str(column)
        elif (
            column
            and (key, column) != ("history", "history")
            and not (key == "query" and column == "input" and "prompt" not in columns)
        ):
            made.notes[f"{name}: {key}"] = f"the column {column} has no counterpart: join it to the prompt"
    for tag, value in dict(entry.pop("tags", None) or {}).items():
        if value not in USUAL_TAGS.get(tag, ()):
            made.notes[f"{name}: {tag}"] = f"{value!r} is not recognised: rename it to {USUAL_TAGS.get(tag, ('',))[-1]}"
    for key in ("formatting", "ranking"):
        entry.pop(key, None)  # seen by the columns
    for key, value in entry.items():
        made.notes[f"{name}: {key}"] = f"no counterpart is known; {str(value)[:60]!r} is left out"
    return part
