"""The processes that run jobs: started when a job waits, one a job, and none while there is no job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from typing import IO

from gradwire_http.child_processes import start_process
from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.access.keys import Keys
from gradwire_server.core.jobs.jobs import JobService
from gradwire_server.core.jobs.states import ENDED, PAUSED
from gradwire_server.core.jobs.turns import JobTurns
from gradwire_server.durable_files import make_folder
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

MODULE = "gradwire_jobs"
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
NOT_STARTED = -1
STOP_S = 20.0
"""Seconds that a worker may take to save a checkpoint when it is told to stop."""


class JobWorkers:
    """Starts and stops the workers.

    Args:
        most: Workers at a time.
    """

    def __init__(self, jobs: JobService, turns: JobTurns, keys: Keys, most: int) -> None:
        self._jobs, self._turns, self._keys, self._most = jobs, turns, keys, most
        self._address = ""
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def start(self, address: str) -> None:
        """Start the workers of the jobs that wait.

        Args:
            address: Where workers reach this server.
        """
        self._address = address
        self.look()

    def look(self) -> None:
        """Start what waits while there is room, and stop what should no longer run."""
        if not self._address or self._stopping:
            return
        for job_id, stop in self._stops.items():
            job = self._turns.states.find(job_id)
            if job is None or job.state in (PAUSED, *ENDED):
                stop.set()
        while len(self._stops) < self._most and (job := self._turns.choose(self._stops)) is not None:
            stop = self._stops[job.job_id] = asyncio.Event()
            task = asyncio.create_task(self._run(job.job_id, stop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Stop every worker; their jobs go on at the next start of the server."""
        self._stopping = True
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job_id: str, stop: asyncio.Event) -> None:
        try:
            job = await self._turns.begin(job_id)
            if job is None:
                return
            try:
                code = await self._attempt(job, stop)
            except OSError as error:  # no room for a log, or no process
                log.error("the worker of %s could not be started: %s", job_id, error)
                code = NOT_STARTED
            if self._stopping:
                return
            while not await self._settled(job, code) and not self._stopping:
                await _wait(stop, MAX_BACKOFF_S)
            if crashes := self._turns.crashes(job_id):
                await _wait(stop, min(BACKOFF_S * 2 ** (crashes - 1), MAX_BACKOFF_S))
        except Exception:  # a task's exception is seen by nobody; the job still waits
            log.exception("the job %s could not be begun; it waits for %.0f s", job_id, MAX_BACKOFF_S)
            await _wait(stop, MAX_BACKOFF_S)
        finally:
            del self._stops[job_id]
            self.look()

    async def _settled(self, job: jobs.Job, code: int) -> bool:
        """Write down that a worker ended; False if the disk does not take it now."""
        try:
            await self._turns.worker_ended(job.job_id, job.attempt, code)
        except (ServiceError, OSError, sqlite3.Error) as error:
            log.error("the end of the worker of %s could not be written down: %s", job.job_id, error)
            return False
        return True

    async def _attempt(self, job: jobs.Job, stop: asyncio.Event) -> int:
        """Run a worker until it ends or is told to; return its exit code."""
        stream = await asyncio.to_thread(_open_log, self._jobs, job.job_id)
        with self._keys.lent(job.owner) as key, stream:
            process = await start_process(
                sys.executable, "-m", MODULE,
                stdin=asyncio.subprocess.PIPE, stdout=stream, stderr=stream, start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")},
            )  # fmt: skip
            task = {
                "address": self._address, "key": key, "job_id": job.job_id, "attempt": job.attempt,
                "folder": str(self._jobs.folder(job.job_id)),
            }  # fmt: skip
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(task).encode() + b"\n")
                await process.stdin.drain()
            # The other end of its stdin stays open: when this process dies, the worker reads the end of it, and dies.
            ending, told = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
            await asyncio.wait([ending, told], return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if not ending.done():
                _signal(process.terminate)
                await asyncio.wait([ending], timeout=STOP_S)
            if not ending.done():
                _signal(process.kill)
            code = await ending
            process.stdin.close()
            return code


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the worker is told to stop."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        send()


def _open_log(known: JobService, job_id: str) -> IO[bytes]:
    make_folder(known.folder(job_id), 0o700)
    return known.log_file(job_id).open("ab")
