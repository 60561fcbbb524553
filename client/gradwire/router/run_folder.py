"""The files of a training run: whole or not there, and enough to go on after a kill."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.router.files import whole_file
from gradwire.router.policy import LinearPolicy
from gradwire.router.settings import RouterSettings
from gradwire.router.settings_file import render

HISTORY = "training_history.json"
POLICY = "policy_state.npz"
METADATA = "metadata.json"
SNAPSHOT = "config_snapshot.yaml"
CHECKPOINT = "resume_state.npz"
CHECKPOINT_S = 1.0


class RunFolderError(ValueError):
    """The folder holds something that this run must not go on from, or must not replace."""


@dataclass
class RunProgress:
    """How far a run has come, beside the trainer's own state.

    Attributes:
        history: the figures of every update.
        rounds_without_improvement, best_reward: of the autopilot.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    rounds_without_improvement: int = 0
    best_reward: float | None = None


class RunFolder:
    """Writes the artifacts of a run under one folder.

    Args:
        path: the folder; made when there is something to write.
        settings: as resolved, with the updates and the seed of this run.
    """

    def __init__(self, path: Path | str, settings: RouterSettings) -> None:
        self.path, self._settings = Path(path), settings
        self._saved = time.monotonic()

    def resume(self) -> tuple[dict[str, Any], RunProgress] | None:
        """The trainer's state and the progress of the interrupted run in this folder; None when there is none.

        Raises:
            RunFolderError: when that run has other settings, naming the first that differs, or cannot be read.
        """
        file = self.path / CHECKPOINT
        if not file.exists():
            return None
        try:
            with np.load(file, allow_pickle=False) as stored:
                state = {name: stored[name] for name in stored}
            progress = RunProgress(**json.loads(str(state.pop("progress"))))
            before = str(state.pop("settings"))
        except (KeyError, ValueError, OSError, TypeError, EOFError) as error:
            raise RunFolderError(f"{file} cannot be read ({error}): delete it to begin anew") from None
        now = _comparable(self._settings)
        if before != now:
            lines = [(ours, theirs) for ours, theirs in zip(now.splitlines(), before.splitlines()) if ours != theirs]
            ours, theirs = lines[0] if lines else ("", "")
            raise RunFolderError(
                f"the interrupted run in {self.path} has other settings: `{theirs.partition('#')[0].strip()}` there, "
                f"`{ours.partition('#')[0].strip()}` here. Give the same, or begin anew with --overwrite"
            )
        return state, progress

    def check_free(self, overwrite: bool) -> str | None:
        """What a new run here would replace, in words; None when nothing.

        Raises:
            RunFolderError: when an interrupted run is here and ``overwrite`` is False.
        """
        if (self.path / CHECKPOINT).exists():
            if not overwrite:
                raise RunFolderError(
                    f"an interrupted run is in {self.path}: go on with --resume, or begin anew with --overwrite"
                )
            return f"the interrupted run in {self.path}"
        return f"the finished run in {self.path}" if (self.path / METADATA).exists() else None

    def checkpoint_is_due(self) -> bool:
        return time.monotonic() - self._saved >= CHECKPOINT_S

    def checkpoint(self, state: Mapping[str, Any], progress: RunProgress) -> None:
        """Keep what :meth:`resume` needs."""
        arrays = dict(state) | {
            "progress": np.array(json.dumps(asdict(progress))),
            "settings": np.array(_comparable(self._settings)),
        }
        with whole_file(self.path / CHECKPOINT) as file:
            np.savez(file, **arrays)
        self._saved = time.monotonic()

    def finish(self, policy: LinearPolicy, history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        """Write the artifacts, then remove the checkpoint; the metadata last: where it is, the run is finished."""
        (self.path / METADATA).unlink(missing_ok=True)
        with whole_file(self.path / HISTORY) as file:
            file.write((json.dumps(list(history), indent=1) + "\n").encode())
        policy.save(self.path / POLICY)
        with whole_file(self.path / SNAPSHOT) as file:
            file.write(render(self._settings).encode())
        with whole_file(self.path / METADATA) as file:
            file.write((json.dumps(self._metadata(facts), indent=1) + "\n").encode())
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def _metadata(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self._settings.trainer.model_dump()
        weights = trainer.pop("reward_weights")
        own = ("enabled", "updates", "seed")
        return {
            "seed": trainer["seed"],
            **facts,
            "ppo": {name: value for name, value in trainer.items() if name not in own},
            "rollout": self._settings.rollout.model_dump(),
            "reward_weights": weights,
            "hicra": self._settings.hicra.model_dump(),
            "versions": {
                "gradwire": version("gradwire"),
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def _comparable(settings: RouterSettings) -> str:
    """The settings that decide the result: not where it is told, nor in how many processes it is computed."""
    told = settings.model_copy(
        update={
            "observability": type(settings.observability)(),
            "rollout": settings.rollout.model_copy(update={"workers": 1}),
        }
    )
    return render(told)
