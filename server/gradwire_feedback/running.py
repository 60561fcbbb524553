"""Run one service, from the training server to the listening socket."""

from __future__ import annotations

import asyncio
import signal
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from gradwire_http.browsers import BrowserGuard
from gradwire_http.heads import BoundedHeads
from gradwire_shell.policy import ContentPolicy
from gradwire_shell.serving import HttpServer, listen, url_of
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Match

from gradwire_feedback import pages
from gradwire_feedback.api import errors, feedback, policies, rankings, ratings, training
from gradwire_feedback.api.errors import BodyLimit
from gradwire_feedback.context import Context
from gradwire_feedback.database.connection import Database, UnusableDatabaseError
from gradwire_feedback.database.ownership import Ownership
from gradwire_feedback.settings import LIMITS, Settings
from gradwire_feedback.training.jobs import JobRunner
from gradwire_feedback.training.server import TrainingServer

ROUTERS = (feedback.router, training.router, policies.router, ratings.router, rankings.router)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_application(context: Context) -> FastAPI:
    """Create the application for a context; the caller starts and stops its server and jobs."""
    app = FastAPIOffline(  # the files of /docs come from the package, for machines without internet
        redoc_url=None,
        title="gradwire feedback",
        version=version("gradwire"),
        summary="From people's scores to a better policy.",
        max_body_size=LIMITS.body_bytes,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    names = (context.settings.host, *context.settings.host_names) if context.settings.loopback else None
    app.add_middleware(errors.ForeignPages, guard=BrowserGuard(names, pages=True))
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)

    @app.api_route("/api/{path:path}", methods=METHODS, include_in_schema=False)
    def unknown(request: Request) -> Response:
        """Answers requests that no other route of the API matches, which the pages' mount would answer with HTML."""
        allowed = sorted(
            {
                method
                for router in ROUTERS
                for route in router.routes
                if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE
                for method in route.methods or ()
            }
        )
        if not allowed:
            raise HTTPException(404, f"{request.url.path} is not a path of the API, which /docs describes")
        raise HTTPException(
            405, f"{request.method} is not possible here: use {' or '.join(allowed)}", {"Allow": ", ".join(allowed)}
        )

    pages.mount(app, context)
    app.add_middleware(ContentPolicy)
    app.add_middleware(GZipMiddleware)
    return app


GRACE_S = 5
STARTED_POLL_S = 0.02
OWNERSHIP_CHECK_S = 5.0


async def serve_until_stopped(settings: Settings, database: Database) -> bool:
    """Serve until SIGTERM or SIGINT; return False if a job did not stop and its thread still runs.

    Raises:
        OSError: The address cannot be used.
        UnusableDatabaseError: Another service works on the database, or took it while this one was disconnected.
        gradwire.GradwireError: The training server cannot be started or reached.
    """
    listener = listen(settings.host, settings.port)
    ownership = Ownership(database, url_of(listener))
    server = TrainingServer(settings)
    jobs = JobRunner(settings, database, server)
    app = create_application(Context(settings, database, server, jobs))
    http = HttpServer(
        uvicorn.Config(
            BodyLimit(app), http=BoundedHeads, log_level="warning", lifespan="on", timeout_graceful_shutdown=GRACE_S
        )
    )
    stopping = asyncio.Event()

    def stop() -> None:
        jobs.interrupt()
        http.should_exit = True
        stopping.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop)

    async def watch() -> None:
        while await asyncio.to_thread(ownership.held):  # noqa: ASYNC110  the database sends no event
            await asyncio.sleep(OWNERSHIP_CHECK_S)
        stop()

    ended = True
    try:
        await asyncio.to_thread(ownership.take)
        watching = asyncio.create_task(watch())
        if not await _unless(stopping, server.start()):
            return True
        await asyncio.to_thread(jobs.start)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        while not http.started and not serving.done():  # noqa: ASYNC110  uvicorn sets no event
            await asyncio.sleep(STARTED_POLL_S)
        print(f"gradwire feedback: listening on {url_of(listener)}", flush=True)
        await serving
        if watching.done():
            raise UnusableDatabaseError("another service took the database while this one had lost it")
    finally:
        ended = await asyncio.to_thread(jobs.stop)
        await server.stop()
        await asyncio.to_thread(ownership.release)
        listener.close()
    return ended


async def _unless(stopping: asyncio.Event, work: object) -> bool:
    """Wait for the work; return False if stopping came first."""
    starting, stopped = asyncio.ensure_future(work), asyncio.create_task(stopping.wait())  # type: ignore[call-overload]
    await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return False
