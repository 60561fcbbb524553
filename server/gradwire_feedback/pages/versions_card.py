"""Card of the policies page for the trained versions, and the reward of their training steps."""

from __future__ import annotations

from gradwire_shell.components import Column, Plot, Table, plain, title
from nicegui import ui

from gradwire_feedback.pages.charts import curves
from gradwire_feedback.pages.overview import Overview, VersionRow

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
