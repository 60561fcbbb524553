"""A training from its settings to its files: updates, evaluation, autopilot, resumption."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from gradwire.router.evaluation import HeldOut, Report
from gradwire.router.observability import Telling
from gradwire.router.policy import LinearPolicy
from gradwire.router.run_folder import RunFolder, RunProgress
from gradwire.router.settings import RouterSettings
from gradwire.router.settings_file import load_settings
from gradwire.router.trainer import Figures, PPOTrainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Records the first signal while the block runs; a second one has its usual effect.

    Outside the main thread, where Python cannot install handlers, it does nothing.

    Attributes:
        asked: Whether a signal was received.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}


Told = Callable[[Figures], None]
BEST = "best."


class TrainingDisabledError(RuntimeError):
    """The settings disable training; the message names the switches."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        policy: The trained policy; with the autopilot, the best one.
        history: The metrics of every update.
        stopped: The reason why it ended.
        report: The policy compared with other routers; None if evaluation is off.
        output_dir: Folder of the artifacts; None if they are not written.
        skipped_updates: Updates without a step, because all credits were zero.
    """

    policy: LinearPolicy
    history: list[dict[str, Any]]
    stopped: str
    report: Report | None
    output_dir: Path | None
    skipped_updates: int


class RouterPPOAdapter:
    """Trains a router's policy by PPO on synthetic rollouts.

    Args:
        config: Settings, the path of a settings file, or a dictionary; everything is off by default.

    Raises:
        SettingsError, ValueError: Invalid settings.
    """

    def __init__(self, config: RouterSettings | Path | str | Mapping[str, Any] | None = None) -> None:
        if isinstance(config, RouterSettings):
            self.settings = config
        elif isinstance(config, Path | str):
            self.settings = load_settings(config)
        else:
            self.settings = RouterSettings.model_validate(dict(config or {}))

    def train(
        self,
        updates: int | None = None,
        seed: int | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        told: Told = lambda figures: None,
        said: Callable[[str], None] = lambda line: None,
    ) -> TrainingResult:
        """Train, and write the files that the settings ask for.

        Args:
            updates: Overrides the settings; with the autopilot, its budget.
            seed: Overrides the settings.
            resume: Continue the interrupted run in ``experiment.output_dir``; starts a new run if there is none.
            overwrite: Start anew even if there is a run.
            told: Called with the metrics of each update.
            said: Called with each line for the user.

        Raises:
            TrainingDisabledError: ``rllm.enabled`` or ``trainer.enabled`` is false; nothing was done.
            RunFolderError: ``output_dir`` holds a run that must not be continued, or replaced.
        """
        off = self.settings.switched_off()
        if off:
            switches = " and ".join(f"{name}.enabled: true" for name in off)
            raise TrainingDisabledError(f"training is off: nothing was trained or written. To train, set {switches}")
        settings = _resolved(self.settings, updates, seed)
        folder = RunFolder(settings.experiment.output_dir, settings) if settings.experiment.enabled else None
        if resume and folder is None:
            raise ValueError("to resume, set experiment.enabled: true; the interrupted run wrote its state there")
        earlier = folder.resume() if folder is not None and resume else None
        if folder is not None and not resume:
            replaced = folder.check_free(overwrite)
            if replaced:
                said(f"this will replace {replaced} at the end")
        if settings.hicra.enabled and settings.hicra.normalize:
            said(
                "hicra.normalize takes the mean reward of a step off every step, which teaches a policy to avoid deep "
                "modes even where they pay: set hicra.normalize: false unless all episodes are equally deep"
            )
        telling = Telling(settings.observability)
        for note in telling.notes:
            said(note)
        try:
            with telling.tracer.span("train", seed=settings.trainer.seed):
                return _Run(settings, folder, telling, earlier, told, said).go()
        finally:
            telling.close()


def _resolved(settings: RouterSettings, updates: int | None, seed: int | None) -> RouterSettings:
    """Apply the arguments to the settings, and validate the result."""
    values = settings.model_dump()
    if updates is not None:
        values["trainer"]["updates"] = updates
        if settings.autopilot.enabled:
            values["autopilot"]["max_updates"] = updates
    if seed is not None:
        values["trainer"]["seed"] = seed
    return RouterSettings.model_validate(values)


class _Run:
    """A training in progress."""

    def __init__(
        self,
        settings: RouterSettings,
        folder: RunFolder | None,
        telling: Telling,
        earlier: tuple[dict[str, Any], RunProgress] | None,
        told: Told,
        said: Callable[[str], None],
    ) -> None:
        self._settings, self._folder, self._telling, self._told, self._said = settings, folder, telling, told, said
        self._trainer = PPOTrainer(settings, settings.trainer.seed, telling.tracer.span)
        self._progress = RunProgress()
        self._best: LinearPolicy | None = None
        evaluation = settings.evaluation
        self._held_out = (
            HeldOut(self._trainer.world, evaluation.seeds, evaluation.episodes) if evaluation.enabled else None
        )
        if earlier is not None:
            state, self._progress = earlier
            self._trainer.load({name: array for name, array in state.items() if not name.startswith(BEST)})
            best = {name.removeprefix(BEST): array for name, array in state.items() if name.startswith(BEST)}
            if best:
                self._best = LinearPolicy(self._trainer.policy.features, self._trainer.world.modes, best)
            said(f"continuing after update {self._trainer.updates}")
        telling.events.write(
            "resumed" if earlier else "started", update=self._trainer.updates, seed=settings.trainer.seed
        )

    def go(self) -> TrainingResult:
        with Interruption() as interruption:
            try:
                while (stopped := self._stopped()) is None:
                    self._update()
                    self._keep(now=interruption.asked)
                    if interruption.asked:
                        self._telling.events.write("interrupted", update=self._trainer.updates)
                        raise KeyboardInterrupt(f"after update {self._trainer.updates}")
            finally:
                self._trainer.close()
        return self._finish(stopped)

    def _stopped(self) -> str | None:
        """Return why there is no further update; None if there is one."""
        autopilot, done = self._settings.autopilot, self._trainer.updates
        if not autopilot.enabled:
            return f"all {done} updates are done" if done >= self._settings.trainer.updates else None
        if self._progress.rounds_without_improvement >= autopilot.patience:
            return f"no improvement in {autopilot.patience} rounds, after {done} updates"
        return f"the budget of {done} updates is spent" if done >= autopilot.max_updates else None

    def _update(self) -> None:
        with self._telling.tracer.span("update", update=self._trainer.updates + 1):
            figures = self._trainer.update()
            reward = self._evaluate()
        if self._held_out is not None:
            figures["evaluation_reward"] = reward
        self._progress.history.append(dict(figures))
        self._telling.figures(self._trainer.updates, figures)
        if figures["optimizer_steps"] == 0 and figures["policy_loss"] is None:
            self._said(f"update {self._trainer.updates} is skipped: every credit is zero, so there is no gradient")
        self._told(figures)

    def _evaluate(self) -> float | None:
        """Measure the mean reward on the held-out requests if it is due, and update the autopilot."""
        autopilot, done = self._settings.autopilot, self._trainer.updates
        if autopilot.enabled:
            due = done % autopilot.updates_per_round == 0 or done == autopilot.max_updates
        else:
            due = done % self._settings.evaluation.interval == 0 or done == self._settings.trainer.updates
        if self._held_out is None or not due:
            return None
        with self._telling.tracer.span("evaluate"):
            reward = self._held_out.mean_reward(self._trainer.policy)
        if autopilot.enabled:
            best = self._progress.best_reward
            if best is None or reward > best + autopilot.min_improvement:
                self._progress.best_reward, self._best = reward, self._trainer.policy.copy()
                self._progress.rounds_without_improvement = 0
            else:
                self._progress.rounds_without_improvement += 1
        return reward

    def _keep(self, *, now: bool) -> None:
        if self._folder is not None and (now or self._folder.checkpoint_is_due()):
            state = self._trainer.state()
            if self._best is not None:
                state |= {f"{BEST}{name}": array for name, array in self._best.parameters.items()}
            self._folder.checkpoint(state, self._progress)

    def _finish(self, stopped: str) -> TrainingResult:
        policy = self._best or self._trainer.policy
        report = None if self._held_out is None else self._held_out.report(policy)
        folder = self._folder
        if folder is not None:
            facts: dict[str, Any] = {"updates": self._trainer.updates, "stopped": stopped}
            facts["skipped_updates"] = self._trainer.skipped
            if report is not None:
                facts["evaluation"] = report.to_json()
            folder.finish(policy, self._progress.history, facts)
        self._telling.events.write("finished", update=self._trainer.updates, stopped=stopped)
        return TrainingResult(
            policy,
            self._progress.history,
            stopped,
            report,
            None if folder is None else folder.path,
            self._trainer.skipped,
        )
