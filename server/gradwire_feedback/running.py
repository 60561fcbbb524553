"""Run one service, from the training server to the listening socket."""

from __future__ import annotations

import asyncio
import signal

import uvicorn
from gradwire_http.heads import BoundedHeads
from gradwire_shell.serving import HttpServer, listen, url_of

from gradwire_feedback.api.errors import BodyLimit
from gradwire_feedback.application import create_application
from gradwire_feedback.context import Context
from gradwire_feedback.database.connection import Database, UnusableDatabaseError
from gradwire_feedback.database.ownership import Ownership
from gradwire_feedback.settings import Settings
from gradwire_feedback.training.jobs import JobRunner
from gradwire_feedback.training.server import TrainingServer

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
