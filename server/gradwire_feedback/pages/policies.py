"""`/policies/{agent_id}`: scores with advice, training, versions, A/B comparison and deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import (
    Column,
    Curve,
    Lines,
    Plot,
    Table,
    button,
    error,
    facts,
    named,
    panel,
    plain,
    title,
)
from gradwire_shell.frame import page_at
from nicegui import events, ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.policies import report_of
from gradwire_feedback.api.schemas import ComparisonOut, PreferencesOut, ReportOut, RewardModelOut
from gradwire_feedback.context import Context
from gradwire_feedback.names import BASE
from gradwire_feedback.pages.charts import Chart, curves, histogram, intervals
from gradwire_feedback.pages.overview import Overview, VersionRow, load
from gradwire_feedback.pages.session import entrance, shell, signed_in
from gradwire_feedback.pages.training_card import Act, TrainingCard
from gradwire_feedback.store import deployments
from gradwire_feedback.store.keys import Role
from gradwire_feedback.store.problems import ProblemError

CURVES = {
    "reward": "Predicted reward of the answers", "kl": "KL to the start, nats an answer", "loss": "Loss",
    "valueError": "Value error, in standard deviations of the ratings squared", "accuracy": "Accuracy on the pairs",
    "rewardMargin": "Reward margin on the pairs",
}  # fmt: skip


class ReportCard:
    """The report on a version's training; the newest version's at first."""

    def __init__(self, context: Context, agent_id: str) -> None:
        self._context, self._agent_id = context, agent_id
        self._rows: tuple[VersionRow, ...] = ()
        self._report: ReportOut | None = None

    def show(self) -> None:
        """Show the card, empty before the first :meth:`refresh`."""
        with ui.card().classes("full-width"):
            title("What the training did", 2)
            self._none = ui.label("No version was trained yet.").classes("quiet")
            with ui.row().classes("items-center"):
                self._version = ui.select([], label="Version", on_change=self._choose).style("width: 10rem")
                self._newer = ui.label().classes("quiet")
            self._figures = ui.element("div")
            self._verdict = Lines()
            self._details = ui.column().classes("full-width")
        self._show_report(None)

    async def refresh(self, rows: tuple[VersionRow, ...]) -> None:
        """Show what became of the shown version, the newest at first; offer newer ones."""
        if rows != self._rows:
            self._rows = rows
            names = [row.version for row in reversed(rows)]
            self._version.set_options(names, value=self._version.value or names[0])
            await self._load()

    async def _choose(self, _event: events.ValueChangeEventArguments[str]) -> None:
        await self._load()

    async def _load(self) -> None:
        version = self._version.value
        report = None
        if version is not None:
            report = await run_in_threadpool(report_of, self._context, self._agent_id, version)
        if version == self._version.value:  # nobody chose another meanwhile
            self._show_report(report)

    def _show_report(self, report: ReportOut | None) -> None:
        """Show a report; what people scroll and zoom is made anew for another version alone."""
        before, self._report = self._report, report
        self._none.set_visibility(report is None)
        self._version.set_visibility(report is not None)
        newest = self._rows[-1].version if self._rows else ""
        self._newer.text = f"{newest} is newer" if report is not None and report.version != newest else ""
        if report is None or report == before:
            return
        self._figures.clear()
        with self._figures:
            facts(_report_figures(report))
        self._verdict.show(
            ([_verdict(report.reward_model)] if report.method == "ppo" else [])
            + ([_preferred(report.preferences)] if report.preferences is not None else [])
        )
        if before is None or _details(report) != _details(before):
            self._details.clear()
            with self._details:
                self._show_details(report)

    def _show_details(self, report: ReportOut) -> None:
        with ui.element("div").classes("gw-answers full-width"):
            for colour, (name, values) in enumerate(report.curves.items()):
                points = [(step, round(value, 4)) for step, value in enumerate(values, 1) if value is not None]
                with ui.element("div").classes("gw-lines"):
                    ui.label(CURVES[name]).classes("quiet")
                    Plot([Curve(name, points, colour)], title=CURVES[name])
        if report.examples:
            title("Answers before and after", 2)
        for example in report.examples:
            with panel().classes("full-width"):
                plain(example.prompt, "quiet text gw-scroll").props("tabindex=0")
                with ui.element("div").classes("gw-answers full-width"):
                    for name, text, score in (
                        (report.started_from, example.before, example.before_score),
                        (report.version, example.after, example.after_score),
                    ):
                        with ui.element("div").classes("gw-lines"):
                            plain(name if score is None else f"{name}, predicted {score:.2f}", "quiet")
                            named(plain(text or "(empty)", "text gw-scroll"), name).props("tabindex=0 role=group")


def _details(report: ReportOut) -> tuple[object, ...]:
    return report.version, report.curves, report.examples


def _report_figures(report: ReportOut) -> dict[str, object]:
    predicted = None if report.predicted_reward is None else f"{report.predicted_reward:.3f}, by the reward model"
    rated = "not rated yet" if report.rated_reward is None else f"{report.rated_reward:.3f}"
    return {
        "Trained on from": report.started_from,
        "Method": "DPO, on preferences" if report.method == "dpo" else "PPO, against the reward model",
        "Predicted reward": predicted,
        "Rated reward": rated + (f", by people, of {report.rated_answers} answers" if report.rated_answers else ""),
    }


def _verdict(report: RewardModelOut | None) -> str:
    if report is None:
        return "The reward model was not checked: no ratings could be held out, as all are of one prompt."
    correlation = "unknown" if report.pearson is None else f"{report.pearson:.2f}"
    good = report.mean_squared_error < report.baseline_error
    return (
        f"Reward model on {report.num_ratings} held-out ratings: correlation {correlation}, squared error "
        f"{report.mean_squared_error:.4f} against {report.baseline_error:.4f} of always saying the mean. "
        + ("It knows more than the mean." if good else "It knows no more than the mean: collect more ratings.")
    )


def _preferred(preferences: PreferencesOut) -> str:
    if not preferences.held_out:
        return f"Trained on {preferences.pairs} preferences; none could be held out, as all are of one prompt."
    before, after = preferences.before, preferences.after
    return (
        f"On {preferences.held_out} held-out preferences of {preferences.pairs}: loss {before['loss']:.3f} before, "
        f"{after['loss']:.3f} after; it now leans to the better answer in {after['accuracy']:.0%}."
    )


COLUMNS = {
    "version": "Version", "parent": "Trained on from", "method": "Method", "feedback": "Feedback",
    "reward": "Predicted reward", "rated": "Rated reward", "steps": "Steps", "created": "Made (UTC)",
}  # fmt: skip
REWARDS = "Mean predicted reward of each training step"


class VersionsCard:
    """Shows nothing before :meth:`show`."""

    def __init__(self) -> None:
        with ui.card().classes("full-width"):
            title("Versions", 2)
            columns = [Column(name, label) for name, label in COLUMNS.items()]
            self._table = Table(columns, [], label="Versions", none="No version was trained yet.").classes("full-width")
            with ui.column().classes("full-width") as self._rewards:
                ui.label(REWARDS).classes("quiet")
                self._legend = ui.element("div").classes("gw-legend")
                self._plot = Plot([], title=REWARDS)

    def show(self, overview: Overview) -> None:
        self._table.show(
            [
                {
                    "key": each.version, "version": each.version, "parent": each.parent, "method": each.method.upper(),
                    "feedback": _feedback(each), "reward": _predicted(each), "rated": _rated(each),
                    "steps": each.training_steps, "created": f"{each.created_at:%Y-%m-%d %H:%M}",
                }
                for each in reversed(overview.versions)
            ]
        )  # fmt: skip
        histories = {each.version: each.reward_history for each in overview.versions if each.reward_history}
        self._plot.show(curves(histories))
        self._legend.clear()
        with self._legend:
            for colour, version in enumerate(histories):
                with ui.element("span").classes("gw-key").style(f"--c: var(--s{colour % 8 + 1})"):
                    plain(version)
        self._rewards.set_visibility(bool(histories))


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


class ScoresCard:
    """Shows nothing before :meth:`show`."""

    def __init__(self) -> None:
        with ui.card().classes("full-width"):
            title("Scores", 2)
            self._figures = ui.label()
            self._advice = Lines(classes="gw-note")
            self._histogram = Chart("Histogram of the scores").style("height: 14rem")

    def show(self, overview: Overview) -> None:
        scores = overview.distribution
        figures = f"{scores.count} scores"
        if scores.mean is not None:
            figures += f", mean {scores.mean:.2f}, standard deviation {scores.std:.2f}"
        if overview.agreement is not None:
            figures += f", agreement of raters (Krippendorff's alpha) {overview.agreement:.2f}"
        self._figures.text = figures
        self._advice.show(scores.advice)
        self._histogram.show(histogram(scores.histogram) if scores.count else {})


NEWEST_SHOWN = 6


class DeploymentCard:
    """Deployed shares with a field for each version.

    A refresh adds fields and changes those that show what is deployed; it removes none, and a field in which somebody
    typed another share stays as it is.

    Args:
        may_train: whether to show the fields and buttons.
        act: carries out what a button asks for.
    """

    def __init__(self, context: Context, agent_id: str, may_train: bool, act: Act) -> None:
        self._context, self._agent_id, self._may_train, self._act = context, agent_id, may_train, act
        self._fields: dict[str, ui.number] = {}
        self._placed: dict[str, float | None] = {}

    def show(self, overview: Overview) -> None:
        with ui.card().classes("full-width"):
            title("Deployed", 2)
            self._deployed = ui.label()
            if self._may_train:
                self._row = ui.row().classes("items-end")
                with ui.row():
                    button("Deploy", self._deploy, kind="primary")
                    button("Roll back", self._roll_back)
        self.refresh(overview)

    def refresh(self, overview: Overview) -> None:
        self._found = overview
        shares = ", ".join(f"{version} {weight:.0%}" for version, weight in overview.weights.items())
        self._deployed.text = f"Answers come from: {shares}"
        if not self._may_train:
            return
        every = [BASE, *(each.version for each in overview.versions)]
        shown = [version for version in every if version in every[-NEWEST_SHOWN:] or version in overview.weights]
        for version in [*shown, *(version for version in self._fields if version not in shown)]:
            share = round(100 * overview.weights.get(version, 0.0), 6)
            if version not in self._fields:
                with self._row:
                    field = ui.number(f"{version} %", value=share, min=0, max=100, step=5).style("width: 7rem")
                self._fields[version] = field
            elif not self._typed(version):
                self._fields[version].value = share
            else:
                continue
            self._placed[version] = share

    def _typed(self, version: str) -> bool:
        """Whether the user has changed the field's share."""
        return bool(self._fields[version].value != self._placed[version])

    async def _deploy(self) -> None:
        shares = {version: (field.value or 0) / 100 for version, field in self._fields.items()}

        def store() -> dict[str, float]:
            with self._context.database.write() as session:
                return deployments.deploy(session, self._agent_id, shares)

        await self._carry_out(store, "Deployed.")

    async def _roll_back(self) -> None:
        def store() -> dict[str, float]:
            with self._context.database.write() as session:
                return deployments.roll_back(session, self._agent_id)

        await self._carry_out(store, "Rolled back.")

    async def _carry_out(self, store: Callable[[], dict[str, float]], done: str) -> None:
        """Store a deployment; the fields then show it."""
        if await self._act(store, done):
            self._placed = {version: field.value for version, field in self._fields.items()}
            self.refresh(self._found)


class ComparisonCard:
    """Shows nothing before :meth:`show`."""

    def __init__(self) -> None:
        with ui.card().classes("full-width"):
            title("A/B comparison", 2)
            self._verdict = ui.label().classes("text-weight-medium")
            self._chart = Chart("Mean score and interval of each version")
            self._figures = Lines()
            self._advice = ui.label("The intervals stay valid however often you look: stop when it is settled.")
            self._advice.classes("quiet")

    def show(self, comparison: ComparisonOut) -> None:
        self._verdict.text = comparison.verdict
        self._chart.style(f"height: {4 + 3 * len(comparison.versions)}rem")
        self._chart.show(intervals(comparison) if comparison.versions else {})
        self._figures.show(_figures(comparison) if comparison.versions else [])
        self._advice.set_visibility(bool(comparison.versions))


def _figures(comparison: ComparisonOut) -> list[str]:
    lines = []
    for each in comparison.versions:
        mean = "no scores yet" if each.mean is None else f"mean {each.mean:.3f}"
        lines.append(
            f"{each.version}: {mean} from {each.count} rated answer{'s' * (each.count != 1)} of "
            f"{each.users} user{'s' * (each.users != 1)}, "
            f"{comparison.confidence:.0%} interval {each.interval[0]:.3f} to {each.interval[1]:.3f}"
        )
    for gap in comparison.differences:
        lines.append(
            f"{gap.version} minus {gap.baseline}: "
            + ("no figure yet" if gap.difference is None else f"{gap.difference:+.3f}")
            + f", interval {gap.interval[0]:+.3f} to {gap.interval[1]:+.3f}"
        )
    ratio = comparison.sample_ratio
    if ratio is not None:
        drawn = ", ".join(f"{version} {count}" for version, count in ratio.observed.items())
        lines.append(f"Drawn: {drawn}; sample ratio {'as deployed' if ratio.ok else 'WRONG'} (p = {ratio.p_value:.2g})")
    return lines


REFRESH_S, LOOK_S = 2.0, 5.0


def register(context: Context) -> None:
    @page_at("/policies/{agent_id}", title="Policies")
    async def policies(agent_id: str) -> RedirectResponse | None:
        caller = entrance(context, "read", agent_id, f"/policies/{agent_id}")
        if caller is None or isinstance(caller, RedirectResponse):
            return caller
        with shell(agent_id, "policies"):
            await _Policies(context, agent_id, caller.may("train")).show()
        return None


class _Policies:
    """The page; what is refreshed changes in place, so that nothing that a person is using is replaced."""

    def __init__(self, context: Context, agent_id: str, may_train: bool) -> None:
        self._context, self._agent_id = context, agent_id
        self._training = TrainingCard(context, agent_id, may_train, self._act)
        self._report = ReportCard(context, agent_id)
        self._deployment = DeploymentCard(context, agent_id, may_train, self._act)

    async def show(self) -> None:
        self._shown = await run_in_threadpool(load, self._context, self._agent_id)
        with ui.column().classes("full-width").style("gap: var(--gap-3)"):
            title(f"Policies of {self._agent_id}")
            self._away = error("")
            self._away.set_visibility(False)
            self._scores = ScoresCard()
            self._training.show(_names(self._shown))
            self._report.show()
            self._versions = VersionsCard()
            self._deployment.show(self._shown)
            self._comparison = ComparisonCard()
        self._update(self._shown)
        await self._report.refresh(self._shown.versions)

        async def refresh() -> None:
            await self._training.refresh(_names(self._shown))
            policies = await run_in_threadpool(load, self._context, self._agent_id)
            if policies != self._shown:
                self._update(policies)
            await self._report.refresh(policies.versions)

        async def look() -> None:
            trouble = await self._context.server.trouble()
            if trouble != self._away.text:
                self._away.text = trouble
                self._away.set_visibility(bool(trouble))

        ui.timer(REFRESH_S, refresh)
        ui.timer(LOOK_S, look)

    def _update(self, overview: Overview) -> None:
        self._shown = overview
        self._scores.show(overview)
        self._versions.show(overview)
        self._deployment.refresh(overview)
        self._comparison.show(overview.comparison)

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


def _names(found: Overview) -> list[str]:
    return [each.version for each in found.versions]
