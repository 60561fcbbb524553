"""Alerts: requests to a webhook about runs that need somebody, sent also while nobody looks at the console."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import numpy as np
from gradwire import History

from gradwire_console.advice import SPAN, START, Advice, advise
from gradwire_console.series import Numbers, non_finite, values_of
from gradwire_console.workspace import Workspace

log = logging.getLogger(__name__)
QUIET_S = 600.0
"""Seconds in which a remark on a run is told once, however often it comes and goes."""
TRIES_AFTER_S = (0.0, 2.0, 10.0)
MOST_WAITING = 100
LOOK_S = 1.0


def checked(url: str) -> str:
    """The address of a webhook.

    Raises:
        ValueError: It is not a valid address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--webhook {url!r} is not an address, as https://chat.example/hooks/abc")
    return url


class Recent:
    """The newest values of a run's metrics, as :func:`.advise` wants them."""

    def __init__(self) -> None:
        self.non_finite = 0
        self._values: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPAN))
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        self._from_start = True

    def append(self, history: History) -> None:
        if not self._values and history.seq[0] > 1:
            self._from_start = False
        for name, values, measured in values_of(history):
            finite = values[measured & np.isfinite(values)].tolist()
            self._values[name].extend(finite)
            first = self._first[name]
            first += finite[: START - len(first)]
        self.non_finite += int(non_finite(history).sum())

    def newest(self, metric: str, count: int) -> Numbers:
        return np.array(self._values[metric])[-count:] if metric in self._values else np.zeros(0)

    def first(self, metric: str, count: int) -> Numbers:
        """The first values, as a record has them; unknown for a run that is older than the console."""
        return np.array(self._first.get(metric, ()) if self._from_start else ())[:count]


class Alerts:
    """Posts remarks on the runs of a key to an address, each when it is new. Runs are followed from the start on.

    Args:
        workspace: The runs.
        webhook: The address; gets JSON with ``text`` (what Slack and Mattermost show), ``run_id``, ``run``, ``alert``,
            ``what``, ``remedy`` and ``url``.
        console: Address of the console, for links.
    """

    def __init__(self, workspace: Workspace, webhook: str, console: str) -> None:
        self._workspace, self._webhook, self._console = workspace, webhook, console
        self._recent: defaultdict[str, Recent] = defaultdict(Recent)
        self._active: set[tuple[str, str]] = set()
        self._told: dict[tuple[str, str], float] = {}
        self._waiting: asyncio.Queue[dict[str, str]] = asyncio.Queue(MOST_WAITING)
        workspace.on_history(lambda run_id, history: self._recent[run_id].append(history))

    async def run(self) -> None:
        """Follow the runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            tasks.create_task(self._send())

    async def _look(self) -> None:
        await self._workspace.listed()
        self._active = {key async for key, _ in self._remarks()}  # what is so already is no news
        revision = self._workspace.revision
        while True:
            await asyncio.sleep(LOOK_S)
            if self._workspace.revision != revision and not self._workspace.away:
                revision = self._workspace.revision
                self._compare({key: advice async for key, advice in self._remarks()})

    async def _remarks(self) -> AsyncIterator[tuple[tuple[str, str], Advice]]:
        for run_id, live in list(self._workspace.runs.items()):
            if live.info.parked:
                remedy = "Its journal is kept; run.discard_pending() and run.accept_changes() say what may be done."
                yield (run_id, "parked"), Advice("parked", f"The run is parked: {live.info.parked}", remedy)
            if run_id in self._recent:
                for each in advise(self._recent[run_id], await self._workspace.vocab_size(run_id)):
                    yield (run_id, each.name), each

    def _compare(self, current: dict[tuple[str, str], Advice]) -> None:
        now = time.monotonic()
        current = {key: advice for key, advice in current.items() if key[0] in self._workspace.runs}
        for key, advice in current.items():
            if key not in self._active and now - self._told.get(key, -QUIET_S) >= QUIET_S:
                self._told[key] = now
                self._post(key[0], advice)
        self._active = set(current)
        for run_id in [each for each in self._recent if each not in self._workspace.runs]:
            del self._recent[run_id]
        self._told = {key: at for key, at in self._told.items() if now - at < QUIET_S}

    def _post(self, run_id: str, advice: Advice) -> None:
        name = self._workspace.runs[run_id].name
        url = f"{self._console}/run/{run_id}"
        text = f"{name}: {advice.what} {advice.remedy} {url}"
        about = {"run_id": run_id, "run": name, "alert": advice.name, "what": advice.what, "remedy": advice.remedy}
        try:
            self._waiting.put_nowait({"text": text, "url": url} | about)
        except asyncio.QueueFull:
            log.warning("%d alerts wait for the webhook; this one is lost: %s", MOST_WAITING, text)

    async def _send(self) -> None:
        async with httpx.AsyncClient(timeout=10.0) as client:
            while True:
                alert = await self._waiting.get()
                refusal = ""
                for pause in TRIES_AFTER_S:
                    await asyncio.sleep(pause)
                    try:
                        answer = await client.post(self._webhook, json=alert)
                        refusal = "" if answer.is_success else f"it answers {answer.status_code}"
                    except httpx.HTTPError as error:
                        refusal = str(error) or type(error).__name__
                    if not refusal:
                        break
                if refusal:
                    log.warning("the webhook did not take an alert: %s; %s", refusal, alert["text"])
