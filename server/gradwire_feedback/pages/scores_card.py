"""Card of the policies page for the scores, with advice on collecting more."""

from __future__ import annotations

from gradwire_shell.components import Lines, title
from nicegui import ui

from gradwire_feedback.pages.charts import Chart, histogram
from gradwire_feedback.pages.overview import Overview


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
