"""The files of a training run: atomic, and sufficient to continue after a kill."""

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

from gradwire.router.policy import LinearPolicy
from gradwire.router.settings import RouterSettings
from gradwire.router.settings_file import render
from gradwire.whole_files import whole_file

HISTORY = "training_history.json"
POLICY = "policy_state.npz"
METADATA = "metadata.json"
SNAPSHOT = "config_snapshot.yaml"
CHECKPOINT = "resume_state.npz"
CHECKPOINT_S = 1.0


class RunFolderError(ValueError):
    """The folder holds a run that must not be continued, or must not be replaced."""


@dataclass
class RunProgress:
    """The progress of a run, in addition to the trainer's own state.

    Attributes:
        history: The metrics of every update.
        rounds_without_improvement, best_reward: State of the autopilot.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    rounds_without_improvement: int = 0
    best_reward: float | None = None


class RunFolder:
    """Writes the artifacts of a run under one folder.

    Args:
        path: The folder; created at the first write.
        settings: The resolved settings, with the updates and the seed of this run.
    """

    def __init__(self, path: Path | str, settings: RouterSettings) -> None:
        self.path, self._settings = Path(path), settings
        self._saved = time.monotonic()

    def resume(self) -> tuple[dict[str, Any], RunProgress] | None:
        """Load the trainer's state and the progress of the interrupted run in this folder; None if there is none.

        Raises:
            RunFolderError: That run has other settings (names the first difference) or cannot be read.
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
            raise RunFolderError(f"{file} cannot be read ({error}): delete it to start anew") from None
        now = _comparable(self._settings)
        if before != now:
            lines = [(ours, theirs) for ours, theirs in zip(now.splitlines(), before.splitlines()) if ours != theirs]
            ours, theirs = lines[0] if lines else ("", "")
            raise RunFolderError(
                f"the interrupted run in {self.path} has other settings: `{theirs.partition('#')[0].strip()}` there, "
                f"`{ours.partition('#')[0].strip()}` here. Use the same settings, or start anew with --overwrite"
            )
        return state, progress

    def check_free(self, overwrite: bool) -> str | None:
        """Describe the run that a new run here would replace; None if there is none.

        Raises:
            RunFolderError: There is an interrupted run and ``overwrite`` is False.
        """
        if (self.path / CHECKPOINT).exists():
            if not overwrite:
                raise RunFolderError(
                    f"an interrupted run is in {self.path}: continue with --resume, or start anew with --overwrite"
                )
            return f"the interrupted run in {self.path}"
        return f"the finished run in {self.path}" if (self.path / METADATA).exists() else None

    def checkpoint_is_due(self) -> bool:
        return time.monotonic() - self._saved >= CHECKPOINT_S

    def checkpoint(self, state: Mapping[str, Any], progress: RunProgress) -> None:
        """Write the state that :meth:`resume` needs."""
        arrays = dict(state) | {
            "progress": np.array(json.dumps(asdict(progress))),
            "settings": np.array(_comparable(self._settings)),
        }
        with whole_file(self.path / CHECKPOINT) as file:
            np.savez(file, **arrays)
        self._saved = time.monotonic()

    def finish(self, policy: LinearPolicy, history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        """Write the artifacts, then remove the checkpoint. The metadata comes last: its presence marks a finished
        run."""
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
    """Select the settings that decide the result, without reporting and the number of processes."""
    told = settings.model_copy(
        update={
            "observability": type(settings.observability)(),
            "rollout": settings.rollout.model_copy(update={"workers": 1}),
        }
    )
    return render(told)
