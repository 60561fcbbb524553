"""External names that become parts of paths: agent ids and versions."""

from __future__ import annotations

import re
from pathlib import Path

AGENT_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
VERSION = r"^v[1-9][0-9]{0,9}(\.[1-9][0-9]{0,5})?$"
BASE = "base"
"""Version name of the untrained model."""

RESERVED_AGENT_IDS = frozenset({"feedback", "items", "jobs", "rankings", "train_policy"})
"""Path segments of the API, which cannot be agent ids."""


def is_agent_id(text: str) -> bool:
    return re.fullmatch(AGENT_ID, text) is not None and text not in RESERVED_AGENT_IDS


def is_version(text: str) -> bool:
    return re.fullmatch(VERSION, text) is not None


def version_folder(models_dir: Path, agent_id: str, version: str) -> Path:
    """``MODELS/AGENT/VERSION``.

    Raises:
        ValueError: A name is invalid, or the folder is a link that leads out of the models' folder.
    """
    if not is_agent_id(agent_id) or not is_version(version):
        raise ValueError(f"not an agent's version: {agent_id!r}, {version!r}")
    folder = models_dir / agent_id / version
    if not folder.resolve().is_relative_to(models_dir.resolve()):
        raise ValueError(f"{folder} leads out of the models' folder")
    return folder
