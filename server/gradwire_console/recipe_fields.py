"""The settings of a recipe as fields of a form: in groups, with choices, and with what their defaults come to."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gradwire
from gradwire.jobs import SERVERS_OWN
from gradwire.recipes.command import settings_kind
from gradwire.recipes.own_code import REWARDS
from gradwire.recipes.rates import learning_rate, warmup_steps
from gradwire.recipes.settings import Settings
from gradwire.recipes.settings_file import built, set_by

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Recipe": (),
    "Length": ("epochs", "max_steps", "batch_size", "batch_tokens", "accumulation", "eval_every", "eval_first",
               "save_every", "keep", "best_by", "patience", "eval_problems"),
    "Optimizer": ("learning_rate", "learning_rate_multiplier", "schedule", "warmup", "optimizer", "weight_decay",
                  "max_grad_norm", "head_learning_rate", "seed"),
    "Data": ("validation", "held_out", "limit", "mapping", "train_on", "max_tokens", "overlong", "on_error",
             "order_by"),
    "Shown": ("tags", "record_batches", "record_every"),
    "Adapter": ("init_from", "lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "rslora", "dropout",
                "neftune_noise_alpha", "deterministic"),
    "Loss": (),
}  # fmt: skip
"""Group -> its settings; a recipe's own are in the first, and arguments of its loss in the last."""
LEFT_OUT = frozenset((*SERVERS_OWN, "model", "data", "split", "loggers", "wandb", "optimizer_args", "loss",
                      "environment_args", "command"))  # fmt: skip
"""The form's main fields, and what a job does not take or a form cannot ask for."""
EXAMPLES = {
    "tags": "{team: support}",
    "mapping": "{prompt: question, completion: answer}",
}
"""Placeholders of the fields that take a mapping, in YAML."""
_COMPARED = 'name: answer, input: "{{sample.output_text}}", reference: "{{item.answer}}"'
GRADERS = {
    f"{{type: string_check, {_COMPARED}, operation: eq}}": "1 for the row's answer, word for word",
    f"{{type: string_check, {_COMPARED}, operation: ilike}}": "1 for a text with the row's answer in it",
    f"{{type: text_similarity, {_COMPARED}, evaluation_metric: fuzzy_match}}": "how alike it and the row's answer are",
}
"""Graders in YAML that a form offers, with what they give; others may be written."""


@dataclass(frozen=True)
class Field:
    """A setting.

    Attributes:
        name: Its name; of an argument of the loss ``"loss.NAME"``.
        choices: The values that it may have; () if others may be written.
    """

    name: str
    group: str
    help: str
    default: Any
    choices: tuple[str, ...] = ()


def fields_of(recipe: str, losses: Mapping[str, gradwire.LossInfo]) -> list[Field]:
    """The fields of a recipe, group by group.

    Args:
        losses: Losses by name, whose arguments are fields as well.
    """
    kind = settings_kind(recipe)
    hints, defaults = typing.get_type_hints(kind), kind()
    groups = {name: group for group, names in GROUPS.items() for name in names}
    found = []
    for field in dataclasses.fields(kind):
        if field.name in LEFT_OUT:
            continue
        hint = hints[field.name]
        choices = tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is Literal else ()
        group = groups.get(field.name, "Recipe")
        default = getattr(defaults, field.name)
        found.append(Field(field.name, group, field.metadata.get("help", ""), default, choices))
    loss_fn = next(each.metadata.get("loss_fn", "") for each in dataclasses.fields(kind) if each.name == "loss")
    schema = losses[loss_fn].kwargs_schema if loss_fn in losses else {}
    own = {field.name for field in found}
    for name, about in schema.get("properties", {}).items():
        if name not in own and not name.startswith("reference"):  # which the recipe sets
            choices = tuple(map(str, about.get("enum", ())))
            found.append(Field(f"loss.{name}", "Loss", about.get("description", ""), about.get("default"), choices))
    order = {name: number for number, name in enumerate(name for names in GROUPS.values() for name in names)}
    return sorted(found, key=lambda field: (list(GROUPS).index(field.group), order.get(field.name, 0)))


def settings_given(recipe: str, texts: Mapping[str, str], model: str, data: str) -> tuple[dict[str, Any], Settings]:
    """The settings that a form's fields say, and all of them.

    Args:
        texts: Field -> its value as YAML; those that are empty keep their defaults.
        model, data: The model, and the id of a file on the server.

    Raises:
        SettingsError: A value does not fit.
    """
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if text.strip():
            set_by(values, f"{name}={text}")
    values |= {"model": model, "data": data}
    return values, built(settings_kind(recipe), values)


def resolved(settings: Settings, hidden_size: int, num_rows: int) -> dict[str, str]:
    """The values of defaults that depend on the model, the data and other settings, each as a phrase.

    Args:
        hidden_size: Width of the model.
        num_rows: Rows of the data set.
    """
    rows = min(num_rows, settings.limit or num_rows)
    held_out = 0 if settings.validation else round(rows * settings.held_out)
    per_step = settings.batch_size * getattr(settings, "accumulation", 1)
    per_epoch = math.ceil((rows - held_out) / per_step)
    total = settings.max_steps or per_epoch * settings.epochs
    rate = learning_rate(settings, hidden_size, adapter=settings.lora_rank > 0)
    steps = "about " if getattr(settings, "batch_tokens", 0) else ""
    return {
        "learning_rate": f"{rate:.2g}, by the model's width",
        "head_learning_rate": f"{rate:.2g}, as the others",
        "max_steps": f"{steps}{total:,}"
        + ("" if settings.max_steps else f": {settings.epochs} × {rows - held_out:,} rows, {per_step} a step"),
        "warmup": f"{settings.warmup:g}: {warmup_steps(settings, total)} steps",
        "lora_alpha": f"{settings.lora_alpha or 2 * settings.lora_rank:g}, twice the rank",
        "lora_dropout": f"{settings.dropout:g}, as dropout",
        "held_out": f"{settings.held_out:g}: {held_out:,} rows",
        "limit": f"all {num_rows:,} rows",
        "save_every": f"{settings.save_every or per_epoch} steps",
        "keep": "all",
        "batch_tokens": f"by rows: {settings.batch_size}",
    }


def summary(settings: Settings, hidden_size: int, num_rows: int) -> str:
    """Describe the training in a few sentences: weights, steps, learning rate."""
    what = f"LoRA of rank {settings.lora_rank}" if settings.lora_rank else "All weights"
    rate = learning_rate(settings, hidden_size, adapter=settings.lora_rank > 0)
    steps = resolved(settings, hidden_size, num_rows)["max_steps"]
    return f"{what}. Steps: {steps}. Learning rate: {rate:.2g}, {settings.schedule}."


def rewards() -> list[str]:
    """The rewards that a form offers by name."""
    return [each for each in REWARDS if each != "environment"]
