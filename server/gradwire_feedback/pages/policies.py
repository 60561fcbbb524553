"""`/policies/{agent_id}`: scores with advice, training, versions, A/B comparison and deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import Plot, title
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.pages import charts
from gradwire_feedback.pages.deployment_card import DeploymentCard
from gradwire_feedback.pages.overview import Overview, VersionRow, load
from gradwire_feedback.pages.session import entrance, shell, signed_in
from gradwire_feedback.pages.training_card import TrainingCard
from gradwire_feedback.store.keys import Role
from gradwire_feedback.store.problems import ProblemError

REFRESH_S = 2.0


def register(context: Context) -> None:
    @ui.page("/policies/{agent_id}", title="Policies")
    async def policies(agent_id: str) -> RedirectResponse | None:
        caller = entrance(context, "read", agent_id, f"/policies/{agent_id}")
        if caller is None or isinstance(caller, RedirectResponse):
            return caller
        with shell(agent_id, "policies"):
            await _Policies(context, agent_id, caller.may("train")).show()
        return None


class _Policies:
    def __init__(self, context: Context, agent_id: str, may_train: bool) -> None:
        self._context, self._agent_id, self._may_train = context, agent_id, may_train
        self._shown: Overview | None = None
        self._deployment = DeploymentCard(context, agent_id, may_train, self._act)

    async def show(self) -> None:
        self._shown = await run_in_threadpool(load, self._context, self._agent_id)
        with ui.column().classes("full-width gap-3"):
            title(f"Policies of {self._agent_id}")
            self._scores()
            training = TrainingCard(self._context, self._agent_id, self._may_train, self._act)
            training.show()
            self._versions()
            self._deployment.show(self._shown)
            self._comparison()

        async def refresh() -> None:
            await training.refresh()
            found = await run_in_threadpool(load, self._context, self._agent_id)
            if found != self._shown:  # the charts are kept while nothing changes
                self._update(found)
                self._scores.refresh()

        ui.timer(REFRESH_S, refresh)

    def _update(self, found: Overview) -> None:
        self._shown = found
        self._versions.refresh()
        self._deployment.refresh(found)
        self._comparison.refresh()

    @ui.refreshable_method
    def _scores(self) -> None:
        assert self._shown is not None
        found = self._shown.distribution
        with ui.card().classes("full-width").mark("scores"):
            title("Scores", 2)
            figures = f"{found.count} scores"
            if found.mean is not None:
                figures += f", mean {found.mean:.2f}, standard deviation {found.std:.2f}"
            if self._shown.agreement is not None:
                figures += f", agreement of raters (Krippendorff's alpha) {self._shown.agreement:.2f}"
            ui.label(figures)
            for sentence in found.advice:
                with ui.row().classes("gw-note items-center no-wrap full-width"):
                    ui.icon("info")
                    ui.label(sentence).mark("advice")
            if found.count:
                ui.echart(charts.histogram(found.histogram)).style("height: 14rem")

    @ui.refreshable_method
    def _versions(self) -> None:
        assert self._shown is not None
        with ui.card().classes("full-width").mark("versions"):
            title("Versions", 2)
            if not self._shown.versions:
                ui.label("No version was trained yet.").classes("quiet")
                return
            columns = [
                {"name": name, "label": label, "field": name, "align": "left"}
                for name, label in (
                    ("version", "Version"), ("parent", "Trained on from"), ("feedback", "Feedback"),
                    ("reward", "Reward"), ("steps", "Steps"), ("created", "Made (UTC)"),
                )
            ]  # fmt: skip
            rows = [
                {
                    "version": each.version, "parent": each.parent, "feedback": _feedback(each),
                    "reward": f"{each.reward_mean:.3f} ± {each.reward_std:.3f}", "steps": each.training_steps,
                    "created": f"{each.created_at:%Y-%m-%d %H:%M}",
                }
                for each in reversed(self._shown.versions)
            ]  # fmt: skip
            ui.table(columns=columns, rows=rows, row_key="version").props("flat dense").classes("full-width")
            histories = {each.version: each.reward_history for each in self._shown.versions if each.reward_history}
            if histories:
                ui.label("Mean reward of each training step").classes("quiet")
                Plot(charts.curves(histories), title="Mean reward of each training step")

    @ui.refreshable_method
    def _comparison(self) -> None:
        assert self._shown is not None
        found = self._shown.comparison
        with ui.card().classes("full-width").mark("comparison"):
            title("A/B comparison", 2)
            ui.label(found.verdict).classes("text-weight-medium").mark("verdict")
            if not found.versions:
                return
            ui.echart(charts.intervals(found)).style(f"height: {4 + 3 * len(found.versions)}rem")
            for each in found.versions:
                mean = "no scores yet" if each.mean is None else f"mean {each.mean:.3f}"
                ui.label(
                    f"{each.version}: {mean} from {each.count} rated answers of {each.users} users, "
                    f"{found.confidence:.0%} interval {each.interval[0]:.3f} to {each.interval[1]:.3f}"
                )
            for gap in found.differences:
                ui.label(
                    f"{gap.version} minus {gap.baseline}: "
                    + ("no figure yet" if gap.difference is None else f"{gap.difference:+.3f}")
                    + f", interval {gap.interval[0]:+.3f} to {gap.interval[1]:+.3f}"
                )
            ratio = found.sample_ratio
            if ratio is not None:
                drawn = ", ".join(f"{version} {count}" for version, count in ratio.observed.items())
                ui.label(
                    f"Drawn: {drawn}; sample ratio {'as deployed' if ratio.ok else 'WRONG'} (p = {ratio.p_value:.2g})"
                )
            ui.label("The intervals stay valid however often you look: stop when it is settled.").classes("quiet")

    async def _act(self, work: Callable[[], Any], done: str, role: Role = "train") -> bool:
        """Run a button's action if the key still allows it, and report the result."""
        caller = signed_in(self._context)
        if caller is None or not caller.may(role):
            ui.navigate.to(f"/login?next=/policies/{self._agent_id}")
            return False
        try:
            await run_in_threadpool(work)
        except ProblemError as error:
            ui.notify(str(error), type="negative")
            return False
        self._update(await run_in_threadpool(load, self._context, self._agent_id))
        ui.notify(done, type="positive")
        return True


def _feedback(version: VersionRow) -> str:
    """How many ratings a version was trained on, and how many of them were changed since."""
    changed = f" ({version.changed_feedback} changed since)" if version.changed_feedback else ""
    return f"{version.feedback_count}{changed}"
