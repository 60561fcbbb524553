"""Card of the policies page for the A/B comparison."""

from __future__ import annotations

from gradwire_shell.components import Lines, title
from nicegui import ui

from gradwire_feedback.api.schemas import ComparisonOut
from gradwire_feedback.pages.charts import Chart, intervals


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
