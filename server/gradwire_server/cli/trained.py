"""What a recipe's training left in its folder, as far as a server needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire_server.cli.settings_file import SettingsError

HTTP = "127.0.0.1:8000"
"""Where what was trained is served to OpenAI's clients unless --http says otherwise."""


@dataclass(frozen=True)
class Trained:
    """A training that had a server of its own.

    Attributes:
        model: Its base model.
        state_dir: State folder of its server.
        checkpoint: ``RUN_ID/NAME`` of its newest checkpoint.
    """

    model: str
    state_dir: str
    checkpoint: str

    @staticmethod
    def read(folder: Path) -> Trained:
        """Read a training's folder.

        Raises:
            SettingsError: There is no finished training in it, or another server holds what it trained.
        """
        file = folder / "state.json"
        try:
            note = dict(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            note = {}
        except (OSError, ValueError, TypeError):
            raise SettingsError(f"{file} is not the state of a training") from None
        if not note.get("checkpoint") or "settings" not in note:
            raise SettingsError(f"{folder} holds no training that has saved a checkpoint")
        if not note.get("server"):
            raise SettingsError(f"the training in {folder} used the server at {note.get('address')}, which serves it")
        return Trained(note["settings"]["model"], note["server"], note["checkpoint"])

    def flags(self) -> dict[str, Any]:
        """The settings of a server for it."""
        return {"models": [self.model], "state_dir": self.state_dir, "http": HTTP}
