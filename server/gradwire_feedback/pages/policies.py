"""`/policies/{agent_id}`: scores with advice, training, versions, A/B comparison and deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import Column, Plot, Table, error, title
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.pages import charts
from gradwire_feedback.pages.deployment_card import DeploymentCard
from gradwire_feedback.pages.overview import Overview, VersionRow, load
from gradwire_feedback.pages.report_card import ReportCard
from gradwire_feedback.pages.session import entrance, shell, signed_in
from gradwire_feedback.pages.training_card import TrainingCard
from gradwire_feedback.store.keys import Role
from gradwire_feedback.store.problems import ProblemError

REFRESH_S, LOOK_S = 2.0, 5.0
VERSION_COLUMNS = {
    "version": "Version", "parent": "Trained on from", "method": "Method", "feedback": "Feedback",
    "reward": "Predicted reward", "rated": "Rated reward", "steps": "Steps", "created": "Made (UTC)",
}  # fmt: skip


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
        self._report = ReportCard(context, agent_id)
        self._trouble = ""
        self._deployment = DeploymentCard(context, agent_id, may_train, self._act)

    async def show(self) -> None:
        self._shown = await run_in_threadpool(load, self._context, self._agent_id)
        with ui.column().classes("full-width gap-3"):
            title(f"Policies of {self._agent_id}")
            self._away()
            self._scores()
            training = TrainingCard(self._context, self._agent_id, self._may_train, self._act)
            training.show(_names(self._shown))
            await self._report.show(self._shown.versions)
            self._versions()
            self._deployment.show(self._shown)
            self._comparison()

        async def refresh() -> None:
            await training.refresh(_names(self._shown))
            found = await run_in_threadpool(load, self._context, self._agent_id)
            if found != self._shown:  # the charts are kept while nothing changes
                self._update(found)
                self._scores.refresh()
            await self._report.refresh(found.versions)

        async def look() -> None:
            trouble = await self._context.server.trouble()
            if trouble != self._trouble:
                self._trouble = trouble
                self._away.refresh()

        ui.timer(REFRESH_S, refresh)
        ui.timer(LOOK_S, look)

    @ui.refreshable_method
    def _away(self) -> None:
        if self._trouble:
            error(self._trouble)

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
                ui.echart(charts.histogram(found.histogram), renderer="svg").classes("gw-chart").style("height: 14rem")

    @ui.refreshable_method
    def _versions(self) -> None:
        assert self._shown is not None
        with ui.card().classes("full-width").mark("versions"):
            title("Versions", 2)
            if not self._shown.versions:
                ui.label("No version was trained yet.").classes("quiet")
                return
            columns = [Column(name, label) for name, label in VERSION_COLUMNS.items()]
            rows = [
                {
                    "key": each.version, "version": each.version, "parent": each.parent, "method": each.method.upper(),
                    "feedback": _feedback(each), "reward": _predicted(each), "rated": _rated(each),
                    "steps": each.training_steps, "created": f"{each.created_at:%Y-%m-%d %H:%M}",
                }
                for each in reversed(self._shown.versions)
            ]  # fmt: skip
            Table(columns, rows, label="Versions").classes("full-width")
            histories = {each.version: each.reward_history for each in self._shown.versions if each.reward_history}
            if histories:
                ui.label("Mean predicted reward of each training step").classes("quiet")
                Plot(charts.curves(histories), title="Mean predicted reward of each training step")

    @ui.refreshable_method
    def _comparison(self) -> None:
        assert self._shown is not None
        found = self._shown.comparison
        with ui.card().classes("full-width").mark("comparison"):
            title("A/B comparison", 2)
            ui.label(found.verdict).classes("text-weight-medium").mark("verdict")
            if not found.versions:
                return
            chart = ui.echart(charts.intervals(found), renderer="svg").classes("gw-chart")
            chart.style(f"height: {4 + 3 * len(found.versions)}rem")
            for each in found.versions:
                mean = "no scores yet" if each.mean is None else f"mean {each.mean:.3f}"
                ui.label(
                    f"{each.version}: {mean} from {each.count} rated answer{'s' * (each.count != 1)} of "
                    f"{each.users} user{'s' * (each.users != 1)}, "
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


def _names(found: Overview | None) -> list[str]:
    return [] if found is None else [each.version for each in found.versions]


def _predicted(version: VersionRow) -> str:
    if version.reward_mean is None or version.reward_std is None:
        return "none"
    return f"{version.reward_mean:.3f} ± {version.reward_std:.3f}"


def _rated(version: VersionRow) -> str:
    return "not yet" if version.rated is None else f"{version.rated[1]:.3f} ({version.rated[0]} scores)"


def _feedback(version: VersionRow) -> str:
    """How many ratings a version was trained on, and how many of them were changed since."""
    changed = f" ({version.changed_feedback} changed since)" if version.changed_feedback else ""
    return f"{version.feedback_count}{changed}"
