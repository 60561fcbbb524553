"""Card of the policies page for training: settings, estimate, running job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import gradwire
from gradwire_shell.components import button, title
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.database.tables import Job
from gradwire_feedback.names import BASE
from gradwire_feedback.store import jobs as store
from gradwire_feedback.store.problems import ProblemError
from gradwire_feedback.training.estimate import estimate
from gradwire_feedback.training.plan import Plan, make_plan

STAGES = {
    "reward_model": "training the reward model", "policy": "training the policy",
    "preferences": "training on the preferences", "export": "writing the model",
}  # fmt: skip
METHODS = {"ppo": "PPO, on the scores", "dpo": "DPO, on the preferences"}
NEWEST = "newest"
Act = Callable[[Callable[[], Any], str], Awaitable[bool]]


class TrainingCard:
    """The training of an agent: a form to start one, and the running one's progress.

    Args:
        may_train: whether to show the buttons.
        act: carries out what a button asks for.
    """

    def __init__(self, context: Context, agent_id: str, may_train: bool, act: Act) -> None:
        self._context, self._agent_id, self._may_train, self._act = context, agent_id, may_train, act
        self._job: Job | None = None
        self._versions: list[str] = []

    def show(self, versions: list[str]) -> None:
        """Show the card; training may start from the base model, a version, or the newest one."""
        self._versions = versions
        with ui.card().classes("full-width"):
            title("Training", 2)
            self._estimate = ui.label()
            self._state = ui.label()
            with ui.column().classes("full-width") as self._progress:
                self._bar = ui.linear_progress(show_value=False).classes("full-width")
                with ui.row().classes("items-center"):
                    if self._may_train:
                        button("Cancel", self._cancel)
                    self._numbers = ui.label().classes("quiet")  # whose width changes
            self._show_job()
            if not self._may_train:
                return
            with ui.row().classes("items-end"):
                self._method = ui.select(METHODS, value="ppo", label="Method").style("width: 14rem")
                self._start = ui.select(self._starts(), value=NEWEST, label="Start from").style("width: 12rem")
                self._steps = ui.number("Steps", value=100, min=1, precision=0).style("width: 8rem")
                self._rate = ui.number("Learning rate", value=1e-5, format="%.0e").style("width: 8rem")
                self._reward = ui.select(
                    {"retrain": "train it again", "reuse": "reuse the last one"}, value="retrain", label="Reward model"
                ).style("width: 12rem")
                self._reward.bind_visibility_from(self._method, "value", value="ppo")
                button("Estimate", self._dry_run)
                button("Train", self._train, kind="primary")

    def _starts(self) -> dict[str, str]:
        newest = self._versions[-1] if self._versions else BASE
        known = {version: version for version in self._versions[::-1]}
        return {NEWEST: f"the newest: {newest}", BASE: "the base model"} | known

    async def refresh(self, versions: list[str] | None = None) -> None:
        """Show the newest job, and offer these versions to start from."""
        if versions is not None and versions != self._versions:
            self._versions = versions
            if self._may_train:
                self._start.set_options(self._starts())

        def newest() -> Job | None:
            with self._context.database.read() as session:
                return store.newest_job(session, self._agent_id)

        self._job = await run_in_threadpool(newest)
        self._show_job()

    def _show_job(self) -> None:
        job = self._job
        active = job is not None and job.status in store.ACTIVE
        self._progress.set_visibility(active)
        failed = job is not None and job.status == "failed"
        self._state.classes(
            add="text-negative" if failed else "" if active else "quiet",
            remove="quiet" if failed or active else "text-negative",
        )
        if job is None:
            self._state.text = "No training yet."
        elif not active:
            ended = {"succeeded": f"made {job.version}", "cancelled": "was cancelled", "failed": f"failed: {job.error}"}
            self._state.text = f"The last training {ended[job.status]}."
        else:
            progress = job.progress or {"stage": "", "step": 0, "total": 1, "metrics": {}}
            stage = STAGES.get(progress["stage"], "waiting for its turn" if job.status == "queued" else "starting")
            self._state.text = (
                f"{job.version or 'A new version'}: {stage}, step {progress['step']} of {progress['total']}"
            )
            self._bar.value = progress["step"] / max(progress["total"], 1)
            metrics = progress["metrics"].items()
            self._numbers.text = ", ".join(f"{name} {value:.3g}" for name, value in metrics if value is not None)

    async def _cancel(self) -> None:
        job = self._job
        if job is not None:
            await self._act(lambda: self._context.jobs.cancel(job.id), "It will stop soon.")

    def _plan(self) -> Plan:
        settings = {"max_steps": int(self._steps.value or 0), "learning_rate": float(self._rate.value or 0)}
        start = None if self._start.value == NEWEST else self._start.value
        method = self._method.value
        reward_model = self._reward.value if method == "ppo" else "retrain"
        return make_plan(
            self._context.database, self._context.settings, self._agent_id, settings, start, reward_model, {}, method
        )

    async def _dry_run(self) -> None:
        notice = ui.notification("Measuring a training step…", spinner=True, timeout=None)
        try:
            plan = await run_in_threadpool(self._plan)
            figures = await estimate(
                self._context.database, self._context.server, self._context.settings, self._agent_id, plan
            )
        except (ProblemError, gradwire.GradwireError) as error:
            ui.notify(str(error), type="negative")
            return
        finally:
            notice.dismiss()
        self._estimate.text = (
            f"{figures['estimated_steps']} steps on {figures['feedback_count']} "
            f"{'preferences' if plan.method == 'dpo' else 'scores'}: about "
            f"{figures['estimated_time_minutes']:.1f} minutes and {figures['estimated_memory_gib']:.1f} GiB."
        )

    async def _train(self) -> None:
        def submit() -> None:
            try:
                plan = self._plan()
            except gradwire.InvalidArgumentError as error:
                raise ProblemError(str(error)) from None
            self._context.jobs.submit(self._agent_id, plan)

        await self._act(submit, "Training has begun.")
        await self.refresh()
