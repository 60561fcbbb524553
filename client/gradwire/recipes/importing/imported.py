"""The result of an import, and the settings that all trainers name alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

REASONS: Mapping[str, tuple[str, ...]] = {
    "the server's: gradwire serve --dtype": ("bf16", "fp16", "tf32", "float16", "bfloat16", "torch_dtype"),
    "the server's: gradwire serve --quantize": ("load_in_4bit", "load_in_8bit", "quantization_bit"),
    "the server's: gradwire serve --ranks": ("deepspeed", "fsdp", "fsdp_config"),
    "the server decides by its memory": ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "not needed: the server packs rows, which do not see each other": (

        "sample_packing",
        "packing",
        "neat_packing",
        "eval_sample_packing",
        "sample_packing_group_size",
        "sample_packing_bin_size",
        "sample_packing_sequentially",
    ),
    "not needed: nothing is padded": ("pad_to_sequence_len", "group_by_length"),
    "not needed: every step is logged, and report.html has the curves": ("logging_steps", "plot_loss"),
    "not needed: it is the model's own": ("model_type", "tokenizer_type", "is_llama_derived_model", "special_tokens"),
    "the model's own chat template is used": ("template", "chat_template"),
    "eval_every and save_every say when": ("eval_strategy", "save_strategy", "evaluation_strategy"),
    "not needed: the same command goes on where it stood": ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    "not needed": (
        "flash_attention", "flash_attn", "do_train", "do_eval", "overwrite_output_dir", "overwrite_cache",
        "preprocessing_num_workers", "dataset_prepared_path", "dataloader_num_workers", "dataset_processes", "strict",
        "ddp_timeout", "eval_batch_size", "per_device_eval_batch_size",
    ),
    "code of models is never run here": ("trust_remote_code",),
    "no counterpart: DoRA's magnitudes are not computed": ("peft_use_dora", "use_dora"),
}  # fmt: skip
"""Why keys have no setting here -> the keys."""
PACKING = ("sample_packing", "packing", "neat_packing")
"""Keys by which others fill sequences with several rows, so that a batch has many more rows than sequences."""
SERVERS = {key: reason for reason, keys in REASONS.items() for key in keys}
OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw8bit", "adamw_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit", "sgd": "sgd",
    "muon": "muon",
}  # fmt: skip
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
SAME: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "learning_rate": ("learning_rate", float), "weight_decay": ("weight_decay", float),
    "neftune_noise_alpha": ("neftune_noise_alpha", float), "max_grad_norm": ("max_grad_norm", float),
    "seed": ("seed", int), "max_steps": ("max_steps", lambda n: max(0, int(n))),
    "num_epochs": ("epochs", math.ceil), "num_train_epochs": ("epochs", lambda n: math.ceil(float(n))),
    "warmup_steps": ("warmup", float), "warmup_ratio": ("warmup", float), "output_dir": ("folder", str),
    "save_total_limit": ("keep", int),
    "lora_alpha": ("lora_alpha", float), "lora_dropout": ("lora_dropout", float), "temperature": ("temperature", float),
}  # fmt: skip
"""Key -> the setting of the same meaning, and how its value is written."""


@dataclass
class Imported:
    """A configuration as a recipe's settings.

    Attributes:
        recipe: The recipe's name.
        settings: The settings that differ from its defaults.
        notes: Key -> what became of it, if it has no setting of its own here.
    """

    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def take_shared(self, config: dict[str, Any]) -> None:
        """Take the keys that trainers name alike out of a configuration; note those that need no setting."""
        for key, (setting, convert) in SAME.items():
            if config.get(key) is not None:
                self.take(config, key, setting, convert)
        for key, known in (("optimizer", OPTIMIZERS), ("optim", OPTIMIZERS)):
            self._take_named(config, key, "optimizer", known)
        for key in ("lr_scheduler", "lr_scheduler_type"):
            self._take_named(config, key, "schedule", SCHEDULES)
        betas = [config.pop(f"adam_beta{number}", default) for number, default in ((1, 0.9), (2, 0.999))]
        if betas != [0.9, 0.999]:
            self.settings.setdefault("optimizer_args", {})["betas"] = [float(each) for each in betas]
        if (eps := config.pop("adam_epsilon", None)) is not None:
            self.settings.setdefault("optimizer_args", {})["eps"] = float(eps)
        for key in ("eval_steps", "save_steps"):
            value = config.pop(key, None)
            if isinstance(value, int) or (isinstance(value, float) and value >= 1):
                self.settings["eval_every" if key == "eval_steps" else "save_every"] = int(value)
            elif value is not None:
                self.notes[key] = f"{value} of the steps: write their number, which --dry-run says"
        for key in [key for key in config if key in SERVERS]:
            if config.pop(key) not in (None, False):
                self.notes[key] = SERVERS[key]

    def take(
        self, config: dict[str, Any], key: str, setting: str, convert: Callable[[Any], Any] = lambda each: each
    ) -> None:
        """Take one key as a setting; a value that the setting does not take is noted."""
        value = config.pop(key)
        try:
            self.settings[setting] = convert(value)
        except (TypeError, ValueError):
            self.notes[key] = f"its value {value!r} is none that {setting} takes"

    def _take_named(self, config: dict[str, Any], key: str, setting: str, known: Mapping[str, str]) -> None:
        value = config.pop(key, None)
        if value is None:
            return
        if value in known:
            self.settings[setting] = known[value]
        else:
            self.notes[key] = (
                f"{value} has no counterpart; {setting} is one of {', '.join(dict.fromkeys(known.values()))}"
            )

    def take_batch(self, config: dict[str, Any], per_device: str) -> None:
        """Take the sizes of a batch: here one number, which the server divides by its memory."""
        packed = [key for key in PACKING if config.get(key)]
        small, times = config.pop(per_device, None), config.pop("gradient_accumulation_steps", None)
        if small is not None or times is not None:
            self.settings["batch_size"] = int(1 if small is None else small) * int(1 if times is None else times)
            self.notes["gradient_accumulation_steps"] = (
                f"batch_size is {per_device} times it, for one device; the server divides it by its memory"
            )
        if packed and "max_tokens" in self.settings:
            rows = self.settings.pop("batch_size", 1)
            self.settings["batch_tokens"] = rows * self.settings["max_tokens"]
            self.notes[packed[0]] = "the server packs rows, which do not see each other"
            self.notes["gradient_accumulation_steps"] = (
                f"batch_tokens is {per_device} times it, times the longest row: what a step's packed rows held"
            )
            config.pop(packed[0])

    def note_rest(self, config: Mapping[str, Any]) -> None:
        """Note the keys that nothing took."""
        for key, value in config.items():
            if value not in (None, False, "", [], {}):
                self.notes[key] = f"no counterpart is known; {str(value)[:60]!r} is left out"

    def for_recipe(self, names: set[str]) -> Imported:
        """Move settings that the recipe has not to the notes."""
        for name in [name for name in self.settings if name not in names]:
            self.notes[name] = f"the recipe {self.recipe} has no such setting; {self.settings.pop(name)!r} is left out"
        return self
