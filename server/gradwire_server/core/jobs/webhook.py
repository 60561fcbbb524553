"""News of each job's end to an address of the administrator's, signed and repeated until it is taken.

The form is that of OpenAI's events and of the Standard Webhooks specification 1.0.0: the headers ``webhook-id``,
``webhook-timestamp`` and ``webhook-signature``, the base64 of an HMAC-SHA256 over ``id.timestamp.body``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.client
import json
import logging
import os
import secrets
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import jobs_pb2 as jobs

from gradwire_server.core.jobs.jobs import JobService

log = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 1.0, 3600.0
"""Seconds before the first repetition; each next one waits twice as long."""
GIVEN_UP_S = 72 * 3600.0
TIMEOUT_S = 10.0
PREFIX = "whsec_"


class Webhook:
    """Tells one address of the jobs that end.

    Args:
        url: The address; "" for none.
        secret_file: The secret that signs, made here if there is none.
    """

    def __init__(self, jobs: JobService, url: str, secret_file: Path) -> None:
        self._jobs, self._url, self._secret_file = jobs, url, secret_file
        self._secret = b""
        self._telling: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Tell what an earlier server could not."""
        if self._url:
            self._secret = await asyncio.to_thread(read_secret, self._secret_file)
            self.look()

    def look(self) -> None:
        """Tell of the jobs that have ended since."""
        if not self._secret:
            return
        for job in self._jobs.untold(time.time() - GIVEN_UP_S):
            if job.job_id not in self._telling:
                self._telling[job.job_id] = asyncio.create_task(self._tell(job))

    async def stop(self) -> None:
        """Stop; the next start tells the rest."""
        self._secret = b""
        tasks = list(self._telling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, job: jobs.Job) -> None:
        pause = FIRST_S
        while time.time() - job.finished_at < GIVEN_UP_S:
            problem = await asyncio.to_thread(_post, self._url, *message(job, self._secret))
            if not problem:
                await self._jobs.mark_told(job.job_id)
                del self._telling[job.job_id]
                return
            log.warning("the webhook did not take the end of %s: %s; again in %.0f s", job.job_id, problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)


def message(job: jobs.Job, secret: bytes) -> tuple[bytes, dict[str, str]]:
    """Body and headers of the news of a job's end."""
    event_id, now = f"evt_{job.job_id.partition('-')[2]}", int(time.time())
    event: dict[str, Any] = {
        "id": event_id, "object": "event", "created_at": int(job.finished_at),
        "type": f"fine_tuning.job.{job.state}", "data": {"id": job.job_id},
    }  # fmt: skip
    body = json.dumps(event).encode()
    signed = hmac.new(secret, b"%s.%d.%s" % (event_id.encode(), now, body), hashlib.sha256).digest()
    return body, {
        "content-type": "application/json", "webhook-id": event_id, "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
    }  # fmt: skip


def read_secret(file: Path) -> bytes:
    """The bytes that sign, as the file has them after ``whsec_`` in base64."""
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as made:
            made.write(PREFIX + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
    return base64.b64decode(file.read_text().strip().removeprefix(PREFIX))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes, headers: dict[str, str]) -> str:
    """Why a message was not taken; "" if it was."""
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"it answered {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
