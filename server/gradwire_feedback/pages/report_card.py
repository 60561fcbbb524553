"""Card of the policies page for what a training did: its reward model, its curves, and answers before and after."""

from __future__ import annotations

from gradwire_shell.components import Curve, Lines, Plot, facts, named, panel, plain, title
from nicegui import events, ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.policies import report_of
from gradwire_feedback.api.schemas import PreferencesOut, ReportOut, RewardModelOut
from gradwire_feedback.context import Context
from gradwire_feedback.pages.overview import VersionRow

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
            facts(_figures(report))
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


def _figures(report: ReportOut) -> dict[str, object]:
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
