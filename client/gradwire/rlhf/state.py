"""Local state of a training, from which it continues after the program was killed."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.errors import NotFoundError, UnsupportedError
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient
from gradwire.whole_files import replace_json

CHECKPOINT_SHARE = 0.1


def fingerprint(*parts: Any) -> str:
    """Hash settings and data; equal inputs give equal hashes."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()


class TrainingState:
    """A JSON file with one section per stage; every change is on disk before the next step begins.

    Args:
        path: The file, replaced atomically.
        inputs: Fingerprint of the data and the settings.

    Attributes:
        job: Name of the training's runs on the server.
        resumed: Whether the file held an unfinished training of the same inputs.
        discarded: Whether it held a training of other inputs, which this one replaces.
    """

    def __init__(self, path: Path, inputs: str) -> None:
        self._path = path
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.resumed = values.get("inputs") == inputs
        self.discarded = bool(values) and not self.resumed
        self._values: dict[str, Any] = values if self.resumed else {"inputs": inputs, "job": secrets.token_hex(6)}
        self._save()

    @property
    def job(self) -> str:
        return str(self._values["job"])

    def section(self, name: str) -> dict[str, Any]:
        """Return a copy of a stage's last section; empty if there is none."""
        return dict(self._values.get(name, {}))

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Update a stage's section."""
        self._values[name] = self.section(name) | dict(values)
        self._save()

    def forget(self, name: str) -> None:
        self._values.pop(name, None)
        self._save()

    def _save(self) -> None:
        replace_json(self._path, self._values, indent=1)


OWN_FOLDER = ".gradwire"
STATE_FILE = "state.json"


async def discard_training(service: ServiceClient, output_dir: str | Path) -> None:
    """Delete the server's runs of an abandoned training; the caller removes its folder."""
    job = _job_of(Path(output_dir))
    for run in await service.list_runs() if job else ():
        if run.name.startswith(f"rlhf {job} "):
            await service.delete_run(run.run_id)


def _job_of(output_dir: Path) -> str:
    """Return the name of a folder's training on the server; empty if there is none."""
    file = output_dir.expanduser() / OWN_FOLDER / STATE_FILE
    return str(json.loads(file.read_text(encoding="utf-8"))["job"]) if file.exists() else ""


async def find_run(service: ServiceClient, name: str) -> TrainingClient | None:
    """Find the run of this name, the newest if there are several."""
    named = [run for run in await service.list_runs() if run.name == name]
    if not named:
        return None
    return service.get_training_client(max(named, key=lambda run: run.created_at).run_id)


class Checkpoints:
    """Saves a run periodically, using at most a tenth of the time, and deletes all but the newest checkpoint.

    Args:
        run: The run to save.
        prefix: Prefix of the checkpoints' names, before the number.
        last: The newest existing checkpoint.
    """

    def __init__(self, run: TrainingClient, prefix: str, *, last: str = "") -> None:
        self._run, self._prefix = run, prefix
        self._old = [last] if last else []
        self._cost_s, self._saved_at = 0.0, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the next save is due."""
        return time.monotonic() - self._saved_at >= self._cost_s / CHECKPOINT_SHARE

    async def save(self, number: int, state: TrainingState, section: str, values: Mapping[str, Any]) -> None:
        """Save the run, then write the values and the checkpoint's path into the state."""
        started = time.monotonic()
        checkpoint = await self._run.save_checkpoint(f"{self._prefix}-{number}", overwrite=True)
        state.write(section, {**values, "checkpoint": checkpoint.path})
        self._old = [path for path in self._old if path != checkpoint.path and not await self._deleted(path)]
        self._old.append(checkpoint.path)
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - started

    async def _deleted(self, path: str) -> bool:
        """Return whether it was deleted. The server keeps a checkpoint that a restored run would load, until there
        are newer ones."""
        try:
            await self._run.delete_checkpoint(path)
        except NotFoundError:
            return True
        except UnsupportedError:
            return False
        return True
