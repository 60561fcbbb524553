"""Local state of a training, from which it continues after the program was killed."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from gradwire.service import ServiceClient
from gradwire.training import TrainingClient
from gradwire.whole_files import read_state, replace_state


def fingerprint(*parts: Any) -> str:
    """Hash settings and data; equal inputs give equal hashes."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()


class TrainingState:
    """The position of a training: which inputs it has, and a file for each stage's loop.

    Args:
        folder: Folder of the training's own files.
        inputs: Fingerprint of the data and the settings. A training of other inputs is forgotten.

    Attributes:
        job: Name of the training's runs on the server.
        resumed: Whether there was an unfinished training of the same inputs.
        discarded: Whether there was a training of other inputs, which this one replaces.
    """

    def __init__(self, folder: Path, inputs: str) -> None:
        self._folder = folder
        path = folder / STATE_FILE
        values = read_state(path) if path.exists() else {}
        self.resumed = values.get("inputs") == inputs
        self.discarded = bool(values) and not self.resumed
        if not self.resumed:
            values = {"inputs": inputs, "job": secrets.token_hex(6)}
            for stage in STAGES:
                self.file(stage).unlink(missing_ok=True)
            replace_state(path, values, indent=1)
        self.job = str(values["job"])

    def file(self, stage: str) -> Path:
        """Return the file of a stage's loop."""
        return self._folder / f"{stage}.json"

    def run_name(self, stage: str) -> str:
        return f"rlhf {self.job} {stage.replace('_', ' ')}"

    async def find_run(self, service: ServiceClient, stage: str) -> TrainingClient | None:
        """Find the run of an interrupted stage. One without a checkpoint is deleted, a file without a run removed."""
        named = [run for run in await service.list_runs() if run.name == self.run_name(stage)]
        newest = max(named, key=lambda run: run.created_at, default=None)
        if newest is not None and self.file(stage).exists():
            return service.get_training_client(newest.run_id)
        if newest is not None:
            await service.delete_run(newest.run_id)
        self.file(stage).unlink(missing_ok=True)
        return None


OWN_FOLDER = ".gradwire"
STATE_FILE = "state.json"
REWARD_MODEL, POLICY = STAGES = "reward_model", "policy"


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
