"""The application: guard, pages, and the same content as JSON."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import gradwire
from fastapi import FastAPI, HTTPException, Path, Request
from fastapi.responses import HTMLResponse, JSONResponse
from gradwire_http.browsers import BrowserGuard
from gradwire_http.request_headers import headers_of
from gradwire_shell.frame import add_pages
from gradwire_shell.policy import ContentPolicy
from nicegui import app as pages
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gradwire_console.pages import (
    audit,
    batches,
    checkpoints,
    compare,
    jobs,
    journal,
    login,
    playground,
    ratings,
    rollouts,
    run,
    runs,
    server,
    sessions,
    timeline,
    uploads,
)
from gradwire_console.pages.common import SECTIONS
from gradwire_console.series import AXES
from gradwire_console.workspace import Workspace, Workspaces

Number = Annotated[int, Path(ge=0, lt=2**64)]  # what the wire can hold
STATUS = (
    (gradwire.NotFoundError, 404),
    (gradwire.LimitExceededError, 429),
    (gradwire.InvalidRequestError, 400),
    (gradwire.UnauthenticatedError, 401),
    (gradwire.PermissionDeniedError, 403),
)
"""HTTP status of an error by its first kind here; others are the server's, 503."""


class Guarded:
    """Wrap an application to refuse what browsers send on behalf of other sites' pages."""

    def __init__(self, app: ASGIApp, guard: BrowserGuard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refused = self.guard.refusal(scope.get("method", "GET"), headers_of(scope.get("headers", ())))

        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[1]})
        else:
            await JSONResponse({"detail": refused[1]}, refused[0])(scope, receive, send)


def create_application(workspaces: Workspaces, names: Sequence[str]) -> ASGIApp:
    """Create the application.

    Args:
        names: Its host names beside loopback's: the address that it listens on, and given ones. Where
            browsers sign in it answers to any, as a session is sent to the name that it was begun with.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await workspaces.close()

    app = FastAPI(title="gradwire console", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_json(pages, workspaces)  # the inner application has the browsers' sessions
    for page in (
        login,
        runs,
        run,
        checkpoints,
        batches,
        rollouts,
        journal,
        compare,
        timeline,
        server,
        jobs,
        sessions,
        playground,
        uploads,
        ratings,
        audit,
    ):
        page.register(workspaces)
    secret = secrets.token_urlsafe(32)  # a session ends with the console, which holds its key
    add_pages(app, "console", secret=secret, sections=SECTIONS)
    guarded = Guarded(app, BrowserGuard(None if workspaces.asks else names, pages=True))
    return GZipMiddleware(ContentPolicy(guarded), compresslevel=6)  # 9 takes a list of runs twice the time


def _add_json(app: FastAPI, workspaces: Workspaces) -> None:
    async def workspace_of(request: Request) -> Workspace:
        try:
            workspace = await workspaces.of(str(request.session.get("id", "")))
        except gradwire.GradwireError as error:
            raise HTTPException(503, str(error)) from None
        if workspace is None:
            raise HTTPException(401, "sign in at /login first")
        await workspace.listed()
        if workspace.away:  # a page shows how old it is
            raise HTTPException(503, f"the server is away: {workspace.away}")
        return workspace

    @app.exception_handler(gradwire.GradwireError)
    async def failed(_request: Request, error: gradwire.GradwireError) -> JSONResponse:
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 503)
        return JSONResponse({"detail": str(error)}, status)

    @app.get("/api/runs")
    async def list_runs(request: Request) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        return [
            dataclasses.asdict(each.info) | {"state": each.state, "tokens_per_s": each.tokens_per_s}
            for each in workspace.newest_first()
        ]

    @app.get("/api/runs/{run_id}/metrics")
    async def metrics(request: Request, run_id: str, axis: str = "step", smooth: int = 1) -> dict[str, Any]:
        if axis not in AXES:
            raise HTTPException(422, f"axis is one of {', '.join(AXES)}")
        record = await (await workspace_of(request)).whole_record(run_id)
        return {name: record.curve(name, axis, smooth) for name in record.metrics}

    @app.get("/api/runs/{run_id}/checkpoints")
    async def list_checkpoints(request: Request, run_id: str) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        return [dataclasses.asdict(each) for each in await workspace.checkpoints(run_id)]

    @app.get("/api/runs/{run_id}/activity")
    async def activity(request: Request, run_id: str) -> dict[str, Any]:
        return dataclasses.asdict(await (await workspace_of(request)).activity(run_id))

    @app.get("/api/runs/{run_id}/recordings")
    async def recordings(request: Request, run_id: str) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        return [dataclasses.asdict(each) for each in await workspace.client(run_id).list_recordings()]

    @app.get("/api/runs/{run_id}/rollouts/{iteration}")
    async def recorded_rollouts(request: Request, run_id: str, iteration: Number) -> list[dict[str, Any]]:
        return await (await workspace_of(request)).client(run_id).recorded_rollouts(iteration)

    @app.get("/api/queues")
    async def queues(request: Request) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in await (await workspace_of(request)).queues()]

    @app.get("/api/keys")
    async def keys(request: Request) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in await (await workspace_of(request)).keys()]

    @app.get("/api/report")
    async def report(request: Request, runs: str) -> HTMLResponse:
        workspace = await workspace_of(request)
        asked = list(dict.fromkeys(runs.split(",")))[: compare.MOST]
        readable = [run_id for run_id in asked if run_id in workspace.runs]
        if not readable:
            raise HTTPException(404, "there are no such runs, or this key may not read them")
        headers = {"Content-Disposition": 'attachment; filename="gradwire-comparison.html"'}
        return HTMLResponse(await compare.report(workspace, readable), headers=headers)

    @app.get("/api/trace")
    async def trace(request: Request) -> JSONResponse:
        workspace = await workspace_of(request)
        events = timeline.trace(workspace, await timeline.spans(workspace))
        return JSONResponse(events, headers={"Content-Disposition": 'attachment; filename="gradwire-trace.json"'})

    @app.get("/api/uploads")
    async def list_uploads(request: Request) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in await (await workspace_of(request)).uploads()]

    @app.get("/api/ratings")
    async def list_ratings(request: Request) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        if workspaces.feedback is None:
            raise HTTPException(404, "no feedback service is beside this console: start it with --feedback URL")
        try:
            everybodys = await workspaces.feedback.ratings()
        except OSError as error:
            raise HTTPException(503, str(error)) from None
        return [dataclasses.asdict(each) for each in ratings.readable(workspace, everybodys)]

    @app.get("/api/audit")
    async def list_events(request: Request) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in await audit.events(await workspace_of(request))]

    @app.get("/api/sessions")
    async def list_sessions(request: Request) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        return [dataclasses.asdict(each) for each in await workspace.sessions(sessions.MOST)]

    @app.get("/api/jobs")
    async def list_jobs(request: Request) -> list[dict[str, Any]]:
        workspace = await workspace_of(request)
        return [dataclasses.asdict(each) for each in await workspace.jobs()]
