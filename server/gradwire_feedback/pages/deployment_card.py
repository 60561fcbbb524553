"""Card of the policies page that shows and changes the deployed versions."""

from __future__ import annotations

from collections.abc import Callable

from gradwire_shell.components import button, title
from nicegui import ui

from gradwire_feedback.context import Context
from gradwire_feedback.names import BASE
from gradwire_feedback.pages.overview import Overview
from gradwire_feedback.pages.training_card import Act
from gradwire_feedback.store import deployments

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
