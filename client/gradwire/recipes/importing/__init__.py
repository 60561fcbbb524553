"""Configurations of other trainers as ours, with a report of what has no counterpart."""

from gradwire.recipes.importing.axolotl import from_axolotl
from gradwire.recipes.importing.imported import Imported
from gradwire.recipes.importing.llama_factory import from_dataset_info, from_llama_factory
from gradwire.recipes.importing.reading import imported

__all__ = ["Imported", "from_axolotl", "from_dataset_info", "from_llama_factory", "imported"]
