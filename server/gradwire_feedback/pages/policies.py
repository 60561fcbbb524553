"""`/policies/{agent_id}`: scores with advice, training, versions, A/B comparison and deployment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi.responses import RedirectResponse
from gradwire_shell.components import error, title
from gradwire_shell.frame import page_at
from nicegui import ui
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.context import Context
from gradwire_feedback.pages.comparison_card import ComparisonCard
from gradwire_feedback.pages.deployment_card import DeploymentCard
from gradwire_feedback.pages.overview import Overview, load
from gradwire_feedback.pages.report_card import ReportCard
from gradwire_feedback.pages.scores_card import ScoresCard
from gradwire_feedback.pages.session import entrance, shell, signed_in
from gradwire_feedback.pages.training_card import TrainingCard
from gradwire_feedback.pages.versions_card import VersionsCard
from gradwire_feedback.store.keys import Role
from gradwire_feedback.store.problems import ProblemError

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
