"""Reporting of a training: its history, trajectories to a recorder, one-time warnings, located failures."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.errors import GradwireError
from gradwire.loop.warnings import WarnOnce
from gradwire.rl.algorithms.config import AlgorithmConfig
from gradwire.rl.recording import Recorder, TrajectoryRecorder
from gradwire.rl.types import Trajectory

logger = logging.getLogger("gradwire.rl")
PROMPT_END = 16
"""Tokens at the end of a prompt that say whether the template begins the reasoning."""

SHOWN = (
    "rewards/reward",
    "eval/success",
    "train/kl_divergence",
    "train/entropy",
    "rollouts/avg_trajectory_length",
    "rewards/not_scored",
)


class RolloutsFailedError(GradwireError):
    """Nothing in an iteration can be trained on: every episode, or every reward, failed.

    Attributes:
        traceback: That of the first failure; empty if it has none.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class Reporter:
    """The history and the recorder of an algorithm, as a logger of its loop.

    Args:
        config: Names the recorder's folder.
        recorder: Recorder of trajectories; by default one that follows ``config.record_every``.
    """

    def __init__(self, config: AlgorithmConfig, recorder: Recorder | None) -> None:
        folder = config.folder
        self.recorder = recorder
        if recorder is None and folder is not None and config.record_every:
            self.recorder = TrajectoryRecorder(folder / "trajectories.jsonl", every=config.record_every)
        self.history: list[dict[str, float]] = []
        self.warn_once = WarnOnce("gradwire.rl")

    def forget(self, iteration: int) -> None:
        """Remove what was recorded from this iteration on."""
        if self.recorder is not None:
            self.recorder.forget(iteration)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.history.append(dict(metrics))

    async def record(self, iteration: int, trajectories: Sequence[Trajectory], codec: Any) -> None:
        if self.recorder is not None:
            await self.recorder.record(iteration, trajectories, codec)

    def pass_on(self, iteration: int, warnings: Sequence[str], meaningless: Sequence[str]) -> None:
        """Log the service's warnings, each kind once, except those that do not apply to this batch's layout."""
        for warning in warnings:
            kind = warning.split(" ", 1)[0]
            if kind not in meaningless:
                self.warn_once(kind, "iteration %d: %s", iteration, warning)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


async def warn_of_cut(reporter: Reporter, trajectories: Sequence[Trajectory], most: int, codec: Any) -> None:
    """Log a warning, once, if every response of an iteration was cut off: none of them is what the policy would say.

    Args:
        most: Tokens that a response may have.
        codec: Decodes the ends of prompts, in which some templates begin the reasoning; None: they are not looked at.
    """
    last = [each.steps[-1] for each in trajectories if each.steps]
    if not last or any(step.stop_reason != "length" for step in last):
        return
    ends = [""] * len(last)
    if codec is not None:
        ends = await codec.decode([step.prompt_ids[-PROMPT_END:] for step in last])
    reasoning = all(_is_open(end + step.action.raw) for end, step in zip(ends, last))
    reporter.warn_once(
        "cut",
        "all %d answers were cut at %d tokens%s: raise max_tokens (in a recipe, answer_tokens)%s",
        len(last), most, " inside <think>, before they said their answer" if reasoning else "",
        ", or use a template or a prompt without reasoning" if reasoning else "",
    )  # fmt: skip


def _is_open(text: str) -> bool:
    """Whether a text ends inside of its reasoning."""
    return text.rfind("<think>") > text.rfind("</think>")


def shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the numbers for the progress bar: known metrics, and failures if there were any."""
    known = {name: metrics[name] for name in SHOWN if math.isfinite(metrics.get(name, math.nan))}
    return {name.split("/")[1]: value for name, value in known.items() if value or name != "rewards/not_scored"}


def check_failures(iteration: int, trajectories: Sequence[Trajectory]) -> None:
    """Raise if everything in an iteration failed.

    Raises:
        RolloutsFailedError: Everything failed; the message has the first failure and its line.
    """
    if not trajectories:
        return
    failed = [each for each in trajectories if each.error]
    unscored = [each for each in trajectories if each.evaluation is not None and each.evaluation.error]
    if len(failed) + len(unscored) < len(trajectories):
        return
    if failed:
        first = failed[0]
        told, traceback = f"{first.error}{_place(first.traceback)}", first.traceback
        what = f"{len(failed)} of {len(trajectories)} episodes failed, and none can be trained on"
    else:
        assert unscored[0].evaluation is not None
        first = unscored[0]
        told, traceback = unscored[0].evaluation.error, ""
        what = f"none of the {len(trajectories)} trajectories could be scored"
    if traceback:
        logger.error("iteration %d: the first failure:\n%s", iteration, traceback)
    raise RolloutsFailedError(
        f"iteration {iteration}: {what} (on_failure: warn continues anyway); the first, of the task "
        f"{first.task.key!r:.100}: {told.strip()}",
        traceback,
    )


def _place(traceback: str) -> str:
    """Return the last line of a traceback that names a file."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    return f" ({lines[-1]})" if lines else ""
