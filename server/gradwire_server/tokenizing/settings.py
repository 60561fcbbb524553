"""The settings with which a tokenizing process is started, and its answers."""

from __future__ import annotations

from gradwire_server.bounded.frames import ProcessSettings
from gradwire_server.limits import Limits

METHODS = ("Encode", "Decode", "Render", "GetTokenizerInfo")
"""The RPCs that are answered in these processes."""


class TokenizerSettings(ProcessSettings):
    """The settings of a tokenizing process.

    Attributes:
        files: Path of each model's ``tokenizer.json``, by model name.
        models: Path of each model that a caller may name, by name.
        named_first: Names of the models that were loaded at the start.
    """

    files: dict[str, str]
    models: dict[str, str]
    named_first: tuple[str, ...]
    limits: Limits
