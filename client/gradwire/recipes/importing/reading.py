"""Recognition of the trainer that a file was written for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gradwire.recipes import command
from gradwire.recipes.importing.axolotl import from_axolotl
from gradwire.recipes.importing.imported import Imported
from gradwire.recipes.importing.llama_factory import from_dataset_info, from_llama_factory
from gradwire.recipes.settings import SettingsError
from gradwire.recipes.settings_file import read_yaml


def imported(file: Path) -> Imported:
    """Translate a configuration of Axolotl or LLaMA-Factory, or LLaMA-Factory's ``dataset_info.json``.

    Raises:
        SettingsError: The file is of another program, or its settings do not fit.
    """
    if file.name == "dataset_info.json":
        return from_dataset_info(file)
    config, _ = read_yaml(file, example="")
    if "base_model" in config:
        made = from_axolotl(config)
    elif "model_name_or_path" in config:
        made = from_llama_factory(config, file.parent)
    else:
        raise SettingsError(
            f"{file} has neither base_model, as Axolotl's configurations, nor model_name_or_path, as LLaMA-Factory's"
        )
    if not made.settings.get("data"):
        raise SettingsError(f"{file} names no data: add its datasets (LLaMA-Factory: dataset), and import it again")
    names = {field.name for field in dataclasses.fields(command.settings_kind(made.recipe))}
    command.settings_of(made.recipe, made.for_recipe(names).settings)
    return made
